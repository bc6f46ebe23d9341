"""The scripts that write pages, as modules: tests hold the page against what its script makes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def script(name: str) -> Any:
    """scripts/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
