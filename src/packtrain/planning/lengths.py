"""Lengths: how many tokens each sample of a source takes, with further costs and a status.

One value for every input form: a list, a numpy array of any integer type, a memory map. Tokens and
costs are stored as int32 when every value is below 2**31, else int64, so the digest depends on the
values alone. Arrays that the caller may still change are copied (4 bytes a sample); read-only arrays
and memory maps of the stored type are used as they are and never loaded whole.

A sample with 0 tokens and status ok becomes status empty: a zero-length sample never reaches a pack.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import extend
from ..errors import LengthError, counted
from ..files import BLOCK, canonical_json

STATUS_OK, STATUS_EMPTY, STATUS_FAILED, STATUS_BEYOND = 0, 1, 2, 3

#: Ledger reason of a status for which `reasons` names no finer one.
STATUS_NAMES = ("ok", "empty", "failed", "beyond_model")

_MOST_TOKENS = 3_037_000_499  # of one sample: the largest whose square is below 2**63
_CHUNK = 1 << 24  # samples converted at a time, so that a memory map is never loaded whole
_SCHEMA = "packtrain.lengths/1"


class Lengths:
    """Lengths and costs of the samples 0..n-1 of a source. Immutable.

    Args:
        tokens: int[n] >= 0, tokens of each encoded sample.
        costs: further costs by name (`images`, `patches`, …), each int[n] >= 0.
        status: uint8[n]: 0 ok, 1 empty, 2 failed, 3 beyond the model; None = all ok.
        reasons: sample id -> ledger reason, for samples whose status is not ok.

    Raises:
        LengthError: a value is negative, NaN, not an integer or too large, or a shape differs.

    >>> L = Lengths([3, 0, 5], costs={"images": [1, 0, 2]})
    >>> len(L), L.tokens.dtype.name, L.status.tolist()
    (3, 'int32', [0, 1, 0])
    """

    __slots__ = ("_digest", "costs", "max_tokens", "media", "reasons", "status", "tokens")

    tokens: NDArray[Any]
    costs: dict[str, NDArray[Any]]
    status: NDArray[np.uint8]
    reasons: dict[int, str]
    max_tokens: int
    #: Digest of the names, sizes and headers of the media they were measured from; None: it is not known.
    media: str | None

    def __init__(
        self,
        tokens: Any,
        costs: Mapping[str, Any] | None = None,
        status: Any = None,
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        self._digest: str | None = None
        self.media = None
        self.tokens, self.max_tokens = canonical("tokens", tokens)
        if self.max_tokens > _MOST_TOKENS:
            raise LengthError(
                f"tokens holds {self.max_tokens}, limit is {_MOST_TOKENS}: its square would not be exact"
            )
        n = len(self.tokens)
        for field, given in (("costs", costs), ("reasons", reasons)):
            if given is not None and not isinstance(given, Mapping):
                raise LengthError(
                    f"{field} is {type(given).__name__}, expected a mapping", hint="name -> values"
                )
        self.costs = {}
        for name in sorted(costs or {}):
            _check_cost_name(name)
            self.costs[name], _ = canonical(name, (costs or {})[name], n)
        self.status = _statuses(status, self.tokens)
        self.reasons = _checked_reasons(reasons or {}, self.status)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        extra = f", costs={list(self.costs)}" if self.costs else ""
        return f"Lengths(n={len(self)}, max={self.max_tokens}{extra}, digest={self.digest[:7]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the values; equal for equal values whatever the input's type or form."""
        if self._digest is None:
            header = {
                "schema": _SCHEMA,
                "n": len(self),
                "tokens": self.tokens.dtype.str,
                "costs": {name: array.dtype.str for name, array in self.costs.items()},
            }
            digest = hashlib.sha256(canonical_json(header))
            for array in (self.tokens, *self.costs.values(), self.status):
                for block in block_digests(array):
                    digest.update(block)
            digest.update(canonical_json([[i, self.reasons[i]] for i in sorted(self.reasons)]))
            self._digest = digest.hexdigest()
        return self._digest

    def array_digests(self) -> dict[str, list[str]]:
        """Digests of the 64 MiB blocks of each stored array, by file stem."""
        arrays = {"tokens": self.tokens, **self.costs, "status": self.status}
        return {name: [d.hex() for d in block_digests(array)] for name, array in arrays.items()}

    def reason(self, index: int) -> str:
        """The ledger's word for why sample `index` cannot be packed ("ok" when it can)."""
        return self.reasons.get(index, STATUS_NAMES[int(self.status[index])])

    def usable(self) -> NDArray[Any]:
        """Tokens of the samples that can be packed."""
        return np.asarray(self.tokens)[np.asarray(self.status) == STATUS_OK]  # type: ignore[no-any-return]

    def unusable(self) -> dict[str, int]:
        """How many samples cannot be packed, by reason."""
        left = np.flatnonzero(np.asarray(self.status) != STATUS_OK).tolist()
        return dict(sorted(Counter(map(self.reason, left)).items()))

    def save(self, folder: str | Path, **fields: Any) -> None:
        """Write the lengths folder; see `packtrain.store.lengths.save` for the further fields."""
        extend.lookup("store", "lengths").save(self, folder, **fields)

    @classmethod
    def load(cls, folder: str | Path) -> Lengths:
        """Open a lengths folder, memory-mapped."""
        return extend.lookup("store", "lengths").load(folder)  # type: ignore[no-any-return]


