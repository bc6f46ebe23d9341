"""Padding inside segments, masks and Megatron's words; values of samples; dummy media."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.collate import (
    PackBatch,
    PaddingFreeCollator,
    context_parallel_index,
    filler_pack,
    segment_multiple,
)
from packtrain.errors import InputError


def sample(length: int, sample_id: int, **fields: Any) -> dict[str, Any]:
    ids = [100 * sample_id + i for i in range(1, length + 1)]
    return {"input_ids": ids, "labels": list(ids), "sample_id": sample_id, **fields}


def test_context_parallel_pads_inside_every_segment() -> None:
    collate = PaddingFreeCollator(context_parallel=2)
    assert segment_multiple(2) == 4 and segment_multiple(1) == 1
    batch = collate([[sample(5, 1), sample(4, 2), sample(1, 3)]])
    assert batch["input_ids"][0].tolist() == [
        101,
        102,
        103,
        104,
        105,
        0,
        0,
        0,
        201,
        202,
        203,
        204,
        301,
        0,
        0,
        0,
    ]
    assert batch["labels"][0].tolist() == [
        -100, 102, 103, 104, 105, -100, -100, -100, -100, 202, 203, 204, -100, -100, -100, -100,
    ]  # fmt: skip
    assert batch["position_ids"][0].tolist() == [*range(8), *range(4), *range(4)]
    assert batch.lengths == (8, 4, 4) and batch.unpadded == (5, 4, 1) and batch.tail == 0
    params = batch.packed_seq_params()
    assert params["cu_seqlens_q"].tolist() == params["cu_seqlens_kv"].tolist() == [0, 5, 9, 10]
    assert params["cu_seqlens_q_padded"].tolist() == params["cu_seqlens_kv_padded"].tolist() == [0, 8, 12, 16]
    assert params["cu_seqlens_q"].dtype is torch.int32 and params["qkv_format"] == "thd"
    assert params["max_seqlen_q"] == params["max_seqlen_kv"] == 8 and type(params["max_seqlen_q"]) is int
    assert batch.seq_start_id().tolist() == [0, 8, 12]
    assert batch["cu_seq_lens_q"].tolist() == [0, 8, 12, 16]


def test_a_plan_with_multiple_of_holds_for_the_padded_row() -> None:
    """Law 2: what padding adds was counted, so no row grows past the plan."""
    import packtrain as pt

    lengths = np.random.default_rng(0).integers(1, 40, 60)
    plan = pt.plan(lengths, 96, multiple_of=segment_multiple(3), long_samples="error")
    collate = PaddingFreeCollator(context_parallel=3, pad_to_length=96)
    for position in range(len(plan)):
        row = collate([[sample(int(lengths[i]), int(i)) for i in plan[position]]])
        assert row["input_ids"].shape == (1, 96) and sum(row.lengths) == 96
        assert all(length % 6 == 0 for length in row.lengths)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_a_context_parallel_group_share_the_row_evenly(size: int) -> None:
    batch = PaddingFreeCollator(context_parallel=size, padding_mask=True)([[sample(7, 1), sample(2, 2)]])
    parts = [batch.context_parallel_part(size, rank) for rank in range(size)]
    assert len({part["input_ids"].shape for part in parts}) == 1
    places = torch.cat([context_parallel_index(batch.lengths, size, rank) for rank in range(size)])
    assert sorted(places.tolist()) == list(range(sum(batch.lengths)))
    for key in ("input_ids", "labels", "position_ids", "padding_mask"):
        whole = torch.cat([part[key] for part in parts], dim=-1)
        assert torch.equal(whole, batch[key][..., places]), key
    if size == 2:  # 8 tokens in 4 chunks of 2: the first and last, the two in the middle
        assert context_parallel_index((8,), 2, 0).tolist() == [0, 1, 6, 7]
        assert context_parallel_index((8,), 2, 1).tolist() == [2, 3, 4, 5]
    with pytest.raises(InputError, match="does not divide"):
        context_parallel_index((7,), 2, 0)
    with pytest.raises(InputError, match="rank 2"):
        context_parallel_index((8,), 2, 2)


def test_mrope_positions_and_fields_grow_with_their_segment() -> None:
    rows = [[0, 1, 1, 1, 2], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]]
    members = [sample(5, 1, position_ids=rows, loss_scale=[2.0] * 5, mm_token_type_ids=[0, 1, 1, 1, 0])]
    batch = PaddingFreeCollator("qwen2_vl", context_parallel=4, pad_to_length=16)([members])
    assert batch["position_ids"].shape == (4, 1, 16)
    assert batch["position_ids"][0, 0].tolist() == [*range(8), *range(8)]
    assert batch["position_ids"][1, 0].tolist() == [0, 1, 1, 1, 2, 3, 4, 5, *range(8)]
    assert batch["loss_scale"][0].tolist() == [2.0] * 5 + [0.0] * 11
    assert batch["mm_token_type_ids"][0].tolist() == [0, 1, 1, 1, 0] + [0] * 11


def test_padding_mask_marks_every_kind_of_padding() -> None:
    collate = PaddingFreeCollator(context_parallel=2, pad_to_length=16, padding_mask=True)
    batch = collate([[sample(3, 1), sample(4, 2)], filler_pack()])
    assert batch["padding_mask"].dtype is torch.bool
    assert batch["padding_mask"][0].tolist() == [False] * 3 + [True] + [False] * 4 + [True] * 8
    assert "padding_mask" not in PaddingFreeCollator()([[sample(3, 1)]])
    assert batch.unpadded == (3, 4, 1, 4) and batch.lengths == (4, 4, 4, 4)


def test_boundaries_are_strictly_increasing_whatever_is_padded() -> None:
    """Case K2, over every small mix of lengths and paddings."""
    for lengths in ((1,), (1, 1), (3, 1, 2), (8, 8)):
        for size in (1, 2, 4):
            for multiple in (None, 8, 24):
                batch = PaddingFreeCollator(
                    context_parallel=size, pad_multiple=multiple, boundary_kwargs=["cu_seq_lens_q", "seq_idx"]
                )([[sample(length, i) for i, length in enumerate(lengths)]])
                total = batch["input_ids"].shape[1]
                for offsets in (batch["cu_seq_lens_q"], batch.packed_seq_params()["cu_seqlens_q_padded"]):
                    assert offsets[0] == 0 and offsets[-1] == total and bool((offsets.diff() > 0).all())
                assert sum(batch.unpadded) - batch.tail == sum(lengths)
                numbers = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
                assert batch["seq_idx"][0].tolist() == numbers.tolist()
                starts = batch.seq_start_id()
                assert bool((batch["labels"][0, starts] == -100).all())


def test_values_of_samples_travel_beside_the_row() -> None:
    members = [
        sample(2, 4, source="a", channel="ocr", weight=0.5),
        sample(3, 5, source="b", weight=torch.tensor([2.0])),
    ]
    batch = PaddingFreeCollator(pad_to_length=8)([members])
    assert batch.sample_values == {"source": ("a", "b"), "channel": ("ocr", None), "weight": (0.5, 2.0)}
    assert not {"source", "channel", "weight"} & set(batch)
    assert pickle.loads(pickle.dumps(batch)).sample_values == batch.sample_values
    assert PackBatch().sample_values == {} and PaddingFreeCollator()([filler_pack()]).sample_values == {}
    with pytest.raises(InputError, match="sample 6: channel has 3 values, one per token"):
        PaddingFreeCollator()([[sample(3, 6, channel=[0, 1, 1])]])


class Vision:
    """What the collator reads of a Qwen-VL config."""

    spatial_merge_size, patch_size, temporal_patch_size, in_channels = 2, 14, 2, 3
    model_type, _attn_implementation, layer_types = "qwen2_vl", "sdpa", None
    image_token_id, video_token_id, vision_start_token_id, vision_end_token_id = 9, 8, 6, 7

    @property
    def vision_config(self) -> Vision:
        return self


def test_a_row_without_images_gets_one_weightless_image() -> None:
    collate = PaddingFreeCollator(Vision(), dummy_media=True, pad_to_length=12)
    plain = sample(4, 1, position_ids=torch.arange(4).expand(3, -1), loss_scale=[1.0] * 4)
    batch = collate([[plain]])
    assert batch.dummies == 1 and batch.sample_ids == (1,) and batch.segment_sources == (0, -1, -1)
    assert batch["input_ids"][0].tolist() == [101, 102, 103, 104, 6, 9, 7, 0, 0, 0, 0, 0]
    assert batch["labels"][0].tolist() == [-100, 102, 103, 104] + [-100] * 8
    assert batch["loss_scale"][0].tolist() == [1.0] * 4 + [0.0] * 8
    assert batch["pixel_values"].shape == (4, 3 * 2 * 14**2) and batch["image_grid_thw"].tolist() == [
        [1, 2, 2]
    ]
    assert batch["position_ids"][:, 0, 4:7].tolist() == [[0, 1, 2]] * 4
    with_image = {
        **sample(3, 2, position_ids=torch.arange(3).expand(3, -1), loss_scale=[1.0] * 3),
        "input_ids": [1, 9, 2],
        "pixel_values": torch.ones(4, 1176),
        "image_grid_thw": [[1, 2, 2]],
    }
    assert collate([[plain, with_image]]).dummies == 0
    filler = collate([filler_pack()])
    assert filler.filler and filler.dummies == 1 and "pixel_values" in filler
    again = pickle.loads(pickle.dumps(collate))([[plain]])
    assert torch.equal(again["pixel_values"], batch["pixel_values"])


def test_dummy_media_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(InputError, match="family text, which has no media"):
        PaddingFreeCollator("qwen3", dummy_media=True)
    with pytest.raises(InputError, match="without a model"):
        PaddingFreeCollator("qwen2_vl", dummy_media=True)
    with pytest.raises(InputError, match="has no media"):
        PaddingFreeCollator("qwen2_vl", dummy_media=[sample(2, 1)])


def test_nothing_of_the_caller_changes() -> None:
    members = [
        sample(5, 1, position_ids=torch.arange(5), loss_scale=np.ones(5), weight=1.0),
        {
            "input_ids": torch.tensor([1, 2]),
            "labels": np.array([1, 2]),
            "position_ids": [0, 1],
            "loss_scale": [1, 1],
        },
    ]
    before = copy.deepcopy(members)
    options: list[dict[str, Any]] = [{}, {"context_parallel": 2}, {"pad_to_length": 16}]
    for option in options:
        batch = PaddingFreeCollator(padding_mask=True, **option)([members])
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.fill_(1)
    for old, new in zip(before, members, strict=True):
        assert old.keys() == new.keys()
        for key in old:
            assert np.array_equal(np.asarray(old[key]), np.asarray(new[key])), key
