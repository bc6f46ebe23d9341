"""What TRL does not read of its rows, and what it cuts of them, is told or refused before packing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import ConfigError
from packtrain.sources._account import UnreadKeys

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _trainer(model: Path, rows: list[dict[str, Any]], out: Path, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = {"max_length": 512, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
    settings |= {
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        **more,
    }
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name) for name in names} for row in rows]
    args = SFTConfig(output_dir=str(out), **settings)
    return SFTTrainer(model=str(model), args=args, train_dataset=Dataset.from_list(rows))


def _rows(count: int, turns: int = 1) -> list[dict[str, Any]]:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]
    return [{"messages": copy.deepcopy(talk) * turns, "id": n} for n in range(count)]


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rejected_response": lambda row: row.update(rejected_response="no"),
    "system": lambda row: row.update(system="Be brief."),
    "videos": lambda row: row.update(videos=["a.mp4"]),
    "shown": lambda row: row.update(shown="a.png"),
    "messages[].weight": lambda row: row["messages"][1].update(weight=0.5),
    "messages[].loss": lambda row: row["messages"][1].update(loss=False),
    "messages[].image": lambda row: row["messages"][0].update(image="a.png"),
}


@pytest.mark.parametrize("key", list(ODD))
def test_a_key_that_trl_drops_stops_it_or_leaves_its_row_out(
    key: str, saved_model: Callable[[str], Path], tmp_path: Path, caplog: Any
) -> None:
    from packtrain.hosts.trl import pack

    rows = _rows(120)
    ODD[key](rows[3])
    caplog.set_level("WARNING")
    few = pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path), pack_length=512)
    assert dict(few.packs.plan.ledger) == {3: "unread_key"}
    assert f"left out for: {key} (1)" in caplog.text
    for row in rows[:2]:
        ODD[key](row)
    many = _trainer(saved_model("tiny:qwen3"), rows, tmp_path)
    with pytest.raises(UnreadKeys, match="3 of 120 records") as caught:
        pack(many, pack_length=512)
    assert f"row 0: the key '{key}'" in str(caught.value) and "ignore_keys" in caught.value.hint
    kept = pack(many, pack_length=512, ignore_keys=[key.removeprefix("messages[].")])
    assert not len(kept.packs.plan.ledger)
    with pytest.raises(ConfigError, match="ignore_keys cannot be kept"):
        pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path), source=kept.packs, ignore_keys=["a"])


@pytest.mark.parametrize("side", ["keep_start", "keep_end"])
def test_answers_that_trl_cuts_are_told(
    side: str, saved_model: Callable[[str], Path], tmp_path: Path, caplog: Any
) -> None:
    from packtrain.hosts.trl import pack

    rows = _rows(20)
    rows[4] = {**_rows(1, turns=6)[0], "id": 4}
    caplog.set_level("WARNING")
    made = _trainer(saved_model("tiny:qwen3"), rows, tmp_path, max_length=40, truncation_mode=side)
    trainer = pack(made, pack_length=40)
    assert len(trainer.packs.plan.ledger) == 0
    (line,) = [one.getMessage() for one in caplog.records if "without all answers" in one.getMessage()]
    assert (
        line.startswith("1 row trained without all answers of the record: row ")
        and "removed: the answers" in line
    )
    assert ("message 1," in line) == (side == "keep_end") and ("11" in line) == (side == "keep_start")


def test_rows_of_plain_text_are_accounted_for(saved_model: Callable[[str], Path], tmp_path: Path) -> None:
    from packtrain.hosts.trl import pack

    rows = [{"text": f"words and words {n}", "id": n} for n in range(120)]
    rows[3]["sample_weight"] = 0.5
    few = pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path), pack_length=512)
    assert dict(few.packs.plan.ledger) == {3: "unread_key"}
    rows[4]["messages_loss_mask"] = [0, 1]
    with pytest.raises(UnreadKeys, match="2 of 120 records"):
        pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path), pack_length=512)
