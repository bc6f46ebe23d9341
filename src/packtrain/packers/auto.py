"""auto: the packer to use when nothing else is asked for; the plan records what it chose."""

from __future__ import annotations

from dataclasses import replace

from ..extend import PackProblem, Patterns
from . import bfd

__all__ = ["HISTOGRAM", "VERSION", "pack"]

VERSION = 1
HISTOGRAM = True


def pack(problem: PackProblem) -> Patterns:
    """Best fit decreasing."""
    return replace(bfd.pack(problem), notes={"chosen": f"bfd/{bfd.VERSION}"})
