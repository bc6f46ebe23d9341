"""`training.replan: epoch`: the plans of a run's epochs. No torch here.

Epoch 0 is the plan on disk; the others are made in memory when they begin, on every rank alike, and are
never written: (plan, lengths, epoch) names them, and their checksum stands in the log and in checkpoints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans

if TYPE_CHECKING:
    from .config import RunConfig

__all__ = ["epoch_checksums", "epoch_plans"]

#: Epochs whose checksums a dry run tells.
_TOLD = 4


def epoch_plans(config: RunConfig, plan: PackPlan, lengths: Any) -> EpochPlans | None:
    """The plans of the run's epochs; None without `training.replan`.

    Raises:
        ConfigError: there are no lengths to plan from.
        PlanError: they are not those of the plan, or the plan cannot be made anew.
    """
    if config.training.replan is None:
        return None
    if lengths is None:
        raise ConfigError("training.replan needs the lengths of the plan", hint="pass lengths to train()")
    return EpochPlans(plan, lengths)


def epoch_checksums(config: RunConfig, plan: PackPlan, lengths: Any, steps: int) -> list[str] | None:
    """Checksums of the raw plans of the first epochs of the run; None without `training.replan`.

    Args:
        steps: optimizer steps of an epoch.
    """
    plans = epoch_plans(config, plan, lengths)
    if plans is None:
        return None
    training = config.training
    count = math.ceil(training.max_steps / steps if training.max_steps > 0 else training.num_train_epochs)
    return [plans.plan(epoch).checksum for epoch in range(min(_TOLD, max(1, count)))]
