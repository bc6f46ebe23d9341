"""`packtrain init` on real samples: what it writes runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from packtrain.cli import main
from packtrain.template import ensure_torchvision, load_processor

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """A tiny model beside its tokenizer."""
    from packtrain.testing.tiny import tiny_model

    tokenizer = load_processor(str(tokenizer_folder))
    tiny_model("tiny:qwen3", tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    held = json.loads(path.read_text())
    held.pop("processor_class", None)
    path.write_text(json.dumps(held))
    return tmp_path / "model"


@pytest.fixture
def gsm8k(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    with (data / "text_sft" / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(40), strict=False)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return path


def init(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["init", *map(str, words)])
    return int(caught.value.code or 0)


@pytest.mark.parametrize("host", ["hf", "trl"])
def test_the_script_it_writes_trains(
    host: str, model: Path, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(gsm8k, "--model", model, "--host", host, "-o", tmp_path / "out", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 40 and told["agreed_tokens"] > 50
    script = tmp_path / "out" / "train.py"
    done = subprocess.run(
        [warm.python(), str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plan = next((tmp_path / "out" / "runs" / "packs" / "train").glob("plan-*/plan.json"))
    assert json.loads(plan.read_text())["stats"]["samples"] == 40


def test_the_yaml_it_writes_is_a_configuration(model: Path, gsm8k: Path, tmp_path: Path) -> None:
    from packtrain.train.config import load_config

    assert init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out", "--pack-length", 512) == 0
    config = load_config(tmp_path / "out" / "packtrain.yaml")
    assert config.pack_length == 512
    assert config.custom.train_jsonl == str(gsm8k)


def test_what_it_refuses(
    model: Path,
    gsm8k: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out") == 0
    assert init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out") == 0  # equal: nothing to say
    with monkeypatch.context() as patch:  # before anything is read
        patch.setattr("packtrain.sources.open_source", None)
        capsys.readouterr()
        assert (
            init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out", "--pack-length", 512) == 2
        )
        told = capsys.readouterr().err
    assert "is there and differs: it was written without --pack-length 512\n" in told
    assert "--overwrite" in told
    (tmp_path / "out" / "train.py").write_bytes(b"\xffmine")  # of another editor: overwritten unread
    assert init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out", "--overwrite") == 0
    (tmp_path / "out" / "train.py").write_text("mine")
    cases: list[tuple[list[Any], str]] = [
        ([gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out"], "is there and differs"),
        ([gsm8k, "--model", model, "--host", "hf", "--pack-length", 0], "expected an integer >= 1"),
        ([gsm8k, "--model", model, "--host", "verl"], "verl"),
        ([gsm8k, "--model", model, "--host", "swift", "-o", tmp_path / "s"], "ms-swift is not installed"),
    ]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"colour": "red"}\n')
    cases.append(([bad, "--model", model, "--host", "hf"], "can be used"))
    for words, told in cases:
        capsys.readouterr()
        assert init(*words) == 2
        assert told in capsys.readouterr().err, words
    assert (tmp_path / "out" / "train.py").read_text() == "mine"


def test_a_host_template_that_differs_is_an_error(
    model: Path, gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Callable[..., Any]
) -> None:
    """transformers adds a turn that our rendering does not know of: exit 1, both numbers told."""
    ensure_torchvision()
    from transformers import PreTrainedTokenizerBase

    real = PreTrainedTokenizerBase.apply_chat_template

    def longer(self: Any, chat: Any, *args: Any, **kwargs: Any) -> Any:
        made = real(self, chat, *args, **kwargs)
        if kwargs.get("return_dict") and kwargs.get("tokenize"):
            made["input_ids"] = [*made["input_ids"], 1]
        return made

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", longer)
    assert init(gsm8k, "--model", model, "--host", "hf", "-o", tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()


def test_the_template_type_of_ms_swift_stands_in_its_script(
    tmp_path: Path, model: Path, gsm8k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from packtrain.hosts._scaffold import files_for

    values = {
        "by": "# packtrain init",
        "data": "d.jsonl", "model": "m", "out": "o", "pack_length": 1024, "samples": 1, "kinds": "text",
        "looked": 1, "mean": 1, "longest": 1,
    }  # fmt: skip
    for name in (None, "qwen2_5_vl"):
        script = files_for("swift", tmp_path, {**values, "template": name})[tmp_path / "train.sh"]
        lines = [line.strip() for line in script.splitlines() if line.startswith("  --")]
        assert ("--template qwen2_5_vl \\" in lines) == (name is not None)
        assert all(line.endswith("\\") or line == lines[-1] for line in lines)
    assert init(gsm8k, "--model", model, "--host", "hf", "--template", "qwen3", "--out", tmp_path / "o") == 0
    assert "--template: no effect with --host hf" in capsys.readouterr().err


def test_it_says_how_many_samples_the_model_cannot_use(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures for a text model: a few are told, a tenth is the limit (media that cannot be used)."""
    picture = str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg")
    answer = {"role": "assistant", "content": "A picture."}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": [picture]},
        {"messages": [{"role": "user", "content": "What?"}, answer]},
    ]
    path = tmp_path / "mixed.jsonl"
    for pictures, code in ((10, 0), (11, 2)):
        chosen = [rows[number >= pictures] for number in range(100)]
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        assert init(path, "--model", model, "--host", "hf", "-o", tmp_path / str(pictures)) == code
        told = capsys.readouterr()
        if code:
            why = f"11 of 100 samples hold image that {model} does not take, the first mixed.jsonl:1"
            assert why in told.err and "name a model that takes them" in told.err
            assert not (tmp_path / "11").exists()
        else:
            assert "cannot be used: 10 of the 100 samples read: mixed.jsonl:1 (unsup" in told.out
            found = re.search(r"read and (\d+) tried; the run measures the other (\d+)", told.out)
            assert found is not None and int(found[1]) + int(found[2]) == 100 and 50 < int(found[1]) <= 65


