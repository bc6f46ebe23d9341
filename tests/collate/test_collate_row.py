"""One row from packs: literal examples of the specification and of public bug reports."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.collate import PackBatch, PaddingFreeCollator, filler_pack
from packtrain.errors import InputError, IsolationError, UnknownNameError


def sample(ids: Any, sample_id: int | None = None, **fields: Any) -> dict[str, Any]:
    made = {"input_ids": ids, "labels": list(ids), **fields}
    return made if sample_id is None else {**made, "sample_id": sample_id}


def ints(tensor: torch.Tensor) -> Any:
    return tensor.tolist()


def test_pb24_first_label_of_every_segment_is_ignored() -> None:
    batch = PaddingFreeCollator()([[sample([1, 2, 3]), sample([4, 5]), sample([9])]])
    assert ints(batch["labels"]) == [[-100, 2, 3, -100, 5, -100]]
    pairs = [
        (int(batch["input_ids"][0, t]), int(batch["labels"][0, t + 1]))
        for t in range(5)
        if int(batch["labels"][0, t + 1]) != -100
    ]
    assert pairs == [(1, 2), (2, 3), (4, 5)]


def test_rows_first_label_is_ignored_too_and_caller_is_untouched() -> None:
    labels = [torch.tensor([2, 3, 4]), torch.tensor([1, 2])]
    members = [
        {"input_ids": torch.tensor([11, 12, 13]), "labels": labels[0]},
        {"input_ids": torch.tensor([21, 22]), "labels": labels[1]},
    ]
    batch = PaddingFreeCollator()([members])
    assert ints(batch["labels"]) == [[-100, 3, 4, -100, 2]]
    assert ints(batch["cu_seq_lens_q"]) == [0, 3, 5]
    alone = PaddingFreeCollator()([members[:1]])
    alone["labels"].fill_(7)
    alone["input_ids"].fill_(7)
    assert ints(labels[0]) == [2, 3, 4] and ints(labels[1]) == [1, 2]
    assert ints(members[0]["input_ids"]) == [11, 12, 13]


SPEC_004 = [
    ([4, 2], 8, [0, 1, 2, 3, 0, 1, 0, 1], [0, 4, 6, 8]),
    ([3, 2, 2], 10, [0, 1, 2, 0, 1, 0, 1, 0, 1, 2], [0, 3, 5, 7, 10]),
    ([4, 1], 8, [0, 1, 2, 3, 0, 0, 1, 2], [0, 4, 5, 8]),
]


@pytest.mark.parametrize(("lengths", "target", "positions", "offsets"), SPEC_004)
def test_spec_004_padding_examples(
    lengths: list[int], target: int, positions: list[int], offsets: list[int]
) -> None:
    ids = iter(range(101, 200))
    pack = [sample([next(ids) for _ in range(length)]) for length in lengths]
    real = sum(lengths)
    batch = PaddingFreeCollator(pad_to_length=target)([pack])
    assert ints(batch["input_ids"]) == [[*range(101, 101 + real), *[0] * (target - real)]]
    assert ints(batch["position_ids"]) == [positions]
    assert ints(batch["cu_seq_lens_q"]) == ints(batch["cu_seq_lens_k"]) == offsets
    assert ints(batch["labels"])[0][real:] == [-100] * (target - real)
    assert batch["max_length_q"] == batch["max_length_k"] == max(*lengths, target - real)
    assert batch.tail == target - real and batch.segment_sources[-1] == -1
    assert sum(batch.lengths) == target


def test_batch_types_and_attributes() -> None:
    batch = PaddingFreeCollator()([[sample([1, 2, 3], 7), sample([4], 9)]])
    assert isinstance(batch, PackBatch) and isinstance(batch, dict)
    assert batch["cu_seq_lens_q"].dtype is torch.int32
    assert type(batch["max_length_q"]) is int
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch
    assert (batch.lengths, batch.sample_ids, batch.segment_sources) == ((3, 1), (7, 9), (0, 1))
    again = pickle.loads(pickle.dumps(batch))
    assert again.lengths == (3, 1) and ints(again["input_ids"]) == [[1, 2, 3, 4]]
    moved = batch.with_values({key: value for key, value in batch.items() if key != "labels"})
    assert moved.lengths == (3, 1) and "labels" not in moved


def test_several_packs_of_a_call_become_one_row() -> None:
    one, two = [sample([1, 2, 3], 0), sample([4], 1)], [sample([5, 6], 2)]
    both = PaddingFreeCollator()([one, two])
    assert ints(both["cu_seq_lens_q"]) == [0, 3, 4, 6]
    assert ints(both["position_ids"]) == [[0, 1, 2, 0, 0, 1]]
    assert both.sample_ids == (0, 1, 2)


def test_lists_arrays_and_read_only_maps_give_the_same_row() -> None:
    def pack(make: Any) -> list[dict[str, Any]]:
        return [{"input_ids": make([5, 6, 7]), "labels": make([5, 6, 7])}]

    frozen = np.array([5, 6, 7], dtype=np.int32)
    frozen.flags.writeable = False
    rows = [
        PaddingFreeCollator()([pack(make)])
        for make in (list, torch.tensor, lambda v: np.array(v, dtype=np.uint32), lambda v: frozen)
    ]
    for row in rows[1:]:
        assert ints(row["input_ids"]) == ints(rows[0]["input_ids"])
        assert ints(row["labels"]) == ints(rows[0]["labels"]) == [[-100, 6, 7]]
        assert row["input_ids"].dtype is torch.int64


@pytest.mark.spec(
    "001",
    "labels, loss_scale, token types and channel travel with their tokens",
    key="every key",
    api="`PaddingFreeCollator`",
)
def test_pb29_every_token_field_is_padded_together() -> None:
    T = 1234
    member = sample(
        list(range(1, T + 1)),
        loss_scale=[1.0] * T,
        token_type_ids=[1] * T,
        position_ids=torch.arange(T).expand(3, -1),
    )
    batch = PaddingFreeCollator(pad_multiple=8)([[member]])
    for name in ("input_ids", "labels", "loss_scale", "token_type_ids"):
        assert tuple(batch[name].shape) == (1, 1240), name
    assert tuple(batch["position_ids"].shape) == (4, 1, 1240)
    assert ints(batch["position_ids"][:, 0, 1234:]) == [[0, 1, 2, 3, 4, 5]] * 4
    assert ints(batch["cu_seq_lens_q"]) == [0, 1234, 1240]
    assert batch["loss_scale"][0, -1] == 0 and batch["labels"][0, -1] == -100
    flat = PaddingFreeCollator(pad_multiple=8)([[sample(list(range(T)))]])
    assert tuple(flat["position_ids"].shape) == (1, 1240)


def test_pb29_undeclared_field_is_an_error_and_declaring_it_helps() -> None:
    member = sample([1, 2, 3], 12, channel_id=[0, 1, 1])
    with pytest.raises(
        InputError, match=r"sample 12: undeclared field 'channel_id' of 3 values, one per token"
    ):
        PaddingFreeCollator()([[member]])
    batch = PaddingFreeCollator(pad_to_length=4, token_fields={"channel_id": -1})([[member]])
    assert ints(batch["channel_id"]) == [[0, 1, 1, -1]]
    with pytest.raises(InputError, match="did you mean 'loss_scale'"):
        PaddingFreeCollator()([[sample([1, 2], loss_scales=[1.0, 1.0])]])


@pytest.mark.parametrize("T", [12, 8, 3, 1])
def test_pb45_positions_follow_their_declared_layout(T: int) -> None:
    rows = torch.arange(3)[:, None] * 100 + torch.arange(T)
    for given in (rows, rows[:, None]):
        batch = PaddingFreeCollator()([[sample([1] * T, position_ids=given)]])
        assert tuple(batch["position_ids"].shape) == (4, 1, T)
        assert torch.equal(batch["position_ids"][0, 0], torch.arange(T))
        assert torch.equal(batch["position_ids"][1:, 0], rows)


@pytest.mark.spec(
    "001",
    "positions restart with every sample, also in three rows (mRoPE)",
    key="every key",
    api="`PaddingFreeCollator`",
)
def test_positions_are_concatenated_per_sample() -> None:
    """PB-04: the second image sample starts at its own 0, not at the first one's end."""
    t, h, w = [0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]
    member = sample([1] * 9, position_ids=[t, h, w])
    batch = PaddingFreeCollator()([[member, member]])
    assert ints(batch["position_ids"][:, 0]) == [[*range(9)] * 2, t * 2, h * 2, w * 2]


