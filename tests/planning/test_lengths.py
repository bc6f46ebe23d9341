"""Lengths: every integer input form gives one value; what is no length is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import LengthError

VALUES = [3, 0, 120, 7, 7, 127]


@pytest.mark.parametrize(
    "dtype", ["i1", "u1", "i2", "<u2", ">i4", "<i4", "u4", "<i8", ">u8", "f4", "f8"], ids=lambda d: str(d)
)
def test_digest_does_not_depend_on_the_type(dtype: str) -> None:
    expected = pt.Lengths(VALUES)
    made = pt.Lengths(np.array(VALUES, dtype=dtype))
    assert made.digest == expected.digest
    assert made.tokens.dtype == np.int32 and made.tokens.tolist() == VALUES
    assert pt.plan(made, 128).checksum == pt.plan(expected, 128).checksum


def test_memory_map_list_tuple_iterator_and_strides(tmp_path: Path) -> None:
    expected = pt.Lengths(VALUES)
    for dtype in (np.int16, np.int32, np.int64):
        path = tmp_path / f"{np.dtype(dtype).name}.npy"
        np.save(path, np.array(VALUES, dtype=dtype))
        assert pt.Lengths(np.load(path, mmap_mode="r")) == expected
    assert pt.Lengths(tuple(VALUES)) == expected
    assert pt.Lengths(iter(VALUES)) == expected
    assert pt.Lengths(np.repeat(VALUES, 3)[::3]) == expected


def test_a_memory_map_is_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1, 100, dtype=np.int32))
    mapped = np.load(tmp_path / "t.npy", mmap_mode="r")
    assert np.shares_memory(pt.Lengths(mapped).tokens, mapped)


def test_wide_values_are_kept() -> None:
    made = pt.Lengths([1, 1 << 31])
    assert made.tokens.dtype == np.int64 and made.max_tokens == 1 << 31
    assert pt.Lengths([1, (1 << 31) - 1]).tokens.dtype == np.int32


def test_the_callers_array_is_neither_changed_nor_watched() -> None:
    mine = np.array([5, 0, 6], dtype=np.int32)
    made = pt.Lengths(mine)
    mine[0] = 99
    assert made.tokens.tolist() == [5, 0, 6] and mine.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 1


def test_digest_covers_costs_status_and_reasons() -> None:
    variants = [
        pt.Lengths([1, 2]),
        pt.Lengths([1, 3]),
        pt.Lengths([1, 2], costs={"images": [0, 0]}),
        pt.Lengths([1, 2], costs={"images": [0, 1]}),
        pt.Lengths([1, 2], costs={"patches": [0, 1]}),
        pt.Lengths([1, 2], status=[0, 2]),
        pt.Lengths([1, 2], status=[0, 3]),
        pt.Lengths([1, 2], status=[0, 2], reasons={1: "missing_media"}),
    ]
    assert len({made.digest for made in variants}) == len(variants)


def test_golden_digest() -> None:
    made = pt.Lengths([3, 0, 5], costs={"images": [1, 0, 2]}, status=[0, 0, 2], reasons={2: "missing_media"})
    assert made.digest == "b920a9b283a4374163f7108eb368ae3d05ea4bc37996453cc8bede94cc350b10"


def test_empty_samples_get_their_status() -> None:
    made = pt.Lengths([0, 4, 0], status=[0, 0, 2])
    assert made.status.tolist() == [1, 0, 2]
    assert [made.reason(i) for i in range(3)] == ["empty", "ok", "failed"]
    assert len(pt.Lengths([])) == 0


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2], r"tokens\[1\] is -2"),
        ([1.0, float("nan")], r"tokens\[1\] is nan"),
        ([1.5], r"tokens\[0\] is 1.5"),
        ([float("inf")], r"tokens\[0\] is inf"),
        ([True, False], "type bool"),
        (["12"], "type <U2"),
        ([1, None], "type object"),
        ([[1, 2]], "shape"),
        ([[1], [1, 2]], "not an array"),
        (7, "is int"),
        ({}, "is dict, expected an array"),
        ({0: 5, 1: 7}, "is dict, expected an array"),
        ({5, 7}, "is set, expected an array"),
        (frozenset([5]), "is frozenset"),
        ("12", "is str"),
        (b"12", "is bytes"),
        ([1 << 63], "2\\*\\*63"),
        (np.array([2.0**60]), "2\\*\\*53"),
    ],
)
def test_what_is_no_length_is_refused(tokens: object, message: str) -> None:
    with pytest.raises(LengthError, match=message):
        pt.Lengths(tokens)


def test_costs_status_and_reasons_are_checked() -> None:
    with pytest.raises(LengthError, match="images has 1 entry, tokens has 2"):
        pt.Lengths([1, 2], costs={"images": [1]})
    with pytest.raises(LengthError, match=r"images\[0\] is -1"):
        pt.Lengths([1], costs={"images": [-1]})
    with pytest.raises(LengthError, match="not an identifier"):
        pt.Lengths([1], costs={"../x": [1]})
    with pytest.raises(LengthError, match="is taken"):
        pt.Lengths([1], costs={"status": [1]})
    with pytest.raises(LengthError, match=r"status\[1\] is 4"):
        pt.Lengths([1, 1], status=[0, 4])
    with pytest.raises(LengthError, match="its status is ok"):
        pt.Lengths([1, 1], reasons={0: "missing_media"})
    with pytest.raises(LengthError, match="names sample 5"):
        pt.Lengths([1, 1], status=[2, 2], reasons={5: "missing_media"})


def test_sums_are_exact_or_refused() -> None:
    most = 3_037_000_499
    held = pt.Lengths([most, 1], {"bytes": [2**62, 2**62 - 1]})
    plan = pt.plan(held, pack_length=8, packer="bfd")
    assert plan.pack_tokens.tolist() == [most, 1]
    with pytest.raises(LengthError, match="its square would not be exact"):
        pt.Lengths([most + 1])
    for values in ([2**62, 2**62], [2**62] * 1000, [2**63 - 1, 1]):
        with pytest.raises(LengthError, match=rf"bytes sums up to {sum(values)}, limit is 2\*\*63 - 1"):
            pt.Lengths([1] * len(values), {"bytes": values})