def test_a_tiny_model_is_told_by_its_name(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folders are gone, or not there yet, when a refusal is read."""
    picture = str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A picture."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns, "images": [picture]}) + "\n")
    assert init(tmp_path / "a.jsonl", "--model", "tiny:qwen3", "--host", "hf", "-o", tmp_path / "o") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 1 sample hold image that tiny:qwen3 does not take" in told and "tiny-qwen3" not in told


@pytest.mark.parametrize(("absent", "code"), [(6, 0), (7, 2), (50, 2)])
def test_media_that_are_not_there_name_the_root(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], absent: int, code: int
) -> None:
    """LLaVA's bare file names without their folder: more than a tenth is no data set of texts."""
    picture = str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg")
    rows = [
        {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A thing."}],
         "image": f"{k}.jpg" if k < absent else picture}
        for k in range(60)
    ]  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps([*rows, text_row()]), encoding="utf-8")
    assert (
        init(tmp_path / "train.json", "--model", "tiny:qwen2_5_vl", "--host", "hf", "-o", tmp_path / "o")
        == code
    )
    told = capsys.readouterr()
    if code:
        assert f"media of {absent} of the 61 samples looked at are not there, the first" in told.err
        assert "train.json[0]: " in told.err and "--media-root" in told.err
        assert not (tmp_path / "o" / "train.py").exists()


def test_a_processor_alone_is_no_model(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.json").write_text(json.dumps([text_row()] * 3), encoding="utf-8")
    model = data / "processors" / "qwen2_5_vl"
    assert init(tmp_path / "train.json", "--model", model, "--host", "trl", "-o", tmp_path / "o") == 0
    assert f"{model} holds no config.json" in capsys.readouterr().err


def text_row() -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}


