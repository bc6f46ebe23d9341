"""Training on a directory of chunks that may still grow, as a configuration names it.

Nothing is measured, planned or encoded here: packs come as they are, each rank from its own. A checkpoint
holds the cursor (`stream.json`); when it is saved, every rank acknowledges what it covers, which is what lets
the producer remove chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..data import LazyShardedDataset
from ..world import World, world
from .config import RunConfig
from .sft import TrainResult, Validations, train

__all__ = ["STATE_FILE", "growing_of", "train_lazy"]

STATE_FILE = "stream.json"


def growing_of(config: RunConfig, place: World, template: Any = None) -> LazyShardedDataset:
    """The directory that `custom.dataset` names.

    Args:
        template: encodes media where the chunks hold them as bytes.
    """
    training = config.training
    return LazyShardedDataset(
        str(config.custom.dataset),
        place.rank,
        place.size,
        training.sharded_lazy_max_wait_s,
        training.sharded_lazy_poll_s,
        start=training.sharded_lazy_start,
        run=training.output_dir,
        encode=None if template is None else template.encode,
    )


def train_lazy(
    config: RunConfig,
    *,
    val: Validations | None = None,
    val_template: Any = None,
    place: World | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainResult:
    """Train on `custom.dataset` as its chunks come: `train` on `growing_of`; arguments as there.

    Raises:
        ConfigError: `max_steps` is not set and the stream has no end yet.
        WaitTimeoutError, FormatError: from reading; see `LazyShardedDataset`.
    """
    place = place or world()
    template = _template(config)
    data = growing_of(config, place, template)
    return train(
        config, None, data, template, val=val, val_template=val_template, place=place, progress=progress
    )


def _template(config: RunConfig) -> Any:
    """The processor, where one is named: tiny models and chunks with media as bytes need it."""
    if config.template.processor is None:
        return None
    from ..template import HFTemplate, load_processor
    from ..testing.demo import is_demo, resolve_demo
    from .config.sections import PROCESSOR_OPTIONS

    name = config.template.processor
    options = config.template.options()
    limits = {option: options.pop(option) for option in PROCESSOR_OPTIONS if option in options}
    processor = load_processor(str(resolve_demo(name)) if is_demo(name) else name, **limits)
    return HFTemplate(processor, system=config.template.system, **options)
