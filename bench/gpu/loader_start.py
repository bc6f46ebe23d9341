"""How long loader workers take to start: the first batch, and the first of every later pass.

    python bench/gpu/loader_start.py PROCESSOR [--workers 8] [--spawn]

A loader of samples that `HFTemplate` encodes with a real processor, started as `packtrain train` starts it;
with `--spawn` by `multiprocessing`'s spawn. Prints one line of JSON: seconds of the first batch (with
`--early` the server starts so much earlier, as while a model loads), of later passes, and of those with one
worker.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

import packtrain as pt
from packtrain.data import PackedDataset, PackLoader, PackSampler
from packtrain.template import HFTemplate, load_processor
from packtrain.workers import start_early, worker_context

TEXT = "Every sample of this set has some words, and each of them is a token or two. " * 12


def chats(count: int) -> list[Any]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number}: {TEXT}"},
                {"role": "assistant", "content": TEXT},
            ]
        }
        for number in range(count)
    ]


def first_batch(data: Any, workers: int, context: Any) -> float:
    begun = time.perf_counter()
    sampler = PackSampler(data.plan.align(1), rank=0)
    batches = iter(PackLoader(data, sampler, num_workers=workers, multiprocessing_context=context))
    next(batches)
    found = time.perf_counter() - begun
    for _ in batches:
        pass
    return round(found, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processor")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--early", type=float, default=0.0, help="seconds between start_early and the loader")
    asked = parser.parse_args()
    template = HFTemplate(load_processor(asked.processor))
    samples = chats(64)
    lengths = np.array([len(template.encode(one)["input_ids"]) for one in samples])
    planned = pt.plan(lengths, 4 * int(lengths.max()))
    data = PackedDataset(planned, samples, template.encode)
    context = "spawn" if asked.spawn else worker_context()
    row: dict[str, Any] = {"context": "spawn" if asked.spawn else "server", "workers": asked.workers}
    if asked.early and not asked.spawn:
        start_early(template)
        time.sleep(asked.early)
        row["first_after_early"] = first_batch(data, asked.workers, context)
    else:
        row["first"] = first_batch(data, asked.workers, context)
    row["later"] = [first_batch(data, asked.workers, context) for _ in range(3)]
    row["later_one_worker"] = [first_batch(data, 1, context) for _ in range(3)]
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
