"""Rows that are encoded already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import SampleError, SourceError, UnknownNameError
from packtrain.extend import Source, Template
from packtrain.sources import open_source
from packtrain.sources._memory import as_source
from packtrain.sources.encoded import EncodedRows, EncodedTemplate, read_row
from packtrain.sources.keys import ENCODED, ENCODED_TRAINING, ENCODED_TYPES, HARMLESS, LOSS, TRAINING

MASKS = ENCODED["mask"]
Write = Callable[..., Path]
ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 1], "input_length": 4},
    {"input_ids": [9], "labels": [9], "position_ids": [[0], [0], [0]]},
]


def test_samples(write: Write) -> None:
    source = open_source(write("a.jsonl", ROWS), kind="encoded")
    assert isinstance(source, Source) and len(source) == 3 and source.where(1) == "a.jsonl:2"
    template = EncodedTemplate()
    assert isinstance(template, Template)
    expected = [[-100, 6, 7], [-100, -100, 7, 8], [-100]]
    for index, labels in enumerate(expected):
        sample = source[index]
        encoded = template.encode(sample)
        assert encoded["labels"].tolist() == labels
        assert encoded["input_ids"].tolist() == ROWS[index]["input_ids"]
        assert all(array.dtype == np.int64 for array in encoded.values())
        measured = template.measure(sample)
        assert measured == len(encoded["input_ids"])
        assert measured.costs["supervised"] == sum(label != -100 for label in labels)
        encoded["labels"][:] = 0
        assert template.encode(sample)["labels"].tolist() == labels  # fresh arrays
    assert template.encode(source[0])["position_ids"].tolist() == [0, 1, 2]
    assert template.encode(source[2])["position_ids"].shape == (3, 1)


def test_tables_hold_them_too(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = [{"ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"ids": [4], "labels": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", kind="encoded", columns={"input_ids": "ids"}, train_on="all")
    assert source[0]["labels"].tolist() == [-100, 2, 3] and source[1]["labels"].tolist() == [-100]
    assert source.fingerprint != open_source(tmp_path / "a.parquet", kind="encoded").fingerprint


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "input_ids is NoneType"),
        ({"input_ids": "abc"}, "not a list"),
        ({"input_ids": [1.5]}, "no list of whole numbers"),
        ({"input_ids": [1, None]}, "no list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "different lengths|whole numbers"),
        ({"input_ids": [[1, 2]]}, "no list of whole numbers"),
        ({"input_ids": [-1, 2]}, "holds -1"),
        ({"input_ids": [1, 2]}, "no labels and no loss mask"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 entry for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [1, -5]}, "holds -5"),
        ({"input_ids": [1, 0], "labels": [1, -100], "attention_mask": [1, 0]}, "padded"),
        ({"input_ids": [1, 2], "labels": [1, 2], "length": 3}, "length is 3"),
        ({"input_ids": [1, 2], "labels": [1, 2], "position_ids": [[0, 1]]}, "position_ids has shape"),
    ],
)
def test_bad_rows(write: Write, row: dict[str, Any], said: str) -> None:
    source = open_source(write("a.jsonl", [row]), kind="encoded")
    with pytest.raises(SampleError, match=rf"a.jsonl:1: .*({said})") as error:
        source[0]
    assert error.value.reason == "malformed_record"


def test_empty_and_all() -> None:
    with pytest.raises(SampleError) as error:
        read_row({"input_ids": [], "labels": []})
    assert error.value.reason == "empty"
    assert read_row({"input_ids": [1, 2]}, "all")["labels"].tolist() == [-100, 2]


def test_bad_options(write: Write) -> None:
    path = write("a.jsonl", ROWS)
    for options in ({"train_on": "everything"}, {"columns": {"ids": "x"}}):
        with pytest.raises(UnknownNameError):
            open_source(path, kind="encoded", **options)  # type: ignore[arg-type]
    with pytest.raises(SourceError):
        open_source(path, kind="encoded", rows="encoded")


# ------------------------------------------------------------------------------------------ columns
ROW: dict[str, Any] = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


def opened(*rows: dict[str, Any], **options: Any) -> EncodedRows:
    return EncodedRows(as_source(list(rows)), "labels", {}, **options)


def reason(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(SampleError) as error:
        opened(row, **options)[0]
    return error.value.reason


@settings(max_examples=80, deadline=None)
@given(st.text("bcdfghjklmnpqrstvwxz_", min_size=3, max_size=9), st.integers() | st.text("cxyz", min_size=2))
def test_an_unknown_column_is_counted_by_name(name: str, value: Any) -> None:
    source = opened({**ROW, name: value})
    assert source[0]["labels"].tolist() == ROW["labels"]
    assert source.account.drain() == ({} if name in HARMLESS else {name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, [0.5, 1.0]) for name in ENCODED_TRAINING),
        *((name, [0, 1, 1]) for name in ENCODED_TYPES),
        *((name, 1) for name in sorted({*TRAINING, *LOSS} - {"labels", "input_ids", "label", *MASKS})
          if name not in ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")),
        ("images", ["a.png"]), ("video", "a.mp4"), ("else", "x/b.wav"), ("token_mask", [0, 1, 1]),
    ],
)  # fmt: skip
def test_a_column_that_changes_training_is_never_lost(name: str, value: Any) -> None:
    assert reason({**ROW, name: value}) == "unread_key"
    source = opened({**ROW, name: value}, ignore_keys=[name])
    assert source[0]["input_ids"].tolist() == ROW["input_ids"]
    assert source.account.drain() == {} and source.fingerprint != opened({**ROW, name: value}).fingerprint


def test_columns_that_the_tokenizer_leaves_behind_and_texts() -> None:
    left = {"special_tokens_mask": [1, 0, 0], "offset_mapping": [[0, 1], [1, 2], [2, 3]], "num_tokens": 3}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = {"images": [], "messages": turns, "text": "a b"}
    source = opened({**ROW, **left, "token_type_ids": [0, 0, 0], **said})
    assert source[0]["labels"].tolist() == ROW["labels"]
    assert source.account.drain() == {"messages": 1, "text": 1}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=3, max_size=9), st.integers(0, 6))
def test_labels_that_are_moved_by_one_are_refused(ids: list[int], first: int) -> None:
    """They would train each token on the one after the next; in place they are what they are."""
    first = min(first, len(ids) - 3)
    moved = [-100] * first + ids[first + 1 :] + [-100]
    if len({*ids[first:]}) > 1:
        with pytest.raises(SampleError, match="moved by one"):
            read_row({"input_ids": ids, "labels": moved})
    placed = [-100] * first + ids[first:]
    assert read_row({"input_ids": ids, "labels": placed})["labels"].tolist() == [-100, *placed[1:]]


def test_labels_and_masks_that_disagree_are_refused() -> None:
    assert opened({**ROW, "loss_mask": [0, 1, 1]})[0]["labels"].tolist() == ROW["labels"]
    assert reason({**ROW, "completion_mask": [0, 0, 1]}) == "malformed_record"
    masks = {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [0, 0, 1]}
    assert reason(masks) == "malformed_record"
    assert opened(masks, ignore_keys=["completion_mask"])[0]["labels"].tolist() == [-100, -100, 7]
