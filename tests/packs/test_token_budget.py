"""Token-budget batches: spec/004's examples through the collator, hard budgets, known facts, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import TokenBudgetDataset, WeightedSources
from packtrain.errors import InputError, PacktrainError
from packtrain.packs.token_budget import WarmUp

A, B, C, D, E, F, G, H, I, J = range(1, 11)  # noqa: E741 - the letters of the text


def rows(lengths: list[int], effective: list[int] | None = None) -> list[dict[str, Any]]:
    made = []
    for i, n in enumerate(lengths):
        labels = [7] * n if effective is None else [-100] * (n - effective[i]) + [7] * effective[i]
        made.append({"input_ids": [i + 1] * n, "labels": labels})
    return made


def letters() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": ids} for ids in ([A, B, C, D], [E, F], [G, H, I], [J])]


def ids(batches: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in batch] for batch in batches]


def collated(batch: Any, **options: Any) -> tuple[list[int], list[int], list[int]]:
    row = PaddingFreeCollator(**options)([batch])
    return row["input_ids"][0].tolist(), row["position_ids"][0].tolist(), row["cu_seq_lens_q"].tolist()


@pytest.mark.spec(
    "004",
    "`dyn_bsz` on: rows by tokens; off: rows of N samples; no padding between",
    key="`data.dyn_bsz`, `data.micro_batch_size`",
    api="`TokenBudgetDataset(dyn_bsz=)`",
)
def test_spec_004_with_and_without_dyn_bsz() -> None:
    (one,) = TokenBudgetDataset(letters(), micro_batch_size=1, max_seq_len=10)
    assert collated(one)[:2] == ([A, B, C, D, E, F, G, H, I, J], [0, 1, 2, 3, 0, 1, 0, 1, 2, 0])
    first, second = TokenBudgetDataset(letters(), micro_batch_size=2, max_seq_len=10, dyn_bsz=False)
    assert collated(first)[:2] == ([A, B, C, D, E, F], [0, 1, 2, 3, 0, 1])
    assert collated(second)[:2] == ([G, H, I, J], [0, 1, 2, 0])


@pytest.mark.spec(
    "004",
    "padded rows, examples 1 to 3; the length is inferred",
    key="`data.pad_packed_input`, `data.pad_to_length`",
    api="`TokenBudgetDataset(pad_packed_input=, pad_to_length=)`",
)
@pytest.mark.parametrize(
    ("samples", "length", "wanted", "positions", "cu"),
    [
        ([[A, B, C, D], [E, F]], 8, [A, B, C, D, E, F, 0, 0], [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8]),
        (
            [[A, B, C], [D, E], [F, G]], 10, [A, B, C, D, E, F, G, 0, 0, 0],
            [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 3, 5, 7, 10],
        ),
        ([[A, B, C, D], [E]], None, [A, B, C, D, E, 0, 0, 0], [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
    ],
)  # fmt: skip
def test_spec_004_padded_rows(
    samples: list[list[int]], length: int | None, wanted: list[int], positions: list[int], cu: list[int]
) -> None:
    """The third: micro_batch_size 2 * max_seq_len 4 = 8 is inferred. The text prints its tail as 1 2 3; its
    cu_seqlens make the tail a segment, and positions that do not begin at 0 would join it to E."""
    budget = 4 if length is None else 5 if length == 10 else 4
    data = TokenBudgetDataset(
        [{"input_ids": s, "labels": s} for s in samples],
        micro_batch_size=2, max_seq_len=budget, pad_packed_input=True, pad_to_length=length,
    )  # fmt: skip
    (batch,) = data
    assert data.pad_to_length == len(wanted)
    assert collated(batch, pad_to_length=data.pad_to_length) == (wanted, positions, cu)
    labels = PaddingFreeCollator(pad_to_length=data.pad_to_length)([batch])["labels"][0].tolist()
    assert labels[sum(map(len, samples)) :] == [-100] * (len(wanted) - sum(map(len, samples)))


@pytest.mark.spec(
    "004",
    "order of arrival, counted tokens, the physical cap",
    key="`data.order`, `data.overflow_ratio`, `data.buffer_size`",
    api="`TokenBudgetDataset(order=, overflow_ratio=, buffer_size=)`",
)
def test_facts_of_arrival_order() -> None:
    def batches(lengths: list[int], budget: int, **options: Any) -> list[list[int]]:
        data = TokenBudgetDataset(rows(lengths), max_seq_len=budget, order="arrival", **options)
        return [[i + 1 for i in batch] for batch in ids(data)]

    assert batches([6, 3, 2, 2, 2], 10) == [[1, 2], [3, 4, 5]]
    found = batches(list(range(1, 51)), 32, buffer_size=10)
    assert found[:5] == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12], [13, 14], [15, 16]]
    assert sorted(i for batch in found for i in batch) == list(range(1, 51))
    effective = TokenBudgetDataset(
        rows([3, 3, 3], [2, 2, 2]), max_seq_len=4, order="arrival", count_mode="effective", overflow_ratio=1.5
    )
    assert ids(effective) == [[0, 1], [2]]
    skipping = TokenBudgetDataset(
        rows([6, 6, 2], [2, 2, 2]), max_seq_len=4, order="arrival", count_mode="effective", overflow_ratio=2.0
    )
    assert ids(skipping) == [[0, 2], [1]]
    unsupervised = TokenBudgetDataset(
        rows([6] * 5, [0] * 5), max_seq_len=4, order="arrival", count_mode="effective", overflow_ratio=1.5
    )
    assert [len(batch) for batch in unsupervised] == [1] * 5  # the hard cap holds where nothing is counted


@pytest.mark.spec(
    "004",
    "the budget warms up",
    key="`data.warmup_ratio`, `data.warmup_tokens`",
    api="`TokenBudgetDataset(warmup_steps=, warmup_tokens=)`",
)
def test_the_budget_warms_up() -> None:
    assert [WarmUp(1000, 10, 200).budget(b) for b in range(12)] == [*range(200, 1000, 80), 1000, 1000]
    for order in ("packed", "arrival"):
        data = TokenBudgetDataset(
            rows([10] * 200), max_seq_len=100, order=order, warmup_steps=5, warmup_tokens=20, buffer_size=40
        )
        batches = list(data)
        assert [len(batch) for batch in batches[:6]] == [2, 3, 5, 6, 8, 10]
        assert sorted(i for batch in ids(batches) for i in batch) == list(range(200))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=90),
    buffer=st.integers(1, 30),
    order=st.sampled_from(["packed", "arrival"]),
    mode=st.sampled_from(["total", "effective"]),
    dyn=st.booleans(),
    warm=st.integers(0, 4),
    data=st.data(),
)
def test_budgets_are_hard_and_every_stop_resumes(
    lengths: list[int], buffer: int, order: str, mode: str, dyn: bool, warm: int, data: Any
) -> None:
    effective = [n // 2 for n in lengths]
    options: dict[str, Any] = {"micro_batch_size": 2, "max_seq_len": 30}
    if dyn:
        options |= {"order": order, "count_mode": mode, "buffer_size": buffer, "overflow_ratio": 1.2}
        options |= {"warmup_steps": warm, "warmup_tokens": 10} if warm else {}
    else:
        options["dyn_bsz"] = False

    def make() -> TokenBudgetDataset:
        return TokenBudgetDataset(rows(lengths, effective), **options)

    batches = list(make())
    assert sorted(i for batch in ids(batches) for i in batch) == list(range(len(lengths)))
    for place, batch in enumerate(batches):
        tokens = sum(len(sample["input_ids"]) for sample in batch)
        if not dyn:
            assert len(batch) == 2 or place == len(batches) - 1
        elif len(batch) > 1:
            assert tokens <= (72 if mode == "effective" else 60)
            assert mode == "total" or sum(effective[s["sample_id"]] for s in batch) <= 60
    stop = data.draw(st.integers(0, len(batches)))
    first = make()
    stream = iter(first)
    begun = [next(stream) for _ in range(stop)]
    again = make()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ids(begun) + ids(again) == ids(batches)


def test_known_lengths_plan_the_epoch() -> None:
    lengths = [int(n) for n in np.random.default_rng(2).integers(1, 60, 200)]
    made = [
        TokenBudgetDataset(
            rows(lengths),
            micro_batch_size=2,
            max_seq_len=50,
            lengths=lengths,
            rank=rank,
            world_size=4,
            shuffle_buffer=1,
        )
        for rank in range(4)
    ]
    assert len({len(data) for data in made}) == 1
    batches = [list(data) for data in made]
    assert all(len(found) == len(data) for found, data in zip(batches, made, strict=True))
    seen = [i for found in batches for batch in ids(found) for i in batch]
    assert set(seen) == set(range(200))
    state = made[1].state_dict()
    assert state["raw_plan"] == pt.plan(lengths, pack_length=100).checksum
    even = [
        TokenBudgetDataset(
            rows(lengths), micro_batch_size=2, max_seq_len=50, lengths=lengths, rank=rank, world_size=4,
            shuffle_buffer=1, balance="window", grad_accum=2,
        )
        for rank in range(4)
    ]  # fmt: skip
    held = [i for data in even for batch in ids(data) for i in batch]
    assert sorted(set(held)) == list(range(200)) and [ids(d) for d in even] != [ids(d) for d in made]
    with pytest.raises(InputError, match="need lengths"):
        TokenBudgetDataset(rows(lengths), balance="step")
    made[2].set_epoch(1)
    assert ids(made[2]) != ids(batches[2])
    with pytest.raises(TypeError, match="a stream has no length"):
        len(TokenBudgetDataset(rows(lengths)))


def test_packed_order_needs_fewer_batches_than_arrival(data: Path) -> None:
    """Real chat lengths, budget 4096, buffers of 1,000: within 0.1 % or one batch of the bound."""
    lengths = next(iter(sorted((data / "lengths").glob("*.npy"))))
    tokens = np.load(lengths).astype(np.int64)
    tokens = tokens[tokens > 0][:20_000]
    samples = [{"input_ids": np.zeros(n, np.int8)} for n in tokens.tolist()]
    options: dict[str, Any] = {"micro_batch_size": 1, "max_seq_len": 4096, "buffer_size": 1000}
    packed = sum(1 for _ in TokenBudgetDataset(samples, **options))
    arrival = sum(1 for _ in TokenBudgetDataset(samples, order="arrival", **options))
    bound = pt.plan(tokens, pack_length=4096).certificate.bound
    assert bound <= packed <= max(bound + 1, bound * 1.001)
    assert packed <= arrival


def test_what_is_dropped_stands_in_the_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "l.jsonl"
    data = TokenBudgetDataset(
        letters(), micro_batch_size=3, max_seq_len=4, dyn_bsz=False, drop_last=True, ledger_file=ledger
    )
    assert ids(data) == [[0, 1, 2]]
    assert json.loads(ledger.read_text()) == {
        "sample_id": 3,
        "reason": "partial_batch",
        "detail": "the last batch was not full",
    }
    assert data.left_out == {"partial_batch": 1}


def test_weighted_sources() -> None:
    a, b = [f"a{i}" for i in range(6)], [f"b{i}" for i in range(2)]
    first = WeightedSources({"a": a, "b": b}, {"a": 2, "b": 1})
    assert list(first) == ["a0", "b0", "a1", "a2", "b1", "a3", "a4"] and first.taken == {"a": 5, "b": 2}
    whole = list(WeightedSources({"a": a, "b": b}, stopping="all"))
    assert whole.count("b0") == 3 and sorted({x for x in whole if x[0] == "a"}) == a
    endless = iter(WeightedSources({"a": a, "b": lambda: iter(b)}, stopping="never"))
    assert [next(endless) for _ in range(30)].count("a0") == 3
    mixed = TokenBudgetDataset(WeightedSources({"a": rows([5] * 9), "b": rows([5] * 9)}), max_seq_len=10)
    assert sorted(i for batch in ids(mixed) for i in batch) == list(range(18))
    for sources, options, match in (
        ({}, {}, "no source"),
        ({"a": a}, {"weights": {"b": 1}}, "weights are for b"),
        ({"a": a}, {"weights": {"a": 0}}, "weight of a is 0"),
        ({"a": iter(a)}, {}, "source a is a generator"),
        ({"a": a}, {"stopping": "last"}, "unknown stopping 'last'"),
    ):
        with pytest.raises(InputError, match=match):
            WeightedSources(sources, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="source b has no samples"):
        list(WeightedSources({"a": a, "b": []}, stopping="all"))


@pytest.mark.spec(
    "004",
    "options that cannot hold together are refused at construction",
    key="all of `data`",
    api="`TokenBudgetDataset`",
)
def test_options_without_effect_are_refused() -> None:
    for options, match in (
        ({"pad_to_length": 9, "pad_packed_input": False}, "pad_packed_input is False"),
        ({"pad_to_length": 9}, "may have 2048"),
        ({"pad_packed_input": True, "long_samples": "single"}, "would not fit a row that is padded"),
        ({"pad_packed_input": True, "count_mode": "effective", "pad_to_length": 2048}, "may have 3072"),
        ({"warmup_ratio": 0.1}, "nobody says how long"),
        ({"warmup_ratio": 0.1, "train_steps": 9, "warmup_steps": 1}, "both say"),
        ({"warmup_ratio": 2, "train_steps": 9}, "in 0..1"),
        ({"global_batch_size": 3, "micro_batch_size": 2}, "is not grad_accum times 2"),
        ({"buffer_size": 3, "dyn_bsz_buffer_size": 4}, "one keyword"),
        ({"pad_packed_input": True, "pad_to_length": 9}, "may have 2048"),
        ({"dyn_bsz": False, "order": "arrival"}, "dyn_bsz is off"),
        ({"warmup_steps": 3}, "belong together"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"count_mode": "all"}, "count_mode"),
        ({"order": "random"}, "order"),
        ({"drop_last": True}, "written down"),
        ({"overflow_ratio": 0.5}, "overflow_ratio"),
        ({"lengths": [4, 2, 3, 1], "order": "arrival"}, "planned by total tokens"),
        ({"lengths": [4, 2, 3, 1], "cyclic": True}, "cyclic has no effect"),
    ):
        with pytest.raises(InputError, match=match):
            TokenBudgetDataset(letters(), **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no labels"):
        list(TokenBudgetDataset([{"input_ids": [1]}], count_mode="effective"))


@pytest.mark.parametrize("option", ["encode_workers", "max_carry"])
def test_with_lengths_options_of_streams_are_told_once(option: str, caplog: pytest.LogCaptureFixture) -> None:
    made = TokenBudgetDataset(letters(), lengths=[4, 2, 3, 1], **{option: 2})  # type: ignore[arg-type]
    plain = TokenBudgetDataset(letters(), lengths=[4, 2, 3, 1])
    assert [pack.ids for pack in made] == [pack.ids for pack in plain]
    (line,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert option in line


@pytest.mark.parametrize(("supervised", "ratio", "told"), [(3, 2.0, 1), (6, 2.0, 0), (3, 4.0, 0)])
def test_an_effective_budget_that_the_cap_always_beats_is_told_once(
    supervised: int, ratio: float, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A row is full of tokens first where fewer than 1/ratio of a sample's are supervised."""
    labels = [-100] * (10 - supervised) + [1] * supervised
    samples = [{"input_ids": [1] * 10, "labels": labels} for _ in range(600)]
    data = TokenBudgetDataset(samples, max_seq_len=20, count_mode="effective", overflow_ratio=ratio)
    list(data)
    lines = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(lines) == told and all("count_mode 'effective'" in line for line in lines)


