"""Lengths from files, plans as tables, and the way into the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import packtrain as pt
from packtrain.cli import main
from packtrain.errors import FormatError, InputError, LengthError
from packtrain.pipeline.length_files import SUFFIXES, read_lengths
from packtrain.pipeline.page import read_history
from packtrain.pipeline.plan_table import SUFFIXES as TABLES
from packtrain.pipeline.plan_table import plan_table, write_plan_table

TOKENS = [30, 30, 20, 60, 50, 10, 40, 30]
IMAGES = [1, 0, 2, 0, 0, 1, 0, 3]


def call(*args: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    return int(stop.value.code or 0)


def written(folder: Path, suffix: str, tokens: list[int], images: list[int] | None) -> Path:
    path = folder / f"lengths{suffix}"
    columns = {
        "tokens": tokens,
        **({} if images is None else {"images": images, "id": list(range(len(tokens)))}),
    }
    if suffix == ".npy":
        np.save(path, np.asarray(tokens))
    elif suffix == ".npz":
        np.savez(path, **{name: np.asarray(values) for name, values in columns.items()})
    elif suffix == ".json":
        path.write_text(json.dumps(tokens if images is None else columns))
    elif suffix == ".jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".csv":
        with open(path, "w", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    else:
        parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_holds_the_same_lengths(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path, suffix, TOKENS, None)
    assert read_lengths(path).digest == pt.Lengths(TOKENS).digest
    if suffix != ".npy":
        path = written(tmp_path, suffix, TOKENS, IMAGES)
        assert read_lengths(path).digest == pt.Lengths(TOKENS, costs={"images": IMAGES}).digest


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".npz"])
def test_a_file_without_token_counts_names_its_columns(suffix: str, tmp_path: Path) -> None:
    columns = {"a": [1, 2], "b": [3, 4]}
    path = tmp_path / f"x{suffix}"
    if suffix == ".csv":
        path.write_text("a,b\n1,3\n2,4\n")
    elif suffix == ".jsonl":
        path.write_text('{"a": 1, "b": 3}\n{"a": 2, "b": 4}\n')
    elif suffix == ".npz":
        np.savez(path, **{name: np.asarray(values) for name, values in columns.items()})
    else:
        parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(FormatError, match="columns a, b"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "tokens\n1\n\nx\n"),
        ("x.csv", "id,tokens\n1\n"),
        ("x.csv", "tokens\n-3\n"),
        ("x.jsonl", '{"tokens": 1}\n{"tokens": null}\n'),
        ("x.jsonl", '{"tokens": 1}\n7\n'),
        ("x.jsonl", '{"tokens": 1.5}\n'),
        ("x.json", "[1, -2]"),
    ],
)
def test_a_count_that_is_none_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LengthError):
        read_lengths(tmp_path / name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), suffix=st.sampled_from(SUFFIXES))
def test_damaged_files_are_one_line(data: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(data)
    try:
        assert isinstance(read_lengths(path), pt.Lengths)
    except InputError as error:
        assert "\n" not in error.message


def test_a_plan_of_a_file_is_shown_verified_and_written_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, ".parquet", TOKENS, IMAGES)
    assert call("plan", path, "-n", 80, "-o", tmp_path / "plan", "--limit", "images=3") == 0
    assert call("verify", tmp_path / "plan") == 0
    assert "holds for every pack" in capsys.readouterr().out
    assert call("show", tmp_path / "plan", "--html", tmp_path / "plan.html") == 0
    assert (tmp_path / "plan.html").stat().st_size > 1000
    held = {}
    for suffix in TABLES:
        out = tmp_path / f"table{suffix}"
        assert call("show", tmp_path / "plan", "--export", out) == 0
        if suffix == ".npz":
            with np.load(out) as npz:
                held[suffix] = {name: npz[name].tolist() for name in npz.files}
        elif suffix == ".parquet":
            held[suffix] = parquet.read_table(out).to_pydict()
        else:
            rows = (
                [json.loads(line) for line in out.read_text().splitlines()]
                if suffix == ".jsonl"
                else [
                    {k: int(v) for k, v in row.items()}
                    for row in csv.DictReader(out.read_text().splitlines())
                ]
            )
            held[suffix] = {name: [row[name] for row in rows] for name in rows[0]}
    assert all(table == held[".npz"] for table in held.values())
    assert call("show", tmp_path / "plan", "--export", tmp_path / "table.txt") == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 120), min_size=1, max_size=60), st.integers(60, 200))
def test_the_table_holds_the_plan(tokens: list[int], pack_length: int) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, pack_length=pack_length)
    table = plan_table(plan, lengths)
    assert list(table) == ["pack", "position", "sample", "offset", "length"]
    for number in range(len(plan)):
        rows = np.flatnonzero(table["pack"] == number)
        assert table["sample"][rows].tolist() == plan[number].tolist()
        assert table["position"][rows].tolist() == list(range(len(rows)))
        ends = np.cumsum(table["length"][rows])
        assert table["offset"][rows].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == plan.pack_tokens[number]


def test_a_table_of_other_lengths_is_refused(tmp_path: Path) -> None:
    plan = pt.plan(pt.Lengths(TOKENS), pack_length=80)
    with pytest.raises(InputError, match="the plan is of lengths"):
        write_plan_table(plan, pt.Lengths([*TOKENS[:-1], 31]), tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()


def test_the_bare_command_and_help_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    bare = capsys.readouterr().out
    assert "Usage: packtrain" in bare and "  plan " in bare
    assert call("help") == 0 and capsys.readouterr().out == bare
    assert call("plan", "--help") == 0
    page = capsys.readouterr().out
    assert call("help", "plan") == 0 and capsys.readouterr().out == page
    assert call("help", "plam") == 2 and "did you mean 'plan'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"), [(["pl"], "plan"), (["plan", "x", "--packer", "ref"], "refine")]
)
def test_the_shell_completes_verbs_and_packers(
    words: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_PACKTRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["packtrain", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert call() == 0
    assert f"plain,{expected}" in capsys.readouterr().out.split()


def test_packs_over_the_cap_are_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.csv").write_text("tokens\n30\n50\n80\n81\n500\n")
    assert call("plan", tmp_path / "l.csv", "-n", 80, "-o", tmp_path / "plan") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert "2 of 4 packs exceed 80 tokens, longest 500" in rows[0]
    assert call("show", tmp_path / "plan", "--json", "--html", tmp_path / "p.html") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["over_long_packs"], told["longest_pack"]) == (2, 500)
    assert told["efficiency"] == 1.0  # 741 tokens in 80 + 80 + 81 + 500 slots
    page = (tmp_path / "p.html").read_text()
    assert page.index("Over-long packs") < page.index("Packing efficiency")
    assert call("forecast", tmp_path / "l.csv", "--pack-lengths", 80) == 0
    assert "2, 500" in capsys.readouterr().out


def test_a_plan_written_before_the_figure_still_tells_it(tmp_path: Path) -> None:
    plan = pt.plan([30, 500], pack_length=80)
    plan.save(tmp_path / "plan")
    loaded = pt.PackPlan.load(tmp_path / "plan")
    for name in ("over_long_packs", "longest_pack"):
        loaded._stored["stats"].pop(name)
    assert loaded.stats() == plan.stats()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("names", [("messages",), ("messages", "images"), ("text",)])
def test_samples_where_lengths_are_due_are_told_to_be_measured(
    suffix: str, names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not read as no sample at all."""
    values = {"messages": [{"role": "user", "content": "a"}], "images": ["a.png"], "text": "hello"}
    rows = [{name: values[name] for name in names}] * 3
    path = tmp_path / f"samples{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("plan", path, "--pack-length", 8, "--out", tmp_path / "plan") == 2
    told = capsys.readouterr().err
    assert "packtrain measure" in told and "no pack" not in told
    assert not (tmp_path / "plan").exists()


