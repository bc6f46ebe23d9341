"""The set that the tests of exports share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import NAMES, Set, records


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Set]:
    def make(
        count: int = 40,
        cap: int = 64,
        rows: list[dict[str, Any]] | None = None,
        names: list[str] | None = None,
    ) -> Set:
        held = NAMES if names is None else names
        number = len(list(tmp_path.glob("set*")))
        return Set(tmp_path / f"set{number}", records(held, count) if rows is None else rows, cap, held)

    return make
