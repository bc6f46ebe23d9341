"""What a message points at is there: reasons of a refusal, the way out of it, the kind of a wrong folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli import main
from packtrain.cli._app import spoken
from packtrain.cli.export import show_export
from packtrain.cli.init import command as initialise
from packtrain.cli.train import command as training
from packtrain.errors import ForeignArtefactError, FormatError
from packtrain.planning.lengths import Lengths
from packtrain.planning.packplan import PackPlan
from packtrain.train.resume import load_position


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, " ".join(err.split())


def test_reasons_of_a_refused_measurement_are_shown_by_the_command_of_its_hint(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger of lengths is that of a plan that leaves nothing else out."""
    good = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}
    bad: list[Any] = [{"messages": []}, {"messages": 5}, 7, {"messages": [{"role": "zebra", "content": "x"}]}]
    bad.append({"messages": [{"role": "user", "content": "<image>?"}, good["messages"][1]]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [good, *bad, good]))
    lengths = tmp_path / "l of mine"
    words = ("measure", tmp_path / "a.jsonl", "-p", data / "processors" / "qwen2_5_vl", "-o", lengths)
    code, _, err = told(capsys, *words)
    hinted = re.search(r"see the reasons \(packtrain (show .+? --ledger)\)", err)
    assert code == 2 and hinted is not None
    code, shown, _ = told(capsys, *shlex.split(hinted[1]), "--json")
    rows = json.loads(shown)["ledger"]
    assert code == 0 and [row["id"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["where"].startswith("a.jsonl:") and row["detail"] for row in rows)
    plan = tmp_path / "p"
    refused = told(capsys, "plan", lengths, "-n", 64, "-o", plan)
    assert refused[0] == 2 and hinted[1] in refused[2]
    assert told(capsys, "plan", lengths, "-n", 64, "-o", plan, "--max-drop-fraction", 1)[0] == 0
    assert json.loads(told(capsys, "show", plan, "--ledger", "--json")[1])["ledger"] == rows


class Elsewhere:
    """A source of other packs than those of the checkpoint."""

    state_file, per_rank_state, rank = "packs.json", False, 0

    def check_state(self, state: Any) -> None:
        raise ForeignArtefactError("the saved position has seed 1", hint="use that seed, or start anew")


def test_starting_anew_is_a_key(tmp_path: Path) -> None:
    (tmp_path / "packs.json").write_text("{}")
    with pytest.raises(ForeignArtefactError, match=re.escape(f"{tmp_path}: the saved position")) as refused:
        load_position(Elsewhere(), str(tmp_path))
    hint = str(refused.value.hint)
    assert hint == "use that seed, or start anew: resume=None, or another output_dir"
    said = "start anew: training.resume: null, or another training.output_dir"
    assert spoken(hint, training).endswith(said)


def test_what_only_a_step_of_a_run_has_an_option_for_is_told_with_its_verb() -> None:
    assert spoken("append=True measures what is new", training) == (
        "packtrain measure --append measures what is new"
    )
    assert spoken("nobody=3 knows this", training) == "nobody=3 knows this"
    assert spoken("append=True is no word of init", initialise) == "append=True is no word of init"


@pytest.mark.parametrize(
    ("marker", "what"),
    [
        (".packtrain/key.json", ": it is an export"),
        ("stream.json", ": it is a directory of chunks"),
        ("run.json", ", but run.json"),
    ],
)
def test_a_folder_of_another_kind_is_told_as_what_it_is(tmp_path: Path, marker: str, what: str) -> None:
    (tmp_path / marker).parent.mkdir(exist_ok=True)
    (tmp_path / marker).write_text("{}")
    for load, name in ((PackPlan.load, "plan.json"), (Lengths.load, "lengths.json")):
        with pytest.raises(FormatError, match=f"holds no {name}{what}") as refused:
            load(tmp_path)
        assert refused.value.hint == f"name the folder of {name}"


def test_a_share_of_an_export_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    show_export({"out": "sh", "format": "chunks", "shard": [1, 64], "parts": 3})
    said = " ".join(capsys.readouterr().out.split())
    assert "share │ 1 of 0 to 63" in said and "when all are written │ packtrain merge sh" in said


def test_a_place_with_a_colon_of_its_own_stays_whole(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the places of a mixture: the part, and the place in it."""
    good = {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]}
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*[good] * 10, {"messages": 5}])
    )
    (tmp_path / "m.yaml").write_text("shuffle: false\nsources: [{path: a.jsonl, name: one}]")
    words = ("-p", data / "processors" / "qwen2_5_vl", "-o", tmp_path / "l")
    assert told(capsys, "measure", tmp_path / "m.yaml", *words)[0] == 0
    assert told(capsys, "plan", tmp_path / "l", "-n", 64, "-o", tmp_path / "p")[0] == 0
    for place in ("l", "p"):
        (row,) = json.loads(told(capsys, "show", tmp_path / place, "--ledger", "--json")[1])["ledger"]
        assert (row["where"], row["detail"]) == (
            "one: a.jsonl:11",
            "field 'messages' is int, not a list of messages",
        )
        found = json.loads(told(capsys, "show", tmp_path / place, "--sample", 10, "--json")[1])
        assert (found["where"], found["detail"]) == (row["where"], row["detail"])
    (tmp_path / "a.jsonl").write_text(json.dumps(good) + "\n")  # it holds that record no more
    code, out, _ = told(capsys, "show", tmp_path / "l", "--ledger", "--json")
    assert code == 0 and json.loads(out)["ledger"][0]["id"] == 10
