"""Streams, exports, the collator and the import: two versions of the package, in one run.

    python -m bench.before_after OLD/src NEW/src [--rounds 7]

Each round runs every job once with each version, one process each, in turn, the second first in every other
round. Figures are CPU seconds of the job alone; a ratio is that of the minima.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOBS = ("stream", "collate", "export", "import")


def timed(job: Callable[[], Any], repeat: int) -> float:
    """The least CPU seconds of some calls in a row, without the interpreter's collections (`timeit`)."""
    return min(timeit.repeat(job, timer=time.process_time, number=1, repeat=repeat))


def stream() -> float:
    """40,000 lognormal samples through windows of 1,000."""
    import numpy as np
    import torch

    from packtrain.data import StreamingPackedDataset

    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, 40_000), 8, 8192).astype(int).tolist()
    row = torch.arange(8192)
    samples = [{"input_ids": row[:n], "labels": row[:n]} for n in lengths]
    return timed(lambda: sum(1 for _ in StreamingPackedDataset(samples, pack_length=8192, window=1000)), 5)


def collate() -> float:
    """400 rows of 100 segments, 8,192 tokens, as numbers of samples are packed."""
    import torch

    from packtrain.collate import PaddingFreeCollator

    pack = [{"input_ids": torch.arange(81), "labels": torch.arange(81), "sample_id": n} for n in range(100)]
    made = PaddingFreeCollator()

    def rows() -> None:
        for _ in range(400):
            made([pack])

    return timed(rows, 5)


class Source(list):  # type: ignore[type-arg]
    fingerprint = "bench"

    def where(self, number: int) -> str:
        return f"sample {number}"


class Encoded:
    def encode(self, sample: Any) -> Any:
        return dict(sample)

    def config(self) -> dict[str, Any]:
        return {"name": "encoded"}


def export() -> float:
    """6,000 encoded samples as chunks, media as tensors."""
    import numpy as np

    import packtrain as pt
    from packtrain.pipeline.export import export as write

    lengths = np.random.default_rng(0).integers(50, 800, 6000).tolist()
    ids = np.arange(800)
    samples = Source({"input_ids": ids[:n], "labels": ids[:n]} for n in lengths)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        found = pt.Lengths(lengths)
        found.save(root / "lengths")
        pt.plan(found, pack_length=4096).save(root / "plan", origin={"lengths": str(root / "lengths")})
        number = iter(range(99))

        def once() -> None:
            out = root / f"out{next(number)}"
            write(
                root / "plan", out, format="chunks", source=samples, template=Encoded(),
                options={"media": "tensor"},
            )  # fmt: skip

        return timed(once, 4)


def loaded() -> float:
    """`import packtrain`, in a process that has done nothing else."""
    start = time.process_time()
    import packtrain  # noqa: F401

    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", help="OLD/src NEW/src")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", nargs="+", default=JOBS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.path.insert(0, args.sources[0])
        jobs = {"stream": stream, "collate": collate, "export": export, "import": loaded}
        print(jobs[args.jobs[0]]())
        return
    for job in args.jobs:
        best: dict[str, list[float]] = {path: [] for path in args.sources}
        for number in range(args.rounds):
            for path in args.sources[:: 1 if number % 2 else -1]:
                command = [sys.executable, __file__, path, "--one", "--jobs", job]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                best[path].append(float(told.split()[-1]))
        old, new = (min(best[path]) for path in args.sources)
        print(
            json.dumps({"job": job, "old": round(old, 4), "new": round(new, 4), "ratio": round(new / old, 3)})
        )


if __name__ == "__main__":
    main()
