"""Restoring a position and what loader workers hold: floors in the same run.

python -m bench.resume [--samples 100000000] [--packs 2000000]

restore    a sampler over a plan of --samples samples is put to micro step 1,000,000 and asked for its
           first position; floor: the same for a plan of a thousand packs
trainer    the same through the batches that Trainer skips one by one; floor: skipping with a sampler that
           computes the positions that are skipped
memory     resident memory of a loader worker that reads --packs packs of a mapped plan, at its first
           batch, half way and at the end, without the pages of mapped files, which all workers share;
           floor: what it held at its first batch

Asserted at the end: a restore takes at most 10 ms, a worker grows by at most 20 MB.
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
    milliseconds = restore(told.samples)
    grown = memory(told.packs)
    assert milliseconds <= 10, f"a restore takes {milliseconds:.1f} ms"
    assert grown <= 20, f"a worker grew by {grown:.1f} MB"


def restore(samples: int) -> float:
    """Median milliseconds to the first position, of the larger plan."""
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
    skipped(view, step)
    return 1e3 * sorted(times)[2]


def skipped(view: pt.AlignedPlan, step: int) -> None:
    """What Trainer's own skipping takes to the first batch after `step`."""
    from accelerate.data_loader import SkipBatchSampler

    from packtrain.train.positions import TrainBatches

    taken = []
    for computed in (True, False):
        sampler = PackSampler(view, 3, seed=1)
        if not computed:
            sampler.begin_at(step)
        batches = sampler.batches(1) if computed else TrainBatches(sampler)
        begun = time.perf_counter()
        next(iter(SkipBatchSampler(batches, step)))
        taken.append(1e3 * (time.perf_counter() - begun))
    print(f"trainer at micro step {step:,}: {taken[1]:.1f} ms; computing what is skipped: {taken[0]:.0f} ms")


class Ids:
    """Samples of one token; the memory that is seen is that of plan, sampler and loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": np.ones(4, np.int64), "labels": np.ones(4, np.int64)}


def resident() -> tuple[int, int]:
    """(own, mapped) bytes of this process in memory; mapped pages of files are shared by all workers."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii").splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
    return held["RssAnon"], held["RssFile"]


def seen(packs: list[Any]) -> tuple[int, int]:
    """Collate: the worker's own memory."""
    return resident()


def memory(packs: int) -> float:
    """Megabytes that a worker grew by."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pt.Lengths(np.full(2 * packs, 4, np.int32)).save(folder / "lengths")
        lengths = pt.Lengths.load(folder / "lengths")
        pt.plan(lengths, pack_length=8).save(folder / "plan")
        view = pt.PackPlan.load(folder / "plan").align(1)
        data = PackedDataset(view, Ids(2 * packs), lengths=lengths)
        loader = PackLoader(data, PackSampler(view, 0, seed=1), 64, collate_fn=seen, num_workers=1)
        held = list(loader)
        first, mapped = held[4]
        grown = [(held[place][0] - first) / 2**20 for place in (len(held) // 2, -1)]
        pages = (held[-1][1] - mapped) / 2**20
        print(
            f"worker over {packs:,} packs: {first / 2**20:.0f} MB at first, "
            f"half way {grown[0]:+.1f} MB, at the end {grown[1]:+.1f} MB; "
            f"pages of the mapped plan and lengths, shared by all workers: {pages:+.0f} MB"
        )
        return max(grown)


if __name__ == "__main__":
    main()
