"""One finished demo run for all tests of the main job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of our own, so that the demo set is made by this very code."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("PACKTRAIN_CACHE")
    os.environ["PACKTRAIN_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PACKTRAIN_CACHE"]
    else:
        os.environ["PACKTRAIN_CACHE"] = before


def demo_settings(output_dir: Path, **training: Any) -> Any:
    """The demo's configuration with another output folder."""
    from packtrain.testing.demo import demo_config
    from packtrain.train.config import load_config

    path = output_dir.parent / f"{output_dir.name}.yaml"
    path.write_text(demo_config())
    values = load_config(path).to_dict()
    values["training"].update({"output_dir": str(output_dir), "save_strategy": "no", **training})
    return load_config(values)


@dataclasses.dataclass
class Finished:
    config: Any
    result: Any
    folder: Path


@pytest.fixture(scope="session")
def finished(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The demo, trained for a few steps."""
    from packtrain.pipeline.run import run

    folder = tmp_path_factory.mktemp("run") / "demo"
    config = demo_settings(folder, max_steps=24)
    return Finished(config, run(config), folder)
