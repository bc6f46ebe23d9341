"""Source mixing of packs against plain loops; kept by the plan folder and shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import packtrain as pt
from packtrain.cli._show import plan_rows


def lengths(seed: int = 0) -> pt.Lengths:
    rng = np.random.default_rng(seed)
    return pt.Lengths(rng.integers(1, 60, 800), costs={"source": np.sort(rng.integers(3, 7, 800))})


def test_figures_equal_plain_loops(tmp_path: Path) -> None:
    held = lengths()
    plan = pt.plan(held, 128)
    stats = plan.stats()
    kinds = [len({int(held.costs["source"][i]) for i in pack}) for pack in plan]
    assert stats["sources"] == 4 and stats["sources_per_pack"] == round(sum(kinds) / len(plan), 4)
    assert stats["mixed_packs"] == round(sum(k > 1 for k in kinds) / len(plan), 4)
    share = [float((held.costs["source"] == s).mean()) for s in range(3, 7)]
    chance = sum(sum(1 - (1 - p) ** len(pack) for p in share) for pack in plan) / len(plan)
    assert abs(stats["sources_per_pack_at_random"] - chance) < 1e-4
    plan.save(tmp_path / "plan")
    again = pt.PackPlan.load(tmp_path / "plan")
    assert again.stats() == stats and "of 4" in plan_rows(again)["sources per pack"]
    assert "correlation" in plan_rows(again)["length and order"]


def test_a_mixing_packer_mixes_and_a_sequential_one_does_not() -> None:
    mixed = {name: pt.plan(lengths(1), 512, packer=name).stats() for name in ("random_fit", "sequential")}
    assert mixed["random_fit"]["sources_per_pack"] > 0.95 * mixed["random_fit"]["sources_per_pack_at_random"]
    assert mixed["sequential"]["sources_per_pack"] < 1.2


def test_none_without_sources_and_none_in_an_empty_plan() -> None:
    assert "sources" not in pt.plan([3, 4], 10).stats()
    assert pt.plan(pt.Lengths([], costs={"source": []}), 10).stats()["sources"] == 0
