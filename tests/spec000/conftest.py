"""Prepared text runs for the scenarios of spec 000."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.pipeline.prepare import prepare
from packtrain.train.config import load_config


@pytest.fixture
def prepared(text_run: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """`prepared(samples, validation=…, **training)` measures and plans a small text run."""

    def make(samples: int = 40, *, validation: bool = False, **training: Any) -> Any:
        values = text_run(samples, **training)
        values["custom"]["val_jsonl"] = values["custom"]["train_jsonl"]
        config = load_config(values)
        return prepare(config, Path(config.training.output_dir), validation=validation)

    return make
