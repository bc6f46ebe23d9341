"""An energon export read through Megatron-Energon itself: its metadata, its index, its sampler.

    read_through_energon("shards")      # "24 packs of 3 shards, each once, by megatron-energon 7.4.1"

What we write, we write ourselves, so that an export has the same bytes with and without the library and for
both of its metadata formats (5 and 7). This is the other half: the library opens the folder as a training
job would, and every pack must come out once, with the planned ids and the media as they were exported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, LawError, MissingExtraError, PacktrainError, causes, counted, missing_package
from ..planning.packplan import PackPlan
from ..store import shards
from ..store.pack_files import PackFiles
from ..store.pack_records import MEMBER, pack_key, restore

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
    mixin = importlib.import_module("packtrain.hosts.energon").PackedTaskEncoder

    class Check(mixin, energon.DefaultTaskEncoder):  # type: ignore[misc,name-defined,valid-type]
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
    for one in chain:
        if isinstance(one, PacktrainError):
            return one
    fault = missing_package(error, f"energon cannot read {out} here")
    if fault is not None:
        return fault
    said = "; ".join(f"{type(one).__name__}: {' '.join(str(one).split())[:200]}" for one in chain[:3])
    return LawError(f"{out} cannot be read through energon: {said}", hint="export again")
