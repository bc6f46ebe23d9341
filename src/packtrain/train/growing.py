"""Training on a directory that may still grow: what it may begin with, and how many steps it has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ConfigError

__all__ = ["check_beginning", "steps_of", "warn_of_another_template"]

logger = logging.getLogger(__name__)


def check_beginning(source: Any, resumed: str | None, start: str | None, folder: Any) -> int:
    """Micro steps of the stream before this run.

    Args:
        source: the growing packs, standing where the run begins.
        resumed: the checkpoint that it goes on from.
        start: `beginning` or `acknowledged`, where that was asked for.

    Raises:
        ConfigError: an earlier run used packs of this stream, and nobody said what to make of that.
    """
    state = source.state_dict()
    if state["slots"] and resumed is None and start is None:
        raise ConfigError(
            f"an earlier run has used {state['slots']:,} slots of {folder}, and this one has "
            "no checkpoint of it",
            hint="set resume_from_checkpoint: true, or sharded_lazy_start: beginning (all packs again) or "
            "acknowledged (only those behind)",
        )
    return int(state["step"])


def steps_of(source: Any, begun: int, accumulation: int, resumed: str | None) -> int:
    """Optimizer steps to the end of the stream, those before the checkpoint included.

    Raises:
        ConfigError: it has no end yet.
    """
    try:
        whole = len(source)
    except TypeError:
        raise ConfigError(
            "training.max_steps is not set, and the stream has no end yet",
            hint="set max_steps: the learning rate needs to know how long training is",
        ) from None
    done = 0 if resumed is None else int(files.read_json(Path(resumed) / "trainer_state.json")["global_step"])
    return done + -(-(whole - begun) // accumulation)


def warn_of_another_template(made: Any, template: Any, where: Any) -> None:
    """Tell when packs were made by another template than the one that encodes validation samples.

    Args:
        made: digest of the template that the packs were made with.
    """
    if made != files.digest_json(template.config()):
        logger.warning(
            "%s was packed with another template than that of the validation samples: their losses are of "
            "different inputs; compare template.* with the options of packtrain produce",
            where,
        )
