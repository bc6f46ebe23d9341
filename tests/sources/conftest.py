"""Fixtures of the source tests: no index is ever written outside of the test's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(name, records or bytes) -> path of a file in the test's folder."""

    def write_file(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif name.endswith(".json"):
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        else:
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in content)
            path.write_text(lines, encoding="utf-8")
        return path

    return write_file
