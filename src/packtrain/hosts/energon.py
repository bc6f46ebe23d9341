"""Packs of an energon export inside Megatron-Energon 5 and 7, and the export read through it.

    class Encoder(PackedTaskEncoder, DefaultTaskEncoder):
        pass

    encoder = Encoder(template.encode, PaddingFreeCollator())
    dataset = get_train_dataset("shards", task_encoder=encoder, batch_size=1, …)

Every sample of energon is one pack. It is restored as it was planned, its samples are encoded one by one,
checked against their planned lengths, and collated with explicit boundaries: one batch is one packed row, a
dictionary that goes into the model. A pack that does not hold what was planned stops the loader; energon's
habit of logging an error and going on with the next sample would lose it unseen.

Media reach the template as the exported bytes: energon's decoding is switched off for these data sets, in
version 5 on the data set, in version 7 by the task encoder's `decoder`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import (
    ConfigError,
    InputError,
    LawError,
    MissingExtraError,
    PacktrainError,
    causes,
    counted,
    missing_package,
    optional,
)
from ..planning.packplan import PackPlan
from ..store import shards
from ..store.pack_records import MEMBER, pack_key, restore
from ..store.shards import PackFiles

_KEYS = ("__key__", "__restore_key__", "__subflavors__", "__subflavor__", "__sources__")


class PackFault(SystemError):
    """A pack that cannot be used. Of a kind that energon does not skip."""


class PackedTaskEncoder:
    """Mixin in front of `megatron.energon.DefaultTaskEncoder`.

    Args:
        encode: restored sample -> encoded sample, such as `HFTemplate.encode`.
        collate: list of packs -> batch, such as `PaddingFreeCollator()`; None: the list of encoded samples.
        task: as for `ShardedPacks`.

    Raises:
        ConfigError: at the first pack, where `task` or the environment contradicts it.
    """

    decoder: Any = None

    def __init__(
        self,
        encode: Callable[[Any], Mapping[str, Any]],
        collate: Callable[[Any], Any] | None = None,
        *,
        task: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.encode_one = encode
        self.collate = collate
        self.task = task
        self.cookers = [optional("megatron.energon", "megatron-energon", "energon").energon.Cooker(cook)]

    def build_train_datasets(self, *, datasets: Sequence[Any], **options: Any) -> Any:
        """As energon's, with the media left as bytes."""
        _leave_bytes(datasets)
        return super().build_train_datasets(datasets=datasets, **options)  # type: ignore[misc]

    def build_val_datasets(self, *, datasets: Sequence[Any], **options: Any) -> Any:
        """As energon's, with the media left as bytes."""
        _leave_bytes(datasets)
        return super().build_val_datasets(datasets=datasets, **options)  # type: ignore[misc]

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        """One pack: its keys, and its encoded samples under `members`."""
        try:
            return {**_keys_of(sample), "members": self._members(sample)}
        except PacktrainError as error:
            raise PackFault(str(error)) from error

    encode_sample.__stateless__ = True  # type: ignore[attr-defined]

    def batch(self, samples: list[dict[str, Any]]) -> Any:
        """The packed row.

        Raises:
            PackFault: more than one pack; rows are one pack each.
        """
        if len(samples) != 1:
            raise PackFault(
                f"a batch of {counted(len(samples), 'packs')}: each is a row of its own; use batch_size=1"
            )
        return self._row(samples[0])

    batch.__stateless__ = True  # type: ignore[attr-defined]

    def encode_batch(self, batch: Any) -> Any:
        """The batch as it is; a pack alone (batch_size=None) as its row."""
        return self._row(batch) if isinstance(batch, Mapping) and "members" in batch else batch

    encode_batch.__stateless__ = True  # type: ignore[attr-defined]

    # ----------------------------------------------------------------------------------------
    def _row(self, pack: Mapping[str, Any]) -> Any:
        members = pack["members"]
        return members if self.collate is None else self.collate([members])

    def _members(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        from ..packs.exported import check_task, encode_pack  # needs torch, which reading an export does not

        record, where = sample["record"], str(sample["__key__"])
        told = record.get(MEMBER)
        if not isinstance(told, Mapping):
            raise ConfigError(f"{where} was not exported by packtrain", hint="packtrain export -f energon")
        check_task(str(told["task"]), self.task)
        samples = restore(record, sample["media"].__getitem__, where)
        planned = told["tokens"] or [None] * len(samples)
        total = sum(planned) if told["tokens"] else None
        return encode_pack(samples, planned, total, self.encode_one, where)


def cook(crude: Mapping[str, Any]) -> dict[str, Any]:
    """A crude sample of energon as a pack: its record and the bytes of its media."""
    record = crude["json"]
    media = {name: data for name, data in crude.items() if "." in name and not name.startswith("__")}
    if any(not isinstance(data, bytes) for data in media.values()):
        raise PackFault(
            f"{crude['__key__']}: energon decoded the media; the data set must leave them as bytes"
        )
    parsed = record if isinstance(record, Mapping) else json.loads(bytes(record))
    return {**_keys_of(crude), "record": parsed, "media": media}


cook.__stateless__ = True  # type: ignore[attr-defined]


def _keys_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in _KEYS if name in sample}


