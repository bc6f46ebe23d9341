"""Steps bench: how even the ranks are, what an index of the epoch order costs, how long a forecast takes.

    python bench/steps.py              # 1e6 samples of `sft` lengths at 8192 tokens, 64 ranks
    python bench/steps.py --n 1e5 --world-size 8

Evenness is predicted time (tokens + sum(length**2) / 24,000): slowest rank over mean rank, summed over
micro steps (or steps). Seconds are wall time of this process with compilers warm; on a busy machine read
the ratios. Floors that must hold are asserted at the end.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from planner import facts, lengths_of

import packtrain as pt
from packtrain.planning.balance import Balance
from packtrain.planning.costs import costs_of
from packtrain.planning.epoch_order import EpochOrder
from packtrain.planning.permutation import Permutation
from packtrain.planning.stats import step_evenness


def evenness(aligned: pt.AlignedPlan, ids: np.ndarray, accum: int, *, per_step: bool = False) -> float:
    """Sum of the slowest over sum of the mean, over full steps."""
    width = aligned.world_size * accum
    full = len(ids) // width * width
    costs = costs_of(aligned.plan)[0][ids[:full]].reshape(-1, accum, aligned.world_size)
    held = costs.sum(axis=1, keepdims=True) if per_step else costs
    return float(held.max(axis=2).sum() / held.mean(axis=2).sum())


def steps_of_packs(lengths: pt.Lengths, cap: int, ranks: int) -> dict[str, float]:
    aligned = pt.plan(lengths, cap).align(ranks)
    places = np.arange(len(aligned), dtype=np.int64)
    plain = aligned.pack_ids_at(EpochOrder(aligned).at(places, 0))
    found: dict[str, float] = {}
    print(f"steps of packs: {len(aligned.plan):,} packs, {ranks} ranks")
    for accum in (1, 4, 8):
        order = EpochOrder(aligned, grad_accum=accum, balance="step")
        begin = time.perf_counter()
        ids = aligned.pack_ids_at(order.of_steps(0, order.steps, 0))
        seconds = time.perf_counter() - begin
        before, after = (order.samples_per_step(balanced=b) for b in (False, True))
        assert np.array_equal(before, after), "the samples of a step changed"
        assert accum > 1 or np.array_equal(ids, plain), "G=1 is to stay as it is"
        found[f"micro_{accum}"] = evenness(aligned, ids, accum)
        by_step = EpochOrder(aligned, grad_accum=accum, balance=Balance(grad_accum=accum, sync="step"))
        dealt = by_step.of_steps(0, by_step.steps, 0)
        before_micro = evenness(aligned, plain, accum)
        print(
            f"  G={accum}: micro step {before_micro:.4f} -> {found[f'micro_{accum}']:.4f}; "
            f"step totals {evenness(aligned, plain, accum, per_step=True):.4f} -> "
            f"{evenness(aligned, aligned.pack_ids_at(dealt), accum, per_step=True):.4f}; "
            f"samples/step {after.mean():.1f} sd {after.std():.2f} (unbalanced sd {before.std():.2f}); "
            f"{seconds:.2f} s an epoch"
        )
    return found


def steps_of_samples(lengths: pt.Lengths, cap: int, ranks: int) -> dict[str, float]:
    found = {}
    for batch in (16 * ranks, 8 * ranks):
        pt.plan(lengths, cap, samples_per_step=batch, packs_multiple=ranks, seed=0)  # compile
        begin = time.perf_counter()
        plan = pt.plan(lengths, cap, samples_per_step=batch, packs_multiple=ranks, seed=0)
        seconds = time.perf_counter() - begin
        found[f"samples_{batch}"] = step_evenness(plan, ranks, 1 << 40)
        raw = np.arange(plan.spec.packs_per_step * (len(plan.indices) // batch))
        accum = plan.spec.packs_per_step // ranks
        print(
            f"steps of {batch:,} samples: K={plan.spec.packs_per_step} (G={accum}), "
            f"{plan.step_count:,} steps, "
            f"max/mean over ranks {found[f'samples_{batch}']:.4f} (packs in plan order "
            f"{evenness(plan.align(ranks), raw, accum, per_step=True):.4f}); planned in {seconds:.2f} s"
        )
    return found


def permutation() -> float:
    order, asked = Permutation(10**9, 1), np.random.default_rng(0).integers(0, 10**9, 1_000_000)
    order.map(asked[:1000])
    begin = time.perf_counter()
    entries = order.map(asked)
    seconds = time.perf_counter() - begin
    assert len(np.unique(entries)) == len(np.unique(asked))
    print(f"permutation of 1e9: {seconds * 1e3:.0f} ns an index")
    return seconds


def forecast(cap: int, ranks: int) -> float:
    lengths = pt.Lengths(lengths_of("sft", 10_000_000, cap))
    begin = time.perf_counter()
    rows = pt.forecast(lengths, [cap // 2, cap, 2 * cap], ranks, 4)
    seconds = time.perf_counter() - begin
    best = next(row for row in rows if row["recommended"])
    print(f"forecast of 1e7 samples, 3 pack lengths: {seconds:.1f} s; recommends {best['pack_length']}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=float, default=1e6)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--world-size", type=int, default=64)
    args = parser.parse_args()
    print(json.dumps(facts()))
    lengths = pt.Lengths(lengths_of("sft", int(args.n), args.capacity))
    found = steps_of_packs(lengths, args.capacity, args.world_size)
    found |= steps_of_samples(lengths, args.capacity, args.world_size)
    per_index = permutation()
    forecast(args.capacity, args.world_size)
    assert found["micro_4"] <= 1.045 and found["micro_8"] <= 1.022
    assert found[f"samples_{16 * args.world_size}"] <= 1.01
    assert per_index <= 3, "seconds for a million indices"


if __name__ == "__main__":
    main()
