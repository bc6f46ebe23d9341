"""torchtitan: `pack(config, packs)` in a config function, and its Trainer trains on packs.

    from packtrain.hosts.torchtitan import pack
    def my_run() -> Trainer.Config:
        config = qwen3_0_6b()
        return pack(config, lambda: PackedDataset(plan, chats, template.encode))

Its loader is replaced: a row is a pack, padded to `training.seq_len`; its masks are made from positions that
restart at every sample. Order and state are one for all ranks, so another data-parallel degree goes on.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from ..collate import PaddingFreeCollator
from ..train.loss import shift_labels
from ..train.start_up import prove
from ._plan import rank_packs

try:
    from torchtitan.components.dataloader import BaseDataLoader
    from tyro.conf import Suppress
except ImportError:

    class BaseDataLoader:  # type: ignore[no-redef]
        class Config: ...

    Suppress = None


logger = logging.getLogger(__name__)

_BLOCK = 128  # tokens: rows of the proof are padded to whole blocks of its mask


def pack(
    config: Any,
    packs: Callable[[], Any],
    *,
    infinite: bool = True,
    seed: int = 0,
    balance: str | None = "step",
    num_workers: int = 0,
) -> Any:
    """Let a Trainer of torchtitan train on packs.

    Args:
        config: a `Trainer.Config`, complete; it is changed and returned.
        packs: opens the packs, on every rank: `PackedDataset` over a plan, `open_packs(folder)`.
        infinite: an epoch follows the other, as in torchtitan's loaders; False: training ends with the packs.
        seed: of the epoch orders.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        num_workers: processes that encode.

    Raises:
        IsolationError (when training begins): packed samples would read each other in this model.
    """
    config.dataloader = PackDataLoader.Config(
        packs=packs,
        infinite=infinite,
        seed=seed,
        balance=balance,
        num_workers=num_workers,
        global_batch_size=config.training.global_batch_size,
    )
    _prove_first(config._owner)
    return config


def _prove_first(kind: Any) -> None:
    """Trainers of this class prove isolation where they begin to read our loader, behind a checkpoint."""
    begin = kind.batch_generator
    if getattr(begin, "proves", False):
        return

    @functools.wraps(begin)
    def batch_generator(self: Any, loader: Any) -> Any:
        if isinstance(loader, PackDataLoader):
            _prove(self, loader)
        return begin(self, loader)

    batch_generator.proves = True  # type: ignore[attr-defined]
    kind.batch_generator = batch_generator


def _prove(trainer: Any, loader: Any) -> None:
    if trainer.parallel_dims.pp_enabled or trainer.parallel_dims.cp_enabled:
        logger.warning("pipeline or context parallel: the isolation proof is not run, nothing is proven")
        return
    seen, named = trainer.ntokens_seen, type(trainer.config.model_spec.name, (_AsTrained,), {})
    with trainer.train_context():
        prove(named(trainer), loader.packs, collate=PaddingFreeCollator(pad_multiple=_BLOCK))
    trainer.ntokens_seen = seen


class _AsTrained(nn.Module):  # type: ignore[misc]
    """The model as its trainer calls it, which makes masks of positions and places what a step reads."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer, self.inner = trainer, trainer.model_parts[0]

    def get_input_embeddings(self) -> Any:
        return self.inner.tok_embeddings

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        given = {"input": input_ids, "positions": position_ids}
        ids, _, more = self.trainer.post_dataloading_process(given, input_ids)
        return self.inner(ids, **more)


class PackDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Rows of packs for one data-parallel rank: what torchtitan builds from the config of `pack`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        packs: Annotated[Callable[[], Any], Suppress]
        infinite: bool = True
        seed: int = 0
        balance: str | None = "step"
        num_workers: int = 0
        global_batch_size: int = -1

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ) -> None:
        self.rows, self.infinite = local_batch_size, config.infinite
        whole = max(config.global_batch_size, local_batch_size * dp_world_size)
        self.packs: Any
        self.packs, _ = rank_packs(
            config.packs(),
            rank=dp_rank,
            ranks=dp_world_size,
            count=whole // dp_world_size,
            seed=config.seed,
            balance=config.balance,
        )
        collate = PaddingFreeCollator(pad_to_length=seq_len)
        self.loader = self.packs.loader(collate, num_workers=config.num_workers)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        held: list[Any] = []
        while True:
            for batch in self.loader:
                held.append(batch)
                if len(held) == self.rows:
                    yield _as_batch(held)
                    held = []
            if not self.infinite:
                return
            self.loader.set_epoch(self.packs.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"packs": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(json.loads(state_dict["packs"]))


def _as_batch(rows: list[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows of one pack each, as torchtitan's datasets give them: targets stand at the positions before."""
    places = torch.stack([torch.cat([torch.arange(n) for n in row.lengths]) for row in rows])
    ids = torch.cat([row["input_ids"] for row in rows])
    return {"input": ids, "positions": places}, shift_labels(torch.cat([row["labels"] for row in rows]))
