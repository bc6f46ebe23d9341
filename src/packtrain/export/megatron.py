"""megatron: packs as packed data of Megatron-Bridge, which its own readers open without a tokenizer.

    pack-000000-000.idx.parquet   a row a pack, row groups of 500; the next file begins behind `maxsize` bytes
    pack-000000-000.npy           `layout: npy`: the rows as one object array, for releases before Parquet
    packing.json                  `packed_metadata_path`: what `pad_cu_seqlens` asks for

A row holds `input_ids` (int32), `loss_mask` (int8: 1 where the next token is trained, 0 at the end of every
sample) and `seq_start_id` (int32: where samples begin). Its readers take the last token of a sample for a
target only.

`context_parallel: N` pads every sample so that what is left without that token divides by 2 N
(`pad_seq_to_mult`). Its readers take what stands behind the last other token for padding, so that the pad
token must be the tokenizer's end-of-text token.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..checks import one_of, whole
from ..errors import ChecksumError, ConfigError, InputError, optional
from ._job import Job, Made, Row, by_files, published, write_files

logger = logging.getLogger(__name__)

_LAYOUTS = ("parquet", "npy")
OPTIONS = {"layout": "parquet"}
#: Taken where they are given.
FURTHER = ("context_parallel", "pad_token_id")
FILES = (r".*\.(parquet|pq|npy)|packing\.json", r"pack-\d{6,}-\d{3,}\.(idx\.parquet|npy)|packing\.json")

needs_template = True

_TYPES = {"input_ids": "int32", "loss_mask": "int8", "seq_start_id": "int32"}
_GROUP = 500  # rows: its readers hold one group
_IGNORE = -100
#: Fields of an encoded sample that a row says, or that say nothing more.
_SAID = {"input_ids", "labels", "position_ids", "attention_mask", "sample_id", "length", "source", "channel"}


def check_options(options: dict[str, Any]) -> None:
    """Refuse settings that cannot be, before anything is written; what changes nothing is taken out."""
    one_of("layout", options["layout"], _LAYOUTS)
    for name, least in zip(FURTHER, (1, 0), strict=True):
        if name in options:
            whole(name, options[name], least)
    if options.get("context_parallel", 1) == 1:
        options.pop("context_parallel", None)
        if options.pop("pad_token_id", None) is not None:
            logger.warning("pad_token_id has no effect without context_parallel")


def padding_of(options: Mapping[str, Any], template: Any) -> tuple[int, int]:
    """(what the tokens of a sample without its last one are padded to a multiple of, pad token).

    Args:
        options: of the export.
        template: it knows the end-of-text token; None: it is not at hand.

    Raises:
        ConfigError: it knows none, and `pad_token_id` is not given.
    """
    size = options.get("context_parallel", 1)
    pad = options.get("pad_token_id")
    if size > 1 and pad is None:
        pad = getattr(getattr(template, "tokenizer", None), "eos_token_id", None)
        if pad is None and template is not None:
            raise ConfigError(
                f"context_parallel {size} pads with the end-of-text token, which this template does not tell",
                hint="give its id as pad_token_id",
            )
    return (2 * size, pad or 0) if size > 1 else (1, 0)


def check_job(job: Job) -> None:
    """Refuse a plan that the options do not fit, before anything is written."""
    if job.options["layout"] == "npy" and job.parts > 1:
        raise ConfigError(
            f"layout npy is one file, {len(job.plan):,} packs are {job.parts} parts",
            hint=f"maxcount {len(job.plan)}; or layout parquet, which newer releases read",
        )
    multiple, _ = padding_of(job.options, job.template)
    if job.plan.spec.multiple_of % multiple:
        raise ConfigError(
            f"padding to a multiple of {multiple} makes packs longer than they were planned",
            hint=f"plan with multiple_of {multiple}",
        )


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the files of a part.

    Raises:
        DriftError: a sample encodes to another length than it was planned with.
        InputError: a sample that a row cannot say, by name.
    """
    padding = padding_of(job.options, job.template)
    rows = (packed_row(job.encoded(job.read(number)), *padding) for number in job.packs_of(part))
    if job.options["layout"] == "npy":
        return write_files(job, part, ".npy", _write_npy, rows=rows)
    return write_files(job, part, ".idx.parquet", _write_parquet(job.maxsize), rows=rows)


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what static shapes of boundaries are made from."""
    counts, tokens = np.diff(job.plan.offsets), job.plan.pack_tokens
    told = {
        "dataset_max_seqlen": max(row["told"]["longest"] for part in parts for row in part["files"]),
        "max_samples_per_bin": int(counts.max()),
        "packing_factor": round(float(counts.mean()), 2),
        "packing_efficiency": round(100.0 * float(tokens.mean()) / job.plan.spec.pack_length, 2),
        "pack_size": job.plan.spec.pack_length,
        "min_packed_seqlen": int(tokens.min()),
    }
    return [published(job.out, "packing.json", json.dumps([told], indent=2).encode())]


def packed_row(samples: Sequence[Mapping[str, Any]], multiple: int = 1, pad: int = 0) -> Row:
    """The row of a pack.

    Args:
        samples: encoded.
        multiple: the tokens of a sample without its last one are padded to a multiple of this.
        pad: token of the padding, which is not trained.

    Raises:
        InputError: a sample with media, weights or positions of its own, or of one token.
    """
    ids, masks, starts, begin = [], [], [], 0
    for sample in samples:
        tokens, trained = _said(sample)
        more = (1 - len(tokens)) % multiple
        ids.append(np.pad(tokens, (0, more), constant_values=pad))
        masks.append(np.pad(trained, (0, more)))
        starts.append(begin)
        begin += len(ids[-1])
    held = (np.concatenate(ids), np.concatenate(masks), np.array(starts))
    return {name: value.astype(kind) for (name, kind), value in zip(_TYPES.items(), held, strict=True)}


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order.

    Raises:
        ChecksumError: it holds something else.
    """
    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=True).tolist()
        else:
            parquet = optional("pyarrow.parquet", "pyarrow", "arrow").parquet
            with parquet.ParquetFile(path) as table:
                rows = [row for group in table.iter_batches(_GROUP) for row in group.to_pylist()]
        for row in rows:
            yield {name: np.asarray(row[name], dtype=kind) for name, kind in _TYPES.items()}
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ChecksumError(f"{path} holds no packed rows: {error}", hint="export it again") from None


