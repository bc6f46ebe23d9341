"""Packs for trainers that know ranks and steps of their own and are no transformers Trainer.

packs, count = rank_packs(data, rank=0, ranks=8, count=4, seed=0)    # a step: 4 packs of each of 8 ranks
loader = Steps(packs, collate, count, prove_first)                   # lists of 4 batches
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..packs.source import PackSource, pack_source
from ..planning.balance import Balance


def rank_packs(
    data: Any,
    *,
    rank: int,
    ranks: int,
    count: int,
    seed: int,
    balance: str | None = "step",
    drop_last: bool = False,
) -> tuple[PackSource, int]:
    """The packs of a data-parallel rank, and how many of them a step is.

    Args:
        data: packs of any kind; those over a plan come in whole steps of all ranks.
        count: packs of a rank in a step; a plan of steps of samples says its own.
        seed: of the epoch orders.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        drop_last: the last packs that fill no step are left out; else some come twice.
    """
    if hasattr(data, "over"):
        stepped = data.plan.spec.samples_per_step is not None
        steps = {} if stepped else {"grad_accum": count}
        data = data.over(data.plan.align(ranks, drop_last=drop_last and not stepped, **steps))
        count = data.packs.block // ranks if stepped else count
    even = None if balance is None or count == 1 else Balance(grad_accum=count, mode=balance)
    order: dict[str, Any] = {"rank": rank, "world_size": ranks, "seed": seed, "balance": even}
    return pack_source(data, grad_accum=count, **order), count


class Steps:
    """Lists of the batches of a step, with the state of the packs.

    Args:
        packs: a `PackSource`.
        collate: list of one pack -> batch.
        count: batches of a step.
        first: called before the first pass, when weights and checkpoint are loaded.
        options: of the loader.
    """

    def __init__(
        self, packs: Any, collate: Any, count: int, first: Callable[[], None], **options: Any
    ) -> None:
        self.packs, self.count, self.first = packs, count, first
        self.loader = packs.loader(collate, **options)
        self.set_epoch = self.loader.set_epoch
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def __len__(self) -> int:
        return len(self.packs) // self.count

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.first = self.first, lambda: None
        first()
        batches = iter(self.loader)
        return iter(lambda: list(itertools.islice(batches, self.count)), [])
