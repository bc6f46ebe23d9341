"""One demo set for all demo tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.testing.demo import DemoSet, make_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoSet:
    return make_demo(tmp_path_factory.mktemp("demo") / "set")


@pytest.fixture(scope="session")
def records(demo: DemoSet) -> list[dict[str, Any]]:
    return read_records(demo.train_jsonl)


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
