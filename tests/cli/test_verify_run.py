"""`packtrain verify RUN`: every lengths and plan folder of a run, those of its validation sets too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.cli import main
from packtrain.pipeline.run import finish_run


def verified(capsys: pytest.CaptureFixture[str], run: Path) -> tuple[int, dict[str, str], str]:
    with pytest.raises(SystemExit) as done:
        main(["verify", str(run), "--json"])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), json.loads(out).get("checks", {}), out + err


def made(run: Path, val: Any, figures: dict[str, Any], cache: str | None = None) -> Path:
    """A run of one training set and the validation sets of `val`; those of a cache lie beside it."""
    for k, prefix in enumerate(["", *(f"val_{name}_".replace("__", "_") for name in val)]):
        lengths = pt.Lengths([3, 5, 7 + k, 2])
        place = run if cache is None or not prefix else Path(cache)
        lengths.save(place / f"{prefix}lengths")
        pt.plan(lengths, 12).save(place / f"{prefix}plan")
    given = val.get("", val) if isinstance(val, dict) else val
    finish_run(run, {"data": {"val": given, "cache": {"root_dir": cache}}}, figures)
    return run


@pytest.mark.parametrize("val", [{"": "v.jsonl"}, {"a": "a.jsonl", "b": "b.jsonl"}])
@pytest.mark.parametrize(("part", "file"), [("plan", "indices.npy"), ("lengths", None)])
def test_a_changed_byte_of_a_validation_set_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], val: dict[str, str], part: str, file: str | None
) -> None:
    run = made(tmp_path / "run", val, {})
    code, laws, _ = verified(capsys, run)
    names = [f" ({name})" if name else "" for name in val]
    assert code == 0 and "plan checksum" in laws
    words = [f"validation {name}".rstrip() for name in val]
    assert all(laws[f"{one} plan checksum"] == laws["plan checksum"] for one in words), names
    assert all(f"{one} lengths digest" in laws for one in words)
    last = [*val][-1]
    folder = run / f"val_{last}_{part}".replace("__", "_")
    path = folder / file if file else next(folder.glob("**/*.npy"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, _, err = verified(capsys, run)
    assert code == 1 and str(folder) in err and "Traceback" not in err


def test_a_validation_set_that_is_gone_or_in_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    named = {"": {part: str(cache / f"val_{part}") for part in ("lengths", "plan")}}
    run = made(tmp_path / "run", {"": "v.jsonl"}, {"validation_folders": named}, str(cache))
    code, laws, _ = verified(capsys, run)
    assert code == 0 and "validation capacity" in laws
    (cache / "val_plan").rename(cache / "gone")
    code, _, err = verified(capsys, run)
    assert code == 2 and "does not exist" in err
    older = made(tmp_path / "older", {"": "v.jsonl"}, {}, str(tmp_path / "other"))
    code, laws, _ = verified(capsys, older)
    assert code == 0 and laws["validation"].startswith("not checked")
