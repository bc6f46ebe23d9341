"""Training on a stream (`training.packing_mode: streaming`): samples are encoded and packed as they come.

The stream begins its next epoch where one ends and `max_steps` ends the run, so ranks take equal steps. Each
rank saves where it stands beside every checkpoint (`stream.<rank>.json`); a resume reads the samples that
waited again and goes on with the next pack. With `dyn_bsz` a micro batch takes
`micro_batch_size * max_length` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..data import StreamingPackedDataset, TokenBudgetDataset
from ..errors import ConfigError
from ..world import World, world
from .config import RunConfig
from .sft import TrainResult, Validations, train

__all__ = ["stream_of", "train_streaming"]


def stream_of(config: RunConfig, source: Any, template: Any, place: World) -> StreamingPackedDataset:
    """The run's stream.

    Raises:
        ConfigError: no pack length is set.
    """
    training, length = config.training, config.template.max_length
    if length is None:
        raise ConfigError("no pack length is set", hint="set global_max_length or template.max_length")
    further: dict[str, Any] = {
        "long_samples": "single" if training.packing_allow_single_long else "error",
        "packer": training.packing_strategy,
        "shuffle_buffer": training.stream_shuffle_buffer,
        "seed": training.seed,
        "rank": place.rank,
        "world_size": place.size,
        "encode_workers": training.stream_encode_workers,
        "cyclic": True,
    }
    if training.dyn_bsz:
        return TokenBudgetDataset(
            source,
            template,
            micro_batch_size=training.micro_batch_size,
            max_seq_len=length,
            buffer_size=training.stream_window,
            **further,
        )
    return StreamingPackedDataset(
        source, template, pack_length=length, window=training.stream_window, **further
    )


def train_streaming(
    config: RunConfig,
    source: Any,
    template: Any,
    *,
    val: Validations | None = None,
    model: Any = None,
    place: World | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainResult:
    """Train on a stream of samples: `train` on `stream_of`.

    Args:
        config: the run's configuration, with `packing_mode: streaming`.
        source: sequence or iterable of samples.
        template: `extend.Template`.
        val: as of `sft.train`; evaluated every `training.eval_steps`, and at the end.
        model: a loaded model; None: `config.model` is loaded.
        place: rank and world size; None: from the launcher's environment.
        progress: called with (steps done, steps in total).

    Raises:
        IsolationError, ConfigError: as `train`.
        ForeignArtefactError: the checkpoint is of another stream or number of ranks.
        SampleError: a sample cannot be encoded.
    """
    place = place or world()
    stream = stream_of(config, source, template, place)
    return train(config, None, stream, template, val=val, model=model, place=place, progress=progress)