def test_text_sample_beside_an_mrope_sample_gets_equal_rows() -> None:
    member = sample([1] * 3, position_ids=torch.arange(3).expand(3, -1))
    batch = PaddingFreeCollator()([[member, sample([4, 5], position_ids=[0, 1])]])
    assert ints(batch["position_ids"][:, 0]) == [[0, 1, 2, 0, 1]] * 4


def test_pb79_positions_may_start_elsewhere() -> None:
    alone = PaddingFreeCollator()([[sample([1, 1, 1], position_ids=[5, 6, 7])]])
    assert ints(alone["cu_seq_lens_q"]) == [0, 3]
    members = [sample([1] * 3, position_ids=[2, 3, 4]), sample([1] * 2, position_ids=[2, 3])]
    batch = PaddingFreeCollator()([members])
    assert ints(batch["position_ids"]) == [[2, 3, 4, 2, 3]]
    assert ints(batch["cu_seq_lens_q"]) == [0, 3, 5]


def test_positions_that_run_on_are_refused() -> None:
    members = [sample([1] * 3, 0, position_ids=[0, 1, 2]), sample([1] * 2, 1, position_ids=[3, 4])]
    with pytest.raises(InputError, match="positions of sample 1 start at 3, right after those of sample 0"):
        PaddingFreeCollator()([members])


