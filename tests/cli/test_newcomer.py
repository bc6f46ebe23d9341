"""What a newcomer types first: every wrong word is answered with the right one, in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packtrain.cli import main
from packtrain.train.config import load_config
from packtrain.train.config.aliases import FOREIGN, aliases_of

REPOSITORY = Path(__file__).resolve().parents[2]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), capsys.readouterr().err


def counts(tmp_path: Path, *tokens: int) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens\n" + "".join(f"{value}\n" for value in tokens))
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n\tname_or_path: x\n", "line 2, column 1: a tab"),
        ("data: s.jsonl\n", "write data: {path: s.jsonl}"),
        ("data: [a.jsonl, b.jsonl]\n", "data.mixture"),
        ("model: tiny:qwen3\n", "write model: {name_or_path: tiny:qwen3}"),
        ("template: qwen2_vl\n", "write template: {processor: qwen2_vl}"),
        ("training: 3\n", "a section holds keys"),
        ("data: {pack_lenght: 8}\n", "write global_max_length"),
        ("template: {max_lenght: 8}\n", "did you mean template.max_length?"),
        ("global_max_length: 8k\n", "as an integer\n"),
        ("data: {kind: stream, path: x}\nglobal_max_length: 8\n", "set training.max_steps; the stream"),
        ("stage: sft\nmodel_name_or_path: x\ntemplate: qwen\n", "packtrain llamafactory FILE"),
        ("base_model: x\ndatasets: [{path: y}]\n", "a plugin there: docs/hosts_yaml.md"),
        ("learning_rate: 1.0\n", "did you mean training.learning_rate?"),
        (
            "model: {dtype: 3}\ntraining: {seed: y, samples_per_step: -1}\n",
            "also wrong: training.samples_per_step, training.seed",
        ),
    ],
)
def test_the_hint_of_a_file_says_what_to_write(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    code, said = told(capsys, "run", path)
    assert code == 2 and words in said, said


@pytest.mark.parametrize("key", sorted(FOREIGN))
def test_keys_of_other_trainers_have_their_name_here(key: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_config({key: 1})
    assert caught.value.hint == FOREIGN[key]  # type: ignore[attr-defined]


def test_the_names_that_hints_give_are_keys() -> None:
    values = {"data.val": "v.jsonl", "template.train_on": "last", "model.attn": "sdpa", "data.packing": True}
    values |= {"template.max_pixels": 8, "template.min_pixels": 8, "template.fps": 1.0}
    values |= {"template.max_frames": 2, "data.pad_to_length": 8, "data.measure_workers": 1}
    values |= {"training.num_train_epochs": 1, "training.samples_per_step": 4, "data.media_root": "m"}
    values |= {"training.optim": "adafactor"}
    values |= {"data.path": "x.jsonl", "model.name_or_path": "x", "template.processor": "x"}
    named = {
        word.rstrip(":,;.") for hint in FOREIGN.values() for word in hint.split() if word.count(".") == 1
    }
    named = {word for word in named if word.partition(".")[0] in ("model", "data", "template", "training")}
    assert named <= values.keys(), named - values.keys()
    for name in named:
        section, _, key = name.partition(".")
        assert aliases_of(name) or load_config({section: {key: values[name]}})


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["measure", "x.jsonl", "-o", "l", "--packing_length", "8"],
            "--pack-length is an option of packtrain",
        ),
        (["measure", "x.jsonl", "-o", "l", "--num_proc", "8"], "did you mean --workers?"),
        (["plan", "l", "-o", "p", "--packing-length", "8"], "did you mean --pack-length?"),
        (["run", "x.yaml", "--cutoff_len", "8"], "write global_max_length"),
        (["show", "plan", "--samples_per_step", "8"], "--samples-per-step is an option of packtrain"),
    ],
)
def test_an_option_of_another_verb_or_system_is_named(
    words: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "run":
        (tmp_path / "x.yaml").write_text("{}")
        words = ["run", str(tmp_path / "x.yaml"), *words[2:]]
    code, said = told(capsys, *words)
    assert code == 2 and hint in said, said


def test_options_may_have_underscores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = counts(tmp_path, 5, 6, 7)
    code, _ = told(capsys, "plan", lengths, "--pack_length", 12, "--out", tmp_path / "p", "--max_samples", 1)
    assert code == 0
    spec = json.loads((tmp_path / "p" / "plan.json").read_text())["spec"]
    assert spec["pack_length"] == 12 and spec["max_samples"] == 1


def test_a_pack_length_below_every_sample_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "plan", counts(tmp_path, 50, 60), "-n", 40, "-o", tmp_path / "p")[0] == 0
    assert "every sample is longer than the pack length of 40 tokens: nothing is packed" in caplog.text
    caplog.clear()
    assert told(capsys, "plan", counts(tmp_path, 50, 60, 40), "-n", 40, "-o", tmp_path / "q")[0] == 0
    assert caplog.text == ""
    few = ("--long-samples", "drop", "-o", tmp_path / "r")
    assert told(capsys, "plan", counts(tmp_path, 50, 60, 40), "-n", 40, *few)[0] == 0
    assert "2 of 3 samples are in no pack: {'over_long': 2}" in caplog.text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "contents": "hi"}, "message 0 (user) has no content, only 'contents': rename it"),
        ({"role": "user", "content": None}, "message 0 (user) has null content"),
        ({"role": "user"}, "message 0 (user) has no content"),
    ],
)
def test_a_misspelt_content_is_named(message: dict[str, str], words: str) -> None:
    import packtrain as pt

    source = pt.open_chats([{"messages": [message, {"role": "assistant", "content": "ho"}]}])
    with pytest.raises(ValueError, match="message 0") as caught:
        source[0]
    assert words in str(caught.value)


def test_a_scheduler_that_ends_a_verb_gets_a_closing_line(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n')
    words = ["produce", tmp_path / "raw", tmp_path / "out", "--kind", "encoded", "-n", "8", "--watch"]
    going = subprocess.Popen(
        [sys.executable, "-m", "packtrain", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while not (tmp_path / "out").exists() and going.poll() is None:
        time.sleep(0.05)
    going.send_signal(signal.SIGTERM)
    _, said = going.communicate(timeout=120)
    assert going.returncode == 143, said
    assert "packtrain: stopped by SIGTERM\n  hint: run the same command again" in said


def test_warnings_of_the_file_stand_in_run_json(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = text_run(max_steps=1, save_strategy="no", packing_buffer=8)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    code, said = told(capsys, "run", tmp_path / "run.yaml", "--no-html")
    assert code == 0, said
    stored = json.loads((Path(values["training"]["output_dir"]) / "run.json").read_text())
    assert (
        "training.packing_buffer has no effect: a static plan has no buffer" in stored["result"]["warnings"]
    )


def test_the_example_on_real_conversations_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the README names it, with two steps; from there all folders are its own."""
    text = (REPOSITORY / "examples" / "mllm_demo.yaml").read_text(encoding="utf-8")
    assert text.count("../shared/data/") == 2
    path = tmp_path / "run.yaml"
    path.write_text(
        text.replace("../shared/data/", f"{data}/").replace("num_train_epochs: 4", "max_steps: 2")
    )
    code, err = told(capsys, "run", path, f"--training.output_dir={tmp_path / 'run'}")
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["template"]["processor"].endswith("qwen2_5_vl")
    assert record["result"]["metrics"]["steps"] == 2 and record["result"]["proof"]


