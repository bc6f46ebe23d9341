"""Further limits: hard over the whole corpus, a policy per limit, bounds per limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import InputError, PlanError
from packtrain.pipeline.plan import ledger_rows
from packtrain.planning.laws import check_laws
from packtrain.testing import check_plan, compiled_path, plain_path


def corpus(n: int, seed: int = 0) -> pt.Lengths:
    rng = np.random.default_rng(seed)
    images = rng.choice([0, 1, 1, 2, 3, 6], n)
    patches = images * rng.integers(64, 3000, n)
    text = np.clip(rng.lognormal(5, 0.8, n).astype(np.int64), 10, 2000)
    return pt.Lengths(text + patches // 4, costs={"images": images, "patches": patches})


def test_worked_example() -> None:
    lengths = pt.Lengths([10] * 6, costs={"images": [2, 2, 1, 1, 0, 0]})
    plan = pt.plan(lengths, 100, limits={"images": 2})
    assert len(plan) == 3 and plan.certificate.name == "images" and plan.certificate.optimal
    check_plan(plan, lengths)
    assert len(pt.plan(lengths, 100, max_samples=2)) == 3
    assert pt.plan(lengths, 100, max_samples=2).certificate.name == "samples"


@pytest.mark.parametrize("packer", ["auto", "bfd", "ffd", "random_fit", "sequential"])
def test_limits_are_hard(packer: str) -> None:
    lengths = corpus(3000)
    plan = pt.plan(lengths, 8192, packer=packer, limits={"images": 8, "patches": 26000}, max_samples=12)
    check_plan(plan, lengths)
    check_laws(plan, lengths)


def test_one_binding_limit_is_within_a_thousandth_of_its_bound() -> None:
    lengths = corpus(20_000)
    for limits in ({"images": 8}, {"patches": 12_000}):
        plan = pt.plan(lengths, 32768, limits=limits, long_samples="drop")
        assert plan.certificate.name in limits
        assert plan.certificate.gap <= 0.001, (limits, plan.certificate)


def test_compiled_equals_plain_with_several_limits() -> None:
    lengths = corpus(4000, 2)
    for options in (
        {"limits": {"images": 8, "patches": 26000}, "max_samples": 12},
        {"limits": {"patches": 26000}},
        {"limits": {"images": 17, "patches": 26200}, "max_samples": 64},
        {"max_samples": 5, "multiple_of": 8, "seed": 4},
    ):
        with plain_path():
            plain = pt.plan(lengths, 8192, **options)
        with compiled_path():
            assert pt.plan(lengths, 8192, **options) == plain


def test_three_limits_that_bind_at_once() -> None:
    """Packs that are full in the third dimension don't block the search; the bound is of one dimension."""
    lengths = corpus(60_000)
    options = {"limits": {"images": 19, "patches": 29000}, "max_samples": 64}
    plan = pt.plan(lengths, 8192, **options)
    check_laws(plan, lengths)
    assert plan.certificate.gap <= 0.05


def test_a_sample_that_alone_breaks_a_limit_follows_its_policy(tmp_path: Path) -> None:
    lengths = pt.Lengths([10, 10, 200, 10], costs={"images": [9, 1, 0, 1]})
    single = pt.plan(lengths, 100, limits={"images": 4})
    assert [pack.tolist() for pack in single] == [[0], [1, 3], [2]]
    assert single.long_samples == 2 and single.slots == 100 + 100 + 200
    check_plan(single, lengths)
    mixed = pt.plan(lengths, 100, limits={"images": 4}, long_samples={"images": "drop"})
    assert list(mixed.ledger) == [(0, "over_images")] and mixed.long_samples == 1
    lengths.save(tmp_path)
    assert [row["detail"] for row in ledger_rows(mixed, tmp_path)] == ["9 images, the cap is 4"]
    other = pt.plan(lengths, 100, limits={"images": 4}, long_samples={"tokens": "drop"})
    assert [row["detail"] for row in ledger_rows(other, tmp_path)] == ["200 tokens, the cap is 100"]
    assert list(other.ledger) == [(2, "over_long")] and [0] in [pack.tolist() for pack in other]
    with pytest.raises(PlanError, match=r"1 long sample \(> limit of images 4\): 0 \(9 images\)"):
        pt.plan(lengths, 100, limits={"images": 4}, long_samples={"images": "error"})


def test_a_limit_of_zero_separates() -> None:
    lengths = pt.Lengths([5, 5, 5], costs={"images": [0, 1, 0]})
    assert [pack.tolist() for pack in pt.plan(lengths, 100, limits={"images": 0})] == [[0, 2], [1]]


def test_bad_limits() -> None:
    lengths = pt.Lengths([5], costs={"images": [1]})
    with pytest.raises(PlanError, match="'patches', the lengths hold: images"):
        pt.plan(lengths, 10, limits={"patches": 4})
    with pytest.raises(PlanError, match="the lengths hold: none"):
        pt.plan([5], 10, limits={"patches": 4})
    for packer in ("refine", "optimal"):
        with pytest.raises(InputError, match=packer) as caught:
            pt.plan(lengths, 10, limits={"images": 4}, packer=packer)
        assert "auto, bfd, diverse, ffd, random_fit, sequential" in str(caught.value.hint)
    with pytest.raises(PlanError, match="max_samples is 0"):
        pt.plan(lengths, 10, max_samples=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_first_fit_under_limits_equals_item_by_item(compiled: bool) -> None:
    """The leftmost pack that takes the sample in every dimension."""
    from packtrain.packers._first_fit import first_fit_needs

    for seed in range(40):
        rng = np.random.default_rng(seed)
        need = rng.integers(0, 30, (int(rng.integers(0, 120)), 3))
        caps = np.array([60, int(rng.integers(30, 90)), 45])
        rooms: list[np.ndarray] = []
        expected = []
        for row in need:
            at = next((p for p, room in enumerate(rooms) if (room >= row).all()), len(rooms))
            if at == len(rooms):
                rooms.append(caps.copy())
            rooms[at] -= row
            expected.append(at)
        with compiled_path() if compiled else plain_path():
            assert first_fit_needs(need, caps).tolist() == expected
