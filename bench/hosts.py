"""Our plan against the packing of TRL and ms-swift on the same lengths and rows, in one run.

    python -m bench.hosts DATA_FOLDER          (shared data: text_sft; ratios, not seconds, are the result)

TRL packs windows of 1,000 rows best-fit decreasing, ms-swift windows of 1,000 with the `binpacking` package
(its own `PackingDataset`, in its environment beside our planner: `bench/hosts_swift.py`). All get the lengths
for nothing. Then the time to the first optimizer step of real runs (`bench/hosts_start.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import packtrain as pt

from . import hosts_swift
from .host_child import python_of
from .hosts_start import first_steps, report

CAP = 2048


def lengths_of(folder: Path) -> np.ndarray:
    """Characters / 4 of real texts stand for tokens: only the shape of the distribution matters here."""
    found = []
    for path in sorted((folder / "text_sft").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                found.append(min(CAP, max(1, len(json.dumps(json.loads(line), ensure_ascii=False)) // 4)))
    return np.array(found, np.int64)


def ours(lengths: np.ndarray) -> int:
    return len(pt.plan(pt.Lengths(lengths), pack_length=CAP))


def trl(lengths: np.ndarray) -> int:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    from datasets import Dataset
    from trl import pack_dataset

    rows = Dataset.from_dict({"input_ids": [[0] * int(n) for n in lengths]})
    return len(pack_dataset(rows, CAP, "bfd"))


def main() -> None:
    lengths = lengths_of(Path(sys.argv[1]))
    bound = -(-int(lengths.sum()) // CAP)
    print(f"{len(lengths):,} rows, {int(lengths.sum()):,} tokens, cap {CAP:,}, bound {bound:,} packs")
    first: float | None = None
    for name, pack in (("packtrain", ours), ("TRL", trl)):
        pack(lengths[:2000])  # imports and compilation are not what is compared
        times = []
        for _ in range(3):
            started = time.perf_counter()
            packs = pack(lengths)
            times.append(time.perf_counter() - started)
        first = min(times) if first is None else first
        told(name, packs, lengths, min(times) / first)
    if python_of("swift") is None:
        print("ms-swift: left out (`make test-hosts` makes its environment)")
    else:
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder) / "lengths.npy", lengths)
            found = hosts_swift.packing(Path(folder) / "lengths.npy")
        for name, (packs, seconds) in found.items():
            told(f"{name}, in ms-swift's environment", packs, lengths, seconds / found["packtrain"][1])
    report(first_steps(Path(sys.argv[1])))


def told(name: str, packs: int, lengths: np.ndarray, ratio: float) -> None:
    print(f"{name}: {packs:,} packs, {lengths.sum() / (packs * CAP):.3%} full, {ratio:.1f} x our time")


if __name__ == "__main__":
    main()
