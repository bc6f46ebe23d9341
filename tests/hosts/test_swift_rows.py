"""Keys that ms-swift drops are accounted for alike in a set and in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swift_env import PREAMBLE, swift_python
from swift_sft import refused, sft
from venvs import run

pytestmark = pytest.mark.hosts

#: What changes training -> where it stands.
ODD: dict[str, dict[str, Any]] = {
    "messages[].weight": {"messages": {"weight": 0.5}},
    "messages[].reasoning_content": {"messages": {"reasoning_content": "so"}},
    "loss_weight": {"row": {"loss_weight": 0.5}},
    "label": {"row": {"label": False}},
    "shown": {"row": {"shown": "a.png"}},
    "content[].image": {"part": {"image": "a.png"}},
}


def _row(number: int, **odd: Any) -> dict[str, Any]:
    asked: Any = f"question {number}"
    said: Any = "an answer"
    if "part" in odd:  # a stream of ms-swift takes lists or texts, not both
        asked = [{"type": "text", "text": asked, **odd["part"]}]
        said = [{"type": "text", "text": said}]
    said = {"role": "assistant", "content": said, **odd.get("messages", {})}
    return {"messages": [{"role": "user", "content": asked}, said], "note": "n", **odd.get("row", {})}


def test_what_is_read_of_rows_is_one_thing_for_sets_and_streams(tmp_path: Path) -> None:
    """Marks of each odd row through the host's own loader, as a set and as a stream."""
    cases = {name: [_row(0, **{key: {} for key in odd}), _row(1, **odd)] for name, odd in ODD.items()}
    cases["alpaca"] = [
        {"instruction": "q", "input": "", "output": "a", "note": "n"},
        {"instruction": "q", "input": "", "output": "a", "weights": [1.0]},
    ]
    cases["columns"] = [
        {"query": "q", "response": "a", "note": "n"},
        {"query": "q", "response": "a", "context": "c", "train": False},
    ]
    paths = {}
    for name, rows in cases.items():
        paths[name] = str(tmp_path / f"{name}.jsonl")
        Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run(
        swift_python(),
        PREAMBLE
        + """
import json, sys
from swift.dataset import load_dataset
from packtrain.errors import SampleError
from packtrain.hosts._swift_template import Watch, unmarked, watch_rows
watch_rows(Watch(("nothing",)))
found = {}
for name, path in json.loads(sys.argv[1]).items():
    for streaming in (False, True):
        rows, _ = load_dataset(path, streaming=streaming, use_hf=True, load_from_cache_file=False)
        for row in rows:
            try:
                told = sorted(unmarked(row))
            except SampleError as error:
                told = [error.reason, error.message]
            found.setdefault(name, []).append([streaming, json.loads(row["unread_key"] or "{}"), told])
print(json.dumps(found))
""",
        json.dumps(paths),
        ours=True,
    )
    found = json.loads(told.splitlines()[-1])
    for name in cases:
        rows = found[name]
        assert [one[0] for one in rows] == [False, False, True, True], (name, rows)
        assert rows[0][1] == rows[2][1] == {"keys": ["note"], "fault": []}, (name, rows)
        assert rows[1][1] == rows[3][1], (name, rows)
        assert rows[1][2][0] == rows[3][2][0] == "unread_key", (name, rows)
        assert name not in ODD or f"the key '{name}'" in rows[1][2][1], (name, rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_key_that_is_not_read_leaves_its_row_out_or_stops(
    streaming: bool, model: Path, tmp_path: Path
) -> None:
    rows = [_row(number) for number in range(120)]
    rows[7] = _row(7, messages={"weight": 0.5})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    switches = {
        "model": model,
        "dataset": path,
        "packing": "true",
        "packing_length": 2048,
        "per_device_train_batch_size": 1,
        "train_dataloader_shuffle": "false",
        **({"streaming": "true", "max_steps": 2} if streaming else {}),
    }
    (seen,) = sft(tmp_path, "few", switches, plugin=True)
    assert sorted(set(seen["ids"])) == [number for number in range(120) if number != 7]
    rows[3] = _row(3, messages={"weight": 0.5})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = refused(tmp_path, "many", switches, plugin=True)
    read = 8 if streaming else 120  # a stream stops where it is sure
    assert f"2 of {read} records hold a key that changes training" in told, told[-2000:]
    assert "'messages[].weight'" in told
    (kept,) = sft(tmp_path, "kept", switches, plugin=True, install={"ignore_keys": ["weight"]})
    assert set(kept["ids"]) == set(range(120))
