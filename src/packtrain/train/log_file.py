"""The training log of a run as JSON lines: every row that a Trainer logs, with its step.

A run takes the place of a finished one in its folder with its first step: until then it may be refused, by
the isolation proof or a checkpoint of other packs, and leaves log and record of the finished one as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import append_line, remove
from ..template import ensure_torchvision
from .trace import cut_back

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

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
