"""Three files, four ranks, two loader workers each, under torchrun: a whole pass, and one resumed on its way.

A filler is null.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from packtrain.data import EqualSteps, StreamingPackedDataset

FILES = (7, 1, 12)  # samples of each


def lines() -> Iterator[dict[str, Any]]:
    for count in FILES:
        for _ in range(count):
            yield {"input_ids": [1] * 5}


def steps() -> EqualSteps:
    stream = StreamingPackedDataset(lines, pack_length=10, window=4)
    return EqualSteps(StatefulDataLoader(stream, batch_size=None, num_workers=2), ahead=2)


def told(packs: Any) -> list[Any]:
    return [None if pack[0].get("filler") else [s["sample_id"] for s in pack] for pack in packs]


def main() -> None:
    dist.init_process_group("gloo")
    out: dict[str, Any] = {"whole": told(steps())}
    first = steps()
    packs = iter(first)
    out["begun"] = told(next(packs) for _ in range(1))
    state = first.state_dict()
    del packs, first
    again = steps()
    again.load_state_dict(state)
    out["resumed"] = told(again)
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(out), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # a gloo thread may end the interpreter with an abort


if __name__ == "__main__":
    main()
