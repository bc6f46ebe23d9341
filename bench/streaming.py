"""Streams: throughput against a loop of list concatenations, loss against the bound, flat memory.

    python -m bench.streaming [--samples 200000] [--memory 1000000]

Encoded text, lognormal lengths. The peer is what trainers with dynamic batching do in Python: lists of ids,
labels and positions that are added up until the budget is reached, then tensors. Lengths of real sets:
packs of a stream (windows of 1,000 with carry)
and of arrival order, over the lower bound.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import StreamingPackedDataset, TokenBudgetDataset

CAP = 8192


class Ids:
    """Samples made when they are read: lognormal lengths around `median`."""

    def __init__(self, count: int, median: int = 350) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.lognormal(np.log(median), 1.0, count), 8, CAP).astype(np.int64).tolist()
        self.row = torch.arange(CAP)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = self.row[: self.lengths[i]]
        return {"input_ids": ids, "labels": ids}


def concatenated(source: list[dict[str, list[int]]]) -> int:
    """Rows of ids, labels and positions by list addition, as samples come, then as tensors."""
    rows = 0
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for sample in source:
        if len(row["input_ids"]) + len(sample["input_ids"]) > CAP:
            rows += len({key: torch.tensor([value]) for key, value in row.items()}) > 0
            row = {"input_ids": [], "labels": [], "position_ids": []}
        row["input_ids"] = row["input_ids"] + sample["input_ids"]
        row["labels"] = row["labels"] + [-100] + sample["labels"][1:]
        row["position_ids"] = row["position_ids"] + list(range(len(sample["input_ids"])))
    return rows + 1


def speed(name: str, lengths: list[int]) -> None:
    """Tokens a second of processor time, best of three each, over the same samples in memory."""
    tokens = sum(lengths)
    row = torch.arange(max(lengths))
    source = [{"input_ids": row[:n], "labels": row[:n]} for n in lengths]
    lists = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in lengths]
    stream = StreamingPackedDataset(source, pack_length=CAP, window=1000, shuffle_buffer=1)
    collate = PaddingFreeCollator()
    alone, packs = best(lambda: sum(1 for _ in stream))
    ours, _ = best(lambda: sum(1 for pack in stream if collate([pack])))
    theirs, rows = best(lambda: concatenated(lists))
    rates = [tokens / seconds / 1e6 for seconds in (alone, ours, theirs)]
    print(
        f"{name}: {len(lengths):,} samples, {tokens / 1e6:.0f} M tokens; stream {rates[0]:.1f} M tokens/s "
        f"({packs:,} packs), with rows {rates[1]:.1f}; lists {rates[2]:.1f} ({rows:,} rows): "
        f"{theirs / alone:.1f} and {theirs / ours:.1f} times"
    )


def best(job: Callable[[], int]) -> tuple[float, int]:
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        made = job()
        seconds.append(time.process_time() - begun)
    return min(seconds), made


def loss(folder: Path) -> None:
    for path in sorted(folder.glob("*.npy")):
        tokens = np.load(path).astype(np.int64)
        tokens = tokens[tokens > 0][:100_000]
        if tokens.ndim != 1 or len(tokens) < 1000:
            continue
        samples = [{"input_ids": np.broadcast_to(np.int8(0), n)} for n in tokens.tolist()]
        bound = pt.plan(tokens, pack_length=CAP).certificate.bound
        ours = sum(1 for _ in StreamingPackedDataset(samples, pack_length=CAP, window=1000))
        arrival = sum(
            1 for _ in TokenBudgetDataset(samples, max_seq_len=CAP, order="arrival", buffer_size=1000)
        )
        over = f"stream {ours / bound - 1:+.3%}, arrival {arrival / bound - 1:+.3%}"
        print(f"{path.stem}: bound {bound:,}, {over}")


def memory(count: int) -> None:
    marks = []
    stream = StreamingPackedDataset(Ids(count), pack_length=CAP, window=1000, shuffle_buffer=1)
    for k, _ in enumerate(stream):
        if k % 2000 == 0:
            marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    print(f"{count:,} samples: peak {marks[1]} MB after 2,000 packs, {marks[-1]} MB at the end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--memory", type=int, default=1_000_000)
    parser.add_argument("--lengths", type=Path, default=Path("../shared/data/lengths"))
    told = parser.parse_args()
    for median in (350, 60):
        speed(f"lognormal, median {median}", Ids(told.samples, median).lengths)
    if told.lengths.is_dir():
        for name in ("t0_train_50k", "gsm8k_train", "c4_demo"):
            own = np.load(told.lengths / f"{name}.npy").astype(np.int64)
            speed(name, np.resize(own[own <= CAP], told.samples).tolist())
        loss(told.lengths)
    memory(told.memory)


if __name__ == "__main__":
    main()