def test_messages_hold_no_number_of_the_system_and_no_name_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder where a file belongs, a file where a folder belongs."""
    lengths = counts(tmp_path, 5, 6)
    (tmp_path / "images").mkdir()
    for words, wanted in (
        (
            ("train", tmp_path / "images"),
            f"{tmp_path}/images cannot be read: Is a directory\n  hint: name a YAML",
        ),
        (
            ("plan", lengths, "-n", 9, "-o", tmp_path / "o", "--skip-samples", tmp_path / "images"),
            "Is a directory",
        ),
        (("plan", lengths, "-n", 9, "-o", tmp_path / "o", "--skip-samples", tmp_path / "no"), "No such file"),
        (("plan", lengths, "-n", 9, "-o", lengths), f"{lengths} is a file, not a folder"),
        (("plan", lengths, "-n", 9, "-o", "/dev/null"), "packtrain: /dev/null is "),
    ):
        code, said = told(capsys, *words)
        assert code == 2 and wanted in said, said
        assert "Errno" not in said and "claim" not in said and ".tmp" not in said, said


def test_a_folder_without_a_stream_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").touch()
    path = tmp_path / "run.yaml"
    path.write_text("model: {name_or_path: tiny:qwen3}\ndata: {kind: growing, path: images}\n")
    code, said = told(capsys, "train", path, "--dry-run")
    assert code == 2 and "images holds no stream of packs\n  hint: name the OUT of packtrain produce" in said


def test_an_option_without_its_value_keeps_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "forecast", "lengths", "--pack-lengths")
    assert code == 2 and "see `packtrain forecast --help`" in said


@pytest.mark.parametrize(
    "words", ["which p --step 0", "show p --pack 0", "show p --ledger", "show p --sample 1", "diff p p"]
)
@pytest.mark.parametrize("name", ["indices", "offsets"])
def test_a_damaged_plan_is_named_as_such(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids would be those of other samples."""
    monkeypatch.chdir(tmp_path)
    assert told(capsys, "plan", counts(tmp_path, 3, 5, 2, 7), "-n", 8, "-o", "p")[0] == 0
    array = np.load(f"p/{name}.npy")
    array[1] = 3
    np.save(f"p/{name}.npy", array)
    code, said = told(capsys, *words.split())
    assert code == 2 and f"the plan is damaged: the file changed: p/{name}.npy" in said, said
    assert "hint: make it again: packtrain plan --overwrite" in said


def test_an_empty_ledger_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "plan", counts(tmp_path, 3, 5), "-n", 8, "-o", tmp_path / "p")[0] == 0
    assert told(capsys, "show", tmp_path / "p", "--ledger") == (
        0,
        "the ledger is empty: no sample was left out\n",
    )


def test_a_proof_on_a_plan_of_counts_says_what_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, "plan", counts(tmp_path, 3, 5), "-n", 8, "-o", tmp_path / "p")[0] == 0
    code, said = told(capsys, "verify", tmp_path / "p", "--model", "tiny:qwen3")
    assert code == 2 and "was planned from token counts" in said and "hint: measure a source" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {path: none.jsonl}", "none.jsonl does not exist"),
        ("data: {path: ok.jsonl}", "tiny:qwen3 is a network alone\n  hint: set template.processor"),
        ("data: {path: t.csv}", "pandas: read_csv(path).to_json"),
    ],
)
def test_a_refused_run_leaves_no_folder(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ok.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    Path("t.csv").write_text("a,b\n")
    rest = "model: {name_or_path: tiny:qwen3}\nglobal_max_length: 64\ntraining: {output_dir: runs/a}\n"
    Path("run.yaml").write_text(f"{text}\n{rest}")
    code, said = told(capsys, "train", "run.yaml")
    assert code == 2 and words in said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ok.jsonl", "run.yaml", "t.csv"]
