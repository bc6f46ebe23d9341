"""Rows that were tokenised before: a column beside `input_ids` that changes training is used or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.sources._account import UnreadKeys

pytestmark = [pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")]

SIZE = 12

#: Column -> a value that changes training; all other values of it say nothing.
ODD: dict[str, Any] = {
    "loss_scale": [0.5] * SIZE,
    "weights": [1.0] * SIZE,
    "loss_weight": 0.5,
    "token_type_ids": [0, 1] * (SIZE // 2),
    "loss_mask": [0, 1] * (SIZE // 2),
    "assistant_masks": [1] + [0] * (SIZE - 1),
    "position_ids": [0] * SIZE,
    "pixel_values": [[0.0]],
    "images": ["a.png"],
    "seq_lengths": [6, 6],
    "picture": b"\x89PNG",
}
QUIET: dict[str, Any] = {
    "token_type_ids": [0] * SIZE,
    "position_ids": list(range(SIZE)),
    "special_tokens_mask": [1] + [0] * (SIZE - 1),
    "assistant_masks": [1] * SIZE,
    "id": "a",
    "length": SIZE,
}


def _collate(features: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    ids = torch.tensor([feature["input_ids"] for feature in features])
    masks = [feature.get("loss_mask") or [1] * len(feature["input_ids"]) for feature in features]
    return {"input_ids": ids, "labels": ids.masked_fill(torch.tensor(masks) == 0, -100)}


def _trainer(folder: Path, rows: list[dict[str, Any]], out: Path, as_dataset: bool, **more: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    collate = more.pop("collate", default_data_collator)
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=1, report_to="none", save_strategy="no",
        use_cpu=True, **more,
    )  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name) for name in names} for row in rows] if as_dataset else rows
    data = Dataset.from_list(rows) if as_dataset else rows
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Trainer(model=model, args=args, train_dataset=data, data_collator=collate)


def _rows(count: int, **beside: Any) -> list[dict[str, Any]]:
    ids = list(range(5, 5 + SIZE))
    return [{"input_ids": ids, "labels": list(ids), **beside} for _ in range(count)]


@pytest.mark.parametrize("name", list(ODD))
def test_a_column_that_changes_training_is_named(
    name: str, saved_model: Callable[[str], Path], tmp_path: Path, caplog: Any
) -> None:
    from packtrain.hosts.transformers import pack

    model = saved_model("tiny:qwen3")
    caplog.set_level("WARNING")
    rows = _rows(120)
    rows[3][name] = ODD[name]
    rows[4]["labels"] = [-100, *rows[4]["labels"][1:]]
    few = pack(_trainer(model, rows, tmp_path, True), pack_length=64)
    assert dict(few.packs.plan.ledger) == {3: "unread_key"}
    assert f"left out for: {name} (1)" in caplog.text
    kept = pack(_trainer(model, rows, tmp_path, True), pack_length=64, ignore_keys=[name])
    assert not len(kept.packs.plan.ledger)
    for row in rows[:2]:
        row[name] = ODD[name]
    with pytest.raises(UnreadKeys, match=f"3 of 120 records.*'{name}'"):
        pack(_trainer(model, rows, tmp_path, True), pack_length=64)
    measured = _trainer(model, rows, tmp_path, True)
    with pytest.raises(UnreadKeys, match=f"3 of 120 records.*'{name}'"):
        pack(measured, pack_length=64, measure=lambda row: len(row["input_ids"]))


def test_the_ledger_of_a_plan_says_row_and_fault(
    saved_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show --ledger`, `--sample` and the page of what `pack(trainer)` left: id, reason, row, words."""
    from packtrain.cli import main
    from packtrain.hosts.transformers import pack

    rows = _rows(130)
    rows[3]["loss_scale"] = ODD["loss_scale"]
    rows[7] |= {"input_ids": list(range(90)), "labels": list(range(90))}
    pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path, True), pack_length=64, long_samples="drop")

    def show(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as stop:
            main(["show", str(tmp_path), *words, "--json"])
        assert stop.value.code in (0, None)
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    unread, long = show("--ledger")["ledger"]
    assert (unread["id"], unread["reason"], unread["where"]) == (3, "unread_key", "row 3")
    assert "loss_scale" in unread["detail"]
    assert (long["id"], long["reason"], long["where"]) == (7, "over_long", "row 7")
    assert long["detail"] == "90 tokens, the cap is 64"
    assert show("--sample", "3")["where"] == "row 3"
    show("--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "row 3" in page and "row 7" in page


@pytest.mark.parametrize("name", list(QUIET))
def test_a_column_that_says_nothing_is_passed_over(
    name: str, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from packtrain.hosts.transformers import pack

    rows = _rows(4, **{name: QUIET[name]})
    packed = pack(_trainer(saved_model("tiny:qwen3"), rows, tmp_path, True), pack_length=64)
    assert not len(packed.packs.plan.ledger)


@pytest.mark.parametrize("as_dataset", [True, False])
def test_what_a_collator_reads_is_read(
    as_dataset: bool, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The collator makes labels of `loss_mask`; of what else the rows hold it reads nothing."""
    from packtrain.hosts.transformers import pack

    model = saved_model("tiny:qwen3")
    settings = {"collate": _collate, "remove_unused_columns": False}
    rows = _rows(4, loss_mask=ODD["loss_mask"])
    packed = pack(_trainer(model, rows, tmp_path, as_dataset, **settings), pack_length=64)
    assert not len(packed.packs.plan.ledger)
    rows = _rows(4, loss_mask=ODD["loss_mask"], loss_scale=[0.5] * SIZE)
    with pytest.raises(UnreadKeys, match="'loss_scale'"):
        pack(_trainer(model, rows, tmp_path, as_dataset, **settings), pack_length=64)


def test_the_folder_of_a_plan_is_taken_whole_or_not_at_all(
    saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its ids are those that were planned: a changed byte would train other samples, or none."""
    import packtrain as pt
    from packtrain.errors import ChecksumError
    from packtrain.hosts.transformers import pack

    model, rows, place = saved_model("tiny:qwen3"), _rows(40), tmp_path / "plan"
    pt.plan([SIZE] * 40, pack_length=64).save(place)
    trainer = pack(_trainer(model, rows, tmp_path / "out", False), plan=place)
    assert sorted(trainer.packs.plan.indices.tolist()) == list(range(40))
    held = bytearray((place / "indices.npy").read_bytes())
    held[-4] ^= 1
    (place / "indices.npy").write_bytes(held)
    with pytest.raises(ChecksumError, match="hashes to"):
        pack(_trainer(model, rows, tmp_path / "other", False), plan=place)
