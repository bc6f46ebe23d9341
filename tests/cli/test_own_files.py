"""Folders that hold a user's own files: no verb writes between them, and each is answered before it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli import main
from packtrain.cli._app import _VERBS

LINES = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (5, 7, 3)]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), capsys.readouterr().err


def held(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LINES))
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of somebody's own files, some of which have the names of ours."""
    folder = tmp_path / "mine"
    folder.mkdir()
    np.save(folder / "tokens.npy", np.array([5, 7, 3]))
    for name in ("indices.npy", "reasons.jsonl", "source.json", "cat.png"):
        (folder / name).write_text(f"my {name}")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "mine/tokens.npy", "-n", "8", "--out", "mine"),
        ("plan", "mine/tokens.npy", "-n", "8", "--out", "mine", "--overwrite"),
        ("measure", "rows.jsonl", "--kind", "encoded", "-o", "mine"),
        ("measure", "rows.jsonl", "--kind", "encoded", "-o", "mine", "--overwrite"),
        ("measure", "rows.jsonl", "--kind", "encoded", "-o", ".", "--overwrite"),  # where the input lies
        ("measure", "rows.jsonl", "--kind", "encoded", "-o", "mine", "--shard", "0/2"),
    ],
    ids=" ".join,
)
def test_files_of_others_are_not_written_over(
    words: tuple[str, ...],
    rows: Path,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(rows.parent)
    before = held(rows.parent)
    code, said = told(capsys, *words)
    assert code == 2 and "holds files that are no " in said and "hint: choose an empty folder" in said, said
    assert held(rows.parent) == before


@pytest.mark.parametrize("name", ["plan.json", "lengths.json"])
def test_a_file_with_the_name_of_a_marker_is_no_marker(
    name: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / name).write_text('{"monday": "swim"}')
    before = held(mine)
    assert told(capsys, "plan", mine / "tokens.npy", "-n", 8, "-o", mine)[0] == 2
    assert held(mine) == before


def test_a_folder_of_ours_is_gone_on_with(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths, plan = tmp_path / "work" / "lengths", tmp_path / "work"
    assert told(capsys, "measure", rows, "--kind", "encoded", "-o", lengths)[0] == 0
    (plan / ".DS_Store").write_bytes(b"\0")  # neither it nor the folder of lengths is in the way
    first = told(capsys, "plan", lengths, "-n", 8, "-o", plan)
    assert first[0] == 0, first
    assert told(capsys, "plan", lengths, "-n", 8, "-o", plan)[0] == 0
    assert told(capsys, "plan", lengths, "-n", 9, "-o", plan)[0] == 2
    assert told(capsys, "plan", lengths, "-n", 9, "-o", plan, "--overwrite")[0] == 0
    assert told(capsys, "measure", rows, "--kind", "encoded", "-o", lengths, "--overwrite")[0] == 0


def test_a_plan_that_was_stopped_is_gone_on_with(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: each of its files may be the last one that was written."""
    import packtrain.files as files

    publish: Callable[..., None] = files.publish_array
    assert told(capsys, "measure", rows, "--kind", "encoded", "-o", tmp_path / "lengths")[0] == 0
    for last in ("offsets.npy", "indices.npy", "ledger.npy", "pack_sq.npy"):

        def full(path: Path, array: object, last: str = last) -> None:
            if Path(path).name == last:
                raise OSError(28, "No space left on device")
            publish(path, array)

        out = tmp_path / last
        monkeypatch.setattr(files, "publish_array", full)
        assert told(capsys, "plan", tmp_path / "lengths", "-n", 8, "-o", out)[0] == 2
        monkeypatch.setattr(files, "publish_array", publish)
        assert told(capsys, "plan", tmp_path / "lengths", "-n", 8, "-o", out)[0] == 0
        pt.PackPlan.load(out).verify()


@pytest.mark.parametrize("verb", sorted(_VERBS))
def test_an_empty_path_is_not_the_current_folder(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out "$OUT"` of a variable that nobody set."""
    import click

    from packtrain.cli._app import app

    command = app.get_command(click.Context(app), verb)
    assert command is not None
    paths = [param for param in command.params if isinstance(param.type, click.Path)]
    monkeypatch.chdir(tmp_path)
    for path in paths:
        given = [
            "" if param is path else "x" for param in command.params if isinstance(param, click.Argument)
        ]
        named = [path.opts[0], ""] if isinstance(path, click.Option) else []
        code, said = told(capsys, verb, *named, *given)
        assert code == 2 and "is empty" in said, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["foo://bucket/x", "s4://bucket/x", "S33://bucket/x", "file:///tmp/x"])
@pytest.mark.parametrize(
    "words",
    [
        ("plan", "URL", "-n", "8", "-o", "out"),
        ("plan", "mine/tokens.npy", "-n", "8", "-o", "URL"),
        ("measure", "rows.jsonl", "--kind", "encoded", "-o", "URL"),
        ("measure", "URL", "--kind", "encoded", "-o", "out"),
        ("show", "URL"),
        ("verify", "URL"),
        ("export", "URL", "out"),
        ("export", "plan", "URL", "-f", "chunks"),
        ("produce", "rows.jsonl", "URL", "-n", "8", "--once"),
        ("merge", "URL"),
        ("forecast", "URL", "--pack-lengths", "8"),
    ],
    ids=" ".join,
)
def test_a_url_of_no_known_scheme_is_no_folder_here(
    words: tuple[str, ...],
    url: str,
    rows: Path,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(rows.parent)
    pt.plan(np.array([3, 4, 5]), pack_length=8).save("plan")
    before = held(rows.parent)
    code, said = told(capsys, *[url if word == "URL" else word for word in words])
    scheme = url.partition(":")[0]
    assert code == 2 and f"{url}: unknown scheme {scheme!r}" in said, said
    assert held(rows.parent) == before


def test_a_folder_that_ends_like_a_scheme_is_a_folder(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd:").mkdir()
    assert told(capsys, "plan", mine / "tokens.npy", "-n", 8, "-o", "odd:/plan")[0] == 0
    assert (tmp_path / "odd:" / "plan" / "plan.json").is_file()
