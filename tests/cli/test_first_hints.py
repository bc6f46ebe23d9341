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
