"""Worked examples of documents 001 and 004, line by line: what goes in there, and what they print.

The two examples of 001 that are code (`packing_row`, with and without mRoPE) run beside ours in
`tests/collate/test_collate_row.py`; those of 002 and 003 stand in `tests/export/test_export_documents.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, StreamingPackedDataset, TokenBudgetDataset
from packtrain.errors import ConfigError, InputError, SampleError

A, B, C, D, E, F, G, H, I, J = range(1, 11)  # noqa: E741 - the letters of the text
SAMPLES = [[A, B, C, D], [E, F], [G, H, I], [J]]


def row(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, "length": len(ids)}


class Rows(list[dict[str, Any]]):
    """Rows with a column of lengths, as `dataset['length']` reads it."""

    column_names = ("input_ids", "labels", "length")

    def __getitem__(self, key: Any) -> Any:
        return [held["length"] for held in self] if key == "length" else super().__getitem__(key)


class Template:
    """ms-swift's: `max_length`, and an encode that a failing row leaves empty."""

    max_length = 10

    def encode(self, sample: Any, return_length: bool = False) -> dict[str, Any]:
        return row(sample["ids"]) if sample["ids"] else {}


@pytest.mark.spec(
    "001",
    "`PackedDataset(dataset=, template=, packing_length=)`: `packed_idx`, `packed_length`, lists of samples",
    key="`data.kind: planned`",
    api="`PackedDataset(samples, template, pack_length=)`",
)
def test_the_dataset_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    """`create_packed_idx`: every index once, no group over the cap, the sums beside them. Groups and their
    order are those of our plan (law 3), and never more than the library of the guide makes."""
    lengths = np.random.default_rng(0).integers(1, 90, 300).tolist()
    made = Rows(row([1] * n) for n in lengths)
    packed = PackedDataset(dataset=made, template=None, packing_length=100, num_proc=2)
    assert "num_proc=2 has no effect" in caplog.text
    assert sorted(index for group in packed.packed_idx for index in group) == list(range(300))
    assert packed.packed_length == [sum(lengths[index] for index in group) for group in packed.packed_idx]
    assert max(packed.packed_length) <= 100
    assert len(packed.packed_idx) == len(packed) <= len(to_constant_volume(lengths, 100))
    assert packed.plan == pt.plan(lengths, 100)
    assert [sample["length"] for sample in packed[0]] == [lengths[i] for i in packed.packed_idx[0]]
    # `packing_length or template.max_length`, and lengths that the template has to find
    raw = [{"ids": ids} for ids in SAMPLES]
    assert PackedDataset(raw, Template()).packed_length == [10]
    assert PackedDataset(raw, Template(), packing_length=6).packed_idx == [[0, 1], [2, 3]]
    assert PackedDataset(raw, Template().encode, pack_length=6)[0].lengths == [4, 2]


def to_constant_volume(lengths: list[int], volume: int) -> list[list[int]]:
    """What `binpacking.to_constant_volume` is published to do: the largest first, into the fullest."""
    bins: list[list[int]] = []
    for value in sorted(lengths, reverse=True):
        fitting = [one for one in bins if sum(one) + value <= volume]
        (max(fitting, key=sum) if fitting else bins.append([]) or bins[-1]).append(value)
    return bins


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither a plan nor a pack length"),
        ({"pack_length": 8, "packing_length": 8}, "packing_length and pack_length are one keyword"),
        ({"packing_lenght": 8}, "PackedDataset has no keyword packing_lenght .*did you mean packing_length"),
        ({"packing_length": 8, "strict": False}, "needs a ledger_file"),
    ],
)
def test_calls_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PackedDataset([row(ids) for ids in SAMPLES], **given)


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    packed = PackedDataset([row([A, B]), row([]), row([C])], pack_length=4)
    assert packed.packed_idx == [[0, 2]] and packed.plan.ledger.ids.tolist() == [1]
    assert "1 of 3 samples are left out: {'empty': 1}" in caplog.text


