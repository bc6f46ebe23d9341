"""Training with a configuration, on packs of every kind: the step from packs to a trained model.

    result = train(config, plan, source, template, lengths=lengths, val=(val_plan, val_source, None))
    result = train(config, open_packs("export", template.encode))           # exported
    result = train(config, LazyShardedDataset("packed"))                    # growing
    result = train(config)                                                  # the directory that it names
    result = train(config, StreamingPackedDataset(source, template, …))     # a stream, or by tokens
    result = train(config, samples, template)                               # samples of a stream
    result.losses, result.metrics, result.model

Before the first step the setup is checked (`attention`), and the isolation proof runs on the
shortest samples of the first two packs (`training.proof`): a model nobody has shown to isolate may
only train after it passed. What the run writes lies in `training.output_dir`: `train_log.jsonl`
(every logged row), `failed.jsonl` (samples zeroed at fetch), `model/`, and Trainer's checkpoints.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..collate import PaddingFreeCollator
from ..data import EncodeCache, PackedDataset
from ..errors import ConfigError, InputError
from ..files import make_folder, publish_json, reading
from ..packs.source import is_packs, is_sized, pack_source
from ..planning.align import AlignedPlan
from ..planning.epoch_order import seed_in_use
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..template import dummy_samples
from ..workers import start_early
from ..world import World, world
from .arguments import compile_options, refuse_auxiliary_loss, training_arguments
from .attention import check_attention
from .compiled import compile_layers
from .config import RunConfig
from .loss import bare_model, plain_head
from .model import load_model, no_progress_bars
from .opened import check_beginning, opened, steps_of, warn_of_another_template
from .proof import IsolationReport
from .resume import CONFIG, changed_settings, checkpoint_of, load_position
from .runtime import Runtime, accumulation_of, announce_steps, balance_of, epoch_plans
from .start_up import prove_before_training
from .trace import LOG, LogFile, follow_losses

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Towers that a pack leaves idle: `training.dummy_media` puts a weightless medium into such rows
# --------------------------------------------------------------------------------------------
# Without it, ranks that train a tower wait for the one whose pack has no image (DDP, FSDP, ZeRO), for ever or
# until DDP refuses the next step. The dummy is made by the run's own processor, so every family has one.
def keep_towers_busy(trainer: Any, wanted: bool, template: Any) -> None:
    """Give a PackTrainer a collator with dummies of every tower, where wanted.

    Args:
        trainer: the trainer, before training.
        wanted: `training.dummy_media`.
        template: an `HFTemplate` of a family with media.

    A template without media has no towers: then the option has no effect, and that is told.
    """
    if not wanted:
        return
    family = getattr(template, "family", None)
    if family is None or not family.towers:
        name = type(template).__name__ if family is None else f"family {family.name}"
        logger.warning("training.dummy_media has no effect: %s has no media", name)
        return
    dummies = dummy_samples(template)
    trainer.packs_collator = PaddingFreeCollator(bare_model(trainer.model), dummy_media=dummies)
    tokens = [len(sample["input_ids"]) for sample in dummies]
    logger.info("rows without media get a weightless one of %s tokens", tokens)


# --------------------------------------------------------------------------------------------
# `training.encode_cache`: the packs of the training plan are encoded before the first step
# --------------------------------------------------------------------------------------------
# Every rank encodes its share of the chunks and reads those of all ranks; what another rank has not written
# yet is encoded as ever, so no rank waits for another here. A later run with the same plan and template finds
# everything encoded. The validation plan is read once an evaluation and is not cached.
def _encode_ahead(
    config: RunConfig, plan: PackPlan, source: Any, template: Any, lengths: Any, place: World
) -> EncodeCache | None:
    """The filled cache of the run, or None without `training.encode_cache`.

    Raises:
        ForeignArtefactError: the folder holds packs of another plan or template.
    """
    folder = config.training.encode_cache
    if folder is None:
        return None
    key = {"template": _template_key(template), "source": getattr(source, "fingerprint", None)}
    cache = EncodeCache(folder, plan, key=key, of_media=getattr(lengths, "media", None))
    plain = PackedDataset(plan, source, template.encode, lengths=lengths)
    made = cache.fill(plain, share=(place.rank, place.size), workers=config.training.encode_cache_workers)
    if place.is_writer:
        logger.info("encode cache %s: %d of %d chunks encoded by this rank", folder, made, cache.chunks)
    return cache


def _template_key(template: Any) -> Any:
    """What decides the encoding, as plain JSON; the class alone where a template does not say."""
    config = getattr(template, "config", None)
    return type(template).__name__ if config is None else config() if callable(config) else config


# --------------------------------------------------------------------------------------------
# Training with a configuration, on packs of every kind: the step from packs to a trained model
# --------------------------------------------------------------------------------------------
#: Kinds of data that a run opens itself.
_OPENED = ("growing", "stream", "token_budget")

Progress = Callable[[int, int], None]
Validation = tuple[PackPlan, Any, Any]
Validations = Validation | dict[str, Validation]


@dataclass
class TrainResult:
    """What a run leaves.

    Attributes:
        model: the trained model.
        history: every row that was logged, in order.
        metrics: `train_loss` (mean over steps), `steps`, `unsupervised_steps` (if any), the last evaluation.
        proof: report of the start-up proof, or None when it did not run.
        proven: comparisons of it; of a run that had ended before, those of then; None: it did not run.
        consumed: what all ranks consumed, see `consumed.Consumed`; None: an older checkpoint did not know.
        log_file: the same rows as JSON lines.
    """

    model: Any
    history: list[dict[str, Any]]
    metrics: dict[str, float]
    proof: IsolationReport | None
    proven: int | None
    consumed: dict[str, Any] | None
    log_file: Path

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The loss curve: (step, mean token loss since the row before)."""
        return [(int(row["step"]), float(row["loss"])) for row in self.history if "loss" in row]


