"""The `demo:` spellings and the shipped YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from packtrain.errors import UnknownNameError
from packtrain.testing.demo import DemoSet, demo_config, is_demo, resolve_demo
from packtrain.testing.demo.make import PACK_LENGTH

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demo.yaml"


def test_shipped_yaml_is_the_example() -> None:
    assert demo_config() == EXAMPLE.read_text(encoding="utf-8")


def test_yaml_fits_the_set() -> None:
    config = yaml.safe_load(demo_config())
    assert config["global_max_length"] == PACK_LENGTH
    assert config["training"]["packing_allow_single_long"] is False
    assert config["report"] == {"html": True}
    spellings = [
        config["custom"]["train_jsonl"],
        config["custom"]["val_jsonl"],
        config["template"]["processor"],
    ]
    assert all(is_demo(spelling) for spelling in spellings)


def test_yaml_is_a_valid_configuration() -> None:
    from packtrain.train.config import load_config

    assert load_config(EXAMPLE).training.packing_allow_single_long is False


def test_spellings(demo: DemoSet) -> None:
    folder = demo.train_jsonl.parent
    assert resolve_demo("demo:formulas", folder) == demo.train_jsonl
    assert resolve_demo("demo:formulas-val", folder) == demo.val_jsonl
    assert resolve_demo("demo:qwen2_5_vl", folder) == demo.processor_dir


def test_cache_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    assert resolve_demo("demo:formulas") == tmp_path / "demo" / "v1" / "train.jsonl"


def test_paths_pass_through() -> None:
    assert resolve_demo("data/train.jsonl") == Path("data/train.jsonl")
    assert not is_demo(None) and not is_demo("democracy.jsonl") and is_demo("demo:formulas")


def test_unknown_part_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'formulas'"):
        resolve_demo("demo:formula", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_import_and_second_use_are_light(tmp_path: Path) -> None:
    code = (
        "import sys; from packtrain.testing.demo import make_demo; import packtrain.report.html\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'matplotlib', 'jinja2', 'PIL', 'numba'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"make_demo({str(tmp_path / 'set')!r}, samples=60)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