@pytest.mark.spec(
    "004",
    "every key under its name there, in Python",
    key="`training.dyn_bsz_*` …",
    api="`TokenBudgetDataset`",
)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"dyn_bsz_buffer_size": 3}, {"buffer_size": 3}),
        (
            {"dyn_bsz_count_mode": "effective", "dyn_bsz_physical_overflow_ratio": 1.2},
            {"count_mode": "effective", "overflow_ratio": 1.2},
        ),
        (
            {"dyn_bsz_count_mode": "effective", "dyn_bsz_overflow_ratio": 1.2},
            {"count_mode": "effective", "overflow_ratio": 1.2},
        ),
        (
            {"bsz_warmup_ratio": 0.3, "train_steps": 10, "bsz_warmup_init_mbtoken": 5},
            {"warmup_steps": 3, "warmup_tokens": 5},
        ),
        ({"pad_packed_to_length": 50}, {"pad_packed_input": True, "pad_to_length": 50}),
        ({"pad_to_length": True}, {"pad_packed_input": True}),
        ({"pad_to_length": False}, {}),
        ({"dyn_bsz": False, "micro_batch_size": 3}, {"dyn_bsz": False, "micro_batch_size": 3}),
    ],
)
def test_keys_under_veomnis_names(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    samples = rows([4, 9, 2, 14, 7, 7, 3, 1, 20], [2, 4, 2, 7, 1, 7, 1, 1, 9])
    made = [TokenBudgetDataset(samples, max_seq_len=20, **held) for held in (theirs, ours)]
    assert ids(made[0]) == ids(made[1]) and made[0].pad_to_length == made[1].pad_to_length
    assert made[0].state_dict() == made[1].state_dict()


@pytest.mark.spec(
    "004",
    "`global_batch_size`",
    key="`data.global_batch_size`",
    api="`TokenBudgetDataset(global_batch_size=)`",
)
def test_a_global_batch_is_micro_batches_of_all_ranks() -> None:
    lengths = [5] * 40
    data = TokenBudgetDataset(
        rows(lengths), micro_batch_size=2, max_seq_len=10, global_batch_size=16, world_size=4, rank=1
    )
    assert data.grad_accum == 2
    planned = TokenBudgetDataset(
        rows(lengths), micro_batch_size=2, max_seq_len=10, global_batch_size=16, world_size=4, rank=1,
        lengths=lengths, balance="step",
    )  # fmt: skip
    assert planned.grad_accum == 2 and len(planned) == 3


@pytest.mark.spec(
    "004",
    "effective + padding: the hard cap; what fits no row is named",
    key="`data.count_mode`",
    api="`TokenBudgetDataset(count_mode=, pad_packed_input=)`",
)
def test_padded_rows_hold_what_the_mode_allows() -> None:
    """effective + padding pads to the hard cap; a sample that fits no row is named, in every mode."""
    samples = rows([6, 6, 2, 9], [2, 2, 2, 3])
    data = TokenBudgetDataset(samples, max_seq_len=6, count_mode="effective", pad_packed_input=True)
    assert data.pad_to_length == 9
    for batch in data:
        assert len(collated(batch, pad_to_length=9)[0]) == 9
    for further in ({}, {"order": "arrival"}, {"warmup_steps": 1, "warmup_tokens": 2}):
        with pytest.raises(PacktrainError, match=r"sample 3\b.* 9 tokens|9 .*sample 3"):
            list(TokenBudgetDataset(samples, max_seq_len=8, pad_packed_input=True, **further))


@pytest.mark.spec(
    "004",
    "padding and known lengths with `dyn_bsz` off",
    key="`data.pad_to_length`",
    api="`TokenBudgetDataset(dyn_bsz=False, lengths=)`",
)
def test_rows_of_a_number_of_samples_are_padded_and_planned(caplog: pytest.LogCaptureFixture) -> None:
    """dyn_bsz off: example 1 of the text pads to 8; without a length micro_batch_size * max_seq_len."""
    (batch,) = TokenBudgetDataset(
        [{"input_ids": s, "labels": s} for s in ([A, B, C, D], [E, F])],
        dyn_bsz=False, micro_batch_size=2, pad_packed_to_length=8,
    )  # fmt: skip
    assert collated(batch, pad_to_length=8) == (
        [A, B, C, D, E, F, 0, 0], [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8],
    )  # fmt: skip
    data = TokenBudgetDataset(letters(), dyn_bsz=False, micro_batch_size=2, max_seq_len=4, pad_to_length=True)
    assert data.pad_to_length == 8 and not caplog.records
    with caplog.at_level("WARNING"):
        TokenBudgetDataset(letters(), dyn_bsz=False, micro_batch_size=2, max_seq_len=4)
    assert [r.message for r in caplog.records if "max_seq_len 4 has no effect" in r.message]
    lengths = [len(row["input_ids"]) for row in letters()]
    kept = TokenBudgetDataset(letters(), dyn_bsz=False, micro_batch_size=3, lengths=lengths)
    assert ids(kept) == [[0, 1, 2], [3]] and len(kept) == 2
    mixed = TokenBudgetDataset(
        rows([3] * 30), dyn_bsz=False, micro_batch_size=4, lengths=[3] * 30, shuffle_buffer=9
    )
    assert sorted(map(len, mixed)) == [2] + [4] * 7 and ids(mixed) != sorted(ids(mixed))


@pytest.mark.spec(
    "004", "`drop_last` by the counted tokens", key="`data.drop_last`", api="`TokenBudgetDataset(drop_last=)`"
)
def test_drop_last_counts_what_the_budget_counts(tmp_path: Path) -> None:
    """Nine of ten supervised tokens make a row full, however many others it holds."""
    options: dict[str, Any] = {"max_seq_len": 10, "count_mode": "effective", "overflow_ratio": 3.0}
    options |= {"order": "arrival", "drop_last": True}
    full = TokenBudgetDataset(rows([12, 12], [5, 4]), **options, ledger_file=tmp_path / "a.jsonl")
    assert ids(full) == [[0, 1]]
    part = TokenBudgetDataset(rows([12, 12], [5, 3]), **options, ledger_file=tmp_path / "b.jsonl")
    assert ids(part) == [] and part.left_out == {"partial_batch": 2}


def test_what_is_left_out_says_the_cap_that_it_is_beyond(tmp_path: Path) -> None:
    """Of the cost that is counted: its row of tokens is within the pack length."""
    samples = rows([5, 30, 6])
    options: dict[str, Any] = {"count_mode": "effective", "overflow_ratio": 2.0, "long_samples": "drop"}
    kept = TokenBudgetDataset(samples, max_seq_len=24, ledger_file=tmp_path / "out.jsonl", **options)
    assert [member["sample_id"] for pack in kept for member in pack] == [0, 2]
    (told,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert (told["reason"], told["detail"]) == ("over_effective", "30 effective, the cap is 24")
