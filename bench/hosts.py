"""Our plan against the packing of TRL and ms-swift on the same lengths and rows, in one run.

    python -m bench.hosts DATA_FOLDER          (shared data: text_sft; ratios, not seconds, are the result)

TRL packs windows of 1,000 rows best-fit decreasing, ms-swift windows of 1,000 with the `binpacking` package
(its loop is run here when that package is installed). Both get the lengths for nothing, as we do.
Then the time to the first optimizer step of real runs (`bench/hosts_start.py`).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import packtrain as pt

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


def swift(lengths: np.ndarray) -> int:
    """Its `create_packed_idx`: 1,000 at a time, the last bin of a window is carried on."""
    import binpacking

    packs, carried = 0, []
    for start in range(0, len(lengths), 1000):
        items = carried + [(i, int(lengths[i])) for i in range(start, min(start + 1000, len(lengths)))]
        bins = binpacking.to_constant_volume(items, CAP, weight_pos=1)
        carried = []
        if start + 1000 < len(lengths):
            bins, carried = bins[:-1], bins[-1]
        packs += len(bins)
    return packs


def main() -> None:
    lengths = lengths_of(Path(sys.argv[1]))
    bound = -(-int(lengths.sum()) // CAP)
    print(f"{len(lengths):,} rows, {int(lengths.sum()):,} tokens, cap {CAP:,}, bound {bound:,} packs")
    first: float | None = None
    for name, pack in (("packtrain", ours), ("TRL", trl), ("ms-swift", swift)):
        if name != "ms-swift":
            pack(lengths[:2000])  # imports and compilation are not what is compared
        started = time.perf_counter()
        try:
            packs: Any = pack(lengths)
        except ImportError as error:
            print(f"{name}: not installed ({error.name})")
            continue
        seconds = time.perf_counter() - started
        first = seconds if first is None else first
        fill = lengths.sum() / (packs * CAP)
        print(f"{name}: {packs:,} packs, {fill:.3%} full, {seconds / first:.1f} x our time")
    report(first_steps(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
