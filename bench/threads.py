"""Wall time of planning on 1, 2, … threads: the bytes must be equal, the seconds should not.

    python bench/threads.py --n 1e7 --kinds sft caption --threads 1 2
    python bench/threads.py --n 1e8 --seed 7

Best of several runs in one process, turn and turn about, so that a busy machine is unfair to all alike. Each
thread needs a free core: compare CPU with wall seconds before drawing conclusions. The stages are seconds
inside kernels, summed over threads, of the fastest run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from typing import Any

import numpy as np
from planner import facts, lengths_of

import packtrain as pt
from packtrain.packers import _jit

STAGES: dict[str, float] = {}


def watch() -> None:
    """Time every kernel call."""
    run = _jit.Kernel.__call__

    def timed(self: _jit.Kernel, *args: Any) -> Any:
        begin = time.perf_counter()
        out = run(self, *args)
        name = self.plain.__name__
        STAGES[name] = STAGES.get(name, 0.0) + time.perf_counter() - begin
        return out

    _jit.Kernel.__call__ = timed  # type: ignore[method-assign]


def measure(
    lengths: pt.Lengths, cap: int, seed: int | None
) -> tuple[float, float, dict[str, float], pt.PackPlan]:
    STAGES.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    plan = pt.plan(lengths, cap, seed=seed)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return *seconds, dict(STAGES), plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=float, default=1e7)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--kinds", nargs="+", default=["sft"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(facts()))
    watch()
    for kind in args.kinds:
        lengths = pt.Lengths(lengths_of(kind, int(args.n), args.capacity).astype(np.int32))
        best: dict[int, Any] = {}
        sums = set()
        for turn in range(args.repeat + 1):  # the first compiles
            for count in args.threads:
                os.environ["PACKTRAIN_THREADS"] = str(count)
                *row, plan = measure(lengths, args.capacity, args.seed)
                if turn == 0:
                    sums.add(plan.checksum)
                elif count not in best or row[0] < best[count][0]:
                    best[count] = row
                del plan
        if len(sums) > 1:
            raise SystemExit(f"{kind}: plans differ between threads")
        for count, (wall, cpu, stages) in best.items():
            parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in stages.items() if seconds > 2e-3)
            print(
                f"{kind:10} {int(args.n):>10} threads {count}: wall {wall:.3f} cpu {cpu:.3f}  ({parts})",
                flush=True,
            )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
