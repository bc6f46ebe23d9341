"""transformers Trainer: `pack(trainer, pack_length=4096)` and the script's own Trainer trains on packs.

    from packtrain.hosts.transformers import pack
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate, …)
    pack(trainer, pack_length=4096)                     # rows: measured, planned and encoded by the collator
    pack(trainer, source=open_packs("export", encode))  # packs of any kind; or they are the train_dataset
    trainer.train()

The object stays the user's: its class becomes a subclass of its own class, so overridden methods, callbacks,
optimizers and PEFT stay. Samples of rows are encoded by the script's own collator, one at a time. What
changes: the training loader and the loader of evaluations give packs; each batch carries `use_cache=False`
and restarting positions and no mask, and is checked before it is used; a step without supervised tokens has
loss 0; `eval_loss` is the mean over tokens; checkpoints hold where the packs stand, and a resume on other
packs is refused.

The loss stays Trainer's: it divides the sum of the token losses by the supervised tokens of the whole step,
over accumulation and ranks. Settings under which it would not are refused. Where it is transformers' own loss
of a causal model, the head computes it without building the logits of the row: less memory, the same value.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import files
from ..collate import PackBatch
from ..data import PackedDataset
from ..errors import ConfigError, FormatError, PacktrainError, SampleError, counted
from ..packs.source import is_packs, pack_source
from ..pipeline.inputs import lengths_of_plan
from ..pipeline.page import Report
from ..pipeline.run import finish_run
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.epoch_order import seed_in_use
from ..planning.packplan import PackPlan
from ..planning.spec import PlanSpec
from ..remote.places import typed
from ..template import ensure_torchvision
from ..train.config import load_config
from ..train.early import check_match
from ..train.live import is_sharded
from ..train.loss import bare_model, first_of, fused_head, step_share, token_loss_sum
from ..train.runtime import resolve_runtime
from ..train.trace import LOG, LogFile, plain
from ..version import __version__
from ..world import World
from ._checks import (
    check_loss,
    check_source,
    check_trainer,
    indexable,
    loss_is_the_heads,
    need_trainer,
    own_evaluation,
    own_loss,
    unchanged_on_failure,
)
from ._encode import HostEncoder
from ._plan import PLACE, pack_rows, say
from ._rows import ChatReader, Reads, columns_of, unread_rows

ensure_torchvision()  # transformers imports torchvision with its Trainer

from transformers import TrainerCallback  # noqa: E402

from ..train.mixin import PackingMixin, check_isolation  # noqa: E402

__all__ = ["HostMixin", "PackingMixin", "pack"]

logger = logging.getLogger(__name__)


def pack(
    trainer: Any,
    pack_length: int | None = None,
    *,
    source: Any = None,
    plan: Any = None,
    measure: Any = None,
    samples_per_step: int | str | None = None,
    eval_packing: bool | None = None,
    balance: str | None = "step",
    audited: int = 32,
    timeout_s: float = 7200,
    ignore_keys: Sequence[str] = (),
    allow_remote: bool = False,
    mixin: type[HostMixin] | None = None,
    **options: Any,
) -> Any:
    """Let `trainer` train on packs.

    Args:
        trainer: a transformers `Trainer` (or subclass), complete, not yet trained.
        pack_length: cap of a pack in tokens.
        source: packs that are made already: a dataset of an export (`open_packs`), a growing directory
            (`LazyShardedDataset`), a stream (`StreamingPackedDataset`, `TokenBudgetDataset`), a plan
            (`PackedDataset`), or a `PackSource`. None: the trainer's `train_dataset`, where it is one of
            these, else its rows are measured and planned.
        plan: a plan (or its folder) made before, instead of `pack_length`.
        measure: how lengths are found; see `hosts._rows.measure_rows`. None: by what the rows hold.
        samples_per_step: None: a step is `gradient_accumulation_steps` packs a rank. "same": a step holds
            the samples it held before (batch size x accumulation x ranks), or a number: so many; then
            accumulation follows from the plan, and losses equal those of unpacked training.
        eval_packing: True: pack the evaluation sets too; False: they are evaluated as before. None: packed,
            unless the trainer has `compute_metrics`, which expects its own rows.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        audited: rows encoded for real and compared with their measured length before planning.
        timeout_s: how long the other ranks wait for rank 0.
        ignore_keys: keys of rows, messages and parts that do not matter: a key that changes training and that
            nothing reads leaves its row out, and stops where more than 1 % of the rows hold one.
        allow_remote: fetch media that rows name by a URL, to measure them; False: such a row is encoded by
            your collator to be measured, as any row that is no chat.
        mixin: what is put before the trainer's class; other hosts give theirs.
        options: further keyword arguments of `packtrain.plan` (`packer`, `long_samples`, `limits`, …).

    Returns:
        The same trainer.

    Raises:
        ConfigError: a setting of the trainer that packs cannot keep, with the reason; or the processing class
            is not one of the model.
        IsolationError: packed samples would read each other in this model.
    """
    need_trainer(trainer)
    if isinstance(trainer, PackingMixin):
        raise ConfigError("this trainer packs already", hint="call pack(trainer, …) once")
    if source is None and is_packs(trainer.train_dataset):
        source = trainer.train_dataset
    PlanSpec.check_names(options)
    planned = source is None  # packs that are made already were encoded by another processor
    with unchanged_on_failure(trainer):
        check_trainer(trainer, samples_per_step, has_packs=not planned)
        if planned:
            bare = bare_model(trainer.model)
            check_match(bare.config, getattr(trainer, "processing_class", None))
            check_isolation(bare)
        else:
            given = {"pack_length": pack_length, "plan": plan, "samples_per_step": samples_per_step}
            given |= {**options, "ignore_keys": ignore_keys or None, "allow_remote": allow_remote or None}
            named = [name for name, value in given.items() if value is not None]
            if named:
                raise ConfigError(
                    f"{', '.join(named)} cannot be kept: the packs of the source are made",
                    hint="leave it out, or plan the rows without source=",
                )
        args = trainer.args
        trainer.__class__ = type(f"Packed{type(trainer).__name__}", (mixin or HostMixin, type(trainer)), {})
        reads = {"ignore_keys": list(ignore_keys), "allow_remote": allow_remote}
        reader: ChatReader = trainer.packs_reader()
        trainer.packs_made = {
            "folder": Path(args.output_dir),
            "place": World(args.process_index, args.world_size),
            "reader": replace(reader, source={**reader.source, **reads}),
            "measure": measure if planned else None,
            "audited": audited,
            "timeout_s": timeout_s,
        }
        in_order = str(getattr(args, "train_sampling_strategy", "random")) == "sequential"
        if planned:
            source = _planned(trainer, pack_length, plan, samples_per_step, in_order, options)
        _fit_steps(trainer, getattr(source, "plan", None))
        packs = trainer.packs_of(source, balance, shuffle=not in_order)
        check_source(packs, args)
        trainer.packs_evaluates(eval_packing, {"pack_length": packs.pack_length, **options})
        trainer.packs_start(packs)
        trainer.packs_prove()
        if planned and trainer.packs_made["place"].is_writer:
            _tell_step(args, source.plan)
    return trainer


def _planned(
    trainer: Any, pack_length: int | None, plan: Any, per_step: Any, in_order: bool, options: dict[str, Any]
) -> PackedDataset:
    """The rows of the trainer as packs."""
    args = trainer.args
    if plan is None and pack_length is None:
        raise ConfigError("neither pack_length nor plan is given", hint="pass pack_length=4096, for example")
    trainer.packs_given = Path(plan) if isinstance(plan, (str, Path)) else None
    wanted = {"pack_length": pack_length, **options}
    if per_step:
        same = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        wanted |= {
            "samples_per_step": same if per_step == "same" else per_step,
            "packs_multiple": args.world_size,
            "last_step": "drop" if args.dataloader_drop_last else "keep",
            "seed": None if in_order else trainer.packs_seed(),
        }
    elif in_order:
        wanted.setdefault("packer", "sequential")
    rows, encode = trainer.packs_rows(trainer.train_dataset, "training", bare_model(trainer.model))
    faults = {} if plan is not None else trainer.packs_unread(trainer.train_dataset, rows, encode)
    last = args.dataloader_drop_last
    made = {**trainer.packs_made, "plan": plan, "drop_last": last, "faults": faults, "options": wanted}
    return pack_rows(rows, encode, name="train", **made)


def _fit_steps(trainer: Any, plan: Any) -> None:
    """Packs that were planned by steps say how many of them a rank accumulates."""
    if getattr(getattr(plan, "spec", None), "samples_per_step", None) is not None:
        args = trainer.args
        args.gradient_accumulation_steps = plan.align(args.world_size).block // args.world_size
        args.per_device_train_batch_size = trainer._train_batch_size = 1


def _tell_step(args: Any, plan: Any) -> None:
    packs, held = args.world_size * args.gradient_accumulation_steps, len(plan.indices)
    asked = plan.spec.samples_per_step
    samples = f"{packs * held / max(1, len(plan)):.1f}" if asked is None else min(asked, held)
    accumulated = args.gradient_accumulation_steps
    say("a step: %s samples, %s, %d accumulated", samples, counted(packs, "packs"), accumulated)


class HostMixin(PackingMixin):
    """What `pack` puts before the class of a trainer: `PackingMixin` with the host's own loss and rows."""

    packs_made: dict[str, Any]
    packs_options: dict[str, Any]
    packs_eval: dict[int, tuple[Any, PackedDataset]] | None
    compute_loss_func: Any
    packs_loss_known = False
    #: The head computes the loss, which the proof finds to be the same.
    packs_fused = False
    #: The folder of a plan that was given to `pack`.
    packs_given: Path | None = None

    def packs_start(self, source: Any, collate: Any = None, *, prove: bool = True) -> None:
        super().packs_start(source, collate, prove=prove)
        record_run(self)

    def packs_found(self, report: Any) -> None:
        super().packs_found(report)
        whole = not is_sharded(self.model_wrapped)
        self.packs_fused = (report is None or report.fused) and whole and loss_is_the_heads(self)
        if report is not None and self.is_world_process_zero():  # type: ignore[attr-defined]
            say("isolation: proven on this model (%d comparisons)", len(report.rows))

    @property
    def packs_workers(self) -> str:
        """As the host starts its workers: what its collator closes over may not travel."""
        chosen = multiprocessing.get_start_method(allow_none=True)
        return chosen or multiprocessing.get_all_start_methods()[0]

    @property
    def packs_sampler(self) -> Any:
        """The `PackSampler` of packs of a plan."""
        return self.packs.sampler

    def packs_reader(self) -> ChatReader:
        """How rows are read as chats."""
        return ChatReader(processor=getattr(self, "processing_class", None))

    def packs_unread(self, rows: Any, own: Any, encode: HostEncoder) -> dict[int, SampleError]:
        """Rows of `input_ids` with a column that nothing reads and that changes training.

        A collator may read any column: one that changes no encoded row is not read.

        Args:
            rows: the rows as given.
            own: those that the encoder takes.
            encode: row -> encoded sample.
        """
        names = columns_of(rows)
        if "input_ids" not in names:
            return {}
        taken = {"input_ids", "labels", "attention_mask", "mm_token_type_ids"}
        given = names & columns_of(own)
        mine = taken | {name for name in given - taken if encode.reads(own, name)}
        return unread_rows(rows, Reads(columns=mine, encoded=True), self.packs_ignore) if names - mine else {}

    @property
    def packs_ignore(self) -> Sequence[str]:
        """Keys that the user leaves out."""
        reader: ChatReader = self.packs_made["reader"]
        return tuple(reader.source.get("ignore_keys", ()))

    def packs_rows(self, rows: Any, what: str, bare: Any) -> tuple[Any, HostEncoder]:
        """Rows and their encoder, with unused columns removed as Trainer does it."""
        host: Any = self
        if hasattr(rows, "column_names") and hasattr(rows, "remove_columns"):
            return host._remove_unused_columns(rows, description=what), HostEncoder(host.data_collator, bare)
        collate = host._get_collator_with_removed_columns(host.data_collator, description=what)
        return rows, HostEncoder(collate, bare)

    def packs_seed(self) -> int:
        """Seed of the order of packs."""
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def packs_of(
        self, data: Any, balance: str | None, *, shuffle: bool = True, seed: int | None = None
    ) -> Any:
        """Packs of any kind as the source of this rank."""
        args = self.args
        settings = None
        if balance is not None and not (balance == "step" and args.gradient_accumulation_steps == 1):
            settings = Balance(grad_accum=args.gradient_accumulation_steps, mode=balance)
        return pack_source(
            data,
            rank=args.process_index,
            world_size=args.world_size,
            seed=seed_in_use(self.packs_seed() if seed is None else seed, shuffle, settings),
            shuffle=shuffle,
            balance=settings,
            grad_accum=args.gradient_accumulation_steps,
        )

    def packs_evaluates(self, eval_packing: bool | None, options: dict[str, Any]) -> None:
        """Pack the evaluation sets, or leave them as they were; see `pack`."""
        self.packs_options = options
        expects = own_evaluation(self)
        if eval_packing is None and expects and self.eval_dataset is not None:
            logger.info("evaluation stays as it was: %s expects its own rows", expects)
        self.packs_eval = {} if (expects is None if eval_packing is None else eval_packing) else None
        if self.eval_dataset is None or self.packs_eval is None:
            return
        sets = self.eval_dataset
        for name, rows in (sets if isinstance(sets, Mapping) else {"eval": sets}).items():
            if not indexable(rows):  # asked to be packed, and cannot be planned
                raise ConfigError(
                    f"evaluation set {name!r} is a {type(rows).__name__} without length or index: "
                    "no plan for it",
                    hint="leave out eval_packing=True, and it is evaluated as before",
                )
            self._eval_packs(rows, name)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The class's own loss, which must divide by the tokens of the step."""
        count = None if self.packs_evaluating is not None else kwargs.get("num_items_in_batch")
        if not self.packs_loss_known and count is not None and isinstance(inputs, PackBatch):
            self.packs_loss_known = True
            if self.args.gradient_accumulation_steps > 1 or self.args.world_size > 1:
                self.packs_check_loss(model, inputs, count)
        outputs = bool(args) or kwargs.get("return_outputs", False)
        fused = self.packs_fused and count is not None and isinstance(inputs, PackBatch) and not outputs
        if fused and "shift_labels" not in inputs and loss_is_the_heads(self):
            if self.compute_loss_func is not None:  # of models whose own loss knows no step
                total = token_loss_sum(model, inputs, count=inputs.trained)
                return step_share(total, count, self.args.world_size)
            counted = {"count": inputs.trained, "labels": inputs.get("labels"), "items": count}
            with fused_head(bare_model(self.model), **counted):
                return super().compute_loss(model, inputs, **kwargs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def packs_check_loss(self, model: Any, inputs: PackBatch, count: Any) -> None:
        """Refuse a loss, of the trainer's user or of the model, that packs of a step would sum."""
        host: Any = self
        base = super().compute_loss
        if name := own_loss(self):
            check_loss(self, name, lambda i, n: base(model, i, num_items_in_batch=n), inputs, count)
        elif self.compute_loss_func is None and host.model_accepts_loss_kwargs and not self.packs_fused:
            name = f"the loss of {type(bare_model(self.model)).__name__}"

            def loss(batch: Any, items: Any) -> Any:
                return first_of(model(**batch, num_items_in_batch=items), "loss")

            check_loss(self, name, loss, inputs, count)

    def packs_of_evaluation(self, eval_dataset: Any) -> PackedDataset | None:
        name, rows = "eval", self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            name, rows = eval_dataset, self.eval_dataset[eval_dataset]
        if self.packs_eval is None or rows is None or not indexable(rows):
            return None
        return self._eval_packs(rows, name)

    def packs_eval_plans(self) -> dict[str, Any]:
        """Plans of the evaluation sets by name; one without a name: ""."""
        held = {str(data.samples.name): data.plan for _, data in (self.packs_eval or {}).values()}
        return {"" if name == "eval" else name: plan for name, plan in held.items()}

    def _eval_packs(self, rows: Any, name: str) -> PackedDataset:
        assert self.packs_eval is not None
        if isinstance(rows, PackedDataset) and isinstance(rows.packs, AlignedPlan):
            return rows
        held = self.packs_eval.get(id(rows))
        if held is None:
            bare = bare_model(self.model)
            own, encode = self.packs_rows(rows, "evaluation", bare)
            faults = self.packs_unread(rows, own, encode)
            made = {**self.packs_made, "faults": faults, "options": self.packs_options}
            if isinstance(made["measure"], (str, Path)) and made["measure"] != "encode":
                made["measure"] = None  # a folder of lengths is of the training rows
            held = (rows, pack_rows(own, encode, name=name, repeat_loss="zero", **made))
            self.packs_fit(held[1])
            self.packs_eval[id(rows)] = held
        data: PackedDataset = held[1]
        return data


# --------------------------------------------------------------------------------------------
# What a trainer that trained on packs leaves: the record and the log of a run, beside its plan.
# --------------------------------------------------------------------------------------------
#     <output_dir>/packs/run.json  train_log.jsonl  train/plan-…
#
# `packtrain show <output_dir>` reads them as those of a run of ours: configuration, figures, steps, losses,
# and the isolation proof. `run.json` goes with the first step and comes when training has ended.
def record_run(trainer: Any) -> None:
    """Let `trainer`, which has its packs, leave the record of its run."""
    folder = Path(trainer.args.output_dir) / PLACE
    trainer.add_callback(LogFile(folder / LOG))
    trainer.add_callback(RunRecord(trainer, folder))


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes `run.json` when training has ended.

    Args:
        trainer: a `HostMixin` with its packs.
        folder: of the record.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._told():
                files.make_folder(self.folder)
                files.remove_leftovers(self.folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        consumed = self.trainer.packs_consumed()
        if not state.is_world_process_zero:
            return
        with self._told():
            config = _config(self.trainer)
            figures = {**_of_packs(self.trainer, config, self.folder), **_of_training(state)}
            figures |= {"consumed": consumed, "proof": self.trainer.packs_proven}
            finish_run(self.folder, config, figures)
            say("trained: packtrain show %s", typed(self.folder.parent))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A record that cannot be written ends no training: it is a warning."""
        try:
            yield
        except (PacktrainError, OSError) as error:
            logger.warning("this run leaves no record in %s: %s", self.folder, error)


def _config(trainer: Any) -> dict[str, Any]:
    """The settings of the trainer under their names here, as a configuration of ours holds them."""
    args, packs, bare = trainer.args, trainer.packs, bare_model(trainer.model)
    data: dict[str, Any] = {"kind": packs.kind}
    training = {
        "output_dir": str(args.output_dir),
        **({} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}),
        "max_steps": args.max_steps,
        "learning_rate": args.learning_rate,
        "seed": trainer.packs_seed(),
    }
    if packs.kind in ("planned", "exported"):
        order, plan = packs.sampler.order, packs.plan
        data |= {"shuffle": order.shuffle, "drop_last": order.aligned.drop_last}
        mode = None if order.balance is None else order.balance.mode
        data |= {} if mode == "step" else {"balance": mode}
        training["seed"] = order.seed
        if packs.kind == "planned" and plan.spec.samples_per_step is not None:
            data["samples_per_step"] = plan.spec.samples_per_step
    if "samples_per_step" not in data:
        training["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    model = {"name_or_path": getattr(bare.config, "_name_or_path", None) or None}
    template = {"max_length": packs.pack_length}
    return {"model": model, "template": template, "data": data, "training": training}


def _of_packs(trainer: Any, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Figures of the packs, with the folders of plan and lengths."""
    figures: dict[str, Any] = {"packtrain": __version__, "world_size": trainer.args.world_size}
    packs = trainer.packs
    figures["validation_folders"] = {
        name: {part: str(folder / (name or "eval") / f"{part}-{mark[:12]}") for part, mark in marks}
        for name, plan in trainer.packs_eval_plans().items()
        for marks in [(("plan", plan.checksum), ("lengths", plan.lengths_digest))]
    }
    if packs.kind not in ("planned", "exported"):
        ledger = getattr(packs, "ledger_file", None)
        if ledger is not None:
            figures["ledger_file"] = str(Path(ledger).absolute())
        figures["left_out"] = Report.of_run(folder, config, figures).figures()["ledger"]
        return figures
    plan: PackPlan = packs.plan
    figures |= {**plan.stats(), "checksum": plan.checksum}
    place = _place_of(trainer, plan, folder)
    figures["plan_folder"] = str(place.resolve())
    with contextlib.suppress(FormatError):  # a plan that was given without them
        figures["lengths_folder"] = str(lengths_of_plan(place).resolve())
    figures["padded_to"] = getattr(trainer.packs_collator, "pad_to_length", None)
    balance = packs.sampler.order.balance
    figures["sync"] = None if balance is None else balance.sync
    if packs.kind == "planned":
        with contextlib.suppress(PacktrainError):  # settings that only this trainer has: the plan's figures
            found = resolve_runtime(load_config(config), plan, packs.world_size, trainer.packs_eval_plans())
            figures |= found.figures()
    return figures


def _place_of(trainer: Any, plan: PackPlan, folder: Path) -> Path:
    """The folder of the plan: made by `pack`, given to it, of the export, or a copy that is left now."""
    given = trainer.packs_given
    out = getattr(trainer.packs.data, "out", None)
    if given is not None:
        return Path(given)
    if out is not None:
        from ..store import shards

        return Path(shards.hidden(Path(out), "plan"))
    place = folder / "train" / f"plan-{plan.checksum[:12]}"
    if not (place / "plan.json").is_file():
        plan.save(place)
    return place


def _of_training(state: Any) -> dict[str, Any]:
    """Closing metrics, first and last loss."""
    rows = state.log_history
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    metrics: dict[str, Any] = {"steps": state.global_step}
    for key, value in (item for row in rows for item in row.items()):  # the last of each name stays
        if key.startswith("eval_") or key == "train_loss":
            metrics[key] = plain(value)
    ends = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
    return {"metrics": metrics, **ends}
