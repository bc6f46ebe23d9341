"""PackingMixin: what makes a transformers Trainer train on packs, of any `PackSource`, in every host.

- The source hands out this rank's packs; nothing dispatches or shards them again, and its epoch follows.
- Every batch is checked before it is used: no cache, no mask, restarting positions, boundaries of the pack.
- The loss of a step is over the supervised tokens of all its micro steps and ranks; a step without any has
  loss 0 and a warning, one of fillers alone is not taken.
- Checkpoints hold where the source stands; a resume on other packs is refused; what a checkpoint covers is
  acknowledged.
- Evaluation over a plan is the exact mean; packs that are repeated to fill ranks have no weight.

`train.trainer.PackTrainer` is our own trainer over it; `hosts` puts it before the class of a user's trainer.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..collate import PackBatch, PaddingFreeCollator, filler_pack
from ..collate.model_traits import check_packs, text_config
from ..data import PackedDataset
from ..errors import ChecksumError, ConfigError, IsolationError
from ..packs.source import is_sized, pack_source
from ..planning.align import AlignedPlan
from ..template import ensure_torchvision
from ..workers import worker_context
from .attention import check_attention, check_batch
from .consumed import ExactSums, Meter, read_found, supervised
from .culprit import foreign_methods
from .loss import bare_model
from .opened import steps_of
from .probe import size_of
from .resume import (
    Passes,
    Standing,
    checkpoint_of,
    load_position,
    loader_options,
    pass_loader,
    tell_without_effect,
)
from .start_up import StartUpReport, first_packs, prove_before_training
from .weights import RestoresWeights

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# The start-up proof in a `Trainer`: when training begins, on the model as it was wrapped
# --------------------------------------------------------------------------------------------
class ProofAtBegin(TrainerCallback):  # type: ignore[misc]
    """Proves isolation when training begins; refuses by raising.

    Args:
        trainer: a Trainer with `PackingMixin`; it gets the report.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.packs = trainer, trainer.packs_first

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.packs_found(self.trainer.packs_report())


# --------------------------------------------------------------------------------------------
# PackingMixin: what makes a transformers Trainer train on packs, of any `PackSource`, in every host
# --------------------------------------------------------------------------------------------
#: Methods that a batch passes on its way to the model.
_ON_THE_WAY = ("training_step", "_prepare_inputs", "compute_loss")


