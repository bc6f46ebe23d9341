"""Training on a stream (`training.packing_mode: streaming`): samples are encoded and packed as they come.

Loss, checks of every batch and the isolation proof are those of a static plan (`PackTrainer`). The stream
begins its next epoch where one ends and `max_steps` ends the run, so ranks take equal steps. Each rank saves
where it stands beside every checkpoint (`stream.<rank>.json`); a resume reads the samples that waited again
and goes on with the next pack. With `dyn_bsz` a micro batch takes `micro_batch_size * max_length` tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import files
from ..data import StreamingPackedDataset, TokenBudgetDataset
from ..errors import ConfigError
from ..world import World, world
from .attention import check_attention
from .config import RunConfig
from .eval_keys import check_evaluates
from .loss import bare_model, plain_head
from .sft import TrainResult, Validations, _arguments, _loaded, _validation_data
from .trace import follow_losses
from .unplanned import UnplannedTrainer, asked_checkpoint, trained

from transformers import TrainerCallback  # isort: skip

__all__ = ["StreamTrainer", "stream_of", "train_streaming"]

logger = logging.getLogger(__name__)


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
    """Train on a stream of samples.

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
    check_evaluates(config, val is not None)
    stream = stream_of(config, source, template, place)
    resumed = _checkpoint(config)
    if resumed is not None:
        stream.load_state_dict(files.read_json(_state_file(resumed, place.rank)))
    model = _loaded(config, template) if model is None else model
    setup = check_attention(bare_model(model))
    logger.info("attention: %s", setup.why)
    folder = Path(config.training.output_dir)
    files.make_folder(folder)
    first = _first_packs(config, source, template)
    log_file = folder / "train_log.jsonl"
    if place.is_writer and resumed is None:
        files.remove(log_file)
    arguments = _arguments(
        config, config.accumulation(place.size), has_eval=False
    )  # its default is the end alone
    arguments.ignore_data_skip = True  # the stream stands where it was saved
    trainer = StreamTrainer(
        model,
        arguments,
        stream,
        stream.spec.pack_length,
        _Stand(stream, place.rank),
        eval_data=_validation_data(config, val, template, place),
        rank=place.rank,
        fused=plain_head(bare_model(model)) is not None,
        log_file=log_file,
        progress=progress,
    )
    follow_losses(trainer, config, None)
    trainer.prove_first(
        lambda: first,
        proof=config.training.proof,
        known=setup.proven or all(len(pack) < 2 for pack in first),
    )
    return trained(trainer, template, resumed, log_file)


class StreamTrainer(UnplannedTrainer):
    """UnplannedTrainer over a stream."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.stream,
            batch_size=1,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )


class _Stand(TrainerCallback):  # type: ignore[misc]
    """Saves where each rank's stream stands with every checkpoint."""

    def __init__(self, stream: StreamingPackedDataset, rank: int) -> None:
        self.stream, self.rank = stream, rank

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files.make_folder(folder)
        files.publish_json(_state_file(folder, self.rank), self.stream.state_dict())


def _first_packs(config: RunConfig, source: Any, template: Any) -> list[list[dict[str, Any]]]:
    """Two packs for the proof, read apart, so that the stream itself does not move."""
    stream = stream_of(config, source, template, World(0, 1))
    stream.encode_workers = 0
    return list(islice(iter(stream), 2))


def _state_file(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / f"stream.{rank}.json"


def _checkpoint(config: RunConfig) -> str | None:
    """The checkpoint to resume from.

    Raises:
        ConfigError: there is none, or it holds no state of a stream.
    """
    asked = asked_checkpoint(config)
    if asked is None:
        return None
    place = world()
    if config.training.trainer["resume_from_checkpoint"] in (True, "True"):
        asked = _last_whole(config.training.output_dir, place.size) or asked
    if not _state_file(asked, place.rank).is_file():
        held = len(list(Path(asked).glob("stream.*.json")))
        what = f"was saved by {held} ranks" if held else "holds no state of a stream"
        raise ConfigError(
            f"{asked} {what}, this is rank {place.rank} of {place.size}",
            hint="resume a stream with as many ranks as saved it: each packs its own part",
        )
    return asked


def _last_whole(folder: str, ranks: int) -> str | None:
    """The last checkpoint that every rank finished: a run that was killed, or found its disk full, in the
    middle of one leaves a part of it. The ranks' states are written last."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        parts = [path / "trainer_state.json", *(_state_file(path, rank) for rank in range(ranks))]
        missing = [part.name for part in parts if not part.is_file()]
        if not missing:
            return str(path)
        logger.warning("%s has no %s: it was not finished, and is passed over", path, ", ".join(missing))
    return None
