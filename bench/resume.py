"""Restoring a position and what loader workers hold: floors in the same run.

python -m bench.resume [--samples 100000000] [--packs 2000000]

restore    a sampler over a plan of --samples samples is put to micro step 1,000,000 and asked for its
           first position; floor: the same for a plan of a thousand packs
memory     resident memory of a loader worker that reads --packs packs of a mapped plan, at its first
           batch, half way and at the end; floor: what it held at its first batch
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import packtrain as pt
from packtrain.data import PackedDataset, PackLoader, PackSampler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--packs", type=int, default=2_000_000)
    told = parser.parse_args()
    restore(told.samples)
    memory(told.packs)


def restore(samples: int) -> None:
    for count in (1_000, samples):
        rng = np.random.default_rng(0)
        plan = pt.plan(rng.integers(16, 1024, count, dtype=np.int32), pack_length=8192)
        view = plan.align(4)
        state = PackSampler(view, 3, seed=1).state_dict(micro_step=min(1_000_000, view.steps - 1))
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            sampler = PackSampler(view, 3, seed=1)
            sampler.load_state_dict(state)
            next(iter(sampler))
            times.append(time.perf_counter() - begun)
        step = state["micro_step"]
        print(f"restore at micro step {step:,} of {count:,} samples: {1e3 * sorted(times)[2]:.2f} ms")


class Ids:
    """Samples of one token; the memory that is seen is that of plan, sampler and loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": np.ones(4, np.int64), "labels": np.ones(4, np.int64)}


def resident() -> int:
    """Private and shared bytes that this process has in memory, without those of mapped files."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def seen(packs: list[Any]) -> int:
    """Collate: the worker's own memory."""
    return resident()


def memory(packs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pt.Lengths(np.full(2 * packs, 4, np.int32)).save(folder / "lengths")
        lengths = pt.Lengths.load(folder / "lengths")
        pt.plan(lengths, pack_length=8).save(folder / "plan")
        view = pt.PackPlan.load(folder / "plan").align(1)
        data = PackedDataset(view, Ids(2 * packs), lengths=lengths)
        loader = PackLoader(data, PackSampler(view, seed=1), 64, collate_fn=seen, num_workers=1)
        held = list(loader)
        first, half, last = held[4], held[len(held) // 2], held[-1]
        grown = [(value - first) / 2**20 for value in (half, last)]
        print(
            f"worker over {packs:,} packs: {first / 2**20:.0f} MB at first, "
            f"half way {grown[0]:+.1f} MB, at the end {grown[1]:+.1f} MB"
        )


if __name__ == "__main__":
    main()
