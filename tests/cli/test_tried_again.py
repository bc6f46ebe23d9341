"""What a first try is refused for can be set where it is said, and the second try is not in its way."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packtrain.cli import main
from packtrain.cli._show import table
from packtrain.errors import ConfigError
from packtrain.pipeline.measure import measure
from packtrain.pipeline.run import Heard
from packtrain.store import parts

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), " ".join((out + err).split())


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """100 chats, of which the 71st calls a tool: between those that init measures."""
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    rows: list[dict[str, Any]] = [{"messages": turns} for _ in range(100)]
    rows[70] = {"messages": turns, "tools": [TOOL]}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_hint_of_a_measurement_can_be_followed_in_its_folder(
    chats: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("measure", chats, "-p", data / "processors" / "qwen2_5_vl", "-o", tmp_path / "l")
    code, said = told(capsys, *words)
    assert code == 2 and "a.jsonl:71: the chat template of" in said and "--allow-dropped tools trains" in said
    code, said = told(capsys, *words, "--allow-dropped", "tools")
    assert code == 0 and "samples │ 100" in said


def test_init_says_what_a_row_that_is_not_measured_holds(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the script and the YAML that it writes are refused by their first run."""
    words = ("init", chats, "--model", "tiny:qwen2_5_vl", "--host", "hf", "-o", tmp_path / "first")
    code, said = told(capsys, *words)
    assert code == 2 and "a.jsonl:71: the chat template of" in said and "--allow-dropped tools trains" in said
    assert not (tmp_path / "first" / "train.py").exists()
    assert told(capsys, *words, "--allow-dropped", "tools")[0] == 0
    written = yaml.safe_load((tmp_path / "first" / "packtrain.yaml").read_text(encoding="utf-8"))
    assert written["template"] == {"allow_dropped": ["tools"]}
    script = (tmp_path / "first" / "train.py").read_text(encoding="utf-8")
    assert "template = HFTemplate(processor, allow_dropped=['tools'])" in script


class _Refuses:
    """Lengths of one; the template of version 1 refuses sample 30."""

    def __init__(self, version: int) -> None:
        self.version = version

    def config(self) -> dict[str, Any]:
        return {"version": self.version}

    def measure(self, sample: Any) -> int:
        if self.version == 1 and sample["text"] == "30":
            raise ConfigError("it drops this", hint="version=2")
        return 1

    def encode(self, sample: Any) -> dict[str, Any]:
        return {"input_ids": np.ones(1, np.int64), "labels": np.ones(1, np.int64)}


class _Rows:
    fingerprint = "rows"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": str(index)}

    def where(self, index: int) -> str:
        return f"row {index}"


def test_parts_of_a_refused_measurement_go_on_or_give_way(tmp_path: Path) -> None:
    """The same inputs keep what was measured; others take its place; parts of a stopped one stay."""
    folder = tmp_path / "l"

    def again(version: int) -> Any:
        return measure(_Rows(), _Refuses(version), folder, persist_every=10)

    for _ in range(2):
        with pytest.raises(ConfigError, match="row 30: it drops this") as fault:
            again(1)
        assert fault.value.hint == "version=2"
    assert len(again(2)) == 40 and not (folder / "partial").exists()


def test_a_mark_of_a_refusal_goes_with_the_refusal(tmp_path: Path) -> None:
    parts.open_parts(tmp_path, {"of": 1})

    def refused() -> Any:
        raise ConfigError("no")
        yield

    with pytest.raises(ConfigError):
        list(parts.guarded(tmp_path, refused()))
    assert list(parts.guarded(tmp_path, iter(()))) == []
    assert parts.open_parts(tmp_path, {"of": 2}) == (0, "of")  # as of a measurement that was stopped


