"""diff_plans names what differs: spec, lengths, moved samples; checked against plain sets."""

from __future__ import annotations

import numpy as np
import pytest

import packtrain as pt
from packtrain.planning.diff import diff_plans


def expected_moved(first: pt.PackPlan, second: pt.PackPlan) -> list[int]:
    one = {i: frozenset(pack.tolist()) for pack in first for i in pack.tolist()}
    two = {i: frozenset(pack.tolist()) for pack in second for i in pack.tolist()}
    return sorted(i for i in one if i in two and one[i] != two[i])


@pytest.mark.parametrize("seed", range(8))
def test_moved_samples_equal_plain_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 130, int(rng.integers(0, 300)))
    a = pt.plan(tokens, 100, packer="bfd", long_samples="drop")
    b = pt.plan(tokens, 100, packer="refine", seed=seed or None)
    found = diff_plans(a, b)
    assert found.moved.tolist() == expected_moved(a, b)
    packs = [frozenset(pack.tolist()) for pack in a]
    assert found.same_packs == len(set(packs) & {frozenset(pack.tolist()) for pack in b})
    assert found.entered.tolist() == [i for i, t in enumerate(tokens) if t > 100] and not len(found.left)
    assert set(found.spec) == {"packer", "long_samples"} | ({"seed"} if seed else set())
    assert found.lengths_digest is None


def test_equal_plans_differ_in_nothing() -> None:
    a, b = pt.plan([5, 5, 9, 0], 10), pt.plan(np.array([5, 5, 9, 0], dtype=np.int64), 10)
    found = diff_plans(a, b)
    assert found.equal and found.same_packs == 2 and not len(found.moved) and found.spec == {}
    assert found.to_dict()["moved"] == {"count": 0, "first": []}


def test_lengths_are_compared_sample_by_sample() -> None:
    one = pt.Lengths([5, 5, 9, 4], {"images": [1, 0, 0, 2]}, [0, 0, 0, 2], {3: "missing_media"})
    two = pt.Lengths([5, 6, 9, 4, 3], {"images": [1, 0, 1, 2, 0]}, [0, 0, 0, 2, 0], {3: "truncated_media"})
    found = diff_plans(pt.plan(one, 10), pt.plan(two, 10), (one, two))
    assert not found.equal and found.lengths_digest == (one.digest, two.digest)
    assert found.lengths == {"read": (4, 5), "images": 1, "tokens": 1, "status": 0}
    assert found.changed_lengths.tolist() == [1, 2] and found.reasons.tolist() == [3]
    assert found.entered.tolist() == [4]
