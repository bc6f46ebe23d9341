"""auto: the packer to use when nothing else is asked for; the plan records what it chose.

`bfd` first. Where it does not reach the lower bound, `refine` too, and the one with fewer packs wins
(`bfd` on a tie), so `auto` is never worse than best or first fit decreasing. Under further limits: `bfd`.
"""

from __future__ import annotations

from dataclasses import replace

from ..extend import Bins, PackProblem, Patterns
from . import bfd, refine
from ._bounds import best_bound
from ._multi import pack_limits

VERSION = 3
HISTOGRAM = True
LIMITS = True


def pack(problem: PackProblem) -> Patterns | Bins:
    """The better of `bfd` and `refine`; under further limits `bfd`."""
    chosen = f"bfd/{bfd.VERSION}"
    if problem.limits or problem.max_samples is not None:
        return Bins(bin_of=pack_limits(problem), notes={"chosen": chosen})
    best = bfd.pack_tokens(problem)
    packs = int(best.repeat.sum())
    if packs > best_bound(problem.sizes, problem.counts, problem.capacity, packs, cheap=True)[0]:
        other = refine.pack(problem)
        if int(other.repeat.sum()) < packs:
            best, chosen = other, other.notes.get("chosen", f"refine/{refine.VERSION}")
    return replace(best, notes={"chosen": chosen})
