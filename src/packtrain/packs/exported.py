"""Exported packs as a dataset: the samples of a pack restored, encoded, and checked against the plan.

    packs = open_packs("shards", template.encode)          # any format
    loader = DataLoader(packs, sampler=PackSampler(packs.plan.align(8), rank), collate_fn=collator)

Items are what `PackedDataset` gives: a list of encoded samples, each with its `sample_id`; they go into the
same collator, so boundaries come from the samples' own lengths and never from a flag. A pack whose samples
encode to other lengths than planned stops the run, naming shard, key and sample.

`OFFLINE_PACKED_DATA`, `OFFLINE_PACKING_VQA` and `OFFLINE_PACKING_BMR`, which other trainers read, decide
nothing here: the shards say what they hold. Where they say something else, one warning tells.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch.utils.data import Dataset

from ..errors import ChecksumError, ConfigError, DriftError, FormatError, PlanError, counted
from ..measuring.eligibility import probe_once
from ..measuring.encoding import encoded, encoder_of
from ..planning.align import AlignedPlan
from ..planning.packplan import PackPlan
from ..store import shards
from ..store.chunks import ChunkReader, OpenChunks
from ..store.pack_records import MEMBER, TASKS, members_of_row, restore
from ..store.shards import PackFiles
from ..world import offline_packing
from .ledger_file import Skipping
from .pack import Pack, length_of

logger = logging.getLogger(__name__)

_told: list[bool] = []  # the warning of this process

Encode = Callable[[Any], Mapping[str, Any]]


def open_packs(out: str | Path, encode: Encode | None = None, **options: Any) -> Any:
    """The dataset over an export of any format.

    Args:
        out: the export's folder, or a URL.
        encode: a template, or its `encode`; chunks need it only where they hold media as bytes.
        options: `task`, `aligned`, `skip`, `ledger_file`, `on_error` and `max_skip_fraction`, as for
            `ShardedPacks`; of chunks also `verify`, see `ChunkedPacks`.
    """
    out = shards.at(out)
    if shards.export_of(out)["key"]["format"] == "chunks":
        check_task(None, options.pop("task", None))
        return ChunkedPacks(out, encode, **options)
    if encode is None:
        raise ConfigError(f"{out} holds samples that are not encoded", hint="pass encode=template.encode")
    return ShardedPacks(out, encode, **options)


def pack_of_row(row: Mapping[str, Any], encode: Encode) -> Pack:
    """The pack of a row that another library reads from an `mds`, `litdata`, `lance` or `datasets` export.

    For loaders of those libraries, with their own order, caches and remote storage:

        rows = streaming.StreamingDataset(remote="s3://…", local="/tmp/packs", batch_size=1)
        batch = collate([pack_of_row(rows[0], template.encode)])

    Args:
        row: `key`, `json`, `media`, as the library gave them.
        encode: a template, or its `encode`.

    Raises:
        ChecksumError: it is not what was exported. DriftError: it encodes to another length than planned.
    """
    where, encode = str(row.get("key")), encoder_of(encode)
    try:
        members = members_of_row(row)
        record = json.loads(members["json"])
        told = record[MEMBER]
        samples = restore(record, members.__getitem__, where)
        planned = told["tokens"] or [None] * len(samples)
        return Pack(encode_pack(samples, planned, None, encode, where), pack_id=int(told["pack"]))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ChecksumError(f"{where} is no row of an export: {error}", hint="export it again") from None


class _Exported(Dataset[Pack]):  # type: ignore[misc]
    """Packs of an export in the order of its plan, or of a view of it. Picklable.

    Attributes:
        plan: the plan that was exported (for `align` and `PackSampler`).
    """

    def __init__(
        self,
        out: Path,
        aligned: AlignedPlan | None,
        skip: Iterable[int] | None,
        ledger_file: str | Path | None,
        on_error: str,
        max_skip_fraction: float | None,
    ) -> None:
        self.out, self.aligned = out, aligned
        packed = len(self.plan.indices)
        self.skipping = Skipping(skip, ledger_file, on_error, max_skip_fraction, packed)
        _check_aligned(self.plan, aligned, out)
        samples, last = packed + len(self.plan.ledger), max(self.skipping.ids, default=0)
        if last >= samples:
            raise PlanError(
                f"skip holds sample {last}, but the plan is of {counted(samples, 'samples')}",
                hint="ids are 0..n-1 of the source that was measured",
            )

    @cached_property
    def plan(self) -> PackPlan:
        return PackPlan.load(shards.hidden(self.out, "plan"))

    def __len__(self) -> int:
        return len(self.plan) if self.aligned is None else len(self.aligned)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("plan", "readers")}

    def pack_at(self, position: int) -> int:
        """Pack number of a position; -1 for a filler."""
        position = operator.index(position)
        if position == -1:
            return -1
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of {counted(len(self), 'packs')}")
        return position if self.aligned is None else self.aligned.pack_id(position)

    def over(self, view: AlignedPlan) -> Self:
        """The same packs over a view of the plan. This dataset stays as it is."""
        _check_aligned(self.plan, view, self.out)
        other = copy.copy(self)
        other.aligned = view
        return other


class ShardedPacks(_Exported):
    """Map-style dataset over an export of any format but `chunks`. Picklable when `encode` is.

    Args:
        out: the export's folder.
        encode: restored sample -> encoded sample.
        task: `captions`, `vqa` or `multi_turn`; None = what the shards say. Anything else is refused.
        aligned: of this plan: positions are then aligned positions, as in `PackedDataset`.
        skip: ids of samples that leave their packs, into `ledger_file` (JSON lines); a pack without any other
            is a filler.
        on_error: `raise`; `skip` or `zero`: a sample that cannot be encoded leaves its pack, or a segment
            without weight stands in its place, and stands in `ledger_file`.
        max_skip_fraction: stop when more than this share of the planned samples has failed.

    Attributes:
        plan: the plan that was exported (for `align` and `PackSampler`).
        files: packs by number (`store.shards.PackFiles`): members, records, samples.

    Raises:
        ConfigError: `task` contradicts the shards.
    """

    def __init__(
        self,
        out: str | Path,
        encode: Encode,
        *,
        task: str | None = None,
        aligned: AlignedPlan | None = None,
        skip: Iterable[int] | None = None,
        ledger_file: str | Path | None = None,
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
    ) -> None:
        self.files = PackFiles(out)
        check_task(self.files.task, task)
        self.task = self.files.task
        self.encode = encoder_of(encode)
        super().__init__(self.files.out, aligned, skip, ledger_file, on_error, max_skip_fraction)

    def __getitem__(self, position: int) -> Pack:
        """Encoded samples of a pack in plan order.

        Raises:
            DriftError: a sample encodes to another length than planned.
            ChecksumError: the shard was cut or edited; names shard and key.
        """
        number = self.pack_at(position)
        if number < 0:
            return Pack.filler()
        held = self.files.members(number)
        told = self.files.record(number, held)[MEMBER]
        samples = self.files.samples(number, held)
        planned = told["tokens"] or [None] * len(samples)
        where = self.files.where(number)
        stay = self.skipping.kept(sample["sample_id"] for sample in samples)
        if not stay:
            return Pack.filler()
        total = int(self.plan.pack_tokens[number]) if len(stay) == len(samples) else None
        chosen, tokens = [samples[i] for i in stay], [planned[i] for i in stay]
        members = encode_pack(chosen, tokens, total, self.encode, where, self.skipping.failed)
        return Pack(self.skipping.without(members), pack_id=number)

    def check_still(self) -> None:
        """Refuse an encoding that moves; see `PackedDataset.check_still`."""
        probe_once(self, dict)


class ChunkedPacks(_Exported):
    """Map-style dataset over a `chunks` export. Picklable.

    Args:
        out: the export's folder.
        encode: a template, or its `encode`; only for chunks that hold media as their bytes.
        aligned, skip, ledger_file, on_error, max_skip_fraction: as of `ShardedPacks`.
        verify: hash each chunk once before its first pack is read: damaged bytes are named, never trained
            (`ChecksumError`). False: a chunk is mapped and a pack costs what its own bytes cost.
    """

    def __init__(
        self,
        out: str | Path,
        encode: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        aligned: AlignedPlan | None = None,
        verify: bool = True,
        skip: Iterable[int] | None = None,
        ledger_file: str | Path | None = None,
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
    ) -> None:
        self.verify = verify
        self.out = shards.at(out).absolute()
        self.marker = shards.export_of(self.out)
        if self.marker["key"]["format"] != "chunks":
            raise FormatError(f"{out} holds no chunks", hint="packtrain.data.open_packs reads every format")
        check_task(None)
        self.encode = encoder_of(encode)
        self.maxcount = int(self.marker["key"]["maxcount"])
        super().__init__(self.out, aligned, skip, ledger_file, on_error, max_skip_fraction)

    @cached_property
    def readers(self) -> OpenChunks:
        """Open chunks by number."""
        return OpenChunks(self._opened, verify=self.verify)

    def _opened(self, chunk: int) -> ChunkReader:
        path = self.out / f"chunk_{chunk:08d}.arrow"
        return ChunkReader(path, encode=self.encode, failed=self.skipping.failed_media)

    def __getitem__(self, position: int) -> Pack:
        """Encoded samples of a pack in plan order.

        Raises:
            DriftError: the pack is not as long as planned, or of other samples.
        """
        number = self.pack_at(position)
        if number < 0:
            return Pack.filler()
        chunk, row = divmod(number, self.maxcount)
        members: list[dict[str, Any]] = self.readers[chunk][row]
        ids = [member["sample_id"] for member in members]
        tokens = sum(len(member["input_ids"]) for member in members)
        if ids != self.plan[number].tolist() or tokens != int(self.plan.pack_tokens[number]):
            raise DriftError(
                f"pack {number} ({self.readers[chunk].path}) holds {tokens} tokens of samples {ids[:4]}…, "
                f"planned were {int(self.plan.pack_tokens[number])} of {self.plan[number].tolist()[:4]}…",
                hint="the chunk belongs to another plan: export again",
            )
        members = self.skipping.without([members[i] for i in self.skipping.kept(ids)])
        if not members:
            return Pack.filler()
        return Pack(members, pack_id=number, chunk=chunk, chunk_row=row)

    def check_still(self) -> None:
        """What was encoded ahead lies still."""


def encode_pack(
    samples: list[dict[str, Any]],
    planned: list[int | None],
    total: int | None,
    encode: Encode,
    where: str,
    failed: Callable[[Any, Exception, str, int], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Encode the samples of a pack; DriftError when it is not as long as planned.

    Args:
        failed: what stands in for a sample that cannot be encoded (`Skipping.failed`); None: it is raised.
    """
    failed = failed or Skipping(None, None).failed
    hint = "not the template or processor of the export: use that one, or measure and export again"
    out = []
    for sample, tokens in zip(samples, planned, strict=True):
        sample_id = sample["sample_id"]
        try:
            made = encoded(encode, {name: value for name, value in sample.items() if name != "sample_id"})
        except Exception as error:  # what libraries raise on bytes
            out.append(failed(sample_id, error, where, tokens or 1))
            total = total if tokens else None  # nobody knows how long it was
            continue
        length = length_of(made)
        if tokens is not None and length != tokens:
            why = f"sample {sample_id} ({where}) was planned with {tokens} tokens but encodes to {length}"
            raise DriftError(why, hint=hint)
        out.append({**made, "sample_id": sample_id})
    grown = sum(map(length_of, out))
    if total is not None and grown != total:
        raise DriftError(f"{where} was planned with {total} tokens but encodes to {grown}", hint=hint)
    return out


