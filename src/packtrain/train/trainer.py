"""PackTrainer: the Hugging Face Trainer on packs, with what it gets wrong there put right.

- The loader takes positions from `PackSampler` on every rank; nothing dispatches or re-shards packs,
  and the epoch reaches the sampler (also on resume) through a callback.
- `use_cache=False`, no mask, restarting text positions: checked on every batch before it is used.
- The loss of an optimizer step is the mean over its supervised tokens (or what `reduction` says), over
  all micro steps and ranks; a step without any gives exactly 0 and a warning.
- `evaluate` sums token losses and divides once; a repeated pack has no weight.

Written for W ranks: the counts are gathered, and gradients that DDP averages are scaled by W.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..collate import PackBatch, PaddingFreeCollator
from ..data import PackedDataset, PackSampler
from ..errors import ChecksumError, ConfigError, InputError
from ..files import append_line
from ..measuring.eligibility import listens
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..template import ensure_torchvision
from .attention import check_batch
from .evaluate import evaluate_plan
from .loss import bare_model, count_correct, step_share, token_loss_sum
from .meter import Meter
from .recorded import token_losses
from .reduction import Reduction, loss_normaliser
from .start_up import StartUpReport, prove_before_training
from .trace import LossTrace

ensure_torchvision()  # transformers imports torchvision with its Trainer

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from .at_begin import ProofAtBegin  # noqa: E402
from .positions import Positions, TrainBatches, check_resume  # noqa: E402
from .restore import RestoresWeights  # noqa: E402

__all__ = ["PackTrainer", "pack_loader"]

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class PackTrainer(RestoresWeights, Trainer):  # type: ignore[misc]
    """Trainer over a PackedDataset of an AlignedPlan.

    Args:
        model: transformers model (or PEFT around it), cache off.
        args: TrainingArguments with per-device batch 1 and `remove_unused_columns=False`.
        train_data: dataset of the aligned plan.
        eval_data: dataset of an aligned validation plan, several by name, or None.
        rank: this rank.
        shuffle: False: packs come in plan order in every epoch.
        balance: how the packs of each epoch are rearranged; see `PackSampler`.
        fused: False: build logits although the head is plain.
        log_file: JSON lines file of everything that is logged (rank 0), or None.
        progress: called with (steps done, steps in total).
        banner: figures of the run, logged once before the first row.
    """

    #: How token losses become the loss of a step; set it before training.
    reduction = Reduction()
    #: Losses of samples and sources (`trace_losses`), or None.
    trace: LossTrace | None = None
    #: What the start-up proof found, once training has begun with `prove_first`.
    proof: StartUpReport | None = None

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train_data: PackedDataset,
        eval_data: PackedDataset | dict[str, PackedDataset] | None = None,
        *,
        rank: int = 0,
        shuffle: bool = True,
        balance: Balance | None = None,
        fused: bool = True,
        log_file: Path | None = None,
        progress: Progress | None = None,
        banner: dict[str, float | int | str] | None = None,
    ) -> None:
        if args.per_device_train_batch_size != 1 or args.remove_unused_columns:
            raise ConfigError(
                "PackTrainer needs per_device_train_batch_size=1 and remove_unused_columns=False",
                hint="one device step is one pack, and its boundaries are not columns of the model",
            )
        self.rank = rank
        self.fused = fused
        self.train_sampler = PackSampler(
            _aligned(train_data),
            rank,
            args.seed,
            shuffle,
            balance,
            args.gradient_accumulation_steps,
            replan=train_data.replan,
        )
        self.loss_is_scaled_for_ga = True
        self.unsupervised_steps = 0
        super().__init__(
            model=model,
            args=args,
            data_collator=PaddingFreeCollator(bare_model(model)),
            train_dataset=train_data,
            eval_dataset=eval_data,
            callbacks=[
                Positions(self.train_sampler, train_data, self.check_same_plan),
                _Log(log_file, progress),
            ],
        )
        self.meter = Meter(_aligned(train_data).plan.spec.pack_length, self._summed)
        self._banner = banner
        _check_workers(self.args, train_data)
        self.remove_callback(PrinterCallback)
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"{self.args.n_gpu} GPUs in one process", hint="start one process per GPU with torchrun"
            )

    def prove_first(self, packs: Callable[[], Any], *, proof: bool = True, known: bool = True) -> None:
        """Prove isolation when training begins, on the wrapped model; see `prove_before_training`."""

        def found(report: StartUpReport | None) -> None:
            self.proof = report
            self.fused = self.fused if report is None else report.fused

        if not proof:
            prove_before_training(self.model, packs, proof=False, known=known)
            return
        self.add_callback(ProofAtBegin(self, packs, found, collate=self.data_collator))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`; a checkpoint of other packs is refused before anything is trained."""
        given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        check_resume(self.train_sampler, given, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return pack_loader(self.train_dataset, self.train_sampler, self.data_collator, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        sampler = PackSampler(_aligned(data), self.rank, shuffle=False)
        return pack_loader(data, sampler, self.data_collator, self.args)

    def get_batch_samples(
        self, epoch_iterator: Iterator[PackBatch], num_batches: int, device: torch.device
    ) -> tuple[list[PackBatch], torch.Tensor]:
        """The packs of one optimizer step on this rank, and the normaliser of all ranks' losses."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        for batch in batches:
            check_batch(batch, bare_model(self.model))
        self.meter.add(batches)
        count = loss_normaliser(batches, self.reduction).to(device)
        count = self.accelerator.reduce(count, reduction="sum")
        if batches and not float(count):
            self.unsupervised_steps += 1
            logger.warning("step %d has no supervised token: its loss is 0", self.state.global_step + 1)
        return batches, count

    def compute_loss(
        self,
        model: Any,
        inputs: PackBatch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Weighted token losses of one pack over the normaliser of the whole step.

        Args:
            num_items_in_batch: `loss_normaliser` of the step on all ranks; None: of this pack alone.
        """
        row, weight = self.reduction.scaled(inputs)
        with count_correct() as correct, token_losses() as losses:
            total = token_loss_sum(model, row, fused=self.fused)
        self.meter.correct += correct
        if self.trace is not None and model.training:
            self.trace.add(inputs, losses)
        normaliser = weight if num_items_in_batch is None else num_items_in_batch
        # Ranks' gradients are averaged, so each rank counts W times.
        loss = step_share(total, normaliser, self.accelerator.num_processes)
        return (loss, {}) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Exact mean over a validation plan, reduced as in training; a repeated pack counts once.

        Args:
            eval_dataset: a dataset, several by name, or the name of one; None: those of the trainer.

        Returns:
            `<prefix>_loss`, `<prefix>_token_acc`, `<prefix>_tokens` (supervised), `<prefix>_packs`,
            `<prefix>_samples`; of several sets with the prefix `<prefix>_<name>`.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if data is None:
            raise InputError("there is no validation plan", hint="set custom.val_jsonl")
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for name, one in data.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        metrics = evaluate_plan(self, data, _aligned(data), metric_key_prefix)
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def trace_losses(self, trace: LossTrace) -> None:
        """Follow the losses of samples and sources from now on."""
        self.trace = trace
        self.add_callback(_Flush(trace))

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Trainer's log; a row with the training loss also gets the aggregate figures of `Meter`."""
        if "loss" in logs:
            if self._banner is not None:
                banner, self._banner = self._banner, None
                super().log(dict(banner))
            logs.update(self.meter.row())
            if self.trace is not None and self.trace.with_means:
                logs.update(self.trace.means(self._summed))
        super().log(logs, start_time)

    def check_same_plan(self) -> None:
        """Every rank must have the same view of the same plan (one collective).

        Raises:
            ChecksumError: the checksums of the ranks differ.
        """
        mine = _aligned(self.train_dataset).checksum
        number = torch.tensor([int(mine[:12], 16)], device=self.args.device)
        numbers = self.accelerator.gather(number).tolist()
        if len(set(numbers)) > 1:
            each = ", ".join(f"rank {rank}: {n:012x}" for rank, n in enumerate(numbers))
            raise ChecksumError(
                f"the ranks hold different plans: {each}",
                hint="they read different files; use one shared output folder, or equal inputs on every node",
            )

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.reduce(values.to(self.args.device), "sum")
        return total

    def _prepare_inputs(self, inputs: PackBatch) -> PackBatch:
        moved = super()._prepare_inputs(inputs)
        return inputs.with_values(moved) if isinstance(inputs, PackBatch) else moved


def pack_loader(
    data: PackedDataset, sampler: PackSampler, collate: Any, args: Any, start: str | None = "spawn"
) -> DataLoader[Any]:
    """One pack per item, in sampler order.

    Args:
        start: how workers start where `args` do not say; None: as the platform does. Ours are spawned:
            tokenizers do not survive a fork.
    """
    workers = args.dataloader_num_workers
    context = args.dataloader_multiprocessing_context
    return DataLoader(
        data,
        batch_sampler=TrainBatches(sampler),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers and workers > 0,
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        multiprocessing_context=(context or start) if workers else None,
    )


def _aligned(data: PackedDataset) -> AlignedPlan:
    if not isinstance(data.packs, AlignedPlan):
        raise InputError("the dataset is over a raw plan", hint="make it over plan.align(world_size)")
    return data.packs


def _check_workers(args: Any, data: PackedDataset) -> None:
    if not (args.dataloader_num_workers and args.dataloader_persistent_workers):
        return
    for keeps, what, why in (
        (listens(data.samples), "samples", "this source has set_epoch"),
        (data.replan is not None, "packs", "training.replan is set"),
    ):
        if keeps:
            raise ConfigError(
                f"training.dataloader_persistent_workers would keep the {what} of the first epoch: {why}",
                hint="set training.dataloader_persistent_workers: false",
            )


class _Flush(TrainerCallback):  # type: ignore[misc]
    """Writes the losses of a step's samples when the step is done; steps count from 0 there."""

    def __init__(self, trace: LossTrace) -> None:
        self.trace = trace

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trace.flush(state.global_step - 1)


class _Log(TrainerCallback):  # type: ignore[misc]
    """Writes what is logged as JSON lines and reports progress."""

    def __init__(self, path: Path | None, progress: Progress | None) -> None:
        self.path, self.progress = path, progress

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.path is not None and state.is_world_process_zero:
            row = {"step": state.global_step, **(logs or {})}
            append_line(self.path, json.dumps(row, sort_keys=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)
