"""Every packer in the folder inherits the laws; bfd equals an item-by-item oracle."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain import extend
from packtrain.errors import PacktrainError, UnknownNameError
from packtrain.planning.distribution import phases_of
from packtrain.planning.spec import PlanSpec
from packtrain.testing import PackerLaws, compiled_path, on_threads, plain_path

PACKERS = extend.names("packers")

for _name in PACKERS:
    _suite = type(f"TestLaws_{_name}", (PackerLaws,), {"packer": _name})
    _missing = _name == "optimal" and importlib.util.find_spec("highspy") is None
    globals()[_suite.__name__] = pytest.mark.skipif(_missing, reason="highspy is not installed")(_suite)


def best_fit_decreasing(costs: list[int], capacity: int) -> int:
    """Packs of best fit decreasing, item by item: the fullest pack that still takes the item."""
    rooms: list[int] = []
    packs = 0
    for cost in sorted(costs, reverse=True):
        place = bisect_left(rooms, cost)
        if place == len(rooms):
            packs += 1
            room = capacity
        else:
            room = rooms.pop(place)
        insort(rooms, room - cost)
    return packs


def random_case(seed: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([10, 64, 100, 1000, 8192, 131072]))
    n = int(rng.integers(1, 600))
    kind = seed % 4
    if kind == 0:
        costs = rng.integers(1, capacity + 1, n)
    elif kind == 1:
        costs = rng.lognormal(np.log(capacity / 20 + 1), 1.2, n).astype(np.int64)
    elif kind == 2:
        costs = rng.choice(rng.integers(1, capacity + 1, 5), n)
    else:
        costs = rng.integers(capacity // 4, capacity // 2 + 1, n)
    return np.clip(costs, 1, capacity), capacity


def test_the_packers_of_the_folder_are_found() -> None:
    assert {"auto", "bfd", "diverse", "ffd", "random_fit", "refine", "sequential"} <= set(PACKERS)


@pytest.mark.parametrize("compiled", [False, True])
def test_bfd_counts_equal_the_oracle(compiled: bool) -> None:
    with compiled_path() if compiled else plain_path():
        for seed in range(200):
            costs, capacity = random_case(seed)
            plan = pt.plan(costs, capacity, packer="bfd")
            assert len(plan) == best_fit_decreasing(costs.tolist(), capacity), seed


def test_sequential_is_next_fit() -> None:
    plan = pt.plan([5, 5, 1, 9, 2, 8, 11, 3], 10, packer="sequential")
    assert [pack.tolist() for pack in plan] == [[0, 1], [2, 3], [4, 5], [6], [7]]


def test_unknown_packer_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="sequental") as caught:
        pt.plan([1], 10, packer="sequental")
    assert "sequential" in str(caught.value.hint)


def test_an_unusable_numba_cache_only_costs_time(tmp_path: Path) -> None:
    """A cache folder that is a file, and one whose index files are torn: the same plan, no error."""
    program = (
        "import numpy as np, packtrain as pt\n"
        "t = np.random.default_rng(0).integers(1, 4000, 60000)\n"
        "print(pt.plan(t, 8192, packer='sequential').checksum)\n"
    )

    def run(cache: Path, jit: str = "1") -> str:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PACKTRAIN_JIT": jit}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    plain = run(tmp_path / "unused", jit="0")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(blocked) == plain
    torn = tmp_path / "torn"
    assert run(torn) == plain
    held = sorted(torn.rglob("*.nb*"))
    assert held, "the cache was written"
    for path in held:
        path.write_bytes(b"\x80")
    assert run(torn) == plain


def first_fit_decreasing(costs: list[int], capacity: int) -> list[int]:
    """Bin of each sample, item by item."""
    rooms: list[int] = []
    bins = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        b = next((b for b, room in enumerate(rooms) if room >= costs[i]), len(rooms))
        if b == len(rooms):
            rooms.append(capacity)
        rooms[b] -= costs[i]
        bins[i] = b
    return bins


@pytest.mark.parametrize("compiled", [False, True])
def test_ffd_equals_item_by_item(compiled: bool) -> None:
    from packtrain.planning._materialise import from_bins

    with compiled_path() if compiled else plain_path():
        for seed in range(60):
            costs, capacity = random_case(seed)
            plan = pt.plan(costs, capacity, packer="ffd")
            expected = from_bins(np.array(first_fit_decreasing(costs.tolist(), capacity)))
            assert np.array_equal(plan.indices, expected.indices), seed
            assert np.array_equal(plan.offsets, expected.offsets), seed


def test_refine_fills_without_a_gap() -> None:
    """Best fit decreasing needs 4 packs here; the exact fill needs the optimum of 3."""
    costs = [5, 5, 4, 4, 3, 3, 3, 3]
    assert len(pt.plan(costs, 10, packer="bfd")) == 4
    plan = pt.plan(costs, 10, packer="refine")
    assert len(plan) == 3 and plan.certificate.optimal
    assert pt.plan(costs, 10).packer.notes == {"chosen": "refine/2"}


@settings(deadline=None, max_examples=200)
@given(st.integers(20, 200), st.data())
def test_packers_of_few_packs_are_never_worse_than_ffd(cap: int, data: Any) -> None:
    costs = data.draw(st.lists(st.integers(1, cap), min_size=1, max_size=60))
    fewest = len(pt.plan(costs, cap, packer="ffd"))
    for packer in ("refine", "auto"):
        assert len(pt.plan(costs, cap, packer=packer)) <= fewest


def test_refine_takes_the_packs_of_ffd_where_they_are_fewer() -> None:
    """Uniform lengths, where exact fill alone needs more packs."""
    found = 0
    for seed in range(60):
        costs = np.random.default_rng(seed).integers(150, 500, 50)
        plan = pt.plan(costs, 1000, packer="refine")
        fewest = len(pt.plan(costs, 1000, packer="ffd"))
        assert len(plan) <= fewest and sorted(plan.indices.tolist()) == list(range(50))
        if plan.packer.notes:
            assert plan.packer.notes == {"chosen": "ffd/1"} and len(plan) == fewest
            found += 1
    assert found


@pytest.mark.parametrize("cap", [2048, 8192, 16384])
def test_auto_reaches_the_bound_on_chat_lengths_and_never_loses_to_bfd(cap: int) -> None:
    rng = np.random.default_rng(cap)
    for tokens in (
        np.clip(rng.lognormal(np.log(357), 1.2, 20_000).astype(np.int64), 16, cap),
        rng.integers(1, cap + 1, 3000),
        np.clip(rng.normal(cap / 3, cap / 60, 3000).astype(np.int64), 1, cap),
    ):
        plan = pt.plan(tokens, cap)
        assert len(plan) <= len(pt.plan(tokens, cap, packer="bfd"))
        if tokens is not None and len(tokens) == 20_000:
            assert len(plan) <= plan.certificate.bound + 1


def test_refine_mends_the_end_where_only_small_sizes_are_left() -> None:
    """Formula images with short captions: exact fill alone is 9 packs over the bound."""
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(np.log(90), 0.7, 1_000_000).astype(np.int64), 10, 2048)
    tokens = np.clip(text + rng.choice([64, 128, 256, 512], len(text)), 1, 2048)
    plan = pt.plan(tokens, 2048)
    assert len(plan) <= plan.certificate.bound + 1


def test_refine_keeps_both_paths_equal_beyond_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.packers import refine

    tokens = np.random.default_rng(0).integers(1, 8193, 6000)
    for limit in (0, 1000, 10**9):
        monkeypatch.setattr(refine, "budget", lambda samples, limit=limit: limit)
        with plain_path():
            plain = pt.plan(tokens, 8192, packer="refine")
        with compiled_path():
            assert pt.plan(tokens, 8192, packer="refine") == plain


def test_random_fit_is_seeded_and_mixes() -> None:
    tokens = np.sort(np.random.default_rng(0).integers(1, 500, 4000), kind="stable")
    plans = {seed: pt.plan(tokens, 4096, packer="random_fit", seed=seed) for seed in (None, 0, 1, 1 << 64)}
    assert plans[None].checksum == plans[0].checksum and len({p.checksum for p in plans.values()}) == 3
    spread = np.array([np.ptp(tokens[pack]) for pack in plans[1]])
    assert float(spread.mean()) > 300, "packs hold short and long samples"


@pytest.mark.spec(
    "003",
    "phases: powers of two, seeds above half, multi-strategy, finalise; none is lost",
    key="`data.packer: diverse`",
    api='`plan(packer="diverse")`',
)
def test_diverse_places_every_sample_and_tells_its_phases() -> None:
    rng = np.random.default_rng(0)
    tokens = np.concatenate([2 ** rng.integers(4, 12, 2000), rng.integers(1, 4097, 3000)])
    plan = pt.plan(tokens, 4096, packer="diverse")
    phases = plan.packer.notes["phases"]
    assert list(phases) == ["powers", "seeds", "rest", "finalise"]
    assert sum(row["packs"] for row in phases.values()) == len(plan)
    assert sum(row["samples"] for row in phases.values()) == 5000
    assert phases["powers"]["packs"] > 0 and phases["powers"]["fill"] == 1.0
    assert phases["seeds"]["packs"] >= int((tokens > 2048).sum()) - phases["powers"]["packs"]
    kinds = lambda p: float(np.mean([len(set(tokens[pack].tolist())) for pack in p]))  # noqa: E731
    small = np.clip(rng.lognormal(5, 0.3, 20_000).astype(np.int64), 1, 400)
    tokens = small
    assert kinds(pt.plan(small, 4096, packer="diverse")) > 1.2 * kinds(pt.plan(small, 4096, packer="bfd"))


@pytest.mark.spec(
    "003",
    "seed strategy, samples of a pack, least items and fill, by phase",
    key="`data.packer_options`, `plan --packer-options`",
    api='`plan(packer="diverse", packer_options=)`',
)
def test_knobs_of_diverse() -> None:
    rng = np.random.default_rng(0)
    tokens = np.concatenate([2 ** rng.integers(4, 12, 300), rng.integers(1, 4097, 700)])
    phases = [
        {"seeds": {"top": 5}, "min_fill": 0.99},
        {"seeds": {"range": [2000, 3000]}, "max_items": 3},
        {"seeds": {"above": 0.25}, "min_items": 4, "min_fill": 0.9},
        {"seeds": "half"},
    ]
    options = {"max_items": 6, "phases": phases}
    plan = pt.plan(tokens, 4096, packer="diverse", packer_options=options)
    assert sorted(plan.indices.tolist()) == list(range(1000))
    assert max(len(plan[pack]) for pack in range(len(plan))) == 6
    told = phases_of(plan)
    assert list(told) == [
        "powers",
        "1. top 5",
        "2. range [2000, 3000]",
        "3. above 0.25",
        "4. half",
        "finalise",
    ]
    assert sum(row["samples"] for row in told.values()) == 1000
    assert told["1. top 5"]["fill"] >= 0.99 or not told["1. top 5"]["packs"]
    second = told["2. range [2000, 3000]"]
    assert second["packs"] <= second["samples"] <= 3 * second["packs"]
    third = told["3. above 0.25"]
    assert third["samples"] >= 4 * third["packs"] and (third["fill"] >= 0.9 or not third["packs"])
    assert PlanSpec.from_dict(plan.spec.to_dict()) == plan.spec
    assert "packer_options" not in pt.plan(tokens, 4096, packer="diverse").spec.to_dict()
    default = [{"seeds": "half"}, {"seeds": "largest", "min_fill": 0.95}]
    same = pt.plan(tokens, 4096, packer="diverse", packer_options={"phases": default})
    assert same.indices.tolist() == pt.plan(tokens, 4096, packer="diverse").indices.tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_items": 0}, "max_items is 0"),
        ({"phases": [{"seed": "half"}]}, "seeds"),
        ({"phases": [{"seeds": "middle"}]}, "seeds of a phase"),
        ({"phases": [{"seeds": {"range": 3}}]}, "seeds of a phase"),
        ({"phases": [{"min_fill": 1.5}]}, "min_fill"),
        ({"phases": {"seeds": "half"}}, "no list"),
        ({"phase": []}, "phases"),
    ],
)
def test_knobs_that_cannot_hold(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PacktrainError, match=said):
        pt.plan([3, 4], 8, packer="diverse", packer_options=options)
    with pytest.raises(PacktrainError, match="has no options"):
        pt.plan([3, 4], 8, packer="bfd", packer_options=options)


def test_passes_side_by_side_give_the_same_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.packers import refine

    tokens = np.random.default_rng(2).integers(1, 4097, 30_000)
    made = []
    for many in (1 << 40, 0):
        monkeypatch.setattr(refine, "_MANY_SIZES", many)
        with on_threads(2):
            made.append(pt.plan(tokens, 4096, packer="refine"))
    assert made[0].checksum == made[1].checksum


@pytest.mark.spec(
    "003",
    "limits of `diverse`: images (or any cost) and samples of a pack",
    key="`training.limits`, `data.packer_options.max_items`",
    api='`plan(packer="diverse", limits=)`',
)
@pytest.mark.parametrize(
    "options", [{}, {"max_items": 5, "phases": [{"seeds": "half"}, {"seeds": {"top": 3}}]}]
)
def test_diverse_keeps_limits(options: dict[str, Any]) -> None:
    """Every pack of every phase holds at most 4 images; the phases still come first, and none is lost."""
    rng = np.random.default_rng(1)
    tokens = np.concatenate([2 ** rng.integers(4, 12, 300), rng.integers(1, 4097, 700)])
    images = rng.integers(0, 4, 1000)
    lengths = pt.Lengths(tokens, costs={"images": images})
    plan = pt.plan(
        lengths, 4096, packer="diverse", packer_options=options, limits={"images": 4}, max_samples=7
    )
    assert sorted(plan.indices.tolist()) == list(range(1000))
    held = [int(images[pack].sum()) for pack in plan]
    assert max(held) == 4 and max(len(pack) for pack in plan) <= options.get("max_items", 7)
    told = phases_of(plan)
    assert told["powers"]["packs"] > 0 and told["powers"]["fill"] == 1.0
    assert sum(row["samples"] for row in told.values()) == 1000
    assert len(plan) <= 1.2 * len(
        pt.plan(lengths, 4096, limits={"images": 4}, max_samples=options.get("max_items", 7))
    )
    free = pt.plan(
        pt.Lengths(tokens, costs={"images": images}), 4096, packer="diverse", limits={"images": 9999}
    )
    plain = phases_of(pt.plan(tokens, 4096, packer="diverse"))["powers"]
    assert phases_of(free)["powers"]["packs"] >= plain["packs"]