def check_task(held: str | None, asked: str | None = None) -> None:
    """The argument agrees with the task of shards. The environment of other trainers decides nothing.

    Args:
        held: None: of chunks, which are encoded: no task is left to choose.
        asked: the argument.

    Raises:
        ConfigError: it does not.
    """
    if asked is not None and asked not in TASKS:
        raise ConfigError(f"task is {asked!r}", hint=f"one of {', '.join(TASKS)}")
    if asked is not None and held is not None and not _reads_as(held, asked):
        raise ConfigError(f"task is {asked}, the shards hold {held}", hint="leave it out")
    _tell_environment(held)


def _reads_as(held: str, task: str) -> bool:
    # captions are questions without text, so reading them as vqa is the same
    return task == held or (task == "vqa" and held == "captions")


def _tell_environment(held: str | None) -> None:
    """Variables of other trainers change nothing; one line where they say something else than the shards."""
    told = offline_packing()
    flags = {"0": False, "1": True}
    packed, vqa, bmr = (flags.get((value or "").strip()) for value in told.values())
    task = "vqa" if vqa else "multi_turn" if bmr else "captions" if vqa is False and bmr is False else None
    differs = (
        packed is False
        or (vqa and bmr)
        or (held is not None and task is not None and not _reads_as(held, task))
    )
    odd = [value for value in told.values() if value is not None and value.strip() not in flags]
    if (differs or odd) and not _told:
        _told.append(True)
        names = " ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        logger.warning(
            "%s has no effect here: the packs are read as the export says (%s)", names, held or "encoded"
        )


def _check_aligned(plan: PackPlan, aligned: AlignedPlan | None, out: str | Path) -> None:
    if aligned is not None and aligned.plan.checksum != plan.checksum:
        raise ConfigError(
            f"aligned is of plan {aligned.plan.checksum[:12]}…, {out} holds {plan.checksum[:12]}…",
            hint="align the export's own plan: open_packs(out, encode).plan.align(world_size)",
        )
