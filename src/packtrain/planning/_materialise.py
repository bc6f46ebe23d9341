"""From a packer's answer to the canonical CSR: ids ascend inside a pack, packs ascend by smallest id.

Two materialisers serve all packers. Patterns: "deal" gives every pack its places in the length classes,
"sweep" walks the samples once, hands each the next place of its class and opens packs as they occur, so
nothing is sorted. `bin_of`: bins are renumbered by first occurrence, then one sweep. Both have a compiled
and a plain (numpy) form with equal bytes.

A sample's class key: 0 = left out, 1..top = class of samples that are packed together, > top = a pack of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import Patterns
from ..packers._jit import use_jit

I64 = NDArray[np.int64]

#: Packs dealt from a group at a time, on average: small = packs hold neighbouring ids.
_BURST = 2
_MAX_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Csr:
    """Packs in canonical order: pack p holds indices[offsets[p]:offsets[p+1]]."""

    offsets: I64
    indices: NDArray[Any]


def index_dtype(n: int) -> np.dtype[Any]:
    """Stored type of sample ids: uint32 when n < 2**32, else int64."""
    return np.dtype("<u4") if n < 1 << 32 else np.dtype("<i8")


def from_patterns(
    keys: NDArray[Any], top: int, patterns: Patterns, class_of_size: Any, n_single: int, seed: int | None
) -> Csr:
    """Materialise patterns.

    Args:
        keys: int[n], class key of each sample.
        top: largest key of a class.
        patterns: the packer's answer; its sizes are turned into keys by `class_of_size`.
        class_of_size: function int64[K] sizes -> int64[K] keys.
        n_single: samples with a key above `top`.
        seed: shuffles the places among the samples of a class; None = in id order.
    """
    item_key = class_of_size(patterns.size)
    per_pack = _segment_sums(patterns.number, patterns.offsets)
    n_packed = int((per_pack * patterns.repeat).sum())
    rounds = min(_MAX_ROUNDS, max(1, int(patterns.repeat.sum()) // (_BURST * max(1, len(patterns.repeat)))))
    packed_by_key = counts_by_key(item_key, patterns, top, use_jit(len(keys)))
    starts = np.zeros(top + 2, dtype=np.int64)
    np.cumsum(packed_by_key, out=starts[1:])
    if use_jit(len(keys)):
        from . import _blocks

        work = starts.astype(np.int32 if len(keys) < (1 << 31) else np.int64)
        slot, sizes = _blocks.deal(patterns, item_key, work, n_packed, rounds, len(keys))
        if seed is not None:
            _blocks.shuffle_classes(slot, starts, np.uint64(seed64(seed)))
        return _finish(*_blocks.sweep(keys, top, work, slot, sizes, n_single, index_dtype(len(keys))))
    slot = _deal(patterns, item_key, rounds)
    if seed is not None:
        _shuffle_classes(slot, starts, seed64(seed))
    bin_of = np.full(len(keys), -1, dtype=np.int64)
    packed = np.flatnonzero((keys > 0) & (keys <= top))
    bin_of[packed[np.argsort(keys[packed], kind="stable")]] = slot
    alone = np.flatnonzero(keys > top)
    bin_of[alone] = int(patterns.repeat.sum()) + np.arange(len(alone))
    return from_bins(bin_of)


def from_bins(bin_of: I64) -> Csr:
    """Materialise a bin for each sample (-1 = left out). Bin numbers need not be dense or in order."""
    n = len(bin_of)
    if use_jit(n):
        from . import _blocks

        n_bins = int(bin_of.max()) + 1 if n else 0
        if n_bins <= 2 * n:
            return _finish(*_blocks.by_bin(bin_of, n_bins, np.empty(n, index_dtype(n))))
    ids = np.flatnonzero(bin_of >= 0)
    bins = bin_of[ids]
    order = np.argsort(bins, kind="stable")
    grouped = bins[order]
    starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]])) if len(ids) else ids
    sizes = np.diff(np.append(starts, len(ids)))
    # Inside a bin the stable sort keeps ids ascending, so a bin's first id is its smallest.
    by_first = np.argsort(order[starts], kind="stable")
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(sizes[by_first], out=offsets[1:])
    take = np.repeat(starts[by_first] - offsets[:-1], sizes[by_first]) + np.arange(len(ids))
    return Csr(offsets, ids[order[take]].astype(index_dtype(n)))


def _finish(offsets: I64, indices: NDArray[Any]) -> Csr:
    return Csr(offsets, indices)


def counts_by_key(item_key: I64, patterns: Patterns, top: int, compiled: bool) -> I64:
    """Samples that the patterns pack, by class key 0..top (int64[top + 1])."""
    if compiled:
        from ..packers._kernels import tally

        held: I64 = tally(item_key, patterns.number, patterns.repeat, patterns.offsets, top + 1)
        return held
    out = np.zeros(top + 1, dtype=np.int64)
    np.add.at(out, item_key, patterns.number * np.repeat(patterns.repeat, np.diff(patterns.offsets)))
    return out


def _segment_sums(values: I64, offsets: I64) -> I64:
    """Sum of each segment; no segment is empty."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat(values, offsets[:-1])