def block_digests(array: NDArray[Any]) -> Iterator[bytes]:
    """SHA-256 of each 64 MiB block of `array`'s little-endian bytes (none for an empty array).

    The unit in which plans and lengths are vouched for: it does not depend on the machine, and can be checked
    block by block, in any order, against a memory map.
    """
    little = array.dtype.newbyteorder("<")
    rows = BLOCK // array.dtype.itemsize
    for start in range(0, len(array), rows):
        block = np.ascontiguousarray(array[start : start + rows]).astype(little, copy=False)
        yield hashlib.sha256(block.data.cast("B")).digest()


def as_lengths(lengths: Any) -> Lengths:
    """A `Lengths`, made of an array of tokens where it is not one yet."""
    return lengths if isinstance(lengths, Lengths) else Lengths(lengths)


def part_of_lengths(
    tokens: NDArray[Any], costs: Mapping[str, NDArray[Any]], status: NDArray[np.uint8]
) -> Lengths:
    """`Lengths` of arrays that were cut from others or joined: no value is looked at a second time.

    Args:
        tokens, costs, status: as a `Lengths` holds them; reasons are not taken along.
    """
    out = Lengths.__new__(Lengths)
    out._digest, out.media, out.reasons = None, None, {}
    out.tokens, out.max_tokens = _stored_again("tokens", tokens)
    out.costs = {name: _stored_again(name, costs[name])[0] for name in costs}
    status.flags.writeable = False
    out.status = status
    return out


