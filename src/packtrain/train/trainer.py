"""PackTrainer: the Hugging Face Trainer on packs, with what it gets wrong there put right.

`train.mixin` says what holds in every host. Ours besides:

- the loss is computed without the logits of a whole row where the head is plain (`loss`), weighted as
  `reduction` says, and divided by the weights of the step over all micro steps and ranks;
- `evaluate` reduces as training does, without logits;
- losses of samples and sources are traced where asked, figures of the packs logged with every row.

Written for W ranks: the counts are summed over them, and gradients that DDP averages are scaled by W.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..collate import PackBatch, PaddingFreeCollator
from ..data import PackedDataset
from ..errors import ConfigError, InputError, counted
from ..packs.source import pack_source
from ..planning.balance import Balance
from ..planning.epoch_order import seed_in_use
from ..template import ensure_torchvision
from .attention import check_batch
from .loss import bare_model, count_correct, step_share, token_loss_sum, token_losses
from .reduction import Reduction, loss_normaliser, source_names
from .trace import LogFile, LossTrace, cut_back

ensure_torchvision()  # transformers imports torchvision with its Trainer

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from .mixin import PackingMixin  # noqa: E402

logger = logging.getLogger(__name__)


class PackTrainer(PackingMixin, Trainer):  # type: ignore[misc]
    """Trainer over packs of any kind.

    Args:
        model: transformers model (or PEFT around it), cache off.
        args: TrainingArguments with per-device batch 1 and `remove_unused_columns=False`.
        train_data: packs: a dataset of a plan, an export, a growing directory or a stream, or a `PackSource`.
        eval_data: dataset of an aligned validation plan, several by name, or None.
        rank: this rank of those that the packs are dealt to; None: the trainer's, or what a source was made
            for where one process alone trains.
        shuffle: False: packs come in plan order in every epoch.
        balance: how the packs of each epoch are rearranged; see `PackSampler`.
        fused: False: build logits although the head is plain.
        prove: run the start-up proof when training begins, on the model as it was wrapped.
        pad_to_length: tokens that every row is padded to; None: as long as its pack.
        log: what is logged as JSON lines (rank 0), or None.
        banner: figures of the run, logged once before the first row.
    """

    #: How token losses become the loss of a step; set it before training.
    reduction = Reduction()
    packs_least = 0
    #: Losses of samples and sources (`trace_losses`), or None.
    trace: LossTrace | None = None

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train_data: Any,
        eval_data: PackedDataset | dict[str, PackedDataset] | None = None,
        *,
        rank: int | None = None,
        shuffle: bool = True,
        balance: Balance | str | None = None,
        fused: bool = True,
        prove: bool = True,
        pad_to_length: int | None = None,
        log: LogFile | None = None,
        banner: dict[str, float | int | str] | None = None,
    ) -> None:
        if args.per_device_train_batch_size != 1 or args.remove_unused_columns:
            raise ConfigError(
                "PackTrainer needs per_device_train_batch_size=1 and remove_unused_columns=False",
                hint="one device step is one pack, and its boundaries are not columns of the model",
            )
        self.fused = fused
        self._banner = banner
        self._weight = 0.0
        self.loss_is_scaled_for_ga = True
        place = _place(train_data, args, rank)
        source = pack_source(
            train_data,
            rank=place[0],
            world_size=place[1],
            seed=seed_in_use(args.seed, shuffle, balance),
            shuffle=shuffle,
            balance=balance,
            grad_accum=args.gradient_accumulation_steps,
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=getattr(source, "data", source),
            eval_dataset=eval_data,
            callbacks=[] if log is None else [log],
        )
        self.remove_callback(PrinterCallback)
        collate = None if pad_to_length is None else PaddingFreeCollator(bare_model(model), pad_to_length)
        self.packs_start(source, collate, prove=prove)

    @property
    def rank(self) -> int:
        """This rank among those that the packs are dealt to."""
        return int(self.packs.rank)

    @property
    def train_sampler(self) -> Any:
        """The `PackSampler` of packs of a plan."""
        return self.packs.sampler

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[PackBatch], device: torch.device
    ) -> torch.Tensor:
        """The normaliser of a step: the weights of its packs on all ranks (a collective)."""
        count = loss_normaliser(batch_samples, self.reduction)
        self._weight = float(count)
        total: torch.Tensor = self.accelerator.reduce(count.to(device, non_blocking=True), reduction="sum")
        return total

    def packs_weight(self, batches: Sequence[Any]) -> float:
        return self._weight

    def packs_found(self, report: Any) -> None:
        super().packs_found(report)
        self.fused = self.fused if report is None else report.fused

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
        judged = count_correct() if self.packs_is_logged() else contextlib.nullcontext()
        with judged as correct, token_losses() as losses:
            total = token_loss_sum(model, row, fused=self.fused, count=getattr(inputs, "trained", None))
        if correct is not None:
            self.packs_meter.judge(correct, inputs)
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
        if data is None:
            raise InputError("there is no validation plan", hint="set custom.val_jsonl")
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for name, one in data.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        packs = self.packs_of_evaluation(data)
        if packs is None:
            raise InputError(
                f"a {type(data).__name__} is no validation plan",
                hint="make a PackedDataset over plan.align(world_size)",
            )
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a loader draws its seed
            loader = self.get_eval_dataloader(packs)
            output = self.evaluation_loop(loader, "Evaluation", True, metric_key_prefix=metric_key_prefix)
        metrics: dict[str, float] = dict(output.metrics)
        metrics.pop(f"{metric_key_prefix}_model_preparation_time", None)
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The loop over packs; with a trace of sources also `<prefix>_loss/<source>`, token means."""
        samples = getattr(dataloader.dataset, "samples", None)
        trace = None
        if self.trace is not None and self.trace.with_means:
            trace = LossTrace(None, *source_names(samples))
        self._judge = (self.reduction.over(samples), trace)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        if trace is not None:
            prefix = kwargs["metric_key_prefix"]
            means = trace.means(self.packs_summed)
            output.metrics.update({f"{prefix}_{name}": value for name, value in means.items()})
        return output

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """The loss of one pack, without its logits; what it adds to the sums of the evaluation."""
        sums = self.packs_evaluating
        if sums is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        check_batch(inputs, bare_model(self.model))
        reduction, trace = self._judge
        row, weight = reduction.scaled(inputs)
        moved = self._prepare_inputs(inputs.with_values(row))
        with torch.no_grad(), count_correct() as correct, token_losses() as losses:
            total = token_loss_sum(model, moved, fused=self.fused)
        if sums.counts(inputs):
            hits = float(torch.stack(correct).sum()) if correct else 0.0
            sums.add(inputs, float(total), float(weight), hits)
            if trace is not None:
                trace.add(moved, losses)
                trace.flush(0)
                trace.settle()
        return step_share(total, weight, 1), None, None

    def trace_losses(self, trace: LossTrace) -> None:
        """Follow the losses of samples and sources from now on."""
        self.trace = trace
        self.add_callback(_Flush(trace))

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Trainer's log with the figures of the packs; the first row is told what the run is."""
        if "loss" in logs:
            if self._banner is not None:
                banner, self._banner = self._banner, None
                super().log(dict(banner))
            if self.trace is not None and self.trace.with_means:
                logs.update(self.trace.means(self.packs_summed))
        super().log(logs, start_time)