def test_pb52_a_packed_row_without_boundaries_is_refused() -> None:
    row = sample([1, 2, 3, 4, 5], 3, position_ids=[0, 1, 2, 0, 1])
    with pytest.raises(InputError, match="text positions go from 2 to 0 at token 3"):
        PaddingFreeCollator()([[row]])


def test_without_offsets_every_sample_starts_alike() -> None:
    """Flash attention of transformers takes the smallest position of a row for a boundary."""
    collate = PaddingFreeCollator("qwen3", boundary_kwargs=())
    same = [sample([1] * 3, 0, position_ids=[2, 3, 4]), sample([1] * 2, 1, position_ids=[2, 3])]
    assert ints(collate([same])["position_ids"]) == [[2, 3, 4, 2, 3]]
    higher = [sample([1] * 3, 0, position_ids=[0, 1, 2]), sample([1] * 2, 1, position_ids=[5, 6])]
    with pytest.raises(InputError, match="positions of sample 1 start at 5, those of sample 0 at 0"):
        collate([higher])
    with pytest.raises(InputError, match="the pad tail start at 0, those of sample 0 at 2"):
        PaddingFreeCollator("qwen3", 8, boundary_kwargs=())([same])
    assert ints(PaddingFreeCollator("qwen3")([higher])["cu_seq_lens_q"]) == [0, 3, 5]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"labels": [1, 2, -1]}, "sample 4: the label of token 2 is -1"),
        ({"input_ids": np.array([2**64 - 1, 1, 2], np.uint64)}, "beyond int64"),
        ({"length": "three"}, "says length three"),
        ({"length": [1, 2]}, "length has 2 values"),
        ({"source": {"a": 1}}, "source holds"),
        ({"weight": [[1], [2, 3]]}, "weight is not an array"),
        ({"filler": np.zeros(3)}, "filler is a ndarray"),
        ({"loss_scale": torch.zeros(3).to_sparse()}, "loss_scale is a torch.sparse_coo"),
        ({"pixel_values": torch.zeros(3, device="meta")}, "pixel_values is a meta tensor"),
        (
            {"labels": torch.zeros(3, dtype=torch.int64, device="meta")},
            r"labels of the samples \(on cpu, meta\)",
        ),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        PaddingFreeCollator()([[sample([7, 8], 3), {**sample([1, 2, 3], 4), **fields}]])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"token_fields": {"attention_mask": 1}}, "token_fields names 'attention_mask'"),
        ({"token_fields": {"cu_seq_lens_q": 0}}, "token_fields names 'cu_seq_lens_q'"),
        ({"token_fields": {"pixel_values": 0}}, "token_fields names 'pixel_values'"),
        ({"token_fields": {"sample_id": 0}}, "token_fields names 'sample_id'"),
        ({"token_fields": {"extra": "0"}}, "the pad value of 'extra' is '0'"),
        ({"token_fields": ["extra"]}, "token_fields is a list"),
        ({"pad_token_id": None}, "pad_token_id is None"),
        ({"pad_token_id": -3}, "pad_token_id is -3"),
        ({"boundary_kwargs": None}, "boundary_kwargs is None"),
        ({"pad_to_length": "8"}, "pad_to_length is '8'"),
    ],
)
def test_options_that_contradict_the_row_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        PaddingFreeCollator(**options)
    assert caught.value.hint


