"""replan: another plan each epoch, same shape; the state plans it again or says what differs."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import ForeignArtefactError, PlanError
from packtrain.planning.replan import epoch_seed, replan, resume, state
from packtrain.testing import check_plan

_OPTIMAL = pytest.param(
    "optimal", marks=pytest.mark.skipif(importlib.util.find_spec("highspy") is None, reason="no highspy")
)


def shape(plan: pt.PackPlan, lengths: pt.Lengths) -> list[list[int]]:
    return sorted(sorted(lengths.tokens[pack].tolist()) for pack in plan)


@pytest.mark.parametrize("packer", ["auto", "bfd", "refine", "ffd", "diverse", "sequential", _OPTIMAL])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_epoch_has_the_same_shape_and_other_companions(packer: str, seed: int | None) -> None:
    lengths = pt.Lengths(np.random.default_rng(1).integers(0, 40, 3000))
    base = pt.plan(lengths, 64, packer=packer, seed=seed, long_samples="drop")
    epochs = [replan(base, lengths, epoch) for epoch in range(4)]
    assert epochs[0] is base and len({plan.checksum for plan in epochs}) == 4
    for epoch, plan in enumerate(epochs):
        check_plan(plan, lengths)
        assert shape(plan, lengths) == shape(base, lengths) and list(plan.ledger) == list(base.ledger)
        held = json.loads(json.dumps(state(base, plan, epoch)))
        assert resume(base, lengths, held).checksum == plan.checksum == held["checksum"]


def test_limits_keep_their_shape() -> None:
    rng = np.random.default_rng(2)
    lengths = pt.Lengths(rng.integers(1, 30, 2000), costs={"images": rng.integers(0, 3, 2000)})
    base = pt.plan(lengths, 128, limits={"images": 7}, max_samples=9)
    plan = replan(base, lengths, 3)
    check_plan(plan, lengths)
    assert shape(plan, lengths) == shape(base, lengths) and plan.checksum != base.checksum


def test_seeds_of_epochs_are_fixed() -> None:
    assert epoch_seed(None, 0) is None and epoch_seed(7, 0) == 7
    assert [epoch_seed(7, e) for e in (1, 2)] == [epoch_seed(7, e) for e in (1, 2)]
    assert len({epoch_seed(s, e) for s in (None, 1, 2, 1 << 70) for e in range(1, 50)}) == 4 * 49


def test_what_cannot_be_planned_anew_is_refused() -> None:
    tokens = [5, 6, 7, 8] * 30
    for options in ({"window": 20}, {"packer": "random_fit"}, {"samples_per_step": 8}):
        base = pt.plan(tokens, 64, **options)
        with pytest.raises(PlanError, match=next(iter(options)).split("_")[0]):
            replan(base, tokens, 1)
    base = pt.plan(tokens, 64)
    with pytest.raises(PlanError, match="not the lengths"):
        replan(base, [1, *tokens], 1)
    with pytest.raises(PlanError, match="epoch is -1"):
        replan(base, tokens, -1)


def test_a_state_of_another_run_is_named() -> None:
    tokens = [5, 6, 7, 8] * 30
    base = pt.plan(tokens, 64)
    held = state(base, replan(base, tokens, 2), 2)
    for other in (pt.plan(tokens, 65), pt.plan(tokens, 64, seed=1)):
        with pytest.raises(ForeignArtefactError, match="spec"):
            resume(other, tokens, held)
    with pytest.raises(ForeignArtefactError, match="lengths_digest"):
        resume(pt.plan([*tokens, 3], 64), [*tokens, 3], held)
    with pytest.raises(ForeignArtefactError, match="epoch 1 was planned"):
        resume(base, tokens, {**held, "epoch": 1})
    with pytest.raises(ForeignArtefactError, match="epoch is None"):
        resume(base, tokens, {**held, "epoch": None})
