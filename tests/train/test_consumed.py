"""What a run consumed is counted over ranks and over the legs of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packtrain.errors import PacktrainError
from packtrain.train.consumed import FOUND, Consumed, found_of, read_found

Packs = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 5)), max_size=8)


@given(legs=st.lists(st.tuples(Packs, Packs), min_size=1, max_size=3))
def test_figures_are_those_of_a_plain_loop(legs: list[tuple[list[tuple[int, int]], ...]]) -> None:
    """Two ranks, several legs: the same as all packs counted at once."""
    before: dict[str, int] = {}
    for leg in legs:
        ranks = [Consumed(30) for _ in leg]
        for rank, packs in zip(ranks, leg, strict=True):
            rank.begin(before)
            for tokens, samples in packs:
                assert rank.add(tokens, samples) == max(30, tokens)
        rows = torch.cat([torch.tensor([rank._mine]) for rank in ranks])
        found = ranks[0].figures(lambda row, rows=rows: rows)
        assert found is not None
        before = found
    every = [pack for leg in legs for packs in leg for pack in packs]
    assert before["packs"] == len(every) and before["samples"] == sum(samples for _, samples in every)
    assert before["tokens"] == sum(tokens for tokens, _ in every)
    assert before["slots"] == sum(max(30, tokens) for tokens, _ in every)
    assert before["over_long_packs"] == sum(tokens > 30 for tokens, _ in every)
    assert before["longest_pack"] == max([tokens for tokens, _ in every], default=0)


def test_a_checkpoint_that_does_not_know_makes_no_figures_up(tmp_path: Path) -> None:
    assert read_found(None) == ({}, None) and read_found(str(tmp_path)) == (None, None)
    held = Consumed(30).figures(lambda row: row)
    for version, known in ((1, ({**held, "packs": 0}, 3)), (2, (None, None))):
        (tmp_path / FOUND).write_text(json.dumps({**found_of(held, 3), "version": version}))
        counts, proof = read_found(str(tmp_path))
        assert proof == known[1] and (counts is None) == (known[0] is None)
        assert counts is None or counts.items() <= known[0].items()
    counted = Consumed(30)
    counted.begin(None)
    counted.add(10, 1)
    assert counted.figures(lambda row: row) is None and counted.samples == 1


@pytest.mark.parametrize(
    "told",
    [
        [],
        {"consumed": {}},
        {"version": 1, "consumed": {"packs": -1}, "proof": None},
        {"version": 1, "proof": 1},
    ],
)
def test_an_edited_file_is_refused_in_one_line(tmp_path: Path, told: object) -> None:
    (tmp_path / FOUND).write_text(json.dumps(told))
    with pytest.raises(PacktrainError):
        read_found(str(tmp_path))
