"""Both materialisers: canonical order, equal bytes on the compiled and the plain path."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from packtrain.extend import Patterns
from packtrain.planning import _blocks
from packtrain.planning._materialise import from_bins, from_patterns
from packtrain.testing import compiled_path, on_threads, plain_path


def brute(bins: list[int]) -> list[list[int]]:
    packs: dict[int, list[int]] = {}
    for i, b in enumerate(bins):
        if b >= 0:
            packs.setdefault(b, []).append(i)
    return sorted(packs.values())


def lists(csr: object) -> list[list[int]]:
    offsets = csr.offsets.tolist()  # type: ignore[attr-defined]
    return [csr.indices[a:b].tolist() for a, b in itertools.pairwise(offsets)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("compiled", [False, True])
def test_bins(compiled: bool) -> None:
    rng = np.random.default_rng(0)
    with compiled_path() if compiled else plain_path():
        for _ in range(60):
            bins = rng.integers(-1, int(rng.integers(1, 20)), int(rng.integers(0, 40)))
            assert lists(from_bins(bins)) == brute(bins.tolist())
            relabelled = np.where(bins < 0, -1, 1000 - 7 * bins)
            assert lists(from_bins(relabelled)) == brute(bins.tolist()), "bin numbers do not matter"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_patterns(compiled: bool, seed: int | None) -> None:
    """3 packs {4,4,2}, 2 packs {5}, with a skipped sample (0) and a long one (key 11 above top 10)."""
    patterns = Patterns(
        repeat=np.array([3, 2]),
        offsets=np.array([0, 2, 3]),
        size=np.array([4, 2, 5]),
        number=np.array([2, 1, 1]),
    )
    keys = np.array([4, 4, 0, 2, 11, 5, 4, 2, 4, 4, 5, 4, 2], dtype=np.int32)
    with compiled_path() if compiled else plain_path():
        packs = lists(from_patterns(keys, 10, patterns, lambda sizes: sizes, 1, seed))
    assert sorted(i for pack in packs for i in pack) == [i for i in range(13) if i != 2]
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    shapes = sorted(sorted(keys[pack].tolist()) for pack in packs)
    assert shapes == [[2, 4, 4], [2, 4, 4], [2, 4, 4], [5], [5], [11]]
    if seed is None:
        assert packs == [[0, 1, 3], [4], [5], [6, 7, 8], [9, 11, 12], [10]]


def test_packs_stay_close_in_index() -> None:
    """Dealing in rounds keeps the samples of a pack near each other: good for sharded readers."""
    import packtrain as pt

    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(np.log(357), 1.2, 1_000_000).astype(np.int64), 20, 8192)
    plan = pt.plan(tokens, 8192, packer="bfd")
    first, last = plan.indices[plan.offsets[:-1]].astype(int), plan.indices[plan.offsets[1:] - 1].astype(int)
    assert float((last - first).mean()) < 0.2 * len(tokens)


@pytest.mark.parametrize("packer", ["auto", "bfd", "refine", "diverse"])
@pytest.mark.parametrize("seed", [None, 3])
def test_bytes_do_not_depend_on_threads(
    packer: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks and rounds, left-out samples, long ones, classes of all widths."""
    import packtrain as pt

    rng = np.random.default_rng(8)
    tokens = np.clip(rng.lognormal(5, 1.4, 120_000).astype(np.int64), 0, 3000)
    made: dict[object, tuple[object, ...]] = {}
    for count in (1, 2, 3, 7):
        with on_threads(count):
            plan = pt.plan(tokens, 2048, packer=packer, seed=seed)
            made[count] = (plan.checksum, plan.pack_sq.tobytes(), plan.long_samples, plan.slots)
    monkeypatch.setattr(_blocks, "_BLOCK", 1 << 9)  # one thread, in many blocks
    with on_threads(1):
        made["staged"] = (pt.plan(tokens, 2048, packer=packer, seed=seed).checksum, *made[1][1:])
    assert len(set(made.values())) == 1
    if packer == "bfd":
        with plain_path():
            assert pt.plan(tokens, 2048, packer=packer, seed=seed).checksum == made[3][0]


def test_blocks_cover_everything_once() -> None:
    for n in (0, 1, 5, 100):
        for parts in (1, 2, 3, 8):
            at = _blocks.even_cuts(n, parts)
            assert at[0] == 0 and at[-1] == n and at == sorted(at)
            weights = np.arange(n) % 3
            at = _blocks.cuts(weights, parts)
            assert at[0] == 0 and at[-1] == n and at == sorted(at) and len(at) == parts + 1