def test_the_only_key_of_records_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    path.write_text('{"n": 5}\n{"n": 6}\n')
    assert read_lengths(path).tokens.tolist() == [5, 6]


def test_a_folder_around_a_run_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pt.plan([5, 5], 10).save(tmp_path / "first" / "plan")
    assert call("show", tmp_path / "first") == 2
    assert f"hint: it has {tmp_path / 'first' / 'plan'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "told",
    [
        {"metrics": True},
        {"metrics": {"steps": None}},
        {"metrics": {"steps": 4, "eval_loss": []}},
        {"loss": 1},
        {"eval": 3},
        {"left_out": [1]},
        {"padding_saved": "much"},
        {"warnings": 7},
        {"report": 7},
        {"consumed": "all"},
    ],
)
def test_an_edited_record_of_a_run_is_one_line(told: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    for config in ({"data": {"kind": "stream"}}, {"data": True}, {"data": {}, "training": 3}):
        (tmp_path / "run.json").write_text(json.dumps({"config": config, "result": told}))
        assert call("show", tmp_path) == 2
        said = capsys.readouterr().err
        assert "run.json is not the record of a run" in said and "Traceback" not in said


@pytest.mark.parametrize("name", ["bound", "efficiency", "dropped_by_reason", "length_order_correlation"])
def test_an_edited_figure_of_a_plan_is_one_line(name: str, tmp_path: Path, capsys: Any) -> None:
    pt.plan(pt.Lengths(TOKENS), 64).save(tmp_path)
    told = json.loads((tmp_path / "plan.json").read_text())
    for wrong in (None, [], "much", {}):
        if (name, wrong) == ("dropped_by_reason", {}):
            continue  # none were
        told["stats"][name] = wrong
        (tmp_path / "plan.json").write_text(json.dumps(told))
        assert call("show", tmp_path) == 2
        said = capsys.readouterr().err
        assert "is not a plan as it was written" in said and "Traceback" not in said


def test_a_row_of_a_log_without_its_step_is_named(tmp_path: Path) -> None:
    for row in ({"step_s": 1.0, "tokens_per_s": 2.0}, {"step": 3, "step_s": 1.0}, {"step": -1}):
        (tmp_path / "train_log.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises((FormatError, InputError), match=r"step|tokens_per_s"):
            read_history(tmp_path)
