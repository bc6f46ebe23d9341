"""Asks a packer, checks its answer, and makes the canonical CSR of it.

Ids ascend inside a pack, packs ascend by smallest id.

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

from .. import extend
from ..errors import LawError, counted
from ..extend import I64, Bins, PackProblem, Patterns
from ..packers._jit import use_jit
from ..packers._kernels import tally
from ..packers._multi import needs, types_of
from . import _blocks
from .ledger import Ledger
from .lengths import Lengths
from .long_samples import Classes
from .raw_plan import PackerId
from .spec import PlanSpec

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
    rounds = min(_MAX_ROUNDS, max(1, int(patterns.repeat.sum()) // (_BURST * max(1, len(patterns.repeat)))))
    packed_by_key = counts_by_key(item_key, patterns, top, use_jit(len(keys)))
    starts = np.zeros(top + 2, dtype=np.int64)
    np.cumsum(packed_by_key, out=starts[1:])
    if use_jit(len(keys)):
        work = starts.astype(np.int32 if len(keys) < (1 << 31) else np.int64)
        slot, sizes = _blocks.deal(patterns, item_key, work, rounds, len(keys))
        if seed is not None:
            _blocks.shuffle_classes(slot, starts, np.uint64(seed64(seed)))
        return Csr(*_blocks.sweep(keys, top, work, slot, sizes, n_single, index_dtype(len(keys))))
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
        n_bins = int(bin_of.max()) + 1 if n else 0
        if n_bins <= 2 * n:
            return Csr(*_blocks.by_bin(bin_of, n_bins, np.empty(n, index_dtype(n))))
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


def counts_by_key(item_key: I64, patterns: Patterns, top: int, compiled: bool) -> I64:
    """Samples that the patterns pack, by class key 0..top (int64[top + 1])."""
    if compiled:
        held: I64 = tally(item_key, patterns.number, patterns.repeat, patterns.offsets, top + 1)
        return held
    out = np.zeros(top + 1, dtype=np.int64)
    np.add.at(out, item_key, patterns.number * np.repeat(patterns.repeat, np.diff(patterns.offsets)))
    return out


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
    within = np.arange(int(items.sum()), dtype=np.int64) - np.repeat(np.cumsum(items) - items, items)
    item = np.repeat(patterns.offsets[group], items) + within
    pack = np.repeat(np.arange(len(group), dtype=np.int64), items)
    taken = patterns.number[item]
    return np.repeat(pack, taken)[np.argsort(np.repeat(item_key[item], taken), kind="stable")]


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


# --------------------------------------------------------------------------------------------
# Asking a packer: its answer, checked against partition and capacity, as canonical packs
# --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Packed:
    """A checked and materialised answer of a packer."""

    csr: Csr
    packer: PackerId
    ledger: Ledger


def pack_classes(classes: Classes, lengths: Lengths, spec: PlanSpec) -> Packed:
    """Ask the packer, check its answer, materialise."""
    module = extend.lookup("packers", spec.packer)
    limited = bool(spec.limits) or spec.max_samples is not None
    members = classes.members() if limited or not getattr(module, "HISTOGRAM", False) else None
    problem = PackProblem(
        costs=np.zeros(0, dtype=np.int64) if members is None else classes.costs(),
        capacity=spec.pack_length,
        sizes=classes.sizes,
        counts=classes.counts,
        limits={
            name: (lengths.costs[name][members].astype(np.int64), cap) for name, cap in spec.limits.items()
        },
        max_samples=spec.max_samples,
        seed=spec.seed,
        options=spec.packer_options,
    )
    answer = module.pack(problem)
    notes = dict(answer.notes) if isinstance(answer, Patterns | Bins) else {}
    packer = PackerId(spec.packer, int(module.VERSION), notes)
    if isinstance(answer, Patterns):
        check_patterns(answer, classes, spec)
        csr = from_patterns(
            classes.keys, classes.top, answer, classes.key_of_size, classes.singles, spec.seed
        )
        return Packed(csr, packer, classes.ledger)
    bins = np.asarray(answer.bin_of if isinstance(answer, Bins) else answer, dtype=np.int64)
    if members is None or bins.shape != members.shape:
        raise LawError(
            f"packer {spec.packer!r} answered shape {bins.shape} for {counted(len(problem.costs), 'samples')}"
        )
    if len(bins) and (int(bins.min()) < -1 or int(bins.max()) >= 1 << 62):
        raise LawError(f"packer {spec.packer!r} answered a bin outside -1..2**62")
    if spec.seed is not None and not getattr(module, "SEEDED", False):
        bins = shuffle_bins(bins, types_of(needs(problem)[0]), spec.seed)
    csr = from_bins(_full_bins(bins, members, classes))
    _check_packs(csr, classes, lengths, spec)
    left_out = members[bins < 0]
    ledger = classes.ledger.with_more(left_out, "left_out") if len(left_out) else classes.ledger
    return Packed(csr, packer, ledger)


def _full_bins(bins: I64, members: I64, classes: Classes) -> I64:
    """Bins of all samples from the bins of the members; samples that stand alone get bins of their own."""
    out = np.full(len(classes.keys), -1, dtype=np.int64)
    out[members] = bins
    alone = np.flatnonzero(classes.keys > classes.top)
    out[alone] = np.arange(len(alone)) + (int(bins.max(initial=-1)) + 1)
    return out


def check_patterns(answer: Patterns, classes: Classes, spec: PlanSpec) -> None:
    """Law 1 and law 2 on patterns: every class is used up exactly and no pattern exceeds the cap."""
    if len(answer.repeat) == 0 and len(classes.sizes) == 0:
        return
    ok = len(answer.repeat) > 0 and bool((answer.repeat > 0).all()) and bool((answer.number > 0).all())
    if ok:
        totals = np.add.reduceat(answer.size * answer.number, answer.offsets[:-1])
        ok = int(totals.max()) <= spec.pack_length and bool((np.diff(answer.offsets) > 0).all())
    if ok and not classes.sparse:
        ok = int(answer.size.min()) > 0 and int(answer.size.max()) <= classes.top
        if ok:
            used = counts_by_key(answer.size, answer, classes.top, use_jit(len(classes.keys)))
            ok = bool((used[classes.sizes] == classes.counts).all()) and used.sum() == classes.counts.sum()
    elif ok:
        at = np.minimum(np.searchsorted(classes.sizes, answer.size), len(classes.sizes) - 1)
        ok = bool((classes.sizes[at] == answer.size).all())
        used = counts_by_key(at, answer, len(classes.sizes) - 1, use_jit(len(classes.keys)))
        ok = ok and bool((used == classes.counts).all())
    if not ok:
        raise LawError(f"packer {spec.packer!r} answered patterns that break partition or capacity")


def _check_packs(csr: Csr, classes: Classes, lengths: Lengths, spec: PlanSpec) -> None:
    """Law 2 on packs: a pack of two or more samples is within the cap and every limit."""
    shared = np.diff(csr.offsets) > 1
    if not shared.any():
        return
    keys = classes.keys[csr.indices]
    if classes.sparse:
        costs = np.append(classes.sizes, spec.pack_length + 1)[np.minimum(keys - 1, len(classes.sizes))]
    else:
        costs = keys.astype(np.int64)
    checks = [("tokens", costs, spec.pack_length)]
    checks += [
        (name, lengths.costs[name][csr.indices].astype(np.int64), cap) for name, cap in spec.limits.items()
    ]
    if spec.max_samples is not None:
        checks.append(("samples", np.ones(len(costs), dtype=np.int64), spec.max_samples))
    for name, values, cap in checks:
        held = np.where(shared, np.add.reduceat(values, csr.offsets[:-1]), 0)
        if int(held.max()) > cap:
            raise LawError(
                f"packer {spec.packer!r} put {int(held.max())} {name} into a pack, the limit is {cap}"
            )
