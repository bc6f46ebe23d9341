"""`packtrain forecast`: table, JSON, plot, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import main


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.arange(1, 3001) % 900 + 20)
    return tmp_path / "lengths.npy"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_table_json_and_plots(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("forecast", lengths, "--pack-lengths", "1024,2048", "--world-size", 4, "--grad-accum", 2)
    code, out, _ = call(capsys, *options)
    assert code == 0 and "optimizer steps" in out and "* recommended:" in out
    for name, head in (("f.svg", b"<?xml"), ("f.png", b"\x89PNG")):
        code, out, _ = call(capsys, *options, "--json", "--plot", tmp_path / name)
        rows = json.loads(out)["rows"]
        assert code == 0 and [row["pack_length"] for row in rows] == [1024, 2048]
        assert (tmp_path / name).read_bytes().startswith(head)
    code, out, _ = call(
        capsys, "forecast", lengths, "--pack-length", "auto", "--samples-per-step", 100, "--json"
    )
    assert code == 0 and all(row["samples_per_step_sd"] == 0 for row in json.loads(out)["rows"])
    _, out, _ = call(capsys, "forecast", lengths, "--pack-lengths", "2048", "--samples-per-step", 64)
    assert "64 (the last 56)" in out and "47 steps of 64 (the last 56) samples" in " ".join(out.split())


def test_auto_beside_numbers_and_the_batch_of_every_column(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("forecast", lengths, "--pack-lengths")
    found = {}
    for tried in ("auto", "2048,auto", "1000,auto"):
        found[tried] = json.loads(call(capsys, *words, tried, "--json")[1])["rows"]
    assert found["auto"] == found["2048,auto"] and len(found["auto"]) > 1
    assert [row["pack_length"] for row in found["1000,auto"]] == [
        1000, *(row["pack_length"] for row in found["auto"])
    ]  # fmt: skip
    _, out, _ = call(capsys, *words, "1024,2048")
    assert re.search(r"samples of a batch, n\D+2\D+5\D", out) and "saved, padded batches of n" in out


def test_bad_input(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, match in (
        (("--pack-lengths", "4k"), "not a list of numbers"),
        (("--pack-lengths", "4k"), "4096,8192, or auto, or both"),
        (("--pack-lengths", "auto,0"), "holds 0"),
        (("--plot", tmp_path / "f.pdf"), "neither .svg nor .png"),
        (("--profile", tmp_path / "none.json"), "cannot be read"),
    ):
        code, _, err = call(capsys, "forecast", lengths, *words)
        assert code == 2 and match in err