def _stored_again(name: str, array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """`canonical` of values that were: only the type and the sum may be others."""
    high = int(array.max(initial=0))
    if array.dtype != (np.int32 if high < 1 << 31 else np.int64) or high * len(array) >= 1 << 63:
        return canonical(name, array)
    array.flags.writeable = False
    return array, high


def canonical(name: str, values: Any, n: int | None = None) -> tuple[NDArray[Any], int]:
    """`values` as a read-only int32 or int64 array, and its largest value (0 when empty)."""
    array = _as_array(name, values)
    if array.ndim != 1:
        raise LengthError(f"{name} has shape {array.shape}, expected one dimension", hint="pass int[n]")
    if n is not None and len(array) != n:
        raise LengthError(
            f"{name} has {counted(len(array), 'entries')}, tokens has {n}", hint="one entry a sample"
        )
    low, high = _range(array)
    fault = ""
    if low < 0:
        where = _first(array, lambda block: block < 0)
        fault = f"{name}[{where}] is {array[where]}, expected >= 0"
    elif high >= 1 << 63:
        fault = f"{name} holds {high}, limit is 2**63 - 1"
    elif high * len(array) >= 1 << 63 and _sum(array) >= 1 << 63:
        fault = f"{name} sums up to {_sum(array)}, limit is 2**63 - 1: sums would not be exact"
    if fault:
        raise LengthError(fault)
    dtype = np.dtype("<i4") if high < 1 << 31 else np.dtype("<i8")
    return _stored(array, dtype), high


def _sum(array: NDArray[Any]) -> int:
    """The exact sum of counts below 2**63."""
    wide = array.astype(np.int64)
    return (int((wide >> 32).sum()) << 32) + int((wide & 0xFFFFFFFF).sum())


def _as_array(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise LengthError(
            f"{name} is an array with masked entries", hint="mark failed samples by their status"
        )
    array = values if isinstance(values, np.ndarray) else _listed(name, values)
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind == "f":
        where = _first(array, lambda block: ~np.isfinite(block) | (block != np.trunc(block)))
        if where is not None:
            raise LengthError(
                f"{name}[{where}] is {array[where]}, expected an integer", hint="lengths are token counts"
            )
        if array.size and max(abs(float(array.max())), abs(float(array.min()))) >= 2.0**53:
            raise LengthError(f"{name} holds floats above 2**53, which are not exact", hint="pass int64")
        return array.astype(np.int64)
    raise LengthError(
        f"{name} has type {array.dtype}, expected integers",
        hint="None, strings and booleans are not lengths; mark a failed sample by its status",
    )


def _listed(name: str, values: Any) -> NDArray[Any]:
    """A list, or anything that gives numbers one by one or as an array."""
    if not isinstance(values, Iterable) or isinstance(values, Mapping | Set | str | bytes | bytearray):
        raise LengthError(
            f"{name} is {type(values).__name__}, expected an array or list of integers",
            hint="place i of the array is the length of sample i; a mapping or set has no such order",
        )
    try:
        array = np.asarray(values if hasattr(values, "__array__") else list(values))
    except (ValueError, OverflowError) as error:
        raise LengthError(f"{name} is not an array of integers: {error}") from None
    # an empty list has no type of its own
    empty = array.size == 0 and array.ndim == 1 and array.dtype.kind == "f"
    return array.astype(np.int32) if empty else array


def _range(array: NDArray[Any]) -> tuple[int, int]:
    """Smallest and largest value, read in chunks."""
    low, high = 0, 0
    for start in range(0, len(array), _CHUNK):
        block = array[start : start + _CHUNK]
        low, high = min(low, int(block.min())), max(high, int(block.max()))
    return low, high


def _stored(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    same = array.dtype == dtype and array.dtype.isnative and array.flags.c_contiguous
    if same and (not array.flags.writeable or isinstance(array, np.memmap)):
        out = array.view(np.ndarray) if not isinstance(array, np.memmap) else array.view()
    else:
        out = np.empty(len(array), dtype=dtype)
        for start in range(0, len(array), _CHUNK):
            out[start : start + _CHUNK] = array[start : start + _CHUNK]
    out.flags.writeable = False
    return out


def _first(array: NDArray[Any], test: Any) -> int | None:
    """Index of the first entry that `test` holds for, or None."""
    for start in range(0, len(array), _CHUNK):
        hit = np.flatnonzero(test(array[start : start + _CHUNK]))
        if len(hit):
            return start + int(hit[0])
    return None


def _statuses(status: Any, tokens: NDArray[Any]) -> NDArray[np.uint8]:
    n = len(tokens)
    if status is None:
        out = np.zeros(n, dtype=np.uint8)
        borrowed = False
    else:
        checked, high = canonical("status", status, n)
        if high > STATUS_BEYOND:
            where = int(np.flatnonzero(checked > STATUS_BEYOND)[0])
            raise LengthError(
                f"status[{where}] is {checked[where]}, known: 0 ok, 1 empty, 2 failed, 3 beyond the model"
            )
        borrowed = isinstance(status, np.memmap) and status.dtype == np.uint8
        out = status.view() if borrowed else checked.astype(np.uint8)
    for start in range(0, n, _CHUNK):
        empty = np.flatnonzero(
            (tokens[start : start + _CHUNK] == 0) & (out[start : start + _CHUNK] == STATUS_OK)
        )
        if len(empty):
            if borrowed:
                out, borrowed = np.array(out), False
            out[empty + start] = STATUS_EMPTY
    out.flags.writeable = False
    return out


def _checked_reasons(reasons: Mapping[int, str], status: NDArray[np.uint8]) -> dict[int, str]:
    out: dict[int, str] = {}
    for key in sorted(reasons):
        index, reason = int(key), reasons[key]
        if not 0 <= index < len(status):
            raise LengthError(f"reasons names sample {index}, there are {len(status)}")
        fits = isinstance(reason, str) and bool(reason)
        if not fits or status[index] == STATUS_OK:
            why = " but its status is ok" if fits else ", expected a reason name"
            hint = "set its status to 2 (failed)" if fits else None
            raise LengthError(f"reasons[{index}] is {reason!r}{why}", hint=hint)
        out[index] = reason
    return out


def _check_cost_name(name: object) -> None:
    named = isinstance(name, str) and name.isidentifier()
    if not named or name in ("tokens", "status", "samples", "sq"):
        hint = "choose another, for example 'images'" if named else "names become file names"
        raise LengthError(f"cost name {name!r} is {'taken' if named else 'not an identifier'}", hint=hint)
