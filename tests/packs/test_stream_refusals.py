"""Streams and token budgets: what has no effect or breaks a law is refused in one line, never carried out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import StreamingPackedDataset, TokenBudgetDataset, WeightedSources
from packtrain.errors import ForeignArtefactError, InputError, SampleError

LENGTHS = [5, 3, 9, 2, 40, 1, 7, 8, 6, 4]


def rows(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths]


def ids(batches: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in batch] for batch in batches]


def flat(batches: Any) -> list[Any]:
    return [i for batch in ids(batches) for i in batch]


SAMPLES = rows(LENGTHS)


@pytest.mark.parametrize(
    "options", [{}, {"order": "arrival"}, {"dyn_bsz": False}, {"warmup_steps": 2, "warmup_tokens": 4}]
)
def test_a_sample_without_tokens_is_named_or_written_down(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="sample 1 has no tokens"):
        ids(TokenBudgetDataset(rows([3, 0, 2]), max_seq_len=20, **options))
    ledger = tmp_path / "ledger.jsonl"
    data = TokenBudgetDataset(rows([3, 0, 2]), max_seq_len=20, ledger_file=ledger, **options)
    assert sorted(flat(data)) == [0, 2]
    assert json.loads(ledger.read_text())["sample_id"] == 1
    skips = {"on_error": "skip", "ledger_file": ledger, **options}
    kept = TokenBudgetDataset(rows([3, 0, 2]), max_seq_len=20, max_skip_fraction=0.5, **skips)
    assert sorted(flat(kept)) == [0, 2] and kept.left_out == {"empty": 1}
    with pytest.raises(InputError, match="max_skip_fraction"):
        ids(TokenBudgetDataset(rows([3, 0, 2]), max_seq_len=20, max_skip_fraction=0.1, **skips))


def test_planned_batches_follow_every_keyword(tmp_path: Path) -> None:
    assert max(map(len, TokenBudgetDataset(SAMPLES, max_seq_len=20, lengths=LENGTHS, max_samples=2))) == 2
    for batch in TokenBudgetDataset(SAMPLES, max_seq_len=20, lengths=LENGTHS, multiple_of=8):
        assert len(batch) == 1 or sum(-(-len(s["input_ids"]) // 8) * 8 for s in batch) <= 20
    ledger = tmp_path / "ledger.jsonl"
    options: dict[str, Any] = {"lengths": LENGTHS, "long_samples": "drop", "ledger_file": ledger}
    data = TokenBudgetDataset(SAMPLES, max_seq_len=20, **options)
    left_out = [json.loads(line)["sample_id"] for line in ledger.read_text().splitlines()]
    assert sorted([*flat(data), *left_out]) == list(range(10)) and left_out == [4]
    with pytest.raises(InputError, match="lengths are of 9 samples, the source has 10"):
        TokenBudgetDataset(SAMPLES, max_seq_len=20, lengths=LENGTHS[:-1])
    with pytest.raises(InputError, match="on_error"):
        TokenBudgetDataset(SAMPLES, lengths=LENGTHS, on_error="skip", ledger_file=ledger)


def test_planned_batches_are_shared_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker w of N gives batches w, w + N, … of the epoch: together each once, in order."""
    whole = [pack.ids for pack in TokenBudgetDataset(SAMPLES, max_seq_len=20, lengths=LENGTHS)]
    for worker in range(2):
        info = type("Info", (), {"num_workers": 2, "id": worker})
        monkeypatch.setattr("packtrain.packs.source.get_worker_info", info)
        data = TokenBudgetDataset(SAMPLES, max_seq_len=20, lengths=LENGTHS)
        assert [pack.ids for pack in data] == whole[worker::2]


@pytest.mark.parametrize(
    "order", [{"order": "arrival"}, {"dyn_bsz": False}, {"warmup_steps": 1, "warmup_tokens": 1}]
)
@pytest.mark.parametrize("option", [{"max_samples": 1}, {"multiple_of": 8}, {"long_samples": "error"}])
def test_options_without_effect_are_refused(order: dict[str, Any], option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="has no effect"):
        TokenBudgetDataset(SAMPLES, **order, **option)


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": 3, "warmup_tokens": 2049},
        {"warmup_steps": 3, "warmup_tokens": 0},
        {"overflow_ratio": "a"},
        {"grad_accum": "a", "lengths": LENGTHS},
        {"rank": "a"},
        {"dyn_bsz": "false"},
        {"drop_last": 1},
        {"pad_packed_input": "no"},
        {"cyclic": "no"},
        {"ledger_file": 7},
        {"balance": 1, "lengths": LENGTHS},
        {"world_size": 1.5},
    ],
)
def test_wrong_values_are_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TokenBudgetDataset(SAMPLES, **options)


@pytest.mark.parametrize("source", ["train.jsonl", b"x", {"train": SAMPLES}])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match="is no source of samples"):
        StreamingPackedDataset(source, pack_length=8)
    with pytest.raises(InputError, match="expected an iterable"):
        ids(StreamingPackedDataset(lambda: None, pack_length=8))


@pytest.mark.parametrize("change", [None, "a", [], {"epoch": "x"}, {"held": {}}, {"held": [1]}, [None], [[]]])
def test_a_state_that_is_none_changes_nothing(change: Any) -> None:
    stream = StreamingPackedDataset(SAMPLES, pack_length=10)
    state = {**stream.state_dict(), **change} if isinstance(change, dict) else change
    with pytest.raises(ForeignArtefactError):
        stream.load_state_dict(state)
    for epoch in ("a", 1.5, None, True):
        with pytest.raises(InputError, match="expected an integer"):
            stream.set_epoch(epoch)  # type: ignore[arg-type]
    assert sorted(flat(stream)) == list(range(10))


def test_weighted_sources_refuse_lists_and_sources_that_end_once() -> None:
    with pytest.raises(InputError, match="by name"):
        WeightedSources([SAMPLES])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="by name"):
        WeightedSources({"a": SAMPLES}, [1])  # type: ignore[arg-type]
    once = iter(SAMPLES)
    with pytest.raises(InputError, match="source a gave samples once"):
        list(WeightedSources({"a": lambda: once, "b": SAMPLES * 3}, stopping="all"))


def test_a_written_id_may_be_a_word(tmp_path: Path) -> None:
    named = [{**sample, "sample_id": f"x{i}"} for i, sample in enumerate(SAMPLES)]
    ledger = tmp_path / "ledger.jsonl"
    packs = StreamingPackedDataset(named, pack_length=10, long_samples="drop", ledger_file=ledger)
    assert len(flat(packs)) == 9
    assert json.loads(ledger.read_text())["sample_id"] == "x4"
