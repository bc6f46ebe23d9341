"""Exported chunks as a dataset: packs that are encoded already, checked against the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..collate import filler_pack
from ..errors import DriftError, FormatError
from ..planning.align import AlignedPlan
from ..planning.packplan import PackPlan
from ..store import shards
from ..store.chunks import ChunkReader
from .shards import _check_aligned, check_task, pack_at

__all__ = ["ChunkedPacks"]


class ChunkedPacks(Dataset[list[dict[str, Any]]]):  # type: ignore[misc]
    """Map-style dataset over a `chunks` export. Picklable.

    Args:
        out: the export's folder.
        encode: `template.encode`; only for chunks that hold media as their bytes.
        aligned: of this plan: positions are then aligned positions, as in `PackedDataset`.
        verify: hash each chunk when its first pack is read (`ChecksumError` where its bytes changed). Off: a
            chunk is mapped and a pack costs what its own bytes cost; `packtrain verify` hashes all at once.
    """

    def __init__(
        self,
        out: str | Path,
        encode: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        aligned: AlignedPlan | None = None,
        verify: bool = False,
    ) -> None:
        self.verify = verify
        self.out = Path(out).absolute()
        self.marker = shards.export_of(self.out)
        if self.marker["key"]["format"] != "chunks":
            raise FormatError(f"{out} holds no chunks", hint="packtrain.data.open_packs reads every format")
        check_task(None)
        self.encode = encode
        self.aligned = aligned
        self.maxcount = int(self.marker["key"]["maxcount"])
        _check_aligned(self.plan, aligned, out)

    @cached_property
    def plan(self) -> PackPlan:
        return PackPlan.load(shards.hidden(self.out, "plan"))

    @cached_property
    def readers(self) -> dict[int, ChunkReader]:
        """Open chunks by number; opened when first needed."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("plan", "readers")}

    def __len__(self) -> int:
        return len(self.plan) if self.aligned is None else len(self.aligned)

    def reader(self, chunk: int) -> ChunkReader:
        """The chunk of a number."""
        if chunk not in self.readers:
            path = self.out / f"chunk_{chunk:08d}.arrow"
            reader = ChunkReader(path, encode=self.encode)
            if self.verify:
                reader.check_digest()
            self.readers[chunk] = reader
        return self.readers[chunk]

    def __getitem__(self, position: int) -> list[dict[str, Any]]:
        """Encoded samples of a pack in plan order.

        Raises:
            DriftError: the pack is not as long as planned, or of other samples.
        """
        number = pack_at(position, len(self), self.aligned)
        if number < 0:
            return filler_pack()
        reader, row = self.reader(number // self.maxcount), number % self.maxcount
        members: list[dict[str, Any]] = reader[row]
        ids = [member["sample_id"] for member in members]
        tokens = sum(len(member["input_ids"]) for member in members)
        if ids != self.plan[number].tolist() or tokens != int(self.plan.pack_tokens[number]):
            raise DriftError(
                f"pack {number} ({reader.path}) holds {tokens} tokens of samples {ids[:4]}…, planned were "
                f"{int(self.plan.pack_tokens[number])} of {self.plan[number].tolist()[:4]}…",
                hint="the chunk belongs to another plan: export again",
            )
        return members