@pytest.mark.parametrize("packs", [None, 3, [None], iter([1])])
def test_what_is_no_list_of_packs_is_refused(packs: Any) -> None:
    with pytest.raises(InputError, match=r"no packs|no samples"):
        PaddingFreeCollator()(packs)


def test_missing_short_empty_and_masked_fields_name_the_sample() -> None:
    collate = PaddingFreeCollator()
    good = sample([1, 2], 4, loss_scale=[1.0, 1.0])
    with pytest.raises(InputError, match="sample 5 has no token_type_ids, but sample 4"):
        collate([[sample([1, 2], 4, token_type_ids=[0, 1]), sample([1, 2], 5)]])
    scaled = sample([1, 2], 4, loss_scale=[0.5, 0.5])
    assert collate([[scaled, sample([1, 2], 5, loss_scale=[])]])["loss_scale"].tolist() == [[0.5, 0.5, 1, 1]]
    typed = sample([1, 2], 4, mm_token_type_ids=[0, 1])
    assert collate([[typed, sample([1, 2], 5)]])["mm_token_type_ids"].tolist() == [[0, 1, 0, 0]]
    with pytest.raises(InputError, match="sample 5: loss_scale has 1 values for 2 input_ids"):
        collate([[scaled, sample([1, 2], 5, loss_scale=[1.0])]])
    assert collate([[scaled, sample([1, 2], 5)]])["loss_scale"].tolist() == [[0.5, 0.5, 1.0, 1.0]]
    with pytest.raises(InputError, match="sample 6 has no position_ids, but sample 4"):
        collate([[sample([1, 2], 4, position_ids=[0, 1]), sample([1], 6)]])
    with pytest.raises(InputError, match="sample 4: labels has 1 values for 2 input_ids"):
        collate([[{**good, "labels": [1]}]])
    with pytest.raises(InputError, match="sample 8 has no labels"):
        collate([[{"input_ids": [1], "sample_id": 8}]])
    with pytest.raises(InputError, match="sample 9 has no tokens"):
        collate([[sample([], 9)]])
    with pytest.raises(InputError, match="sample 4: attention_mask has zeros"):
        collate([[{**good, "attention_mask": [1, 0]}]])
    with pytest.raises(InputError, match="says length 5 but has 2"):
        collate([[{**good, "length": 5}]])
    with pytest.raises(InputError, match="expected integers"):
        collate([[{**good, "input_ids": [0.5, 1.0]}]])
    with pytest.raises(InputError, match="member 1 of pack 0 of the call is a list"):
        collate([[sample([1]), [1, 2]]])
    with pytest.raises(InputError, match="pack 0 of the call holds no samples"):
        collate([[]])
    with pytest.raises(InputError, match="no packs"):
        collate([])
    assert ints(collate([[{**good, "attention_mask": [1, 1]}]])["input_ids"]) == [[1, 2]]


