"""Rows that are encoded already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import SampleError, SourceError, UnknownNameError
from packtrain.extend import Source, Template
from packtrain.sources import open_source
from packtrain.sources.encoded import EncodedTemplate, read_row

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
        ({"input_ids": [1, 2], "labels": [1]}, "1 entries for 2 tokens"),
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
