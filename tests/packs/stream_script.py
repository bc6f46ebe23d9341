"""Streams of two ranks under torchrun; each rank writes what it got. A filler is null."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from packtrain.data import StreamingPackedDataset
from packtrain.errors import PacktrainError, SampleError


def rows(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [1] * n} for n in lengths]


class Alone(StreamingPackedDataset):
    """Every rank brings its own data: it reads all of them, and still keeps in step with the others."""

    def __init__(self, source: Any, template: Any = None, **options: Any) -> None:
        super().__init__(source, template, pack_length=100, window=10, rank=0, world_size=1, **options)

    is_shared = True


def told(stream: Any) -> list[Any]:
    return [None if pack[0].get("filler") else [s["sample_id"] for s in pack] for pack in stream]


def failing(sample: Any) -> Any:
    if sample["n"] == 1:
        raise SampleError("failed", "gone")
    return sample


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = rows([95] * 5 if rank == 0 else [20] * 5)
    out: dict[str, Any] = {"skewed": told(Alone(mine)), "first": told(Alone(mine, exhausted="first"))}
    out["empty"] = told(Alone(rows([60, 60]) if rank == 0 else []))
    stream = Alone(mine)
    packs = iter(stream)
    for _ in range(3):
        next(packs)
    state = stream.state_dict()
    packs.close()
    again = Alone(mine)
    again.load_state_dict(state)
    out["resumed"] = told(again)
    try:
        told(Alone([{"n": k, "input_ids": [1] * 60} for k in range(40)], failing if rank == 0 else None))
    except PacktrainError as error:
        out["failed"] = error.message
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(out), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
