"""What a run writes line by line: every row that is logged, and the loss of every sample of a step.

The losses come from the boundaries: one segmented sum a row, one copy to the host a step.
Each rank appends one JSON line a step to its own file, so no collective is needed:

    {"ids": [17, 4], "loss": [2.31, 0.87], "rank": 0, "sources": ["a", "b"], "step": 100, "tokens": [9, 40]}

`step` counts from 0 as `packtrain which --step` does; `loss` is the mean over the sample's own supervised
tokens, without weights, null when it is not finite or there are none. After a resume a step may stand there
twice: the later line counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..collate.pack_batch import to_device
from ..files import append_line, publish, remove
from ..template import ensure_torchvision
from .loss import trained_places
from .reduction import SourceOf, owners, reduction_of, source_names

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)

Reduce = Callable[[torch.Tensor], torch.Tensor]


def cut_back(path: Path | None, stop: int) -> None:
    """Of JSON lines that name a `step`, keep those below `stop`: a resumed run writes the others again.

    A line that a stopped run left half written goes too. `stop` 0: the file goes.
    """
    if path is None or not path.is_file():
        return
    if stop <= 0:
        remove(path)
        return
    with open(path, "rb") as lines, publish(path) as out:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] < stop:
                    out.write(line)


def _trace_file(folder: Path, rank: int) -> Path:
    """Where a rank writes the losses of its samples."""
    return folder / "sample_loss" / f"rank-{rank}.jsonl"


def sample_sums(batch: Any, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Loss sum and supervised tokens of every sample of a row.

    Args:
        batch: the row, with boundaries.
        losses: what `token_losses` collected over it: the loss of each supervised label in row order.

    Returns:
        float64 [2, samples] on the device of the losses.
    """
    place, ids = owners(batch)
    labels = batch["labels"].reshape(-1)
    trained = trained_places(labels[1:], getattr(batch, "trained", None))
    kept = to_device(place, labels.device)[1:].index_select(0, trained)
    every = torch.cat([part.reshape(-1) for part in losses]) if losses else kept.new_zeros(0)
    pair = torch.stack([every.double(), torch.ones_like(every, dtype=torch.float64)])
    sums = pair.new_zeros(2, len(ids) + 1)
    return sums.index_add_(1, kept.to(pair.device), pair)[:, : len(ids)]


