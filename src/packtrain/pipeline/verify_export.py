"""Check an export: every file as its manifest says, every planned sample once, the same text and bytes.

Bytes are hashed shard by shard; where a digest differs the pack that was changed is looked for, so that shard
and key are named. Samples are restored and compared with the plan's ids and, where the source is at hand,
with its texts and media; some are encoded and compared with their planned lengths. Nothing is held but one
pack and a bit for each sample.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import extend, files
from ..errors import (
    ChecksumError,
    FormatError,
    LawError,
    PacktrainError,
    counted,
    missing_package,
)
from ..media.location import media_refs, read_bytes, with_media
from ..planning.packplan import PackPlan
from ..remote.copies import listed_as, present
from ..store import plans, shards
from ..store._folders import check_seal
from ..store.pack_records import MEMBER, pack_key
from ..store.shards import PackFiles, media_hold, split_members
from .inputs import Inputs

Progress = Callable[[int, int], None]


def verify_export(
    out: str | Path,
    *,
    source: Any = None,
    template: Any = None,
    encode: int = 32,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Check everything about an export that can be checked.

    Args:
        out: the export's folder.
        source, template: instead of those the export names.
        encode: packs whose samples are encoded and compared with their planned lengths, evenly spread.
        progress: called with (packs done, packs in all).

    Returns:
        What was checked, as text, by name.

    Raises:
        ChecksumError: a shard was cut, edited or is missing; names shard and key.
        LawError: a sample is missing, twice, or not the planned one.
        FormatError: no export, or an unfinished one.
        InputError: a package that a reader needs cannot be imported here; the export is not blamed for it.
    """
    try:
        with files.reading(out, "an export as it was written", "export it again"):
            return _verified(Path(out), source, template, encode, progress)
    except (PacktrainError, ImportError) as error:
        fault = missing_package(error, f"{out} cannot be checked here")
        if fault is None or fault is error:
            raise
        raise fault from error


# --------------------------------------------------------------------------------------------
def _verified(
    out: Path, source: Any, template: Any, encode: int, progress: Progress | None
) -> dict[str, str]:
    marker, plan, parts = _manifests(out)
    rows = [row for part in parts for row in part["files"]] + list(marker["files"])
    for row in rows:
        _check_file(out, row)
    found = shards.strays(out, str(marker["key"]["format"]), {row["name"] for row in rows})
    if found:
        raise LawError(
            f"{out} holds {found[0]} ({len(found)} such files), which is not of this export: "
            "readers would take it for data",
            hint="move it elsewhere",
        )
    told = sum("count" in row for row in rows)
    done = {
        "files": f"{len(rows):,} as their manifests say ({counted(told, 'shards')})",
        "plan": "checksum equal",
    }
    if source is None:
        source, template, lost = _inputs(out, template, wanted=encode > 0)
    else:
        lost = ""
    if marker["key"]["format"] == "chunks":
        return {**done, **_check_chunks(out, plan, source, template, encode, progress), **_said(lost)}
    module = extend.lookup("export", marker["key"]["format"])
    if hasattr(module, "packed_row"):
        names = [row["name"] for part in parts for row in part["files"]]
        chosen = _spread(len(plan), encode) if source is not None and template is not None else []
        want = {n: [(one, template.encode(source[one])) for one in plan[n].tolist()] for n in chosen}
        padding = module.padding_of(marker["key"]["options"], template)
        return {**done, **_check_packed(out, plan, module, names, want, padding), **_said(lost)}
    if any(row.get("packs") for row in rows):
        done["shards"] = _check_members(out, rows)
    else:
        done["shards"] = f"rows, read through {marker['key']['format']}" if told else "loose files"
    done["samples"] = _check_samples(out, plan, source, progress) + lost
    if template is not None and encode:
        done["tokens"] = _check_tokens(out, plan, template, encode)
    return done


def _manifests(out: Path) -> tuple[dict[str, Any], PackPlan, list[dict[str, Any]]]:
    """Marker, plan and parts of an export that was finished: what of them is torn since breaks a law."""
    if not shards.hidden(out, shards.EXPORT).is_file():
        shards.export_of(out)  # says what is there instead
    try:
        check_seal(shards.hidden(out), shards.EXPORT)
    except FormatError as error:
        raise _torn(error) from None
    marker = shards.export_of(out)
    try:
        plan = plans.verify(shards.hidden(out, "plan"))
        if plan.checksum != marker["key"]["plan"]:
            raise LawError(f"{out} holds another plan than was exported", hint="export again")
        parts = shards.read_parts(out, int(marker["parts"]))
        if files.read_json(shards.key_path(out)) != marker["key"]:
            raise ChecksumError(
                f"{shards.key_path(out)} was edited: it is not the key of this export",
                hint="copy it again, or export again: packtrain export --overwrite",
            )
    except FormatError as error:
        raise _torn(error) from None
    return marker, plan, parts


def _torn(error: FormatError) -> ChecksumError:
    return ChecksumError(error.message, hint="copy it again, or export again")


