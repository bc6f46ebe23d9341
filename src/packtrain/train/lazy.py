"""Training on a directory of chunks that may still grow: the packs come as they are, each rank from its own.

Nothing is measured, planned or encoded here. The loss, the checks of every batch and the isolation proof are
those of a static plan (`PackTrainer`). A checkpoint holds the cursor (`stream.json`); when it is saved, every
rank acknowledges what it covers, which is what lets the producer remove chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import files
from ..data import LazyShardedDataset, PackedDataset
from ..errors import ConfigError
from ..world import World, world
from .attention import check_attention
from .config import RunConfig
from .eval_keys import check_evaluates
from .loss import bare_model, plain_head
from .model import load_model
from .sft import TrainResult, Validations, _arguments, _validation_data
from .trace import follow_losses
from .unplanned import UnplannedTrainer, asked_checkpoint, trained

from transformers import TrainerCallback  # isort: skip

__all__ = ["STATE_FILE", "LazyTrainer", "train_lazy"]

logger = logging.getLogger(__name__)

STATE_FILE = "stream.json"


def train_lazy(
    config: RunConfig,
    *,
    val: Validations | None = None,
    val_template: Any = None,
    place: World | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TrainResult:
    """Train on `custom.dataset` as its chunks come.

    Args:
        config: the run's configuration, with `training.sharded_lazy`.
        val: as of `sft.train`; evaluated every `training.eval_steps`, and at the end.
        val_template: encodes the validation samples; a warning tells when the packs were made by another.
            None: the configuration's.
        place: rank and world size; None: from the launcher's environment.
        progress: called with (steps done, steps in total).

    Raises:
        ConfigError: `max_steps` is not set and the stream has no end yet.
        WaitTimeoutError, FormatError: from reading; see `LazyShardedDataset`.
    """
    place = place or world()
    check_evaluates(config, val is not None)
    template = _template(config)
    dataset = LazyShardedDataset(
        str(config.custom.dataset),
        place.rank,
        place.size,
        config.training.sharded_lazy_max_wait_s,
        config.training.sharded_lazy_poll_s,
        start=config.training.sharded_lazy_start or "acknowledged",
        encode=None if template is None else template.encode,
    )
    accumulation = config.accumulation(place.size)
    resumed = _checkpoint(config)
    if resumed is not None:
        dataset.load_state_dict(files.read_json(Path(resumed) / STATE_FILE))
    begun = _begun(config, dataset, resumed)
    eval_data = _evaluated(config, val, val_template or template, dataset, place)
    if config.model.name_or_path is None:
        raise ConfigError("no model is named", hint="set model.name_or_path")
    model = load_model(
        config.model.name_or_path,
        attn=config.model.attn,
        dtype=config.model.dtype,
        processor=None if template is None else template.processor,
        seed=config.training.seed,
    )
    setup = check_attention(bare_model(model))
    logger.info("attention: %s", setup.why)
    folder = Path(config.training.output_dir)
    files.make_folder(folder)
    first = [pack for pack in dataset.peek(begun, 2) if not pack.is_filler]
    log_file = folder / "train_log.jsonl"
    if place.is_writer and resumed is None:
        files.remove(log_file)
    arguments = _arguments(config, accumulation, has_eval=False)  # its default is the end alone
    arguments.ignore_data_skip = True  # the cursor skips, without reading
    arguments.max_steps = _steps(config, dataset, begun, accumulation, resumed)
    trainer = LazyTrainer(
        model,
        arguments,
        dataset,
        begun,
        eval_data=eval_data,
        rank=place.rank,
        fused=plain_head(bare_model(model)) is not None,
        log_file=log_file,
        progress=progress,
    )
    follow_losses(trainer, config, None)
    trainer.prove_first(
        lambda: [pack.members() for pack in first],
        proof=config.training.proof,
        known=setup.proven or all(len(pack["lengths"]) < 2 for pack in first),
    )
    trainer.check_same_stream()
    return trained(trainer, template, resumed, log_file)


class LazyTrainer(UnplannedTrainer):
    """UnplannedTrainer over a LazyShardedDataset.

    Args:
        begun: micro steps of the stream that were consumed before this run.
        options: further arguments of `UnplannedTrainer`.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        dataset: LazyShardedDataset,
        begun: int,
        **options: Any,
    ) -> None:
        self.cursor = _Cursor(dataset, begun)
        super().__init__(model, args, dataset, int(dataset.config["pack_length"]), self.cursor, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        workers = self.args.dataloader_num_workers
        return DataLoader(
            self.stream.stream(),
            batch_size=1,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            multiprocessing_context="spawn" if workers else None,
        )

    def check_same_stream(self) -> None:
        """Every rank must read the same stream from the same slot (one collective).

        Raises:
            ChecksumError: the ranks differ.
        """
        state = self.stream.state_dict()
        named = f"{state['stream']} {state['start']} {state['step']} {state['order_world']}"
        self.check_equal(
            f"read different streams or from different slots: this one {named}",
            "give all ranks the same custom.dataset and the same checkpoint",
        )


class _Cursor(TrainerCallback):  # type: ignore[misc]
    """Saves the cursor with checkpoints, acknowledges what they cover, and ends with the stream."""

    def __init__(self, dataset: LazyShardedDataset, begun: int) -> None:
        self.dataset, self.begun = dataset, begun
        self.first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first = state.global_step

    def consumed(self, args: Any, state: Any) -> int:
        """Micro steps of the stream that are covered by the steps so far."""
        taken = int(state.global_step) - self.first
        step = self.begun + taken * int(args.gradient_accumulation_steps)
        return min(step, self.dataset.steps) if self.dataset.has_ended else step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        reached = self.consumed(args, state)
        if state.is_world_process_zero and folder.is_dir():
            files.publish_json(folder / STATE_FILE, self.dataset.at_step(reached))
        self.dataset.acknowledge(reached)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < state.max_steps:
            logger.warning(
                "the stream ended after step %d of max_steps %d: training ends with it",
                state.global_step,
                state.max_steps,
            )
        control.should_training_stop = True


def _template(config: RunConfig) -> Any:
    """The processor, where one is named: tiny models and chunks with media as bytes need it."""
    if config.template.processor is None:
        return None
    from ..template import HFTemplate
    from ..testing.demo import is_demo, resolve_demo

    name = config.template.processor
    return HFTemplate(str(resolve_demo(name)) if is_demo(name) else name, system=config.template.system)


def _evaluated(
    config: RunConfig, val: Validations | None, template: Any, dataset: LazyShardedDataset, place: World
) -> PackedDataset | dict[str, PackedDataset] | None:
    """The validation samples, encoded as those of the packs were.

    Raises:
        ConfigError: nothing says how they are encoded.
    """
    if val is None:
        return None
    if template is None:
        raise ConfigError(
            "validation samples are encoded while training, and no processor is named",
            hint="set template.processor to what packtrain produce was given",
        )
    made = dataset.config.get("template")
    if place.is_writer and made != files.digest_json(template.config()):
        logger.warning(
            "%s was packed with another template than that of the validation samples: their losses are of "
            "different inputs; compare template.* with the options of packtrain produce",
            dataset.directory,
        )
    return _validation_data(config, val, template, place)


def _checkpoint(config: RunConfig) -> str | None:
    """The checkpoint to resume from.

    Raises:
        ConfigError: it holds no cursor.
    """
    asked = asked_checkpoint(config)
    if asked is None:
        return None
    if not (Path(asked) / STATE_FILE).is_file():
        raise ConfigError(
            f"{asked} holds no {STATE_FILE}: it is no checkpoint of a growing directory",
            hint="name a checkpoint that was saved with training.sharded_lazy",
        )
    return asked


def _begun(config: RunConfig, dataset: LazyShardedDataset, resumed: str | None) -> int:
    """Micro steps before this run.

    Raises:
        ConfigError: an earlier run used packs of this stream, and nobody said what to make of that.
    """
    state = dataset.state_dict()
    if state["slots"] and resumed is None and config.training.sharded_lazy_start is None:
        raise ConfigError(
            f"an earlier run has used {state['slots']:,} slots of {config.custom.dataset}, and this one has "
            "no checkpoint of it",
            hint="set resume_from_checkpoint: true, or sharded_lazy_start: beginning (all packs again) or "
            "acknowledged (only those behind)",
        )
    return int(state["step"])


def _steps(
    config: RunConfig, dataset: LazyShardedDataset, begun: int, accumulation: int, resumed: str | None
) -> int:
    """Optimizer steps of the run, those before the checkpoint included."""
    if config.training.max_steps > 0:
        return config.training.max_steps
    if not dataset.has_ended:
        raise ConfigError(
            "training.max_steps is not set, and the stream has no end yet",
            hint="set max_steps: the learning rate needs to know how long training is",
        )
    done = 0 if resumed is None else int(files.read_json(Path(resumed) / "trainer_state.json")["global_step"])
    return done + -(-(dataset.steps - begun) // accumulation)
