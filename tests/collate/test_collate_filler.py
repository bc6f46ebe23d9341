"""The filler: one untrained token without a sample, told apart from every pack."""

from __future__ import annotations

from packtrain.collate import FILLER, PaddingFreeCollator, filler_pack, is_filler


def test_a_filler_row_has_no_sample_and_no_target() -> None:
    batch = PaddingFreeCollator()([filler_pack(7)])
    assert FILLER == -1
    assert batch.filler and batch.sample_ids == () and batch.segment_sources == (-1,)
    assert batch.lengths == (1,) and batch["input_ids"].tolist() == [[7]]
    assert (batch["labels"] == -100).all()


def test_only_fillers_are_fillers() -> None:
    sample = {"input_ids": [1, 2], "labels": [1, 2]}
    assert is_filler(filler_pack())
    assert not is_filler([sample]) and not is_filler([*filler_pack(), sample]) and not is_filler([])
