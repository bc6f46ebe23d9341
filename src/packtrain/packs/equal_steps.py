"""Ranks that do not know how much data the others have take the same number of steps.

    for pack in EqualSteps(packs, exhausted="fill"):
        ...

Each rank looks up to `ahead` packs ahead; the ranks exchange how many they have (one small gather over gloo
for `ahead` steps), and all know for how long they go on. A rank that has run out gets fillers (one untrained
token, no sample) while another still has packs, or all stop with the first. A rank without any data takes
part like the others. A rank that fails tells the others, which stop with its reason instead of waiting.

Trade-off: `ahead` packs of each rank are held. The exchange runs in the main process, never in a loader's
workers.

Resume: with the state of the EqualSteps, not of the loader inside, which is up to `ahead` packs further on.
A loader with workers has a state behind each pack; of anything else it is the state from before the packs
that are held, and how many steps were taken since.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..checks import one_of, whole
from ..collate import filler_pack
from ..errors import ForeignArtefactError, InputError, PacktrainError, counted, described

logger = logging.getLogger(__name__)

_STATE = 1

_groups: dict[Any, Any] = {}  # of all ranks over gloo, by the group of a launch


class EqualSteps:
    """Iterates over packs so that all ranks stop together.

    Args:
        packs: this rank's packs (or batches).
        exhausted: `fill`: go on to the last rank's last pack; `first`: stop before the first rank lacks one.
        filler: what a rank without packs gets; default: a filler pack.
        ahead: packs a rank looks ahead; also steps between two exchanges.
        exchange: list of one value for each rank from this rank's value; default: `_exchanged`.

    Attributes:
        fillers: how many were handed out in this pass.
    """

    def __init__(
        self,
        packs: Iterable[Any],
        *,
        exhausted: str = "fill",
        filler: Any = None,
        ahead: int = 8,
        exchange: Any = None,
    ) -> None:
        one_of("exhausted", exhausted, ("fill", "first"))
        self.packs, self.exhausted = packs, exhausted
        self.filler = filler_pack() if filler is None else filler
        self.ahead = whole("ahead", ahead, 1)
        self._exchange = _exchanged if exchange is None else exchange
        # Is there a state behind each pack, without any cost? Workers send theirs with every batch.
        self._has_each = bool(getattr(packs, "num_workers", 0)) and hasattr(packs, "state_dict")
        self.fillers = 0
        self._mark: Any = None  # the packs' state before those that are held
        self._steps = 0  # taken since
        self._ended = False  # no pack was left at the mark
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        self.fillers = 0
        if not self._resumed:
            self._steps, self._ended = 0, False
        self._resumed = False
        stream = iter(()) if self._ended else iter(self.packs)
        while True:
            taken = self._steps  # above 0 in the first round after a resume
            if not self._ended and hasattr(self.packs, "state_dict"):
                self._mark = self.packs.state_dict()
            held, states, ended, problem = self._looked_ahead(stream)
            for _ in range(min(taken, len(held))):
                held.popleft()
                if states:
                    self._mark = states.popleft()
            told = self._told(len(held), ended, problem)
            steps, last = self._steps_of(told, taken)
            yield from self._handed(held, states, steps)
            if last:
                if held:
                    logger.warning("%s of this rank left: another rank has none", counted(len(held), "packs"))
                if self.exhausted == "fill":  # every rank was read out: from here on, the next pass
                    self._mark, self._steps, self._ended = None, 0, False
                return
            self._steps, self._ended = 0, ended

    def _told(self, count: int, ended: bool, problem: Exception | None) -> list[Any]:
        """What every rank has ahead; raises where one cannot go on."""
        why = problem.message if isinstance(problem, PacktrainError) else problem and described(problem)
        told: list[Any] = self._exchange((count, ended, why))
        if problem is not None:
            raise problem
        for rank, (_, _, reason) in enumerate(told):
            if reason is not None:
                raise InputError(f"rank {rank} cannot go on: {reason}", hint="see the log of that rank")
        return told

    def _looked_ahead(self, stream: Iterator[Any]) -> tuple[deque[Any], deque[Any], bool, Exception | None]:
        """The next packs, the state behind each, whether there are no more, and what went wrong."""
        held: deque[Any] = deque()
        states: deque[Any] = deque()
        try:
            while not self._ended and len(held) < self.ahead:
                held.append(next(stream))
                if self._has_each:
                    states.append(self.packs.state_dict())  # type: ignore[attr-defined]
        except StopIteration:
            return held, states, True, None
        except Exception as error:
            return held, states, False, error
        return held, states, self._ended, None

    def _handed(self, held: deque[Any], states: deque[Any], steps: int) -> Iterator[Any]:
        """So many of the packs held, then fillers; the state follows."""
        for _ in range(steps):
            if not self._has_each:
                self._steps += 1
            elif states:
                self._mark, self._steps = states.popleft(), 0
            if not held:
                self.fillers += 1
                if self.fillers == 1:
                    logger.warning("this rank has no more packs: it goes on with fillers (untrained tokens)")
            yield held.popleft() if held else self.filler

    def _steps_of(self, told: list[Any], taken: int) -> tuple[int, bool]:
        """Steps until the next exchange, and whether they are the last ones."""
        counts = [count for count, _, _ in told]
        if self.exhausted == "first":
            steps = min(counts)
            return steps, any(over and count == steps for count, over, _ in told)
        last = all(over for _, over, _ in told)
        return (max(counts) if last else self.ahead - taken), last

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: behind the last pack, or filler, that it handed out.

        Once a pass has ended under `fill`, the beginning of the next one, as for the packs alone.

        Raises:
            InputError: the packs keep no state (a plain DataLoader, a list).
        """
        if not hasattr(self.packs, "state_dict"):
            raise self._without_state()
        mark = self.packs.state_dict() if self._mark is None else self._mark
        ended = self._ended and not self._has_each  # that of a loader says so itself
        return {"version": _STATE, "packs": mark, "steps": self._steps, "ended": ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass begins where `state` stands. Every rank has to resume, from the same step.

        Raises:
            ForeignArtefactError: it is no state of an EqualSteps, or of one with another `ahead`.
            InputError: the packs keep no state.
        """
        if not hasattr(self.packs, "load_state_dict"):
            raise self._without_state()
        told = state if isinstance(state, Mapping) else {}
        steps, ended = told.get("steps"), told.get("ended")
        whole_state = set(told) == {"version", "packs", "steps", "ended"} and told["version"] == _STATE
        if not whole_state or type(steps) is not int or type(ended) is not bool:
            raise ForeignArtefactError(
                f"this is no state of EqualSteps: {str(state)[:120]}",
                hint="pass what its state_dict() gave, not the loader's",
            )
        if not 0 <= steps <= self.ahead:
            raise ForeignArtefactError(
                f"the saved EqualSteps took {counted(steps, 'steps')} with "
                f"more than {counted(self.ahead, 'packs')} ahead",
                hint="resume with the `ahead` that the state was saved with",
            )
        if not ended:
            self.packs.load_state_dict(told["packs"])
        self._mark, self._steps, self._ended, self._resumed = told["packs"], steps, ended, True

    def _without_state(self) -> InputError:
        return InputError(
            f"a {type(self.packs).__name__} keeps no state",
            hint="use torchdata's StatefulDataLoader, or a dataset of packtrain",
        )


def _exchanged(value: Any) -> list[Any]:
    """One value of every rank, over a gloo group of its own; without torch.distributed: this value alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    group = dist.group.WORLD
    if dist.get_backend() != "gloo":  # the exchange must not wait for a GPU
        if group not in _groups:
            _groups.clear()  # those of an earlier launch are gone
            _groups[group] = dist.new_group(backend="gloo")
        group = _groups[group]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values