def test_what_is_no_dataset() -> None:
    with pytest.raises(ConfigError, match="a plan says the packs"):
        PackedDataset(pt.plan([3], 4), [row([1, 2, 3])], pack_length=4)
    with pytest.raises(ConfigError, match="the first argument is a list, no plan"):
        PackedDataset([], [], len, pack_length=4)
    with pytest.raises(InputError, match=r"cannot be indexed .*StreamingPackedDataset"):
        PackedDataset(iter([]), pack_length=4)
    for what in ("a.jsonl", {"a": 1}):
        with pytest.raises(InputError, match=r"is no dataset .*open_chats"):
            PackedDataset(what, pack_length=4)
    for none in ([], [row([])]):
        with pytest.raises(InputError, match=rf"none of {len(none)} samples? can be packed"):
            PackedDataset(none, pack_length=4)
    with pytest.raises(InputError, match="no input_ids"):
        PackedDataset([{"ids": [1]}], pack_length=4)


@pytest.mark.spec(
    "001",
    "`IterablePackedDataset`: packs by `packing_interval`, flushes at the end, skips what encodes to nothing",
    key="`data.window`, `data.on_error`",
    api="`StreamingPackedDataset(packing_interval=, strict=)`",
)
def test_the_stream_of_the_guide(tmp_path: Any) -> None:
    samples = [{"ids": ids} for ids in ([A, B, C, D], [], [E, F], [G, H, I], [J])]
    ledger = tmp_path / "left_out.jsonl"
    stream = StreamingPackedDataset(
        dataset=samples, template=Template(), packing_interval=2, strict=False, ledger_file=ledger
    )
    assert stream.pack_length == 10  # `packing_length or template.max_length`
    packs = list(stream)
    assert sorted(token for pack in packs for sample in pack for token in sample["input_ids"]) == list(
        range(1, 11)
    )
    assert all(sum(pack.lengths) <= 10 for pack in packs) and stream.left_out == {"empty": 1}
    with pytest.raises(SampleError):
        list(StreamingPackedDataset(samples, Template(), strict=True))
    cyclic = StreamingPackedDataset(samples[:1], Template(), cyclic=True, packing_interval=1)
    assert [pack.ids for pack in islice(cyclic, 4)] == [[0]] * 4


@pytest.mark.spec(
    "004",
    "the four samples of the text: what padding would cost, and the rows of two ranks",
    key="`data.dyn_bsz`, `data.pad_packed_input`",
    api="`TokenBudgetDataset`",
)
def test_the_background_of_veomni() -> None:
    """Padded to the longest: 16 slots for 10 tokens. The text puts S1 S2 on rank 0 and S3 S4 on rank 1; here
    the ranks take samples in turn (law 14), so rank 0 has S1 S3 and rank 1 S2 S4. With `dyn_bsz` and known
    lengths the rows are even: 5 tokens each at a target of 5."""
    samples = [row(ids) for ids in SAMPLES]
    alone = [PaddingFreeCollator(pad_to_length=4)([[sample]])["input_ids"][0].tolist() for sample in samples]
    assert alone == [[A, B, C, D], [E, F, 0, 0], [G, H, I, 0], [J, 0, 0, 0]]

    def of_rank(rank: int, **options: Any) -> list[list[int]]:
        data = TokenBudgetDataset(samples, rank=rank, world_size=2, **options)
        return [PaddingFreeCollator()([batch])["input_ids"][0].tolist() for batch in data]

    fixed = [of_rank(rank, dyn_bsz=False, micro_batch_size=2) for rank in (0, 1)]
    assert fixed == [[[A, B, C, D, G, H, I]], [[E, F, J]]]
    even = [of_rank(rank, max_seq_len=5, lengths=[4, 2, 3, 1]) for rank in (0, 1)]
    assert sorted(even) == [[[A, B, C, D, J]], [[E, F, G, H, I]]]


@pytest.mark.spec(
    "004",
    "kwargs of FlashAttention (`cu_seq_lens_q/k`, `max_length_q/k`) are those of the padded row",
    key="`data.pad_packed_input`",
    api="`PaddingFreeCollator(pad_to_length=)`",
)
def test_flash_kwargs_match_the_padded_length() -> None:
    batch = PaddingFreeCollator(pad_packed_to_length=12)([[row([A, B, C, D]), row([E, F])]])
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 6, 12]
    assert batch["max_length_q"] == batch["max_length_k"] == 6  # the tail is the longest segment
    assert batch["labels"][0, 6:].tolist() == [-100] * 6
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]
