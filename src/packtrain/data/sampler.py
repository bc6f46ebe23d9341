"""PackSampler: the aligned positions of one rank, in consumption order.

Micro step m gives place m*W + r of the epoch order to rank r; the order is computed entry by entry
(`planning.steps`), so a sampler holds no permutation and restores in O(1) at any step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from ..errors import ForeignArtefactError, InputError
from ..planning.align import AlignedPlan
from ..planning.steps import consumption
from ..world import World

__all__ = ["PackSampler"]

_BLOCK = 4096  # micro steps computed at a time
_STATE = 1  # version of the state dictionary


class PackSampler(Sampler[int]):  # type: ignore[misc]
    """Yields this rank's aligned positions. Every rank has the same number of them.

    Args:
        aligned: the view that training consumes; its world size is the number of ranks.
        rank: this rank, 0 <= rank < aligned.world_size.
        seed: seed of the epoch orders.
        shuffle: False: packs come in plan order.
        balance: only None; an AlignedPlan that balances its steps brings its own order.
        grad_accum: micro steps per optimizer step; kept in the state, so that a resume can tell.

    A pass starts at micro step 0, the first one after `load_state_dict` where the state stands.
    `micro_step` counts the positions handed out. `set_epoch` chooses the order of the next passes.
    """

    def __init__(
        self,
        aligned: AlignedPlan,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        balance: str | None = None,
        grad_accum: int = 1,
    ) -> None:
        World(rank, aligned.world_size)
        if balance is not None:
            raise InputError(f"balance={balance!r} is not available in the sampler", hint="use balance=None")
        if grad_accum < 1:
            raise InputError(f"grad_accum is {grad_accum}, expected >= 1")
        if seed < 0:
            raise InputError(f"seed is {seed}, expected >= 0")
        self.aligned = aligned
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.grad_accum = grad_accum
        self.epoch = 0
        self.micro_step = 0
        self._start = 0

    def __len__(self) -> int:
        """Micro steps of a whole epoch on this rank, whatever is left of the current one."""
        return self.aligned.steps

    def __iter__(self) -> Iterator[int]:
        epoch, start, self._start = self.epoch, self._start, 0
        self.micro_step = start
        for block in range(start, len(self), _BLOCK):
            positions = consumption(
                self.aligned,
                self.rank,
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                start=block,
                count=_BLOCK,
            )
            for step, position in enumerate(positions.tolist(), start=block):
                self.micro_step = step + 1
                yield position

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch. Naming another epoch starts it from its first micro step."""
        if epoch < 0:
            raise InputError(f"epoch is {epoch}, expected >= 0")
        if epoch != self.epoch:
            self.epoch, self.micro_step, self._start = epoch, 0, 0

    def state_dict(self, micro_step: int | None = None) -> dict[str, Any]:
        """Where the stream stands.

        Args:
            micro_step: micro steps of this epoch that were really consumed. None: those handed out, which
                is more than consumed when a loader fetches ahead.
        """
        return {
            "version": _STATE,
            "plan": self.aligned.checksum,
            "epoch": self.epoch,
            "micro_step": self.micro_step if micro_step is None else micro_step,
            "world_size": self.aligned.world_size,
            "grad_accum": self.grad_accum,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stands.

        Raises:
            ForeignArtefactError: the state belongs to another plan, world size, order or version.
        """
        own = self.state_dict()
        for key in ("version", "world_size", "plan", "seed", "shuffle", "grad_accum"):
            if state.get(key) != own[key]:
                raise ForeignArtefactError(
                    f"the saved position has {key} {state.get(key)!r}, this run has {own[key]!r}",
                    hint="resume with the plan and settings of the saved run, or start anew",
                )
        step = int(state["micro_step"])
        if not 0 <= step <= len(self):
            raise ForeignArtefactError(f"the saved position is micro step {step} of {len(self)}")
        over = step == len(self)  # then the next epoch begins
        self.epoch = int(state["epoch"]) + over
        self.micro_step = self._start = 0 if over else step
