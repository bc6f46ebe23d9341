"""A plan whose bytes were changed is named as damaged before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.cli import main


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    rows, lengths, plan = (tmp_path / name for name in ("rows.jsonl", "lengths", "plan"))
    lines = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (5, 7, 3, 4, 6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert told(capsys, "measure", rows, "--kind", "encoded", "-o", lengths)[0] == 0
    assert told(capsys, "plan", lengths, "-n", 8, "-o", plan)[0] == 0
    return plan


@pytest.mark.parametrize("name", ["indices", "offsets", "pack_tokens"])
@pytest.mark.parametrize("byte", [1, 255])
def test_a_damaged_plan_is_not_exported(
    name: str, byte: int, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan / f"{name}.npy"
    sound = path.read_bytes()
    path.write_bytes(sound[:-15] + bytes([sound[-15] ^ byte]) + sound[-14:])
    code, said = told(capsys, "export", plan, tmp_path / "out", "-f", "chunks")
    assert code == 2 and f"{name}.npy" in said and "damaged" in said, said
    assert not (tmp_path / "out").exists()
    code, said = told(capsys, "verify", plan)
    assert code == 1 and f"{name}.npy" in said, said  # a law of the stored bytes is broken
    path.write_bytes(sound)
    assert told(capsys, "export", plan, tmp_path / "out", "-f", "chunks")[0] == 0
    pt.PackPlan.load(plan).verify()


@pytest.mark.parametrize("option", ["--maxcount", "--maxsize"])
def test_a_part_holds_something(
    option: str, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = told(capsys, "export", plan, tmp_path / "out", "-f", "chunks", option, 0)
    assert code == 2 and f"{option[2:]} is 0, expected an integer >= 1" in said and "both" not in said, said