# --------------------------------------------------------------------------------------------
# plain deal: which pack owns which place of a class
# --------------------------------------------------------------------------------------------
def _deal(patterns: Patterns, item_key: I64, rounds: int) -> I64:
    """Raw pack number of every place, places ordered by class key.

    Group g with m packs has dealt min(m, floor((t*m + o) / rounds)) of them after round t < rounds, all
    after the last round; o = hash(g) mod rounds. Within a round groups take turns in their order.
    """
    repeat = patterns.repeat
    n_groups = len(repeat)
    group = np.repeat(np.arange(n_groups, dtype=np.int64), repeat)
    turn = np.arange(len(group), dtype=np.int64) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    offset = ((np.arange(n_groups, dtype=np.int64) * 2654435761) & 0xFFFFFFFF) % rounds
    wanted = (turn + 1) * rounds - offset[group]
    round_of = np.minimum(-(-wanted // repeat[group]), rounds)
    group = group[np.argsort(round_of, kind="stable")]  # raw pack number -> group
    items = np.diff(patterns.offsets)[group]
    first = patterns.offsets[group]
    n_items = int(items.sum())
    within = np.arange(n_items, dtype=np.int64) - np.repeat(np.cumsum(items) - items, items)
    item = np.repeat(first, items) + within
    pack = np.repeat(np.arange(len(group), dtype=np.int64), items)
    key = np.repeat(item_key[item], patterns.number[item])
    pack = np.repeat(pack, patterns.number[item])
    return pack[np.argsort(key, kind="stable")]


# --------------------------------------------------------------------------------------------
# seed: a permutation of the places inside each class
# --------------------------------------------------------------------------------------------
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """A 64-bit integer hash (the finaliser of splitmix64); the compiled kernels have its twin."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def seed64(seed: int) -> int:
    """Any non-negative seed as 64 bits."""
    out = 0
    while True:
        out = mix64(out ^ (seed & _MASK))
        seed >>= 64
        if seed == 0:
            return out


def shuffle_bins(bins: I64, types: tuple[Any, I64, I64], seed: int) -> I64:
    """Permute bins among samples of equal type; `types` = (rows, counts, ids grouped by type)."""
    _, counts, ids = types
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    slot = bins[ids]
    if use_jit(len(bins)):
        from . import _blocks

        _blocks.shuffle_block(slot, starts, np.uint64(seed64(seed)))
    else:
        _shuffle_classes(slot, starts, seed64(seed))
    out = np.empty_like(bins)
    out[ids] = slot
    return out


def _shuffle_classes(slot: I64, starts: I64, seed: int) -> None:
    """Fisher-Yates inside each class, from the back; the draw for a place depends on (seed, place)."""
    bounds = starts.tolist()
    places = slot.tolist()
    for key in range(len(bounds) - 1):
        low, high = bounds[key], bounds[key + 1]
        for i in range(high - 1, low, -1):
            j = low + mix64(seed ^ i) % (i - low + 1)
            places[i], places[j] = places[j], places[i]
    slot[:] = places