class PackingMixin(RestoresWeights):
    """Put before a class of Trainer; call `packs_start` when the trainer is complete.

    Attributes:
        packs: the source.
        packs_collator: pack -> batch.
        packs_meter: figures of the packs between two log rows.
        proof: what the start-up proof found, once training has begun.
        packs_proven: comparisons it made; of a run that had ended, those of before.
        unsupervised_steps: optimizer steps without any supervised token.
    """

    args: Any
    model: Any
    model_wrapped: Any
    accelerator: Any
    state: Any
    eval_dataset: Any
    packs: Any
    packs_collator: Any
    packs_meter: Meter
    packs_passes: Passes
    is_in_train: bool
    packs_loaded: bool = False
    #: The start-up proof is asked for.
    packs_proves: bool = False
    #: The first packs, kept until the first step begins.
    packs_begun: list[list[Any]] | None = None
    packs_steps: bool = False
    proof: StartUpReport | None = None
    packs_proven: int | None = None
    packs_evaluating: ExactSums | None = None
    unsupervised_steps: int = 0
    _flops: int | None = None
    #: What a host's loss divides by in a step without any supervised token.
    packs_least = 1

    def packs_start(self, source: Any, collate: Any = None, *, prove: bool = True) -> None:
        """Train on the packs of `source` from now on.

        Args:
            source: a `PackSource` of this rank.
            collate: list of one pack -> batch; None: `PaddingFreeCollator` of the model.
            prove: run the start-up proof before the first step.

        Raises:
            ConfigError: a setting of the trainer that packs cannot keep.
            IsolationError: packs whose samples would be trained otherwise than alone.
        """
        host: Any = self
        args = host.args
        if args.n_gpu > 1:
            raise ConfigError(
                f"n_gpu={args.n_gpu} cannot be kept: one process would split packs over GPUs",
                hint="start one process per GPU with torchrun",
            )
        tell_without_effect(source, args)
        if source.kind == "growing":
            source.mark_in(args.output_dir)
        self.packs_fit(getattr(source, "data", None))
        self.packs = source
        self.packs_collator = PaddingFreeCollator(bare_model(host.model)) if collate is None else collate
        self.packs_meter = Meter(source.pack_length, self.packs_summed)
        host.add_callback(Standing(self))
        self.packs_proves = prove
        if prove:
            host.add_callback(ProofAtBegin(self))

    def packs_fit(self, data: Any) -> None:
        """Refuse packs that this model cannot train as their samples alone, where their lengths are known."""
        if isinstance(data, PackedDataset) and data.lengths is not None:
            check_packs(bare_model(self.model), data.plan, data.lengths)

    @property
    def packs_workers(self) -> Any:
        """How loader workers start."""
        return worker_context()

    # ------------------------------------------------------------------------------------ training
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`; a checkpoint of other packs is refused before anything is trained."""
        given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = checkpoint_of(self.packs, given, self.args.output_dir)
        self.packs_loaded = load_position(self.packs, checkpoint)
        self.packs_same()
        self.packs_begun, self.packs_steps = None, False
        self.packs_recall(checkpoint)
        self.packs_proven = None  # it is proven anew
        if self.packs.kind == "growing" and self.args.max_steps <= 0:
            begun = int(self.packs.state_dict()["step"])
            self.args.max_steps = steps_of(
                self.packs, begun, self.args.gradient_accumulation_steps, checkpoint
            )
        return super().train(checkpoint or resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    # ----------------------------------------------------------------------------------- the proof
    def packs_first(self) -> list[list[Any]]:
        """Members of the first packs of this rank, for the proof; nothing is used up."""
        if self.packs_begun is None:
            self.packs_begun = first_packs(self.packs)
        return self.packs_begun

    def packs_collated(self, packs: list[Any]) -> Any:
        """As training makes its batches; the row of the proof may be longer than rows are padded to."""
        most = getattr(self.packs_collator, "pad_to_length", None)
        if most is not None and any(sum(map(size_of, pack)) > most for pack in packs):
            return PaddingFreeCollator(bare_model(self.model))(packs)
        return self.packs_collator(packs)

    def packs_found(self, report: StartUpReport | None) -> None:
        """What the proof found; it runs when training begins, on the model as it was wrapped."""
        self.proof = report
        if report is not None:
            self.packs_proven = len(report.rows)

    def packs_report(self) -> StartUpReport | None:
        """What the proof finds on the model as it is wrapped now."""
        return prove_before_training(self.model_wrapped, self.packs_first, collate=self.packs_collated)

    def packs_prove(self) -> None:
        """Prove isolation now as well, where the model stands where it trains: refused as early as can be.

        Raises:
            IsolationError: packed samples would read each other in this model.
        """
        if all(p.device.type == self.args.device.type for p in self.model.parameters()):
            self.packs_report()

    def training_step(self, *given: Any, **more: Any) -> Any:
        """Trainer's; before the first one, a model that callbacks behind ours changed is proven again.

        What the host's own methods then make of the first pack is checked as it reaches the model.
        """
        if self.packs_steps:
            return super().training_step(*given, **more)  # type: ignore[misc]
        if self.proof is not None:
            self.packs_report()
        self.packs_begun, self.packs_steps = None, True
        with self.packs_watched(*given[:2]):
            return super().training_step(*given, **more)  # type: ignore[misc]

    @contextlib.contextmanager
    def packs_watched(self, model: Any, inputs: Any) -> Iterator[None]:
        """Inside, the model takes the pack only with the boundaries that it was handed out with."""
        bare = bare_model(self.model)
        tokens = inputs["input_ids"].shape if isinstance(inputs, PackBatch) else None

        def check(module: Any, args: Any, given: dict[str, Any]) -> None:
            row = given.get("input_ids", args[0] if args else None)
            if tokens is not None and getattr(row, "shape", None) == tokens:
                cached = getattr(text_config(bare.config), "use_cache", False)
                try:
                    check_batch(inputs.with_values({"use_cache": cached, **given}), bare)
                except IsolationError as error:
                    made = foreign_methods(self, _ON_THE_WAY) or [type(self).__name__]
                    told = f"a pack reaches the model changed ({'; '.join(made)}): {error.message}"
                    raise IsolationError(told, hint="hand the inputs to the model as they are") from None

        with model.register_forward_pre_hook(check, with_kwargs=True):
            yield

    # ---------------------------------------------------------------------------------------- ranks
    def packs_same(self) -> None:
        """Every rank must read the same packs, and evaluate by the same plans (one collective).

        Raises:
            ChecksumError: the ranks differ.
        """
        told = getattr(self.packs, "check_equal", lambda: "")()
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        plans = [f"{name} {data.packs.checksum}" for name, data in sets.items() if _has_plan(data)]
        mine = "; ".join([told, *plans])
        number = int(hashlib.sha256(mine.encode()).hexdigest()[:12], 16)
        numbers = self.accelerator.gather(torch.tensor([number], device=self.args.device)).tolist()
        if len(set(numbers)) > 1:
            raise ChecksumError(
                f"the ranks hold different packs: this one {mine}",
                hint="they read different files; use one shared folder and the same checkpoint",
            )

    def packs_summed(self, values: torch.Tensor) -> torch.Tensor:
        """Summed over the ranks (a collective)."""
        total: torch.Tensor = self.accelerator.reduce(values.to(self.args.device), "sum")
        return total

    def packs_recall(self, checkpoint: str | None) -> None:
        """What the run had consumed and proven when a checkpoint was saved; None: nothing."""
        before, self.packs_proven = read_found(checkpoint)
        self.packs_meter.consumed.begin(before)

    def packs_consumed(self) -> dict[str, Any] | None:
        """What the run has consumed on all ranks (a collective); None: a checkpoint did not know."""
        return self.packs_meter.consumed.figures(
            lambda row: self.accelerator.gather(row.to(self.args.device))
        )

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """The packs of this rank, from where the source stands."""
        options = loader_options(self.args, self.packs_workers)
        loader = pass_loader(self.packs, self.packs_collator, options)
        self.packs_passes = loader.dataset
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """The packs of one optimizer step on this rank, and the normaliser of all ranks' losses.

        None where no rank has anything but fillers: then no step is taken.
        """
        timed = self.packs_meter.fetched(epoch_iterator)
        batches, count = super().get_batch_samples(timed, num_batches, *args, **kwargs)  # type: ignore[misc]
        for batch in batches:
            self.packs_check(batch)
        self.packs_meter.add(batches)
        if 0 < len(batches) < num_batches and not is_sized(self.packs):
            # Trainer steps at the end of a pass whose length it knows, else only behind full windows.
            batches = [
                *batches,
                *(self.packs_collator([filler_pack()]) for _ in range(num_batches - len(batches))),
            ]
        if not batches or not torch.is_tensor(count) or self.packs_weight(batches) > 0:
            return batches, count  # this rank's weight is part of the sum: nothing is copied to look at it
        if float(count.max()) > 0:
            return batches, count
        held = sum(not getattr(batch, "filler", False) for batch in batches)
        if not int(self.packs_summed(torch.tensor([held]))):
            logger.info("a step of fillers alone is not taken")
            return [], count
        self.unsupervised_steps += 1
        logger.warning("step %d has no supervised token: its loss is 0", self.state.global_step + 1)
        return batches, count.clamp(min=self.packs_least)

    def packs_check(self, batch: Any) -> None:
        """Refuse a batch in which samples would read each other."""
        check_batch(batch, bare_model(self.model))

    def packs_weight(self, batches: Sequence[Any]) -> float:
        """What the batches add to the normaliser of their step."""
        return sum(map(supervised, batches))

    def packs_is_logged(self) -> bool:
        """Will Trainer write a row behind the step that is computed now?"""
        args, step = self.args, self.state.global_step + 1
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        if step == 1 and args.logging_first_step:
            return True
        if strategy == "epoch":
            return (
                is_sized(self.packs) and step % -(-len(self.packs) // args.gradient_accumulation_steps) == 0
            )
        return strategy == "steps" and step % max(1, int(self.state.logging_steps)) == 0

    def floating_point_ops(self, inputs: Any) -> int:
        """Trainer's estimate, 6 a weight and token; the weights are counted once, not in every step."""
        if "input_ids" not in inputs or getattr(self.model, "main_input_name", "input_ids") != "input_ids":
            return int(super().floating_point_ops(inputs))  # type: ignore[misc]
        tokens = inputs["input_ids"].numel()
        if self._flops is None:
            self._flops = super().floating_point_ops(inputs) // tokens  # type: ignore[misc]
        return int(self._flops * tokens)

    def num_examples(self, dataloader: Any) -> int:
        """Samples, as Trainer counts them: its samples per second are of samples, not of packs."""
        data = getattr(dataloader, "dataset", None)
        plan = getattr(self.packs if isinstance(data, Passes) else data, "plan", None)
        if plan is not None:
            return len(plan.indices)
        return int(super().num_examples(dataloader))  # type: ignore[misc]

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Trainer's log; a row with the training loss also gets the figures of the packs."""
        if "loss" in logs:
            logs.update(self.packs_meter.row())
        if logs.get("train_runtime"):  # Trainer counts packs where max_steps is set
            samples = int(self.packs_summed(torch.tensor([self.packs_meter.consumed.samples])))
            logs["train_samples_per_second"] = round(samples / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Trainer's, which waits for the device with every tensor that is not there yet."""
        if not isinstance(inputs, PackBatch):
            return super()._prepare_inputs(inputs)  # type: ignore[misc]
        moved = inputs.to(self.args.device, non_blocking=True)
        labels = inputs.get("labels")
        if labels is not None and labels.device.type == "cpu":
            moved.count_trained(labels)
        return moved.with_values(super()._prepare_inputs(moved))  # type: ignore[misc]

    # ---------------------------------------------------------------------------------- evaluation
    def packs_of_evaluation(self, eval_dataset: Any) -> PackedDataset | None:
        """The packs of what `evaluate` was given; None: it is no plan, and the host's own way holds."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        return data if _has_plan(data) else None

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The packs of an evaluation set on this rank, in plan order."""
        data = self.packs_of_evaluation(eval_dataset)
        if data is None:
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        source = pack_source(data, rank=self.packs.rank, world_size=self.packs.world_size, shuffle=False)
        options = loader_options(self.args, self.packs_workers)
        loader: DataLoader[Any] = source.loader(self.packs_collator, **options)
        return loader

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The class's own loss; while packs are evaluated, the mean over the pack's tokens."""
        if self.packs_evaluating is not None:
            kwargs["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop; over packs the loss is the exact mean, see `consumed.ExactSums`."""
        if not _has_plan(getattr(dataloader, "dataset", None)):
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        if self.packs_proves and not self.is_in_train:
            self.packs_prove()
        prefix = kwargs.get("metric_key_prefix") or (args[3] if len(args) > 3 else "eval")
        self.packs_evaluating = sums = ExactSums(dataloader.dataset.packs, self.packs.rank)
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.packs_evaluating = None
        if f"{prefix}_loss" in output.metrics:
            output.metrics.update(sums.metrics(prefix, self.packs_summed))
        return output._replace(num_samples=len(dataloader.dataset.plan.indices))

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sums = self.packs_evaluating
        counts = sums is not None and sums.counts(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if sums is not None and loss is not None:
            count = supervised(inputs)
            loss = loss if count else torch.zeros_like(loss)
            if counts:
                sums.add(inputs, float(loss) * count, count)
        return loss, logits, labels


def _has_plan(data: Any) -> bool:
    return isinstance(data, PackedDataset) and isinstance(data.packs, AlignedPlan)


def check_isolation(bare: Any) -> None:
    """Refuse a setup that is known to leak; the proof decides on all others.

    The cache is judged as each batch sets it; the config stays as it is.
    """
    configs = {id(part): part for part in (bare.config, text_config(bare.config))}
    before = [(part, part.use_cache) for part in configs.values() if hasattr(part, "use_cache")]
    try:
        for part, _ in before:
            part.use_cache = False
        check_attention(bare)
    finally:
        for part, value in before:
            part.use_cache = value