def _inputs(out: Path, template: Any, *, wanted: bool) -> tuple[Any, Any, str]:
    """Source and template that the export names, each where it can still be opened.

    Raises:
        MissingExtraError, ImportError: it is there, and a package that reads it is not.
    """
    try:
        inputs = Inputs.told(files.read_json(shards.hidden(out, "origin.json"))["inputs"], out)
        source = inputs.open_source()
        if source.fingerprint != shards.export_of(out)["key"]["source"]:
            return None, template, "; the source changed since: not compared with it"
    except (PacktrainError, OSError, KeyError, TypeError) as error:
        if missing_package(error, "") is not None:
            raise
        return None, template, f"; the source is not at hand ({type(error).__name__})"
    if not wanted or template is not None:
        return source, template, ""
    try:
        return source, inputs.open_template(source), ""
    except (PacktrainError, OSError) as error:
        if missing_package(error, "") is not None:
            raise
        return source, None, f"; the processor is not at hand ({type(error).__name__}): nothing encoded"


def _check_file(out: Path, row: dict[str, Any]) -> None:
    path = out / row["name"]
    if listed_as(str(path)):
        present(path)
    try:
        shards.check_file(out, row)
    except ChecksumError:
        if row.get("packs") and path.is_file():
            _name_pack(path, row, path.stat().st_size)
        raise


def _name_pack(path: Path, row: dict[str, Any], size: int) -> None:
    """ChecksumError for the first pack of a shard that is not what was written."""
    starts = [start for _, start, _ in row["packs"]] + [row["end"]]
    with open(path, "rb") as handle:
        for place, (number, start, crc) in enumerate(row["packs"]):
            handle.seek(start)
            data = handle.read(starts[place + 1] - start)
            held = split_members(data, pack_key(number))
            if held is None or held[1] != crc or not media_hold(held[0]) or start + len(data) > size:
                whole = pack_key(row["packs"][place - 1][0]) if place else "none"
                raise ChecksumError(
                    f"{path}: {pack_key(number)} was cut or "
                    f"edited (shard of {counted(len(row['packs']), 'packs')}, "
                    f"{size:,} bytes of {row['bytes']:,}; last whole key before it: {whole})",
                    hint="copy the shard again, or remove it and export again",
                )


def _check_members(out: Path, rows: list[dict[str, Any]]) -> str:
    """Members of a key stand next to each other and keys are unique over all shards; read by `tarfile`."""
    seen = -1
    members = 0
    for row in rows:
        if not row.get("packs"):
            continue
        expected = iter(row["packs"])
        current = ""
        if not (out / row["name"]).is_file():
            present(out / row["name"])  # a copy that was let go
        with tarfile.open(out / row["name"], mode="r:") as tar:
            archive: Any = tar
            while (info := tar.next()) is not None:
                archive.members = []
                members += 1
                key = info.name.partition(".")[0]
                if key == current:
                    continue
                number = next(expected, [-2])[0]
                if number <= seen or key != pack_key(number):
                    raise LawError(f"{out / row['name']}: key {key} at member {members} is out of place")
                current, seen = key, number
        if next(expected, None) is not None:
            raise LawError(f"{out / row['name']} lacks keys behind {current}")
    return f"{counted(members, 'members')} adjacent by key, keys unique"


def _check_samples(out: Path, plan: PackPlan, source: Any, progress: Progress | None) -> str:
    packs = PackFiles(out)
    seen = np.zeros(int(plan.indices.max()) + 1 if len(plan.indices) else 0, dtype=bool)
    for number in _numbers(plan, progress):
        fault = next(_faults(packs, number, plan, source, seen), None)
        if fault is not None:
            raise LawError(f"{packs.where(number)}{fault}")
    if int(seen.sum()) != len(plan.indices):
        raise LawError(f"{out} holds {int(seen.sum())} of {counted(len(plan.indices), 'planned samples')}")
    same = ", text and media equal to the source" if source is not None else ""
    return f"{len(plan.indices):,} planned, each there once{same}"


def _numbers(plan: PackPlan, progress: Progress | None) -> Iterator[int]:
    """Every pack of the plan; how many are done is told."""
    for number in range(len(plan)):
        yield number
        if progress is not None and (number % 64 == 63 or number == len(plan) - 1):
            progress(number + 1, len(plan))


def _faults(packs: PackFiles, number: int, plan: PackPlan, source: Any, seen: Any) -> Iterator[str]:
    """What of a pack is not as planned, or not the source's; its samples join those `seen` so far."""
    samples, planned = packs.samples(number), plan[number].tolist()
    ids = [sample["sample_id"] for sample in samples]
    if ids != planned:
        yield f" holds the samples {ids}, planned: {planned}"
    if seen[ids].any() or len(set(ids)) != len(ids):
        yield " holds a sample that stands in another pack too"
    seen[ids] = True
    if source is not None:
        for sample in samples:
            yield from _differences(sample, source[sample["sample_id"]])
    tokens = packs.record(number)[MEMBER]["tokens"]
    if tokens is not None and sum(tokens) != int(plan.pack_tokens[number]):
        yield f" says {sum(tokens)} tokens, planned are {int(plan.pack_tokens[number])}"


