"""One rank of a node that reads an iterable together with others: node_soak_script.py FOLDER STATE.

Each pack and, every few packs, the state behind it go into files of this rank. It ends with its stream.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from counted_source import Counted

from packtrain.data import StreamingPackedDataset
from packtrain.files import publish_text
from packtrain.packs._node_reader import NodeReader

EVERY = 4


def made(folder: Path, **place: Any) -> StreamingPackedDataset:
    return StreamingPackedDataset(
        Counted(folder, 1200, pause=0.001),
        pack_length=64,
        window=16,
        seed=3,
        shuffle_buffer=8,
        splits=4,
        **place,
    )


def main(folder: Path, states: str) -> None:
    NodeReader.is_costly = True  # fed from its first sample on
    rank, stream = os.environ["RANK"], made(folder)
    if states != "-":
        stream.load_state_dict(json.loads(Path(states).read_text()))
    with (folder / f"packs.{rank}").open("w") as out:
        for step, pack in enumerate(stream, 1):
            out.write(json.dumps([sample["sample_id"] for sample in pack]) + "\n")
            if step % EVERY == 0:
                out.flush()
                publish_text(folder / f"state.{rank}.{step}", json.dumps(stream.state_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