def _place(data: Any, args: TrainingArguments, rank: int | None) -> tuple[int | None, int | None]:
    """Rank and world size that are asked of the source; one process may stand for any rank, if told so."""
    if rank is not None:
        return rank, None
    if args.world_size == 1 and hasattr(data, "rank"):
        return None, None
    return int(args.process_index), int(args.world_size)


class EarlyStop(EarlyStoppingCallback):  # type: ignore[misc]
    """transformers' own, with one metric of several sets; a resume goes on counting."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        held = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(held, dict):  # of a checkpoint
            self.early_stopping_patience_counter = held["attributes"]["early_stopping_patience_counter"]
        super().on_train_begin(args, state, control, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        name = "eval_" + str(args.metric_for_best_model).removeprefix("eval_")
        if name in metrics:  # sets are evaluated one after another
            super().on_evaluate(args, state, control, metrics, **kwargs)
            if control.should_training_stop and state.is_world_process_zero:
                logger.info(
                    "training stops early, at step %d: %s was not better in %s; best %s, at step %s",
                    state.global_step, name, counted(self.early_stopping_patience_counter, "evaluations"),
                    "none" if state.best_metric is None else f"{state.best_metric:.4g}",
                    state.best_global_step or "none",
                )  # fmt: skip


class _Flush(TrainerCallback):  # type: ignore[misc]
    """Writes the losses of a step's samples when the step is done; steps count from 0 there."""

    def __init__(self, trace: LossTrace) -> None:
        self.trace, self.begun = trace, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.begun:
            for path in (self.trace.path, *self.trace.others):
                cut_back(path, state.global_step)
        self.begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trace.flush(state.global_step - 1)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trace.settle()

    on_train_end = on_save