def _said(sample: Mapping[str, Any]) -> tuple[Any, Any]:
    """Token ids, and where the next one is trained."""
    ids, labels = (np.asarray(sample[name]).reshape(-1) for name in ("input_ids", "labels"))
    what = next(_unsaid(sample, ids, labels), None)
    if what is not None:
        raise InputError(
            f"sample {sample.get('sample_id')} {what}: a packed row of Megatron-Bridge cannot say that",
            hint="leave it out (packtrain plan --skip-samples), or use another format",
        )
    return ids, np.append(labels[1:] != _IGNORE, False)


def _unsaid(sample: Mapping[str, Any], ids: Any, labels: Any) -> Iterator[str]:
    """What of a sample a row has no place for."""
    for name, value in sample.items():
        if name not in _SAID and not (name in ("weight", "loss_scale") and (np.asarray(value) == 1).all()):
            yield f"has {name}"
    places = np.asarray(sample.get("position_ids", np.arange(len(ids))))
    if places.shape[-1:] != ids.shape or (places != np.arange(len(ids))).any():
        yield "has position_ids of its own"
    if (labels[1:] != ids[1:])[labels[1:] != _IGNORE].any():
        yield "has labels that are not its tokens"
    if len(ids) < 2:
        yield "has one token"


def _write_npy(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
    held = [{name: value.tolist() for name, value in row.items()} for row in rows]
    path = folder / "rows.npy"
    with files.publish(path) as handle:
        np.lib.format.write_array(handle, np.array(held, dtype=object), allow_pickle=True)
    yield path, len(held), {"longest": max(map(_longest, held))}


def _write_parquet(maxsize: int) -> Any:
    def write(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
        arrow = optional("pyarrow.parquet", "pyarrow", "arrow")
        types = {"int32": arrow.int32(), "int8": arrow.int8()}
        schema = arrow.schema([(name, arrow.list_(types[kind])) for name, kind in _TYPES.items()])
        for number, held in by_files(rows, maxsize, _size):
            path, packs, longest = folder / f"{number}.parquet", 0, 0
            with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
                while group := list(itertools.islice(held, _GROUP)):
                    packs += len(group)
                    longest = max(longest, *map(_longest, group))
                    columns = {name: [one[name] for one in group] for name in _TYPES}
                    writer.write_table(arrow.table(columns, schema=schema), row_group_size=_GROUP)
            yield path, packs, {"longest": longest}

    return write


def _size(row: Row) -> int:
    return sum(value.nbytes for value in row.values())


def _longest(row: Mapping[str, Any]) -> int:
    return int(np.diff([*row["seq_start_id"], len(row["input_ids"])]).max())
