"""One id range: statuses, reasons, costs, media identities, and faults that must not be swallowed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import InputError, LengthError, SampleError, SourceError
from packtrain.extend import Measured
from packtrain.measuring.run import BATCH, Part, measure_range
from packtrain.media.location import media_refs


class Rows:
    """A source over a list; an exception in the list is raised."""

    def __init__(self, rows: list[Any], media_root: str | None = None) -> None:
        self.rows = rows
        self.media_root = media_root
        self.fingerprint = "0"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if isinstance(self.rows[index], Exception):
            raise self.rows[index]
        return {"row": self.rows[index]} if not isinstance(self.rows[index], dict) else self.rows[index]

    def where(self, index: int) -> str:
        return f"rows.jsonl:{index + 1}"


class Counts:
    """A third-party template without measure_batch: the length is the row."""

    model_limit: int | None = None

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": [0] * sample["row"]}

    def measure(self, sample: Mapping[str, Any]) -> Any:
        value = sample.get("row", 7)
        if isinstance(value, str):
            raise SampleError(value, f"bad\nrow {value}")
        if value == 13:
            raise KeyError("thirteen")
        return Measured(value, images=value % 2) if isinstance(value, int) and value > 2 else value

    def config(self) -> dict[str, Any]:
        return {}


def test_statuses_reasons_and_details() -> None:
    template = Counts()
    template.model_limit = 50
    source = Rows([5, "empty", "missing_media", 0, SampleError("malformed_record", "half"), 60, 2, 7])
    out = measure_range((source, template), (0, 8))
    assert out.tokens.tolist() == [5, 0, 0, 0, 0, 60, 2, 7] and out.tokens.dtype == np.int64
    assert out.status.tolist() == [0, 1, 2, 1, 2, 3, 0, 0] and out.status.dtype == np.uint8
    assert out.reasons == {
        1: "empty",
        2: "missing_media",
        3: "empty",
        4: "malformed_record",
        5: "beyond_model",
    }
    assert out.costs["images"].tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert out.details[2] == "rows.jsonl:3: bad row missing_media"
    assert out.details[5] == "rows.jsonl:6: 60 tokens, the model takes 50"
    assert all("\n" not in line for line in out.details.values()) and set(out.details) == set(out.reasons)


def test_ranges_join_to_the_whole() -> None:
    rows = [i % 12 + 1 for i in range(3 * BATCH + 17)]
    whole = measure_range((Rows(rows), Counts()), (0, len(rows)))
    cuts = [0, 5, BATCH, 2 * BATCH + 1, len(rows)]
    parts = [measure_range((Rows(rows), Counts()), pair) for pair in pairwise(cuts)]
    assert np.concatenate([p.tokens for p in parts]).tolist() == whole.tokens.tolist() == rows
    assert np.concatenate([p.costs["images"] for p in parts]).tolist() == whole.costs["images"].tolist()
    empty = measure_range((Rows(rows), Counts()), (4, 4))
    assert isinstance(empty, Part) and len(empty.tokens) == 0
    assert pickle.loads(pickle.dumps(whole)).tokens.tolist() == rows


def test_ids_are_global() -> None:
    out = measure_range((Rows([1, 2, "empty", 4]), Counts()), (2, 4))
    assert (out.start, out.stop) == (2, 4) and out.reasons == {2: "empty"} and out.tokens.tolist() == [0, 4]


def test_unknown_exceptions_stop_with_the_record() -> None:
    with pytest.raises(InputError, match=r"rows.jsonl:3: Counts failed: KeyError: 'thirteen'") as caught:
        measure_range((Rows([1, 2, 13, 4]), Counts()), (0, 4))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(InputError, match=r"rows.jsonl:2: the source failed: OSError: disk"):
        measure_range((Rows([1, OSError("disk")]), Counts()), (0, 2))
    with pytest.raises(SourceError, match="gone"):
        measure_range((Rows([1, SourceError("gone")]), Counts()), (0, 2))


def test_batch_faults_are_named() -> None:
    class Batch(Counts):
        def measure_batch(self, samples: list[Any]) -> list[Any]:
            if len(samples) > 3:
                raise RuntimeError("too many")
            return [1] * (len(samples) - 1)

    with pytest.raises(InputError, match=r"rows.jsonl:1 … rows.jsonl:4: Batch failed on the batch"):
        measure_range((Rows([1, 2, 3, 4]), Batch()), (0, 4))
    with pytest.raises(LengthError, match="1 answer for 2 samples"):
        measure_range((Rows([1, 2]), Batch()), (0, 2))


@pytest.mark.parametrize("value", [-1, 2.5, True, None])
def test_a_length_must_be_one(value: Any) -> None:
    with pytest.raises(LengthError, match=r"rows.jsonl:2"):
        measure_range((Rows([1, value]), Counts()), (0, 2))
    assert measure_range((Rows([1, np.int32(2)]), Counts()), (0, 2)).tokens.tolist() == [1, 2]


def test_media_identities(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"A" * 10)
    (tmp_path / "b.png").write_bytes(b"B" * 9000)

    def row(*refs: Any) -> dict[str, Any]:
        parts = [{"type": "image", "image": ref} for ref in refs]
        return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}

    a, b, lost = (str(tmp_path / name) for name in ("a.png", "b.png", "lost.png"))
    rows = [row(b, a), row(a), row(lost, "data:image/png;base64,AAAA", b"bytes"), {"messages": "text"}]
    assert media_refs(rows[2]) == [lost, "data:image/png;base64,AAAA", b"bytes"]
    out = measure_range((Rows(rows, str(tmp_path)), Counts()), (0, 4))
    assert [name for name, _, _ in out.media] == ["a.png", "b.png", "lost.png"]
    assert out.media[2][1:] == (-1, "")
    assert out.media[0] == ("a.png", 10, hashlib.sha256(b"A" * 10).hexdigest())
    (tmp_path / "a.png").write_bytes(b"C" * 10)
    assert measure_range((Rows(rows, str(tmp_path)), Counts()), (0, 4)).media != out.media
