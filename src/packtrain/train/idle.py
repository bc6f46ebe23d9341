"""Towers that a pack leaves idle: `training.dummy_media` puts a weightless medium into such rows.

Without it, ranks that train a tower wait for the one whose pack has no image (DDP, FSDP, ZeRO), for ever or
until DDP refuses the next step. The dummy is made by the run's own processor, so every family has one.
"""

from __future__ import annotations

import logging
from typing import Any

from ..collate import PaddingFreeCollator
from ..template import dummy_samples
from .loss import bare_model

__all__ = ["keep_towers_busy"]

logger = logging.getLogger(__name__)


def keep_towers_busy(trainer: Any, wanted: bool, template: Any) -> None:
    """Give a PackTrainer a collator with dummies of every tower, where wanted.

    Args:
        trainer: the trainer, before training.
        wanted: `training.dummy_media`.
        template: an `HFTemplate` of a family with media.

    A template without media has no towers: then the option has no effect, and that is told.
    """
    family = getattr(template, "family", None)
    if wanted and (family is None or not family.towers):
        name = type(template).__name__ if family is None else f"family {family.name}"
        logger.warning("training.dummy_media has no effect: %s has no media", name)
        return
    if not wanted:
        return
    dummies = dummy_samples(template)
    trainer.packs_collator = PaddingFreeCollator(bare_model(trainer.model), dummy_media=dummies)
    tokens = [len(sample["input_ids"]) for sample in dummies]
    logger.info("rows without media get a weightless one of %s tokens", tokens)