def test_padding_options_are_checked() -> None:
    with pytest.raises(InputError, match="5 tokens is longer than pad_to_length 4"):
        PaddingFreeCollator(pad_to_length=4)([[sample([1] * 5)]])
    with pytest.raises(InputError, match="not a multiple"):
        PaddingFreeCollator(pad_to_length=10, pad_multiple=8)
    with pytest.raises(InputError, match="pad_multiple is 0"):
        PaddingFreeCollator(pad_multiple=0)
    with pytest.raises(InputError, match="pad_to_length 10 is not a multiple of 4, which context_parallel 2"):
        PaddingFreeCollator(context_parallel=2, pad_to_length=10)
    full = PaddingFreeCollator(pad_to_length=5)([[sample([1] * 5)]])
    assert full.tail == 0 and ints(full["cu_seq_lens_q"]) == [0, 5]


def test_filler_is_one_untrained_token_without_a_sample() -> None:
    batch = PaddingFreeCollator()([filler_pack()])
    assert batch.filler and batch.sample_ids == () and batch.segment_sources == (-1,)
    assert ints(batch["labels"]) == [[-100]] and batch.lengths == (1,)
    mixed = PaddingFreeCollator()([[sample([1, 2], 3, loss_scale=[1.0, 1.0])], filler_pack()])
    assert not mixed.filler and mixed.sample_ids == (3,) and mixed.segment_sources == (0, -1)
    assert ints(mixed["loss_scale"]) == [[1.0, 1.0, 0.0]]


class Config:
    """What the collator reads of a transformers config."""

    def __init__(self, model_type: str, attention: str, layer_types: list[str] | None = None) -> None:
        self.model_type, self._attn_implementation, self.layer_types = model_type, attention, layer_types


def test_boundary_arguments_follow_family_and_backend() -> None:
    members = [[sample([1, 2, 3]), sample([4])]]
    flash = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}

    def keys(model: Any, **options: Any) -> set[str]:
        return set(PaddingFreeCollator(model, **options)(members)) & (flash | {"seq_idx"})

    assert keys(None) == flash
    assert keys(Config("qwen3", "flash_attention_2")) == flash
    assert keys(Config("qwen3", "sdpa")) == set()
    assert keys(Config("qwen2_5_vl", "flash_attention_2")) == set()
    assert "seq_idx" in keys(Config("qwen3_5", "sdpa", ["linear_attention", "full_attention"]))
    assert keys(None, boundary_kwargs=["seq_idx"]) == {"seq_idx"}
    batch = PaddingFreeCollator(boundary_kwargs=["seq_idx"])(members)
    assert ints(batch["seq_idx"]) == [[0, 0, 0, 1]] and batch["seq_idx"].dtype is torch.int32
    assert PaddingFreeCollator(Config("qwen2_vl", "sdpa"))(members).lengths == (3, 1)
    with pytest.raises(IsolationError, match="cu_seq_lens_q cannot be given"):
        PaddingFreeCollator(Config("qwen3_vl", "flash_attention_2"), boundary_kwargs=["cu_seq_lens_q"])
    with pytest.raises(IsolationError, match="flex"):
        PaddingFreeCollator(Config("qwen3_vl", "flex_attention"))
    with pytest.raises(UnknownNameError, match="cu_seqlens"):
        PaddingFreeCollator(boundary_kwargs=["cu_seqlens_q"])


def test_vision_family_always_gets_four_rows() -> None:
    batch = PaddingFreeCollator("qwen2_vl")([[sample([1, 2]), sample([3])]])
    assert ints(batch["position_ids"][:, 0]) == [[0, 1, 0]] * 4
    with pytest.raises(InputError, match="has t, h, w positions, the model takes one row"):
        PaddingFreeCollator("qwen3")([[sample([1, 2], position_ids=torch.zeros(3, 2, dtype=torch.int64))]])


