"""auto: the packer to use when nothing else is asked for; the plan records what it chose.

`bfd` first. Where it does not reach the lower bound, `refine` too, and the one with fewer packs wins
(`bfd` on a tie), so `auto` is never worse than best fit decreasing.
"""

from __future__ import annotations

from dataclasses import replace

from ..extend import PackProblem, Patterns
from . import bfd, refine
from ._bounds import best_bound

__all__ = ["HISTOGRAM", "VERSION", "pack"]

VERSION = 2
HISTOGRAM = True


def pack(problem: PackProblem) -> Patterns:
    """The better of `bfd` and `refine`."""
    best, chosen = bfd.pack(problem), f"bfd/{bfd.VERSION}"
    packs = int(best.repeat.sum())
    if packs > best_bound(problem.sizes, problem.counts, problem.capacity, packs, cheap=True)[0]:
        other = refine.pack(problem)
        if int(other.repeat.sum()) < packs:
            best, chosen = other, f"refine/{refine.VERSION}"
    return replace(best, notes={"chosen": chosen})
