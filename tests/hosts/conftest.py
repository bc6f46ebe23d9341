"""A tiny random Qwen2.5-VL and 200 real samples on disk, for the hosts that are run as programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))

from real_rows import real_rows


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL with the real processor, as published: its cache is on."""
    from packtrain.template import load_processor
    from packtrain.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("swift") / "model"
    processor = load_processor(str(data / "processors" / "qwen2_5_vl"))
    made = tiny_model("tiny:qwen2_5_vl", processor)
    made.config.use_cache = made.config.get_text_config().use_cache = True
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def files(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    rows = real_rows(data)
    made = {}
    for name, chosen in {"all": rows, "few": [*rows[:12], *rows[-11:]]}.items():
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return made
