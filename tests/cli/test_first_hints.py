"""What a first measurement of records of another form says: the option that reads them, in words to type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from packtrain.cli import main
from packtrain.cli._app import spoken
from packtrain.errors import SampleError
from packtrain.pipeline.plan import plan_lengths
from packtrain.planning.lengths import Lengths
from packtrain.sources.chat import ChatSource
from packtrain.sources.text import TextSource


def measured(folder: Path, processor: Any, records: list[dict[str, Any]], *words: str) -> tuple[int, Path]:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["measure", str(path), "-p", str(processor), "-o", str(folder / "out"), *words])
    return int(stop.value.code or 0), folder / "out"


def test_media_without_a_placeholder_stop_with_their_option(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the samples would be left out; with the option all are used."""
    Image.new("RGB", (56, 56)).save(tmp_path / "1.png")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A picture."}]
    records = [{"messages": turns} | ({"images": ["1.png"]} if k % 2 else {}) for k in range(8)]
    processor = data / "processors" / "qwen2_5_vl"
    code, _ = measured(tmp_path, processor, records)
    err = capsys.readouterr().err
    assert (
        code == 2
        and "4 of 8 samples (50.0%) are left out: placeholder_mismatch 4; the first: a.jsonl:2" in err
    )
    assert "hint: --media-without-placeholder prepend" in err
    assert measured(tmp_path, processor, records, "--media-without-placeholder", "prepend")[0] == 0


@pytest.mark.parametrize(
    ("record", "task", "hint"),
    [
        ({"text": "hello there"}, (), "--task text trains documents as they are"),
        ({"body": "hello there", "n": 3}, ("--task", "text"), "--column text=body names the text"),
        ({"a": "x", "b": "y"}, ("--task", "text"), "--column text=FIELD names the text"),
    ],
)
def test_documents_name_the_option_that_reads_them(
    record: dict[str, Any], task: tuple[str, ...], hint: str, data: Path, tmp_path: Path, capsys: Any
) -> None:
    code, _ = measured(tmp_path, data / "processors" / "qwen2_5_vl", [record] * 3, *task)
    assert code == 2 and hint in " ".join(capsys.readouterr().err.split())


def test_a_yaml_has_keys_for_the_same() -> None:
    run = click.Command("run")
    told = []
    for source in (ChatSource([{"text": "a"}]), TextSource([{"body": "a"}])):
        with pytest.raises(SampleError) as fault:
            source[0]
        told.append(spoken(str(fault.value.hint), run, keyed=True))
    assert told[0].endswith("data.task: text trains documents as they are")
    assert told[1] == "it has 'body'; data.columns: {text: body} names the text"


def _turns(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}


def test_lengths_of_another_source_are_told_before_a_processor_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    assert measured(tmp_path, "", rows, "--kind", "encoded", "--audit", "0")[0] == 0
    rows.append({"input_ids": [4], "labels": [4]})
    code, _ = measured(tmp_path, tmp_path / "no processor", rows, "--kind", "encoded")
    err = capsys.readouterr().err
    assert code == 2 and "holds lengths of another number of samples, source" in err and "--append" in err
    assert measured(tmp_path, "", rows, "--kind", "encoded", "--audit", "0", "--append")[0] == 0


def test_a_tenth_of_malformed_records_stops_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As media that are missing: a wrong column or half a download, not so many bad records."""
    rows: list[dict[str, Any]] = [{"input_ids": [k, 2], "labels": [k, 2]} for k in range(20)]
    rows[3], rows[4] = {"input_ids": 3}, {"input_ids": "x"}
    words = ("--kind", "encoded", "--audit", "0")
    assert measured(tmp_path, "", rows, *words)[0] == 0  # not more than a tenth
    rows[5] = {"labels": [1]}
    code, _ = measured(tmp_path, "", rows, *words, "--overwrite")
    err = capsys.readouterr().err
    assert (
        code == 2 and "3 of 20 samples (15.0%) are left out: malformed_record 3; the first: a.jsonl:4" in err
    )
    assert measured(tmp_path, "", rows, *words, "--overwrite", "--max-drop-fraction", "1")[0] == 0


def test_a_changed_record_is_told_beside_its_old_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": [k] * 3, "labels": [k] * 3} for k in range(1, 4)]
    _, lengths = measured(tmp_path, "", rows, "--kind", "encoded", "--audit", "0")

    def shown() -> dict[str, Any]:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["show", str(lengths), "--sample", "1", "--json"])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    assert shown()["changed"] is None
    rows[1] = {"input_ids": [2] * 5, "labels": [2] * 5}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    told = shown()
    assert told["tokens"] == 3 and len(told["record"]["input_ids"]) == 5
    assert "no longer as it was measured" in told["changed"]
    for words in (["plan", str(lengths), "-n", "8", "--out"], ["show", "--html", str(tmp_path / "p.html")]):
        with pytest.raises(SystemExit):
            main([*words, str(tmp_path / "plan")])
    assert "no longer as it was measured" in caplog.text


def test_diff_names_the_settings_of_the_template(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("a", ()), ("b", ("--system", "Be brief."))):
        folder = tmp_path / name
        folder.mkdir()
        processor = data / "processors" / "qwen2_5_vl"
        code, lengths = measured(folder, processor, [_turns("Hi"), _turns("You")], "--audit", "0", *words)
        assert code == 0
        with pytest.raises(SystemExit):
            main(["plan", str(lengths), "-n", "512", "--out", str(folder / "plan")])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["diff", str(tmp_path / "a" / "plan"), str(tmp_path / "b" / "plan"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert stop.value.code == 1 and told["template"] == {"system": [None, "Be brief."]}


@pytest.mark.parametrize(("multiple", "told"), [(4, True), (1, False)])
def test_steps_that_leave_their_packs_empty_are_told_with_what_fills_them(
    multiple: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan_lengths(Lengths([100] * 64), None, pack_length=2048, samples_per_step=16, packs_multiple=multiple)
    said = "the 4 packs of a step of samples_per_step=16 are 20 % full (400 of 2048 tokens): a larger"
    assert any(said in line for line in caplog.messages) is told


def test_a_proof_on_fewer_samples_than_asked_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [*range(k, k + 6)], "labels": [*range(k, k + 6)]} for k in (3, 40, 90)]
    _, lengths = measured(tmp_path, "", rows, "--kind", "encoded", "--audit", "0")
    plan, words = str(tmp_path / "plan"), ["--model", "tiny:qwen3", "--attn", "sdpa", "--json"]
    for verb in (["plan", str(lengths), "-n", "32", "--out", plan], ["verify", plan, *words]):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(verb)
    told = json.loads(capsys.readouterr().out)["checks"]
    assert told["samples of the proof"] == "3 of 8: the plan holds no more"