@pytest.mark.parametrize(
    "words",
    [
        ("show", "a.yaml"),
        ("verify", "a.yaml"),
        ("which", "a.yaml", "--step", "0"),
        ("diff", "a.yaml", "a.yaml"),
        ("export", "a.yaml", "out"),
        ("plan", "a.yaml", "-n", "8", "-o", "out"),
        ("forecast", "a.yaml", "--pack-length", "8"),
        ("measure", "a.yaml", "-o", "out", "--kind", "mixture", "-p", "none"),
    ],
)
def test_the_yaml_of_a_run_in_the_place_of_an_artefact_is_told(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("global_max_length: 8\n", encoding="utf-8")
    code, said = told(capsys, *words)
    assert code == 2 and "read by packtrain run and train; name its" in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_samples_in_the_place_of_lengths_are_measured_first(name: str, tmp_path: Path, capsys: Any) -> None:
    """Also where a column of theirs is called as a cost is."""
    path = tmp_path / name
    rows = ['{"messages": [], "images": ["1.png"]}', '{"messages": []}']
    path.write_text("\n".join(rows if name == "a.jsonl" else ["text,images", "how,1.png"]) + "\n")
    code, said = told(capsys, "plan", path, "-n", 8, "-o", tmp_path / "p")
    assert code == 2 and f"measured first: packtrain measure {path}" in said


def test_a_sample_that_has_no_pack_says_what_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "<image>How?"}, {"role": "assistant", "content": "So."}]
    rows = [{"messages": turns[1:]}] + [{"messages": [{**turns[0], "content": "Hi"}, turns[1]]}] * 12
    path = tmp_path / "a.jsonl"
    rows[3] = {"messages": turns, "images": ["none.png"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    folder = tmp_path / "l"
    assert told(capsys, "measure", path, "-p", data / "processors" / "qwen2_5_vl", "-o", folder)[0] == 0
    assert told(capsys, "plan", folder, "-n", 64, "-o", tmp_path / "p")[0] == 0
    for artefact in (folder, tmp_path / "p"):
        _, said = told(capsys, "show", artefact, "--sample", 3, "--json")
        assert json.loads(said)["detail"] == f"{tmp_path / 'none.png'} does not exist"
    assert "0 to 12" in told(capsys, "which", tmp_path / "p", "--sample", 13)[1]
    said = told(capsys, "which", tmp_path / "p", "--sample", 3)[1]
    assert f"packtrain show {tmp_path / 'p'} --sample 3" in said


def test_a_full_disk_under_another_library_is_no_fault_of_ours(monkeypatch: Any, capsys: Any) -> None:
    """safetensors raises an error of its own."""

    def full(*words: object, **more: object) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("packtrain.cli._app.app.main", full)
    code, said = told(capsys, "train", "a.yaml")
    assert code == 2 and "free space" in said and "report it" not in said


def test_warnings_of_single_samples_do_not_fill_the_record_of_a_run() -> None:
    log = logging.getLogger("packtrain.somewhere")
    with Heard() as heard:
        for number in [*range(1000), *range(1000)]:
            log.warning("sample %d left out", number)
        log.warning("another")
        log.warning("another")
    assert heard.lines == [
        *(f"sample {number} left out" for number in range(5)), "… and more like these, in the log", "another"
    ]  # fmt: skip


def test_a_table_prints_what_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are lists and colons are text: no style, and no picture."""
    table(
        "Lengths in a[bold]",
        {"detail": "ignore_keys: [loss_mask] leaves it out", "path": "/a/[red]/b:smile:c"},
    )
    out = " ".join(capsys.readouterr().out.split())
    for text in ("a[bold]", "ignore_keys: [loss_mask] leaves it out", "/a/[red]/b:smile:c"):
        assert text in out


def test_the_ledger_speaks_of_options_or_of_keys(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """A plan was made by the command line, a run by its YAML."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So."}]
    rows: list[dict[str, Any]] = [{"messages": turns} for _ in range(200)]
    rows[3]["loss_mask"] = [1]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (
        told(capsys, "measure", path, "-p", data / "processors" / "qwen2_5_vl", "-o", tmp_path / "l")[0] == 0
    )
    assert told(capsys, "plan", tmp_path / "l", "-n", 64, "-o", tmp_path / "p")[0] == 0
    assert "--ignore-key loss_mask leaves it out" in told(capsys, "show", tmp_path / "p", "--ledger")[1]
    assert "--ignore-key loss_mask" in told(capsys, "show", tmp_path / "p", "--sample", 3)[1]
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("packtrain.cli.show.read_run", lambda folder: ({}, {}))
    (tmp_path / "p").rename(tmp_path / "plan")
    said = told(capsys, "show", tmp_path, "--ledger")[1]
    assert "data.ignore_keys: [loss_mask] leaves it out" in said
