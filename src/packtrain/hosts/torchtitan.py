"""torchtitan: `pack(config, packs)` in a config function, and its Trainer trains on packs.

    from packtrain.hosts.torchtitan import pack
    def my_run() -> Trainer.Config:
        config = qwen3_0_6b()
        return pack(config, lambda: PackedDataset(plan, chats, template.encode))

Its loader is replaced: a row is a pack, padded to `training.seq_len`; its masks are made from positions that
restart at every sample. Order and state are one for all ranks, so another data-parallel degree goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from ..collate import PaddingFreeCollator
from ..errors import IsolationError
from ..packs.source import pack_source
from ..planning.balance import Balance
from ..train.loss import shift_labels

try:
    from torchtitan.components.dataloader import BaseDataLoader
    from tyro.conf import Suppress
except ImportError:

    class BaseDataLoader:  # type: ignore[no-redef]
        class Config: ...

    Suppress = None

__all__ = ["PackDataLoader", "pack"]

#: Its attention that reads where samples begin.
_READS_POSITIONS = ("FlexAttention", "VarlenAttention")


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
        IsolationError: its attention reads no boundaries.
    """
    attention = getattr(config.model_spec.model, "first_attention", None)
    inner = getattr(attention, "inner_attention", None)
    kind = type(inner).__qualname__.partition(".")[0]
    if attention is not None and kind not in _READS_POSITIONS:
        raise IsolationError(
            f"{kind} reads the whole row: packed samples would read each other",
            hint=f"build the model with one of {', '.join(_READS_POSITIONS)} (attn_backend flex or varlen)",
        )
    config.dataloader = PackDataLoader.Config(
        packs=packs,
        infinite=infinite,
        seed=seed,
        balance=balance,
        num_workers=num_workers,
        global_batch_size=config.training.global_batch_size,
    )
    return config


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
        data: Any = config.packs()
        self.rows, self.infinite = local_batch_size, config.infinite
        whole = max(config.global_batch_size, local_batch_size * dp_world_size)
        share = whole // dp_world_size  # packs of a rank in a step
        if hasattr(data, "over"):  # over a plan: whole steps, for any number of ranks that divides them
            steps = {} if data.plan.spec.samples_per_step is not None else {"grad_accum": share}
            data = data.over(data.plan.align(dp_world_size, **steps))
        mode = config.balance
        self.packs: Any = pack_source(
            data,
            rank=dp_rank,
            world_size=dp_world_size,
            seed=config.seed,
            balance=None if mode is None or share == 1 else Balance(grad_accum=share, mode=mode),
            grad_accum=share,
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
