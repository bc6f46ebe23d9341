"""200 samples as packs of every kind, small and the same in every process; no tokenizer, no pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import packtrain as pt
from packtrain import files
from packtrain.data import (
    LazyShardedDataset,
    PackedDataset,
    StreamingPackedDataset,
    TokenBudgetDataset,
    open_packs,
)
from packtrain.store.chunk_folder import END, STREAM, STREAM_SCHEMA, chunk_name, sealed
from packtrain.store.chunks import ChunkWriter

__all__ = ["CAP", "FORMATS", "KINDS", "LENGTHS", "SAMPLES", "open_kind", "write_folders"]

KINDS = ("planned", "exported", "growing", "stream", "token_budget")
#: Formats of exports besides `chunks`, which the kind `exported` reads.
FORMATS = ("webdataset", "energon", "raw")
CAP = 96


def _sample(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    length = 5 + number * 7 % 29
    ids = torch.randint(1, 500, (length,), generator=generator)
    labels = ids.clone()
    labels[: 1 + number % 4] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(length),
        "sample_id": number,
    }


SAMPLES = [_sample(number) for number in range(200)]
LENGTHS = pt.Lengths([len(sample["input_ids"]) for sample in SAMPLES])


def _talk(number: int) -> dict[str, Any]:
    said = {"user": str(number), "assistant": "yes"}
    return {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in said.items()]}


class Encoded:
    """A template for samples that are encoded already, and for talk that names one of them."""

    def encode(self, sample: Any) -> Any:
        if "messages" not in sample:
            return dict(sample)
        return dict(SAMPLES[int(sample["messages"][0]["content"][0]["text"])])

    def config(self) -> dict[str, Any]:
        return {"name": "encoded"}


class Source(list):  # type: ignore[type-arg]
    """The samples as an export wants its source."""

    fingerprint = "kinds"

    def where(self, number: int) -> str:
        return f"sample {number}"


def write_folders(root: Path) -> None:
    """The exports (`root/exported`, and one of each format) and the stream of chunks (`root/growing`)."""
    from packtrain.pipeline.export import export

    plan = pt.plan(LENGTHS, pack_length=CAP)
    LENGTHS.save(root / "lengths")
    plan.save(root / "plan", origin={"lengths": str(root / "lengths")})
    made = {"source": Source(SAMPLES), "template": Encoded()}
    export(root / "plan", root / "exported", format="chunks", maxcount=10, **made)
    for form in FORMATS:
        made["source"] = Source(_talk(number) for number in range(len(SAMPLES)))
        export(root / "plan", root / form, format=form, maxcount=10, **made)
    folder = root / "growing"
    told = {"schema": STREAM_SCHEMA, "stream": "s1", "config": {"pack_length": CAP}}
    folder.mkdir(parents=True)
    files.publish_json(folder / STREAM, sealed(told))
    chunks = range(0, len(plan), 10)
    for number, first in enumerate(chunks):
        meta = {"stream": "s1", "chunk": number}
        with ChunkWriter(folder / chunk_name(number), media="tensor", meta=meta) as writer:
            for pack in range(first, min(first + 10, len(plan))):
                writer.add([SAMPLES[sample] for sample in plan[pack].tolist()])
    ended = {"schema": STREAM_SCHEMA, "stream": "s1", "chunks": len(chunks), "packs": len(plan)}
    files.publish_json(folder / END, sealed({**ended, "stats": {}, "ledger": []}))


def open_kind(kind: str, root: Path) -> Any:
    """The dataset of a kind, new."""
    makers: dict[str, Callable[[], Any]] = {
        "planned": lambda: PackedDataset(
            pt.plan(LENGTHS, pack_length=CAP).align(1), SAMPLES, lengths=LENGTHS
        ),
        "exported": lambda: open_packs(root / "exported"),
        "growing": lambda: LazyShardedDataset(root / "growing", start="beginning"),
        "stream": lambda: StreamingPackedDataset(SAMPLES, pack_length=CAP, window=50),
        "token_budget": lambda: TokenBudgetDataset(
            SAMPLES, micro_batch_size=2, max_seq_len=CAP // 2, buffer_size=50
        ),
    }
    return open_packs(root / kind, Encoded().encode) if kind in FORMATS else makers[kind]()
