"""Law suites for plug-in authors and our own tests, small models (`tiny:…`) and the demo set (`demo:…`).

A packer is tested by inheriting its laws:

    from packtrain.testing import PackerLaws

    class TestMine(PackerLaws):
        packer = "mine"

`crash_points` stops a verb after each of its durable steps and runs it again. Names load on first use:
only the laws need hypothesis, only the tiny models torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .crash import Stopped, crash_points, snapshot, stopped_after
    from .demo import DemoSet, make_demo
    from .laws import (
        PackerLaws,
        check_plan,
        compiled_path,
        lengths_and_options,
        on_threads,
        plain_path,
        token_lists,
    )
    from .tiny import TINY_MODELS, tiny_model

_HOMES = {
    "DemoSet": "demo",
    "PackerLaws": "laws",
    "Stopped": "crash",
    "TINY_MODELS": "tiny",
    "check_plan": "laws",
    "compiled_path": "laws",
    "crash_points": "crash",
    "lengths_and_options": "laws",
    "make_demo": "demo",
    "on_threads": "laws",
    "plain_path": "laws",
    "snapshot": "crash",
    "stopped_after": "crash",
    "tiny_model": "tiny",
    "token_lists": "laws",
}

__all__ = [
    "TINY_MODELS",
    "DemoSet",
    "PackerLaws",
    "Stopped",
    "check_plan",
    "compiled_path",
    "crash_points",
    "lengths_and_options",
    "make_demo",
    "on_threads",
    "plain_path",
    "snapshot",
    "stopped_after",
    "tiny_model",
    "token_lists",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
