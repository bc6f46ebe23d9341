"""What is wrong is said in the words of the command line, with an example that can be typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import packtrain
from packtrain.cli import main
from packtrain.cli._app import progress


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("lengths.json").write_text("[5, 7, 3]")
    Path("none.json").write_text("[]")
    Path("none.csv").write_text("")
    Path("x.csv").write_text("q,a\n")
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text('{"input_ids": [1], "labels": [1]}\n')
    packtrain.plan([5, 7, 3], 8).save("plan")
    Path("x.jsonl").write_text(json.dumps({"q": "a", "a": "b"}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("measure x.jsonl -p . -o o --column a", "--column 'a' is not NAME=FIELD|--column prompt=question"),
        ("measure x.jsonl -p . -o o --option a", "--option 'a' is not NAME=VALUE|--option split=train"),
        ("produce x.jsonl o -p . -n 8 --column a", "for example --column prompt=question"),
        ("measure x.jsonl -p . -o o --column foo=q", "unknown columns key 'foo'|known: |prompt, response"),
        ("plan lengths.json -n 8 -o o --window 0", "window is 0|leave it out for no limit"),
        ("plan lengths.json -n 8 -o o --max-samples 0", "--max-samples is 0|leave it out for no limit"),
        ("plan lengths.json -n 8 -o o --seed -1", "seed is -1|leave it out for no shuffle"),
        ("plan plan -n 8 -o o", "plan holds no lengths.json, but plan.json|name the folder of lengths.json"),
        ("produce rows r --kind encoded -n 8 --media foo", "unknown media 'foo'"),
        ("measure x.csv -p . -o o", "x.csv is of no known kind|to_json(out, orient='records', lines=True)"),
        ("measure x.jsonl -p . -o lengths.json", "lengths.json is a file, not a folder"),
        ("measure x.jsonl -o o", "no processor is named|--processor NAME, a folder or a hub name"),
        ("plan none.json -n 8 -o o", "there is no sample to plan"),
        ("plan none.csv -n 8 -o o", "none.csv is empty"),
        ("forecast lengths.json --pack-lengths 8,0", "holds 0, expected numbers >= 1"),
        ("forecast lengths.json --pack-lengths ²", "is not a list of numbers"),
    ],
)
def test_a_refusal_and_its_hint(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, heard = told(capsys, *words.split())
    assert code == 2
    for part in said.split("|"):
        assert part in heard, heard
    assert "None" not in heard and not (here / "o").exists() and not (here / "r").exists()


def test_warnings_speak_as_errors_do(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    words = "plan lengths.json -n 8 -o o --packs-multiple 4 --last-step drop"
    code, heard = told(capsys, *words.split())
    assert code == 0
    assert "--packs-multiple 4 has no effect without --samples-per-step" in heard, heard
    assert "--last-step drop has no effect" in heard and "samples_per_step" not in heard, heard


def test_what_is_seldom_meant_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    (here / "l.csv").write_text("tokens,images\n5,1\n7,0\n")
    for words, said in (
        ("--samples-per-step 100", "--samples-per-step 100, of 2 samples: an epoch is one step"),
        ("--limit images=0", "--limit images=0 packs samples with images alone; --long-samples drop leaves"),
    ):
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        code, heard = told(capsys, *f"plan l.csv -n 8 -o {words.split()[1]} {words}".split())
        assert code == 0 and said in heard, heard


def test_seconds_left_do_not_grow_while_nothing_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("packtrain.cli._app.time.monotonic", lambda: now[0])
    with progress("packing") as tell:
        for now[0], done in ((20.0, 50), (31.0, 50), (3600.0, 50), (3610.0, 75)):
            tell(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "packing: 50 of 100, 20 s left",
        "packing: 50 of 100, no more for 11 s",
        "packing: 50 of 100, no more for 3,580 s",
        "packing: 75 of 100, 10 s left",
    ]