def train(
    config: RunConfig,
    plan: Any = None,
    source: Any = None,
    template: Any = None,
    *,
    lengths: Any = None,
    val: Validations | None = None,
    val_template: Any = None,
    model: Any = None,
    place: World | None = None,
    runtime: Runtime | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainResult:
    """Train on packs.

    Args:
        config: the run's configuration.
        plan: plan of `source`; or what `source` is without a plan.
        source: samples of the plan by id; without a plan a dataset of packs (of an export, a growing
            directory, a stream) or a `PackSource`, the samples of the stream that `config` names, or None:
            the growing directory that it names.
        template: `extend.Template`; its `encode` makes the encoded samples of a plan, a stream, and `val`.
        lengths: the plan's Lengths, for per-sample checks at fetch.
        val: (plan, source, lengths or None) of the validation samples, or several by name; evaluated as
            `training.eval_strategy` says (packs of a plan: after every epoch), and at the end.
        val_template: encodes the validation samples; None: `template`.
        model: a loaded model; None: `config.model` is loaded.
        place: rank and world size; None: from the launcher's environment.
        runtime: the resolved runtime; its figures are the first row that is logged.
        progress: called with (steps done, steps in total).
        callbacks: transformers' TrainerCallbacks.

    Raises:
        IsolationError: the setup would let packed samples read each other.
        ConfigError: the configuration cannot be carried out.
        ForeignArtefactError: the checkpoint is of other packs.
        DriftError, SampleError, WaitTimeoutError, FormatError: from fetching samples.
    """
    from .trainer import EarlyStop, PackTrainer  # transformers' Trainer loads only when something trains

    place = place or world()
    if plan is not None and not isinstance(plan, PackPlan):
        plan, source, template = None, plan, source if template is None else template
    config = config.evaluated(val is not None)
    folder = Path(config.training.output_dir)
    if plan is None:
        packs, template, accumulation = unplanned_packs(config, source, template, place)
        resumed, begun = _taken_up(packs, config)
        if packs.kind == "growing" and val is not None and place.is_writer:
            warn_of_another_template(packs, val_template or template)
    else:
        packs, accumulation, resumed, begun = None, accumulation_of(config, plan, place.size), None, 0
    val_data = _validation_data(config, val, val_template or template, place)
    if config.training.trainer.get("dataloader_num_workers"):
        start_early(template, val_template)  # while the model loads
    model = _loaded(config, template) if model is None else model
    setup = check_attention(bare_model(model))
    logger.info("attention: %s", setup.why)
    refuse_auxiliary_loss(bare_model(model).config)
    make_folder(folder)
    if packs is None:
        packs = planned_packs(config, plan, source, template, lengths, place, accumulation)
        resumed = _checkpoint(packs, config)
    log_file = folder / LOG
    if place.is_writer and resumed is not None:
        changed_settings(config.to_dict(), folder)
    arguments = _arguments(config, packs, accumulation, val_data is not None)
    if arguments.max_steps <= 0 and packs.kind == "growing":
        arguments.max_steps = steps_of(packs, begun, accumulation, resumed)
    if (options := compile_options(config)) is not None:
        compile_layers(model, **options)
    trainer = PackTrainer(
        model,
        arguments,
        packs,
        val_data,
        fused=plain_head(bare_model(model)) is not None,
        prove=config.training.proof,
        pad_to_length=config.row_length,
        log=LogFile(log_file, progress, lambda: publish_json(folder / CONFIG, config.to_dict())),
        banner=None if runtime is None else runtime.row(),
    )
    patience = config.training.early_stopping_patience
    stop = () if patience is None else [EarlyStop(patience, config.training.early_stopping_threshold)]
    for callback in (*stop, *callbacks):
        trainer.add_callback(callback)
    _refuse_unproven(config, trainer, model, setup)
    keep_towers_busy(trainer, config.training.dummy_media, template)
    follow_losses(trainer, config, getattr(packs, "samples", None))
    return _run(trainer, val_template or template, resumed, folder, log_file)


def planned_packs(
    config: RunConfig,
    plan: PackPlan,
    source: Any,
    template: Any,
    lengths: Any,
    place: World,
    accumulation: int,
    *,
    ahead: bool = True,
) -> Any:
    """The packs of a plan as the configuration orders them, and where they would go on.

    Args:
        ahead: fill `data.encode_cache`, where it is set.

    Raises:
        ForeignArtefactError: with `ahead` false: the checkpoint to resume from is of other packs.
    """
    aligned = plan.align(place.size, config.training.dataloader_drop_last)
    if place.is_writer:
        announce_steps(
            aligned, accumulation, config.training.seed, packing=getattr(config.data, "packing", True)
        )
    plans = epoch_plans(config, plan, lengths)
    cache = _encode_ahead(config, plan, source, template, lengths, place) if ahead else None
    data = _dataset(config, aligned, source, template, lengths, plans, cache)
    packs = pack_source(
        data, rank=place.rank, world_size=place.size, **_order_of(config, accumulation, plans)
    )
    if not ahead:
        load_position(packs, _checkpoint(packs, config))
    return packs


def _refuse_unproven(config: RunConfig, trainer: Any, model: Any, setup: Any) -> None:
    """Where the proof is switched off, the set-up has to be known to keep packs apart."""
    if not config.training.proof:
        known = setup.proven or all(len(pack) < 2 for pack in trainer.packs_first())
        prove_before_training(model, trainer.packs_first, proof=False, known=known)


def _checkpoint(packs: Any, config: RunConfig) -> str | None:
    """The checkpoint of these packs that the run goes on from."""
    asked = config.training.trainer.get("resume_from_checkpoint")
    return checkpoint_of(packs, asked, config.training.output_dir)


def _taken_up(packs: Any, config: RunConfig) -> tuple[str | None, int]:
    """Move packs without a plan to where the run goes on: (its checkpoint, steps before its beginning)."""
    if packs.kind == "growing":
        packs.mark_in(Path(config.training.output_dir))
    resumed = _checkpoint(packs, config)
    load_position(packs, resumed)
    if packs.kind != "growing":
        return resumed, 0
    start = config.training.sharded_lazy_start
    return resumed, check_beginning(packs, resumed, start, getattr(packs, "directory", "this stream"))


def _arguments(config: RunConfig, packs: Any, accumulation: int, validates: bool) -> Any:
    by_epochs = packs.kind in ("planned", "exported")
    steps = -(-len(packs) // accumulation) if is_sized(packs) else None
    return training_arguments(config, accumulation, has_eval=by_epochs and validates, steps=steps)


def _order_of(config: RunConfig, accumulation: int, replan: Any = None) -> dict[str, Any]:
    """How `pack_source` orders packs: shuffled by the seed of the run, or in plan order."""
    shuffle, balance = bool(getattr(config.data, "shuffle", True)), balance_of(config, accumulation)
    seed = seed_in_use(config.training.seed, shuffle, balance, replan)
    order = {"shuffle": shuffle, "balance": balance, "grad_accum": accumulation, "replan": replan}
    return {"seed": seed, **order}


def unplanned_packs(config: RunConfig, data: Any, template: Any, place: World) -> tuple[Any, Any, int]:
    """Packs that no plan of the run makes, the template of their samples, and micro steps of a step.

    Args:
        data: as `train` takes it without a plan.
    """
    if config.data.kind in _OPENED and not is_packs(data):
        data, template = opened(config, data, template, place)
    if data is None:
        raise InputError("nothing to train on", hint="pass a plan with its samples, or a dataset of packs")
    plan = getattr(data, "plan", None)
    accumulation = (
        config.accumulation(place.size) if plan is None else accumulation_of(config, plan, place.size)
    )
    if hasattr(data, "aligned") and data.aligned is None:
        data = copy.copy(data)
        data.aligned = data.plan.align(place.size, config.training.dataloader_drop_last)
    source = pack_source(data, rank=place.rank, world_size=place.size, **_order_of(config, accumulation))
    return source, template, accumulation


def _loaded(config: RunConfig, template: Any) -> Any:
    return load_model(
        config.model_name,
        attn=config.model.attn,
        dtype=config.model.dtype,
        processor=getattr(template, "processor", None),
        seed=config.training.seed,
    )


def _dataset(
    config: RunConfig,
    aligned: AlignedPlan,
    source: Any,
    template: Any,
    lengths: Any,
    replan: EpochPlans | None = None,
    cache: EncodeCache | None = None,
) -> PackedDataset:
    return PackedDataset(
        aligned,
        source,
        template.encode,
        lengths=lengths,
        on_error=config.training.on_error,
        max_skip_fraction=getattr(config.data, "max_skip_fraction", None),
        ledger_file=Path(config.training.output_dir) / "failed.jsonl",
        repeat_loss=config.training.repeat_loss,
        replan=replan,
        cache=cache,
    )


def _validation_data(
    config: RunConfig, val: Validations | None, template: Any, place: World
) -> PackedDataset | dict[str, PackedDataset] | None:
    """What `PackTrainer.evaluate` reads on any rank of `place.size`."""
    if val is None:
        return None
    sets = val if isinstance(val, dict) else {"": val}
    data = {
        name: _dataset(config, plan.align(place.size), source, template, lengths)
        for name, (plan, source, lengths) in sets.items()
    }
    return data if isinstance(val, dict) else data[""]


def _last_evaluation(trainer: Any) -> dict[str, float]:
    """Metrics of the weights that are kept: those of the last step, or the best ones.

    Evaluates where that has not been done. Empty without validation samples.
    """
    if trainer.eval_dataset is None:
        return {}
    state = trainer.state
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    kept = state.best_global_step if best else state.global_step
    rows = [row for row in state.log_history if row.get("step") == kept]
    last = {key: value for row in rows for key, value in row.items()}
    found = last if any(key.startswith("eval_") for key in last) else trainer.evaluate()
    return {key: value for key, value in found.items() if key.startswith("eval_")}


def _run(trainer: Any, template: Any, resumed: str | None, folder: Path, log_file: Path) -> TrainResult:
    """Train, evaluate the end, keep the model beside its processor, and tell the result."""
    metrics: dict[str, float] = {}
    if resumed is not None and (done := _finished(trainer, resumed)):
        logger.warning("%s is the end of this run, step %d: nothing is trained", resumed, done)
    else:
        metrics["train_loss"] = float(trainer.train(resume_from_checkpoint=resumed).training_loss)
    steps = trainer.state.global_step
    metrics["steps"] = steps
    if trainer.unsupervised_steps:
        metrics["unsupervised_steps"] = trainer.unsupervised_steps
    metrics.update(_last_evaluation(trainer))
    if trainer.args.save_strategy.value != "no":
        _save(trainer, template, folder / "model")
    bare = bare_model(trainer.model)
    rows = [dict(row) for row in trainer.state.log_history]
    return TrainResult(
        bare, rows, metrics, trainer.proof, trainer.packs_proven, trainer.packs_consumed(), log_file
    )


def _finished(trainer: Any, resumed: str) -> int | None:
    """The last step of a run that ends with the checkpoint `resumed`, which is then loaded; None: it goes on.

    Trainer itself would train one step more, or tell a loss of 0.

    Raises:
        ForeignArtefactError: the checkpoint is of other packs.
    """
    from transformers import TrainerState

    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:  # they load while training begins
        return None
    path = Path(resumed) / "trainer_state.json"
    if not load_position(trainer.packs, resumed) or not path.is_file():
        return None
    with reading(path, "the state of a trainer", "resume from another checkpoint"):
        state = TrainerState.load_from_json(str(path))
    last, packs = trainer.args.max_steps, trainer.packs
    if last <= 0 and is_sized(packs):
        steps = -(-len(packs) // trainer.args.gradient_accumulation_steps)
        last = math.ceil(trainer.args.num_train_epochs * steps)
    if not (0 < last <= state.global_step or _stopped_early(trainer, state)):
        return None
    trainer._load_from_checkpoint(resumed)
    trainer.packs_recall(resumed)
    trainer.state = state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
        best = Path(resumed).parent / Path(state.best_model_checkpoint).name  # the folder may have moved
        if not best.is_dir():
            raise ConfigError(
                f"the best checkpoint of this run is gone: {best}", hint="training.resume: null begins anew"
            )
        state.best_model_checkpoint = str(best)
        trainer._load_best_model()
    return int(state.global_step)


def _stopped_early(trainer: Any, state: Any) -> bool:
    """Did the run of this state end because its metric got no better?"""
    from .trainer import EarlyStop

    held = state.stateful_callbacks.get(EarlyStop.__name__)
    if not isinstance(held, dict):
        return False
    waited = held["attributes"]["early_stopping_patience_counter"]
    stops = [one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStop)]
    return any(waited >= one.early_stopping_patience for one in stops)


def _save(trainer: Any, template: Any, folder: Path) -> None:
    """The model in Hugging Face's layout, with the processor beside it."""
    with no_progress_bars():
        trainer.save_model(str(folder))
    processor: Any = getattr(template, "processor", None)
    if trainer.is_world_process_zero() and hasattr(processor, "save_pretrained"):
        processor.save_pretrained(str(folder))
