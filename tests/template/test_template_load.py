"""Loading processors: every failure is one line with a hint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.errors import ConfigError, InputError, MissingExtraError, missing_package
from packtrain.template import HFTemplate, load_processor


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text and error.value.hint and len(text) < 500
    return text


@pytest.fixture
def tokenizer_folder(data: Path, tmp_path: Path) -> Path:
    """The tokenizer of a processor alone."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(data / "processors" / "qwen3_vl" / name, folder / name)
    config = json.loads((data / "processors" / "qwen3_vl" / "tokenizer_config.json").read_text())
    del config["processor_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_alone_is_text(tokenizer_folder: Path, chat) -> None:
    loaded = load_processor(tokenizer_folder)
    assert not hasattr(loaded, "image_processor")
    assert HFTemplate(loaded).family.name == HFTemplate(tokenizer_folder).family.name == "text"


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-xyz", "a/b/c"])
def test_missing_folder(name: str) -> None:
    with pytest.raises(InputError, match="does not exist") as caught:
        load_processor(name)
    one_line(caught)


def test_empty_name_and_foreign_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no processor is named"):
        load_processor(" ")
    with pytest.raises(InputError, match="holds no processor") as caught:
        load_processor(tmp_path)
    one_line(caught)


def test_hub_name_without_network() -> None:
    with pytest.raises(InputError, match="from the hub") as caught:
        load_processor("nobody/no-such-model")
    assert "network" in one_line(caught)


def test_torn_files(tokenizer_folder: Path, data: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text('{"half": ')
    with pytest.raises(InputError, match="cannot load the processor in") as caught:
        load_processor(tokenizer_folder)
    one_line(caught)


def test_a_broken_vision_processor_is_not_taken_for_text(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    with pytest.raises(InputError, match=r"describes a processor|cannot load") as caught:
        load_processor(tokenizer_folder)
    one_line(caught)
    (tokenizer_folder / "preprocessor_config.json").write_text('{"image_processor_type": "Unknown"}')
    with pytest.raises(InputError) as caught:
        load_processor(tokenizer_folder)
    one_line(caught)


def test_pixel_limits_take_effect_pb77(data: Path) -> None:
    """200,000 pixels asked for: 3000 x 4000 becomes 364 x 504, 234 tokens, in the real processor too."""
    loaded = HFTemplate(load_processor(data / "processors" / "qwen2_5_vl", max_pixels=200_000))
    assert loaded.verify_limits([(3000, 4000)]) == {(3000, 4000): 234}
    assert len(loaded.verify_limits()) == 3


def test_an_ignored_pixel_limit_is_refused_pb77(data: Path) -> None:
    """A processor that accepts a limit and does not read it: named with the limit in effect."""
    processor = load_processor(data / "processors" / "qwen2_5_vl", max_pixels=200_000)
    template = HFTemplate(processor)
    size = processor.image_processor.size
    processor.image_processor.size = type(size)(shortest_edge=3136, longest_edge=12_845_056)
    with pytest.raises(ConfigError, match=r"takes 15301 tokens .* 234 were expected") as caught:
        template.verify_limits([(3000, 4000)])
    assert "max_pixels" in one_line(caught)


def test_impossible_pixel_limits(data: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(ConfigError, match="not a range"):
        load_processor(data / "processors" / "qwen2_vl", min_pixels=10_000, max_pixels=5_000)
    with pytest.raises(ConfigError, match="no pixel limits"):
        load_processor(tokenizer_folder, max_pixels=5_000)


def test_the_shim_is_quiet_and_repeatable() -> None:
    """In a fresh interpreter with warnings as errors: torchvision and a model module import afterwards."""
    code = (
        "from packtrain.template import ensure_torchvision as f\n"
        "first = f()\nassert f() is first\n"
        "import torchvision, transformers\nassert f() is first\n"
        "from transformers.models.qwen2_vl import image_processing_qwen2_vl\n"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "" and run.stderr == "", run.stderr


PROTOBUF = "\n requires the protobuf library but it was not found in your environment. Check out"


@pytest.mark.parametrize("said", [ImportError(PROTOBUF), ValueError("Tokenizer class X does not exist")])
def test_a_class_of_another_release_is_the_cause_not_what_the_library_asks_for_then(
    said: Exception, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    config = tokenizer_folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": "OfTomorrow"}))

    def broken(*args: object, **options: object) -> None:
        raise said

    for name in ("AutoProcessor", "AutoTokenizer"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", broken)
    with pytest.raises(MissingExtraError, match=r"has no OfTomorrow, which .* was saved with") as caught:
        load_processor(tokenizer_folder)
    assert "protobuf" not in one_line(caught) and caught.value.exit_code == 2
    assert missing_package(caught.value, "") is caught.value
    config.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tokenizer_folder / "tokenizer.json").unlink()
    asks = isinstance(said, ImportError)
    with pytest.raises(InputError, match="holds no tokenizer.json" if asks else "incomplete") as caught:
        load_processor(tokenizer_folder)
    one_line(caught)
