"""optimal: column generation where `auto` misses the bound; its patterns reproduce the plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import PlanError
from packtrain.planning.build import replay
from packtrain.planning.laws import check_laws

pytest.importorskip("highspy")


def triplets(n: int, capacity: int, seed: int = 0) -> np.ndarray:
    """3n/3 samples that fill n/3 packs exactly, three by three."""
    rng = np.random.default_rng(seed)
    a = rng.integers(capacity // 4 + 1, capacity // 2, n // 3)
    b = np.minimum(rng.integers(capacity // 8, capacity // 3, n // 3), capacity - a - 1)
    return np.concatenate([a, b, capacity - a - b])


@pytest.mark.parametrize(("n", "capacity"), [(30_000, 512), (9999, 2048)])
def test_triplets_come_within_two_packs_of_the_bound(
    n: int, capacity: int, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = triplets(n, capacity)
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, capacity, packer="optimal")
    check_laws(plan, lengths)
    assert len(plan) <= n // 3 + 2 and len(plan) <= len(pt.plan(lengths, capacity))
    assert plan.packer.notes["chosen"] == "optimal/2"
    assert capfd.readouterr() == ("", ""), "the solver prints nothing"


def test_the_bound_of_the_program_is_proven() -> None:
    """30 samples of 34 at cap 100: two a pack. Volume says 11; the program proves 15."""
    plan = pt.plan([34] * 30, 100, packer="optimal")
    assert len(plan) == 15 and plan.certificate.optimal
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens = rng.choice(rng.integers(20, 60, 6), 200)
        plan = pt.plan(tokens, 100, packer="optimal")
        assert plan.certificate.bound <= len(plan) <= len(pt.plan(tokens, 100))


def test_stored_patterns_reproduce_the_plan(tmp_path: Path) -> None:
    lengths = pt.Lengths([*triplets(3000, 512).tolist(), 0, 600])
    plan = pt.plan(lengths, 512, packer="optimal", seed=3)
    plan.save(tmp_path)
    loaded = pt.PackPlan.load(tmp_path)
    assert replay(loaded, lengths) == plan == loaded
    assert replay(loaded, lengths).certificate == plan.certificate
    with pytest.raises(PlanError, match="not the lengths"):
        replay(loaded, [1, 2, 3])
    with pytest.raises(PlanError, match="stores no patterns"):
        replay(pt.plan(lengths, 512), lengths)
    json.dumps(plan.packer.to_dict())


def test_beyond_its_limits_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tokens = triplets(30_000, 60_000)
    with caplog.at_level(logging.WARNING, logger="packtrain"):
        plan = pt.plan(tokens, 60_000, packer="optimal")
    assert "left out" in plan.packer.notes["lp"] and "packer optimal" in caplog.text
    assert len(plan) == len(pt.plan(tokens, 60_000))


@pytest.mark.parametrize(("n", "capacity"), [(20_000, 256), (100_000, 512)])
def test_uniform_lengths_are_proven_optimal(n: int, capacity: int) -> None:
    """Many small lengths have no weight in the program: patterns must be read past them."""
    tokens = np.random.default_rng(0).integers(1, capacity + 1, n)
    plan = pt.plan(tokens, capacity, packer="optimal")
    assert plan.certificate.optimal
    assert len(pt.plan(tokens, capacity)) <= plan.certificate.bound * (1 + 1e-4) + 1


def test_priced_patterns_weigh_what_pricing_says() -> None:
    from packtrain.packers.optimal import _SCALE, _price

    rng = np.random.default_rng(3)
    for _ in range(50):
        capacity = int(rng.integers(20, 200))
        sizes = np.unique(rng.integers(1, capacity + 1, 12))
        weights = np.where(rng.random(len(sizes)) < 0.5, 0, rng.integers(0, _SCALE, len(sizes)))
        most, patterns = _price(sizes, weights, capacity)
        worth = [sum(int(weights[k]) * held for k, held in pattern.items()) for pattern in patterns]
        assert all(sum(int(sizes[k]) * held for k, held in p.items()) <= capacity for p in patterns)
        assert all(value > _SCALE for value in worth) and max(worth, default=most) == most
