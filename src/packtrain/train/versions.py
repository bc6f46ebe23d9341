"""Versions of transformers and torch on which isolation was tested, and what happens on others.

Isolation rests on how transformers derives masks and hands positions on, and that changed often.
Others are refused, unless `PACKTRAIN_UNTESTED_VERSIONS=1` is set: then nothing counts as known, and
a run starts only after its start-up proof has passed.
"""

from __future__ import annotations

import importlib.metadata

from ..errors import IsolationError
from ..world import untested_allowed

__all__ = ["OVERRIDE", "TESTED", "untested", "versions_trusted"]

#: Minor versions that the tests or the GPU runs of docs/benchmarks.md passed on.
TESTED = {"transformers": ("5.17", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"), "torch": ("2.11", "2.13")}

OVERRIDE = "PACKTRAIN_UNTESTED_VERSIONS"


def untested() -> list[str]:
    """Installed packages whose minor version was not tested, as "torch 2.9.1 (tested: 2.11, 2.13)"."""
    found = []
    for package, tested in TESTED.items():
        version = importlib.metadata.version(package)
        if ".".join(version.split("+")[0].split(".")[:2]) not in tested:
            found.append(f"{package} {version} (tested: {', '.join(tested)})")
    return found


def versions_trusted() -> bool:
    """True on tested versions; False when the override is set on others.

    Raises:
        IsolationError: other versions, and no override.
    """
    others = untested()
    if not others:
        return True
    if untested_allowed():
        return False
    raise IsolationError(
        f"isolation was not tested on {'; '.join(others)}",
        hint=f"install a tested version, or set {OVERRIDE}=1: the start-up proof then decides",
    )