def test_every_row_decides_what_the_script_carries(
    model: Path, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture, a tool or a key that only the last of many rows has is not an absence."""
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()] * 3
    turns = [{"role": "user", "content": "<image>see"}, {"role": "assistant", "content": "so"}]
    late = {"messages": turns, "images": ["gone.png"], "hue": 3}
    data = tmp_path / "late.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, late]), encoding="utf-8")
    words = (data, "--model", model, "--out", tmp_path / "o", "--json", "--media-root", tmp_path)
    assert init(*words, "--host", "hf") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kinds"] == "image" and figures["keys"] == {"hue": 1}
    assert figures["failed"] == [["late.jsonl:121", "unsupported_media"]]
    assert f"media_root={str(tmp_path)!r}" in (tmp_path / "o" / "train.py").read_text()
    data.write_text("".join(json.dumps({**row, "spans": [[0, 2]]}) + "\n" for row in rows), encoding="utf-8")
    assert init(*words, "--host", "hf", "--overwrite") == 2
    assert "'spans'" in capsys.readouterr().err
    assert init(*words, "--host", "hf", "--overwrite", "--ignore-key", "spans") == 0


@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("host", ["hf", "trl"])
@pytest.mark.parametrize("pictures", [False, True])
def test_the_script_and_the_yaml_supervise_the_same_tokens(
    host: str,
    pictures: bool,
    data: Path,
    small_processor: Path,
    gsm8k: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trained tokens of every sample, in packs of the script's trainer and by the template of the YAML."""
    import runpy

    import transformers

    from packtrain.pipeline.inputs import Inputs
    from packtrain.testing.tiny import tiny_model
    from packtrain.train.config import load_config

    words: list[Any] = [gsm8k, "--model", model]
    if pictures:
        processor = load_processor(str(small_processor))
        for part in (processor, tiny_model("tiny:qwen2_5_vl", processor)):
            part.save_pretrained(tmp_path / "seeing")
        chats = json.loads((data / "mllm_demo" / "mllm_demo.json").read_text(encoding="utf-8"))
        path = tmp_path / "pictures.json"
        path.write_text(json.dumps(chats), encoding="utf-8")
        words = [path, "--model", tmp_path / "seeing", "--media-root", data / "mllm_demo"]
    assert init(*words, "--host", host, "-o", tmp_path / "out") == 0
    trainers: list[Any] = []
    monkeypatch.setattr(transformers.Trainer, "train", lambda self, *args, **kwargs: trainers.append(self))
    runpy.run_path(str(tmp_path / "out" / "train.py"), run_name="__main__")
    packs = trainers[0].packs.data
    found = {sample["sample_id"]: trained(sample) for k in range(len(packs)) for sample in packs[k]}
    inputs = Inputs.of_config(load_config(tmp_path / "out" / "packtrain.yaml"))
    source = inputs.open_source()
    template = inputs.open_template(source)
    assert found == {index: trained(template.encode(source[index])) for index in range(len(source))}
    assert all(found.values())


def trained(sample: Any) -> list[tuple[int, int]]:
    """(place, token) of all that is trained."""
    return [(place, int(token)) for place, token in enumerate(sample["labels"]) if token != -100]


def test_a_refused_init_leaves_no_model(
    data: Path, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data, host, media and files are looked at before anything is written."""
    picture = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "so"}]}
    blind = tmp_path / "blind.jsonl"
    blind.write_text(json.dumps({**picture, "images": ["gone.png"]}) + "\n", encoding="utf-8")
    for path, host, words in (
        (tmp_path / "none.jsonl", "hf", "none.jsonl"),
        (gsm8k, "swift", "ms-swift is not installed\n  hint: pip install ms-swift\n"),
        (blind, "trl", "--media-root"),
    ):
        kind = "tiny:qwen2_5_vl" if path == blind else "tiny:qwen3"
        assert init(path, "--model", kind, "--host", host, "-o", tmp_path / "o") == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "o").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("mine")
    assert init(gsm8k, "--model", "tiny:qwen3", "--host", "hf", "-o", tmp_path / "mine") == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["train.py"]


def test_the_folder_of_a_tiny_text_model_names_no_processor(gsm8k: Path, tmp_path: Path) -> None:
    """`AutoProcessor` takes it for what it is, as TRL asks."""
    ensure_torchvision()
    from transformers import AutoProcessor

    words = (gsm8k, "--model", "tiny:qwen3", "--host", "trl", "-o", tmp_path / "o")
    assert init(*words) == 0 and init(*words) == 0
    folder = tmp_path / "o" / "tiny-qwen3"
    assert "processor_class" not in json.loads((folder / "tokenizer_config.json").read_text())
    assert len(AutoProcessor.from_pretrained(folder)) > 500
    assert f"{str(folder)!r}" in (tmp_path / "o" / "train.py").read_text()
