"""Validation inputs of a run that plans nothing else: streams and growing directories.

    with validation(config) as val:     # {} without data.val
        …train…

A validation set is finite and small, so it is measured and planned as in a planned run: once, by one rank per
disk, into `val_lengths` and `val_plan` (of several sets `val_NAME_lengths` …) of the output folder, where a
resumed run finds them. The folder is
claimed while the block lasts, so two runs in one folder are told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import files
from ..planning.packplan import PackPlan
from ..store import shards
from ..world import World, world
from .prepare import Prepared, Stage, prepare_validation
from .ranks import StartUp

if TYPE_CHECKING:
    from ..train.config import RunConfig

__all__ = ["validation"]


@contextmanager
def validation(
    config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None, place: World | None = None
) -> Iterator[dict[str, Prepared]]:
    """Measure and plan the validation samples, on every rank: their inputs by the name of their set.

    Args:
        config: from `train.load_config`.
        overwrite: replace what `training.output_dir` holds of other validation samples.
        stage: progress display per stage.
        place: rank and world size; None: from the launcher's environment.

    Raises:
        PacktrainError: as `prepare`; InputError when another run takes the folder over.
    """
    if config.data.val is None:
        yield {}
        return
    place = place or world()
    folder = Path(config.training.output_dir)
    files.make_folder(folder)
    config = _with_pack_length(config, place)
    with StartUp(folder, place=place, timeout_s=config.data.wait_timeout_s) as start:
        made = prepare_validation(
            config, start, before=lambda: files.remove_leftovers(folder), overwrite=overwrite, stage=stage
        )
        start.calm()
        yield made
        start.check()


def _with_pack_length(config: RunConfig, place: World) -> RunConfig:
    """The pack length of packs that were made before, where none is named; waits for the first chunk."""
    named = config.template.max_length or config.model.max_model_len
    if named is not None or config.data.kind not in ("exported", "growing"):
        return config
    if config.data.kind == "exported":
        length = PackPlan.load(shards.hidden(shards.at(config.data.path), "plan")).spec.pack_length
        return _capped(config, length)
    from ..data import LazyShardedDataset

    packs = LazyShardedDataset(
        config.data.path,
        place.rank,
        place.size,
        config.data.timeout_s,
        config.data.poll_s,
        start="beginning",
    )
    length = int(packs.config["pack_length"])
    return _capped(config, length)


def _capped(config: RunConfig, length: int) -> RunConfig:
    return config.model_copy(update={"template": config.template.model_copy(update={"max_length": length})})