def _leave_bytes(datasets: Sequence[Any]) -> None:
    """Switch decoding off on crude data sets; an entry is (data set, weight), or has it as an attribute."""
    for entry in datasets:
        held = entry[0] if isinstance(entry, tuple) else getattr(entry, "dataset", entry)
        if hasattr(held, "_decoder"):
            held._decoder = None


# --------------------------------------------------------------------------------------------
# An energon export read through Megatron-Energon itself: its metadata, its index, its sampler.
# --------------------------------------------------------------------------------------------
#     read_through_energon("shards")      # "24 packs of 3 shards, each once, by megatron-energon 7.4.1"
#
# What we write, we write ourselves, so that an export has the same bytes with and without the library and for
# both of its metadata formats (5 and 7). This is the other half: the library opens the folder as a training
# job would, and every pack must come out once, with the planned ids and the media as they were exported.
Progress = Callable[[int, int], None]


def has_energon() -> bool:
    """Is the library installed here?"""
    try:
        return importlib.util.find_spec("megatron.energon") is not None
    except (ImportError, ValueError):
        return False


def check_readable(out: str | Path) -> None:
    """Refuse at once what `read_through_energon` cannot read.

    Raises:
        MissingExtraError: the library is not installed. InputError: no energon export, or one in a layout
            whose sample class is not installed.
    """
    key = shards.export_of(shards.at(out))["key"]
    if key["format"] != "energon":
        raise InputError(f"{out} holds {key['format']}", hint="only --format energon is read by energon")
    if not has_energon():
        raise MissingExtraError("megatron-energon", "energon")
    if key["options"].get("layout") == "llava":
        raise InputError(
            f"{out} is in the layout of LLaVA-OneVision: its training code builds the samples",
            hint="read it there, or export with --layout packtrain",
        )


def read_through_energon(out: str | Path, *, progress: Progress | None = None) -> str:
    """Read every pack of an energon export once, through the library.

    Args:
        out: the export.
        progress: called with (packs read, packs in all).

    Returns:
        What was found, as text.

    Raises:
        MissingExtraError: the library is not installed. InputError: no energon export, or one in a layout
            whose sample class is not installed.
        LawError: a pack does not come, comes twice, or not as planned; or the library cannot open it.
    """
    check_readable(out)
    packs = PackFiles(out)
    plan = PackPlan.load(shards.hidden(packs.out, "plan"))
    read: dict[str, list[int]] = {}
    try:
        # it prints its shards, and warns about its own loaders
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            rows = _rows(packs.out)
            for _ in range(len(plan)):
                key, ids = next(rows)
                if key in read:
                    raise LawError(f"{out}: energon reads {key} twice", hint="export again")
                read[key] = ids
                if progress is not None and (len(read) % 64 == 0 or len(read) == len(plan)):
                    progress(len(read), len(plan))
    except PacktrainError:
        raise
    except Exception as error:
        raise _told(error, packs.out) from error
    for number in range(len(plan)):
        if read.get(pack_key(number)) != plan[number].tolist():
            raise LawError(
                f"{packs.where(number)}: energon reads the samples {read.get(pack_key(number))}, "
                f"planned are {plan[number].tolist()}",
                hint="export again",
            )
    version = importlib.metadata.version("megatron-energon")
    return f"{counted(len(plan), 'packs')}, each once and whole, by megatron-energon {version}"


def _rows(out: Path) -> Any:
    """(key, ids) of packs, as the library hands them out; endless, each once in every round."""
    energon = importlib.import_module("megatron.energon")

    class Check(PackedTaskEncoder, energon.DefaultTaskEncoder):  # type: ignore[misc,name-defined]
        """Restores a pack (sizes and CRC-32 of its media) and tells its ids."""

        def _members(self, sample: Any) -> list[dict[str, Any]]:
            where = f"{sample['__key__']} in {out}"
            restored = restore(sample["record"], sample["media"].__getitem__, where)
            told = sample["record"][MEMBER]["pack"]
            return [{"pack": told, "ids": [one["sample_id"] for one in restored]}]

    dataset = energon.get_train_dataset(
        str(out),
        batch_size=1,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        task_encoder=Check(encode=dict),
    )
    for members in energon.get_loader(dataset):
        yield pack_key(members[0]["pack"]), members[0]["ids"]


def _told(error: BaseException, out: Path) -> PacktrainError:
    """Our own error behind those of the library, else one that says what the library said."""
    chain = causes(error)
    ours = next((one for one in chain if isinstance(one, PacktrainError)), None)
    fault = ours or missing_package(error, f"energon cannot read {out} here")
    if fault is not None:
        return fault
    said = "; ".join(f"{type(one).__name__}: {' '.join(str(one).split())[:200]}" for one in chain[:3])
    return LawError(f"{out} cannot be read through energon: {said}", hint="export again")