def _differences(sample: dict[str, Any], want: Any) -> Iterator[str]:
    """Where the restored sample is not the source's: texts to the letter, media to the byte."""
    held = {name: value for name, value in sample.items() if name != "sample_id"}
    data = iter(media_refs(held))
    for ref in media_refs(want):
        if next(data, None) != read_bytes(ref):
            yield f": a medium of sample {sample['sample_id']} is not the source's"
    if next(data, None) is not None or _without_media(held) != _without_media(want):
        yield f": sample {sample['sample_id']} is not the source's"


def _without_media(sample: Any) -> Any:
    return with_media(sample, lambda ref: None)


def _check_tokens(out: Path, plan: PackPlan, template: Any, count: int) -> str:
    from ..packs.exported import ShardedPacks

    packs = ShardedPacks(out, template.encode)
    chosen = _spread(len(plan), count)
    samples = sum(len(packs[number]) for number in chosen)
    return f"{counted(samples, 'samples')} of {counted(len(chosen), 'packs')} encode to their planned lengths"


def _said(lost: str) -> dict[str, str]:
    return {"source": lost.lstrip("; ")} if lost else {}


def _check_chunks(
    out: Path, plan: PackPlan, source: Any, template: Any, encode: int, progress: Progress | None
) -> dict[str, str]:
    from ..packs.exported import ChunkedPacks

    packs = ChunkedPacks(out, (lambda sample: {}) if template is None else template.encode, verify=False)
    for number in _numbers(plan, progress):
        reader, row = packs.readers[number // packs.maxcount], number % packs.maxcount
        if row == 0:
            reader.verify()
        ids, tokens = reader.sample_ids(row), int(reader.lengths(row).sum())
        if ids != plan[number].tolist() or tokens != int(plan.pack_tokens[number]):
            raise LawError(
                f"{reader.path}: pack {number} is not the planned one ({tokens} tokens, {ids[:4]}…)"
            )
    done = {"samples": f"{len(plan.indices):,} planned, each there once, tokens equal to the plan"}
    if source is None or template is None or not encode:
        return done
    chosen = _spread(len(plan), encode)
    for number in chosen:
        for sample in packs[number]:
            _compare_encoded(sample, template.encode(source[sample["sample_id"]]), packs, number)
    samples = sum(len(plan[number]) for number in chosen)
    return {
        **done,
        "encoding": f"{counted(samples, 'samples')} of "
        f"{counted(len(chosen), 'packs')} equal the source's, bit for bit",
    }


def _check_packed(
    out: Path, plan: PackPlan, module: Any, names: list[str], want: dict[int, Any], padding: tuple[int, int]
) -> dict[str, str]:
    """Rows of encoded packs: as many samples and tokens as planned, some equal to what they encode to."""
    number = -1
    for name in names:
        for row in module.read_rows(out / name):
            number += 1
            planned = (len(plan[number]), int(plan.pack_tokens[number])) if number < len(plan) else (0, 0)
            held = (len(row["seq_start_id"]), len(row["input_ids"]))
            if held[0] != planned[0] or not 0 <= held[1] - planned[1] <= held[0] * (padding[0] - 1):
                raise LawError(
                    f"{out / name}: row {number} holds {held[1]} tokens of {counted(held[0], 'samples')}, "
                    f"planned are {planned[1]} of {planned[0]}"
                )
            if number not in want:
                continue
            samples = [{**encoded, "sample_id": one} for one, encoded in want[number]]
            equal = module.packed_row(samples, *padding)
            for field, value in equal.items():
                if not np.array_equal(value, row[field]):
                    raise LawError(
                        f"{out / name}: {field} of row {number} is not what its samples encode to",
                        hint="the source changed since, or another template was used",
                    )
    if number + 1 != len(plan):
        raise LawError(f"{out} holds {counted(number + 1, 'rows')} of {counted(len(plan), 'packs')}")
    done = {"samples": f"{len(plan.indices):,} planned, rows of as many samples and tokens"}
    if want:
        done["encoding"] = f"{counted(len(want), 'rows')} equal the source's, bit for bit"
    return done


def _compare_encoded(sample: Any, want: Any, packs: Any, number: int) -> None:
    """A sample of a chunk is what its source encodes to."""
    import torch

    for name, value in want.items():
        held = sample.get(name)
        if isinstance(value, torch.Tensor):
            same = isinstance(held, torch.Tensor) and torch.equal(held, value)
        elif isinstance(value, np.ndarray):
            same = np.array_equal(held, value)
        else:
            same = name == "sample_id" or held == value
        if not same:
            raise LawError(
                f"{packs.readers[number // packs.maxcount].path}: {name} of sample {sample['sample_id']} "
                f"(pack {number}) is not what its source encodes to",
                hint="the source changed since, or another template was used",
            )


def _spread(packs: int, count: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, packs - 1, min(count, packs))})