@pytest.mark.spec(
    "001",
    "`loss_scale` that `packing_row` would build shorter than the tokens: samples without it weigh 1",
    key="every key",
    api="`PaddingFreeCollator`",
)
@pytest.mark.parametrize("missing", [{}, {"loss_scale": []}, {"loss_scale": None}])
def test_loss_scale_of_some_samples_stays_with_their_tokens(missing: dict[str, Any]) -> None:
    """`sum((x.get(key) or [] for x in row), [])` of the text gives 3 weights for 8 tokens, wrongly placed."""
    row = [
        sample([1, 2], 4, **missing),
        sample([3, 4, 5], 5, loss_scale=[0.0, 2.0, 3.0]),
        sample([6, 7, 8], 6, **missing),
    ]
    spec = [*chain.from_iterable(x.get("loss_scale") or [] for x in row)]
    assert spec == [0.0, 2.0, 3.0] and len(spec) < 8
    batch = PaddingFreeCollator()([row])
    assert batch["loss_scale"].tolist() == [[1.0, 1.0, 0.0, 2.0, 3.0, 1.0, 1.0, 1.0]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.spec(
    "001",
    "`packing_row`: ids, labels and loss_scale in a row, positions `range(length)` of each, lengths summed",
    key="every key",
    api="`PaddingFreeCollator`",
)
def test_the_row_that_packing_row_makes() -> None:
    """The text's own lines, run beside ours."""
    row = [
        sample(ids, number, loss_scale=[1.0] * len(ids))
        for number, ids in enumerate([[1, 2, 3], [4], [5, 6]])
    ]
    keys = ("input_ids", "labels", "loss_scale")
    spec = {key: [*chain.from_iterable(list(x[key]) for x in row)] for key in keys}
    spec["position_ids"] = [*chain.from_iterable(range(len(x["input_ids"])) for x in row)]
    batch = PaddingFreeCollator()([row])
    firsts = [0, 3, 4]  # no token before the first of a sample predicts it
    for key, values in spec.items():
        wanted = [-100 if key == "labels" and at in firsts else value for at, value in enumerate(values)]
        assert batch[key][0].tolist() == wanted, key
    assert sum(batch.lengths) == 6


def test_a_plain_sample_is_read_as_any_other() -> None:
    """Ids and labels of int64 are taken as they are: the segment of the full reading, and its refusals."""
    from packtrain.collate import fields

    ids = torch.arange(5)
    for sample in (
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": ids[1:], "sample_id": 3},
        {"input_ids": ids[:0], "labels": ids[:0]},
        {"input_ids": ids, "labels": ids.float()},
        {"input_ids": ids, "labels": None},
        {"input_ids": ids[None], "labels": ids[None]},
        {"labels": ids},
        {"input_ids": ids, "labels": ids, "sample_id": 7},
    ):
        told = []
        for one in (sample, {**sample, "position_ids": None}):
            try:
                read = fields.read_sample(one, "here", token_fields=fields.TOKEN_FIELDS, media={})
                tokens = {name: value.tolist() for name, value in read.tokens.items()}
                told.append((read.sample_id, read.where, read.length, tokens, read.weightless, read.values))
            except (InputError, KeyError) as error:
                told.append(str(error))
        assert told[0] == told[1]


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_text_positions_are_those_of_the_sample_whatever_its_length_and_form(length: int) -> None:
    """Three tokens are no three axes; [T] and [1,T] say the same, also beside a sample with t, h, w."""
    ids = torch.arange(length)
    text = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(length) + 7}
    flat = {**text, "position_ids": text["position_ids"][None]}
    wide = {
        "input_ids": torch.arange(3),
        "labels": torch.arange(3),
        "position_ids": torch.arange(9).view(3, 3),
    }
    for sample in (text, flat):
        row = PaddingFreeCollator(pad_to_length=12)([[sample, {**sample}]])["position_ids"]
        tail = list(range(12 - 2 * length))
        assert row.tolist() == [[*range(7, 7 + length), *range(7, 7 + length), *tail]]
        mixed = PaddingFreeCollator()([[sample, wide]])["position_ids"]
        assert mixed.shape == (4, 1, length + 3)
        assert mixed[:, 0, :length].tolist() == [list(range(7, 7 + length))] * 4
        assert mixed[1:, 0, length:].tolist() == wide["position_ids"].tolist()