class LossTrace:
    """Collects the rows of a step, and writes them down at its end.

    Args:
        path: JSON lines file of this rank; None: nothing is written.
        names: names of all sources, the same on every rank.
        source_of: sample id -> source name.
        rank: this rank.
        means: `means` is asked for; False leaves the sums out.

    Attributes:
        others: files of ranks that an earlier start had and this one has not; rank 0 cuts them back.
    """

    def __init__(
        self,
        path: Path | None,
        names: Sequence[str],
        source_of: SourceOf,
        *,
        rank: int = 0,
        means: bool = True,
    ) -> None:
        self.path, self.names, self.rank = path, tuple(names), rank
        self.others: list[Path] = []
        self.source_of = source_of
        self.with_means = means
        self._places = {name: place for place, name in enumerate(self.names)}
        self._rows: list[tuple[Sequence[Any], torch.Tensor]] = []
        self._away: list[tuple[int, list[Any], torch.Tensor, Any]] = []
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64)

    def add(self, batch: Any, losses: Sequence[torch.Tensor]) -> None:
        """A row that was trained on now; `losses` as `sample_sums` takes them."""
        if batch.sample_ids:
            self._rows.append((batch.sample_ids, sample_sums(batch, losses)))

    def flush(self, step: int) -> None:
        """The step (from 0) is done: its sums leave the device, and its line is written.

        From a card they travel while the next step runs: then the line stands one step later, or at `settle`.
        """
        if not self._rows:
            return
        ids = [sample for row, _ in self._rows for sample in row]
        sums = torch.cat([part for _, part in self._rows], 1)
        self._rows.clear()
        if sums.device.type == "cuda":
            landed = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            landed.copy_(sums, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record()
            self.settle()
            self._away.append((step, ids, landed, arrival))
        else:
            self._write(step, ids, sums.cpu())

    def settle(self) -> None:
        """Write down the steps whose sums were still on their way."""
        for step, ids, sums, arrival in self._away:
            arrival.synchronize()
            self._write(step, ids, sums)
        self._away.clear()

    def _write(self, step: int, ids: list[Any], sums: torch.Tensor) -> None:
        sources = [self.source_of(sample) for sample in ids]
        if self.with_means:
            self._sums.index_add_(1, torch.tensor([self._places[name] for name in sources]), sums)
        if self.path is None:
            return
        row: dict[str, Any] = {
            "step": step,
            "rank": self.rank,
            "ids": ids,
            "loss": [_mean(*pair) for pair in sums.T.tolist()],
            "tokens": sums[1].long().tolist(),
        }
        if len(self.names) > 1:
            row["sources"] = sources
        append_line(self.path, json.dumps(row, sort_keys=True, default=str))

    def means(self, reduce: Reduce) -> dict[str, float]:
        """`loss/<source>`: token mean of every source since the last call, over all ranks (a collective)."""
        self.settle()
        sums = reduce(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        return {
            f"loss/{name}": total / count
            for name, total, count in zip(self.names, *sums, strict=True)
            if count
        }


def follow_losses(trainer: Any, config: Any, source: Any) -> None:
    """Give a PackTrainer the reduction and the loss logs of a configuration.

    Args:
        trainer: the trainer, before training.
        config: `RunConfig`.
        source: samples by id; its mixture, if any, names the sources. None: there are no names.

    Raises:
        ConfigError: a key names sources that the data do not have.
    """
    training = config.training
    trainer.reduction = reduction_of(training.loss_reduction, training.source_weights, source)
    names, source_of = source_names(source)
    by_source = training.log_source_loss and len(names) > 1
    if training.log_source_loss and not by_source and trainer.rank == 0:
        logger.warning("training.log_source_loss has no effect: no mixture names parts of these data")
    if not (training.log_sample_loss or by_source):
        return
    path = _trace_file(Path(training.output_dir), trainer.rank) if training.log_sample_loss else None
    trace = LossTrace(path, names, source_of, rank=trainer.rank, means=by_source)
    if path is not None and trainer.rank == 0:
        own = {_trace_file(Path(training.output_dir), rank) for rank in range(trainer.packs.world_size)}
        trace.others = sorted({*path.parent.glob("rank-*.jsonl")} - own)
    trainer.trace_losses(trace)


def _mean(total: float, count: float) -> float | None:
    mean = total / count if count else math.nan
    return mean if math.isfinite(mean) else None


# --------------------------------------------------------------------------------------------
# The training log of a run as JSON lines: every row that a Trainer logs, with its step.
# --------------------------------------------------------------------------------------------
# A run takes the place of a finished one in its folder with its first step: until then it may be refused, by
# the isolation proof or a checkpoint of other packs, and leaves log and record of the finished one as they
# are.
#: Its name in the folder of a run.
LOG = "train_log.jsonl"


class LogFile(TrainerCallback):  # type: ignore[misc]
    """Writes what is logged, and reports progress. A run that goes on keeps the rows up to its step.

    Args:
        path: None: nothing is written.
        progress: called with (steps done, steps in total).
        begins: called on the writing rank when the run begins to leave something.
    """

    def __init__(
        self,
        path: Path | None,
        progress: Callable[[int, int], None] | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.progress, self.begins, self.begun = path, progress, begins, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.path is None or self.begun or not state.is_world_process_zero:
            return
        self.begun = True
        remove(self.path.with_name("run.json"))
        cut_back(self.path, state.global_step + 1 if state.global_step else 0)
        self.begins()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.on_step_begin(args, state, control)  # a row before any step: an evaluation, or nothing to train
        if self.path is not None and state.is_world_process_zero:
            row = {"step": state.global_step, **(logs or {})}
            append_line(self.path, json.dumps(row, sort_keys=True, default=plain))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)


def plain(value: Any) -> Any:
    """A number as it is, one of numpy or torch as Python's, anything else as its text."""
    if isinstance(value, int | float | str | None):
        return value
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)
