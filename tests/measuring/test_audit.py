"""The audit catches every kind of drift and passes what is true (PB-06, PB-54)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from packtrain.errors import DriftError, InputError, SampleError
from packtrain.measuring.audit import audit, encoded_costs
from packtrain.planning.lengths import Lengths


class Numbers:
    fingerprint = "0"

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"n": self.values[index]}

    def where(self, index: int) -> str:
        return f"n.json[{index}]"


def encode(sample: Mapping[str, Any]) -> dict[str, Any]:
    n = sample["n"]
    return {"input_ids": [1] * n, "labels": [-100] + [1] * (n - 1)}


VALUES = [3 + i % 50 for i in range(500)]


def test_true_lengths_pass() -> None:
    lengths = Lengths(VALUES, {"supervised": [v - 1 for v in VALUES]})
    report = audit(Numbers(VALUES), lengths, encode, count=32, seed=1)
    assert len(report.ids) == 32 and report.ids.dtype == np.int64
    assert report.ids.tolist() == sorted(set(report.ids.tolist()))
    assert report.tokens == sum(VALUES[i] for i in report.ids) and report.failed == {}
    assert audit(Numbers(VALUES), lengths, encode, seed=1).ids.tolist() == report.ids.tolist()
    assert audit(Numbers(VALUES), lengths, encode, seed=2).ids.tolist() != report.ids.tolist()
    assert audit(Numbers(VALUES), lengths, encode, count=10_000).ids.tolist() == list(range(500))


def test_drift_is_named() -> None:
    wrong = list(VALUES)
    wrong[7] += 2
    wrong[400] -= 1
    with pytest.raises(DriftError) as caught:
        audit(Numbers(VALUES), Lengths(wrong), encode, count=500)
    text = str(caught.value)
    assert f"id 7 (n.json[7]) tokens: measured {VALUES[7] + 2}, encoded {VALUES[7]}" in text
    assert "id 400" in text and "2 of 500" in text and caught.value.exit_code == 1
    every = Lengths([v + 1 for v in VALUES])
    with pytest.raises(DriftError, match="and 27 more"):
        audit(Numbers(VALUES), every, encode)


def test_drift_of_a_further_cost() -> None:
    lengths = Lengths(VALUES, {"supervised": VALUES})
    with pytest.raises(DriftError, match="supervised: measured"):
        audit(Numbers(VALUES), lengths, encode)


def test_text_only_counting_is_caught_pb54() -> None:
    """127 text tokens and one image of 576: counted as 128 it fits a cap of 128, encoded it is 703."""

    def with_image(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": [0] * 703}

    with pytest.raises(DriftError, match="measured 128, encoded 703"):
        audit(Numbers([1]), Lengths([128]), with_image)


def test_only_usable_samples_are_encoded() -> None:
    def picky(sample: Mapping[str, Any]) -> dict[str, Any]:
        if sample["n"] == 9:
            raise SampleError("unreadable_media", "broken inside")
        assert sample["n"] > 0
        return encode(sample)

    lengths = Lengths(
        [4, 0, 0, 9, 99], status=[0, 1, 2, 0, 3], reasons={1: "empty", 2: "missing_media", 4: "beyond_model"}
    )
    report = audit(Numbers([4, 0, 0, 9, 99]), lengths, picky)
    assert report.ids.tolist() == [0, 3, 4] and report.failed == {3: "unreadable_media"}


def test_a_check_that_fails_ends_the_audit() -> None:
    """It is the caller's own: what it raises is no fault of the sample's media."""

    def check(*_: Any) -> None:
        raise SampleError("unreadable_media", "a check of the caller")

    with pytest.raises(SampleError, match="of the caller"):
        audit(Numbers([4]), Lengths([4]), encode, check=check)


def test_foreign_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="3 lengths for a source of 2"):
        audit(Numbers([1, 2]), Lengths([1, 2, 3]), encode)


def test_drift_inside_encode_names_the_record() -> None:
    def drifts(sample: Mapping[str, Any]) -> dict[str, Any]:
        raise DriftError("the processor gives 5 tokens", hint="look")

    with pytest.raises(DriftError, match=r"n.json\[0\] \(id 0\): the processor gives"):
        audit(Numbers([1]), Lengths([1]), drifts)


def test_costs_of_an_encoded_sample() -> None:
    torch = pytest.importorskip("torch")
    found = encoded_costs(
        {
            "input_ids": torch.arange(9),
            "labels": torch.tensor([-100] * 5 + [1] * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 6]]),
        }
    )
    assert found == {"tokens": 9, "supervised": 4, "images": 2, "patches": 28}
