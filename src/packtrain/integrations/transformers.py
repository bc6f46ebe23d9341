"""transformers Trainer: `pack(trainer, pack_length=4096)` and the script's own Trainer trains on packs.

    from packtrain.integrations.transformers import pack
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate, …)
    pack(trainer, pack_length=4096)
    trainer.train()

The object stays the user's: its class becomes a subclass of its own class, so overridden methods, callbacks,
optimizers and PEFT stay. Samples are encoded by the script's own collator, one at a time. What changes: the
training loader and the loader of evaluations give packs; each batch carries `use_cache=False` and restarting
positions and no mask, and is checked before it is used; a step without supervised tokens has loss 0;
`eval_loss` is the mean over tokens; checkpoints hold `packs.json`, and a resume on other packs is refused.

The loss stays Trainer's: it divides the sum of the token losses by the supervised tokens of the whole step,
over accumulation and ranks. Settings under which it would not are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..collate import PackBatch, PaddingFreeCollator
from ..data import PackedDataset, PackSampler
from ..errors import ChecksumError, ConfigError
from ..planning.balance import Balance
from ..template import ensure_torchvision
from ..train.attention import check_batch
from ..train.loss import bare_model
from ..train.meter import supervised
from ..world import World
from ._checks import (
    check_evaluation,
    check_isolation,
    check_loss,
    check_trainer,
    indexable,
    own_evaluation,
    own_loss,
    prove_packs,
    unchanged_on_failure,
)
from ._encode import HostEncoder
from ._plan import pack_rows
from ._rows import ChatReader

ensure_torchvision()  # transformers imports torchvision with its Trainer

from ..train.positions import Positions, check_resume  # noqa: E402
from ..train.restore import RestoresWeights  # noqa: E402
from ..train.trainer import _aligned, pack_loader  # noqa: E402

__all__ = ["PackingMixin", "pack"]

logger = logging.getLogger(__name__)


def pack(
    trainer: Any,
    pack_length: int | None = None,
    *,
    plan: Any = None,
    measure: Any = None,
    samples_per_step: int | str | None = None,
    eval_packing: bool | None = None,
    balance: str | None = "step",
    audited: int = 32,
    timeout_s: float = 7200,
    mixin: type[PackingMixin] | None = None,
    **options: Any,
) -> Any:
    """Let `trainer` train on packs.

    Args:
        trainer: a transformers `Trainer` (or subclass), complete, not yet trained.
        pack_length: cap of a pack in tokens.
        plan: a plan (or its folder) made before, instead of `pack_length`.
        measure: how lengths are found; see `integrations._rows.measure_rows`. None: by what the rows hold.
        samples_per_step: None: a step is `gradient_accumulation_steps` packs a rank. "same": a step holds
            the samples it held before (batch size x accumulation x ranks), or a number: so many; then
            accumulation follows from the plan, and losses equal those of unpacked training.
        eval_packing: True: pack the evaluation sets too; False: they are evaluated as before. None: packed,
            unless the trainer has `compute_metrics`, which expects its own rows.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        audited: rows encoded for real and compared with their measured lengths before planning.
        timeout_s: how long the other ranks wait for rank 0.
        mixin: what is put before the trainer's class; other hosts give theirs.
        options: further keyword arguments of `packtrain.plan` (`packer`, `long_samples`, `limits`, …).

    Returns:
        The same trainer.

    Raises:
        ConfigError: a setting of the trainer that packs cannot keep, with the reason.
        IsolationError: packed samples would read each other in this model.
    """
    if isinstance(trainer, PackingMixin):
        raise ConfigError("this trainer packs already", hint="call pack(trainer, …) once")
    given = {"plan": plan, "measure": measure, "balance": balance, "audited": audited, "timeout_s": timeout_s}
    with unchanged_on_failure(trainer):
        check_trainer(trainer, samples_per_step)
        return _pack(
            trainer, pack_length, samples_per_step, eval_packing, mixin or PackingMixin, options, **given
        )


def _pack(
    trainer: Any,
    pack_length: int | None,
    samples_per_step: int | str | None,
    eval_packing: bool | None,
    mixin: type[PackingMixin],
    options: dict[str, Any],
    *,
    plan: Any,
    measure: Any,
    balance: str | None,
    audited: int,
    timeout_s: float,
) -> Any:
    args = trainer.args
    bare = bare_model(trainer.model)
    check_isolation(bare)
    place = World(args.process_index, args.world_size)
    same = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    per_step = same if samples_per_step == "same" else samples_per_step
    seed = args.seed if args.data_seed is None else args.data_seed
    in_order = str(getattr(args, "train_sampling_strategy", "random")) == "sequential"
    wanted = {"pack_length": pack_length, **options}
    if in_order and not per_step:
        wanted.setdefault("packer", "sequential")
    if plan is None and pack_length is None:
        raise ConfigError("neither pack_length nor plan is given", hint="pass pack_length=4096, for example")
    trainer.__class__ = type(f"Packed{type(trainer).__name__}", (mixin, type(trainer)), {})
    trainer.packs_made = {
        "folder": Path(args.output_dir),
        "place": place,
        "measure": measure,
        "reader": trainer.packs_reader(),
        "audited": audited,
        "timeout_s": timeout_s,
    }
    rows, encode = trainer.packs_rows(trainer.train_dataset, "training", bare)
    steps = {"samples_per_step": per_step, "packs_multiple": place.size} if per_step else {}
    if per_step:
        steps["last_step"] = "drop" if args.dataloader_drop_last else "keep"
        steps["seed"] = None if in_order else seed
    data = pack_rows(
        rows,
        encode,
        name="train",
        plan=plan,
        drop_last=args.dataloader_drop_last,
        options={**wanted, **steps},
        **trainer.packs_made,
    )
    if data.plan.spec.samples_per_step is not None:
        args.gradient_accumulation_steps = _aligned(data).block // place.size
        args.per_device_train_batch_size = trainer._train_batch_size = 1
    trainer.packs_options = {"pack_length": data.plan.spec.pack_length, **options}
    rows_expected = own_evaluation(trainer)
    if eval_packing is None and rows_expected and trainer.eval_dataset is not None:
        logger.info("evaluation stays as it was: %s expects its own rows", rows_expected)
    trainer.packs_eval = {} if (rows_expected is None if eval_packing is None else eval_packing) else None
    trainer.packs_start(data, bare, balance, shuffle=not in_order, seed=seed)
    prove_packs(trainer, data, trainer.packs_collator)
    stats = data.plan.stats()
    if place.is_writer:
        logger.info(
            "packs: %s samples in %s packs, %.2f %% full, accumulation %d",
            f"{stats['samples']:,}", f"{stats['packs']:,}", 100 * stats["efficiency"],
            args.gradient_accumulation_steps,
        )  # fmt: skip
    return trainer


class PackingMixin(RestoresWeights):
    """What `pack` puts before the class of a trainer."""

    args: Any
    model: Any
    accelerator: Any
    state: Any
    packs: PackedDataset
    packs_made: dict[str, Any]
    packs_options: dict[str, Any]
    packs_eval: dict[int, tuple[Any, PackedDataset]] | None
    packs_evaluating: list[torch.Tensor] | None
    packs_loss_known = False

    def packs_reader(self) -> ChatReader:
        """How rows are read as chats."""
        return ChatReader(processor=getattr(self, "processing_class", None))

    def packs_rows(self, rows: Any, what: str, bare: Any) -> tuple[Any, HostEncoder]:
        """Rows and their encoder, with unused columns removed as Trainer does it."""
        host: Any = self
        if hasattr(rows, "column_names") and hasattr(rows, "remove_columns"):
            return host._remove_unused_columns(rows, description=what), HostEncoder(host.data_collator, bare)
        collate = host._get_collator_with_removed_columns(host.data_collator, description=what)
        return rows, HostEncoder(collate, bare)

    def packs_start(
        self,
        data: PackedDataset,
        bare: Any,
        balance: str | None,
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        """Sampler, collator and callback of the training packs."""
        host: Any = self
        args = host.args
        settings = None
        if balance is not None and not (balance == "step" and args.gradient_accumulation_steps == 1):
            settings = Balance(grad_accum=args.gradient_accumulation_steps, mode=balance)
        self.packs = data
        self.packs_collator = PaddingFreeCollator(bare)
        self.packs_sampler = PackSampler(
            _aligned(data),
            args.process_index,
            args.seed if seed is None else seed,
            shuffle,
            settings,
            args.gradient_accumulation_steps,
        )
        self.packs_evaluating = None
        if host.eval_dataset is not None and self.packs_eval is not None:
            sets = host.eval_dataset
            for name, rows in (sets if isinstance(sets, Mapping) else {"eval": sets}).items():
                check_evaluation(rows, name)
                self._eval_packs(rows, name)
        host.add_callback(Positions(self.packs_sampler, data, lambda: None))

    # ------------------------------------------------------------------------------------ training
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`; a checkpoint of other packs is refused before anything is trained."""
        given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        check_resume(self.packs_sampler, given, self.args.output_dir)
        mine = torch.tensor([int(self.packs_sampler.aligned.checksum[:12], 16)], device=self.args.device)
        if len(set(self.accelerator.gather(mine).tolist())) > 1:
            raise ChecksumError("the ranks hold different plans", hint="use one shared output folder")
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        return pack_loader(self.packs, self.packs_sampler, self.packs_collator, self.args, start=None)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        for batch in batches:
            check_batch(batch, bare_model(self.model))
        return batches, count

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Trainer's count; a step without supervised tokens counts 1, so that its loss is 0 and no NaN."""
        count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if torch.is_tensor(count) and not int(count.max()):
            logger.warning("step %d has no supervised token: its loss is 0", self.state.global_step + 1)
            return count.clamp(min=1)
        return count

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The class's own loss; while packs are evaluated, the mean over the pack's tokens."""
        if self.packs_evaluating is not None:
            kwargs["num_items_in_batch"] = None
        count = kwargs.get("num_items_in_batch")
        if not self.packs_loss_known and count is not None and isinstance(inputs, PackBatch):
            self.packs_loss_known = True
            if own_loss(self) and (self.args.gradient_accumulation_steps > 1 or self.args.world_size > 1):
                base = super().compute_loss  # type: ignore[misc]
                check_loss(self, lambda i, n: base(model, i, num_items_in_batch=n), inputs, count)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def num_examples(self, dataloader: Any) -> int:
        """Samples, as Trainer counts them: its samples per second are of samples, not of packs."""
        data = getattr(dataloader, "dataset", None)
        if isinstance(data, PackedDataset):
            return len(data.plan.indices)
        return int(super().num_examples(dataloader))  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        moved = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return inputs.with_values(moved) if isinstance(inputs, PackBatch) else moved

    # ---------------------------------------------------------------------------------- evaluation
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        host: Any = self
        name = "eval"
        if isinstance(eval_dataset, str):
            name, eval_dataset = eval_dataset, host.eval_dataset[eval_dataset]
        rows = host.eval_dataset if eval_dataset is None else eval_dataset
        if self.packs_eval is None or rows is None or not indexable(rows):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        data = self._eval_packs(rows, name)
        return pack_loader(data, self.packs_order(data), self.packs_collator, self.args, start=None)

    def packs_order(self, data: PackedDataset) -> PackSampler:
        """The packs of an evaluation set on this rank, in plan order."""
        return PackSampler(_aligned(data), self.args.process_index, shuffle=False)

    def _eval_packs(self, rows: Any, name: str) -> PackedDataset:
        assert self.packs_eval is not None
        held = self.packs_eval.get(id(rows))
        if held is None:
            bare = bare_model(self.model)
            own, encode = self.packs_rows(rows, "evaluation", bare)
            made = {**self.packs_made}
            if isinstance(made["measure"], (str, Path)) and made["measure"] != "encode":
                made["measure"] = None  # a folder of lengths is of the training rows
            held = (
                rows,
                pack_rows(own, encode, name=name, repeat_loss="zero", options=self.packs_options, **made),
            )
            self.packs_eval[id(rows)] = held
        data: PackedDataset = held[1]
        return data

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop; over packs the loss is the exact mean over supervised tokens."""
        if not isinstance(getattr(dataloader, "dataset", None), PackedDataset):
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        prefix = kwargs.get("metric_key_prefix") or (args[3] if len(args) > 3 else "eval")
        self.packs_evaluating = [torch.zeros(2, dtype=torch.float64)]
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            sums = torch.stack(self.packs_evaluating).sum(0).to(self.args.device)
        finally:
            self.packs_evaluating = None
        loss, tokens = self.accelerator.reduce(sums, "sum").tolist()
        if f"{prefix}_loss" in output.metrics:
            output.metrics[f"{prefix}_loss"] = loss / max(1.0, tokens)
        return output._replace(num_samples=len(dataloader.dataset.plan.indices))

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        count = supervised(inputs) if self.packs_evaluating is not None else 0
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self.packs_evaluating is not None and loss is not None:
            loss = loss if count else torch.zeros_like(loss)
            self.packs_evaluating.append(torch.tensor([float(loss) * count, count], dtype=torch.float64))
        return loss, logits, labels
