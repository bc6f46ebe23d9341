"""The marks of a stream: what it is (`stream.json`, first), what is refused before that, and its `END`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..checks import whole
from ..errors import (
    ForeignArtefactError,
    FormatError,
    InputError,
    PlanError,
    SourceError,
    counted,
    meant,
    told_with_hint,
)
from ..extend import Source, Template
from ..planning.lengths import STATUS_OK, Lengths
from ..planning.spec import PlanSpec
from ..sources._account import UNREAD, UnreadKeys, check_share
from ..store import chunk_folder
from ..store._folders import sealed
from ..waiting.poll import fresh_json, fresh_names
from ._journal import Journal, ProduceStats

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# The beginning of a stream: what is refused before anybody reads of it, and how it is taken back
# --------------------------------------------------------------------------------------------
# A wrong processor, kind or column makes every record fail. Each of them would be a fault for the ledger, and
# all of them together are a fault of the command: it stops, and what it began is forgotten, so that the right
# command can use the same folder. The same holds for a cap on a cost that nobody measures.
#: Records that may all fail for one reason before the producer stops.
STOP_AFTER = 100

#: Raw shards that may all be unreadable before a watching producer stops.
FAULTY = 10


def check_limits(limits: Mapping[str, int], measured: Iterable[str] | None) -> None:
    """Refuse a limit of a cost that is not measured: it would have no effect.

    Args:
        measured: names of the costs; None: nobody knows yet.

    Raises:
        PlanError: names the cost and those that are known.
    """
    if measured is None:
        return
    known = sorted(measured)
    for name in limits:
        if name not in known:
            raise PlanError(
                f"limits names the cost {name!r}, the template measures: {', '.join(known) or 'none'}",
                hint=meant(name, known, "leave the limit out"),
            )


def limited(lengths: Lengths, limits: Mapping[str, int], *, check: bool) -> Lengths:
    """The lengths with the costs that are limited, 0 where no sample of the window has one.

    Args:
        check: refuse a cost that no sample has, where one can be used: a template that does not say what it
            measures (`cost_names`) has said so now.
    """
    if check and (lengths.status == STATUS_OK).any():
        check_limits(limits, lengths.costs)
    none = np.zeros(len(lengths), np.int64)
    costs = {name: lengths.costs.get(name, none) for name in limits}
    return Lengths(lengths.tokens, costs, lengths.status, lengths.reasons)


def check_readable(output: Path, journal: Journal, *, least: int | None = None) -> None:
    """Stop where no raw shard can be read, and take back what was begun.

    Args:
        least: so many shards are enough to say so; 0: none are. None: the input has ended.

    Raises:
        SourceError: there is no raw shard, or none that can be read.
    """
    shards = journal.shards
    if any(not shard.fault for shard in shards) or (least is not None and not 0 < least <= len(shards)):
        return
    undo_beginning(output)
    if not shards:
        raise no_shard(journal.raw.folder)
    raise SourceError(
        f"none of the {len(shards)} raw shards in {journal.raw.folder} can be read; "
        f"{shards[0].name}: {shards[0].fault}",
        hint="check the kind, or repair them, and run the command again; nothing was published",
    )


def no_shard(folder: Path) -> SourceError:
    """The input holds nothing to read."""
    return SourceError(
        f"{folder} holds no raw shard", hint="JSONL, tars, or folders of clips with transcripts"
    )


def check_usable(
    output: Path, stats: ProduceStats, stop_after: int, first: Mapping[str, Any] | None, *, last: bool
) -> None:
    """Stop where no record that was read can be used; call it while nothing is packed or waits.

    Args:
        stop_after: so many records that fail for one reason are enough; 0: none are, never stop.
        first: the ledger's row of the first one.
        last: nothing follows: all records failed, for whatever reasons.

    Raises:
        SourceError: what was begun is taken back before.
    """
    dropped = sum(stats.dropped.values())
    if not stop_after or stats.packed or not dropped or first is None:
        return
    if not last and (len(stats.dropped) > 1 or dropped < stop_after):
        return
    undo_beginning(output)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(stats.dropped.items()))
    all_of = f"all {counted(dropped, 'records')}" if last else f"the first {counted(dropped, 'records')} all"
    detail = str(first["detail"] or first["reason"])
    named = first["shard"] == "." or detail.startswith(first["shard"])  # the input itself is one shard
    where = "" if named else f"{first['shard']}, record {first['row'] + 1}: "
    said, advice = told_with_hint(where + detail)
    raise SourceError(
        f"{all_of} failed ({reasons}); the first: {said}",
        hint=(advice or "check the processor, the kind, the columns, the media folder and the pack length")
        + "; nothing was published; stop_after_failures=0 goes on and puts them into the ledger",
    )


def check_account(
    output: Path, stats: ProduceStats, ledger: Iterable[Mapping[str, Any]], *, last: bool
) -> None:
    """Stop where more than 1 % of the records hold a key that changes training and is not read.

    Args:
        ledger: rows of samples that were left out.
        last: nothing follows.

    Raises:
        UnreadKeys: what was begun is taken back before, where nothing of it was published.
    """
    first = next((str(row["detail"]) for row in ledger if row["reason"] == UNREAD), "")
    try:
        check_share(stats.dropped.get(UNREAD, 0), stats.read, first, last=last)
    except UnreadKeys:
        undo_beginning(output)
        raise


def undo_beginning(output: Path) -> bool:
    """Forget a stream that has published nothing; False where something of it can have been read.

    `stream.json` goes last: stopped anywhere, the next run finds a stream that has published nothing.
    """
    names = fresh_names(output)
    if _is_published(names):
        return False
    journal = output / chunk_folder.JOURNAL
    for name in sorted(fresh_names(journal), reverse=True):  # states, then shards from the newest on
        files.remove(journal / name)
    with contextlib.suppress(OSError):  # not there, or something else lies in it
        journal.rmdir()
    for name in names:
        stem = name.removesuffix(".arrow")
        if stem != name and chunk_folder.number_of(f"{stem}.json") is not None:
            files.remove(output / name)  # a chunk whose manifest was never written
    files.remove(output / chunk_folder.STREAM)
    return True


def _is_published(names: Sequence[str]) -> bool:
    """Can something of the stream have been read?"""
    marks = (chunk_folder.END, chunk_folder.INDEX)
    return any(
        name in marks or chunk_folder.number_of(name) is not None or name.endswith(chunk_folder.COMPLETED)
        for name in names
    )


def refuse_other(output: Path, config: Mapping[str, Any]) -> None:
    """Refuse to go on with a stream that was made with other options, where it can have been read.

    Raises:
        ForeignArtefactError: names the first of them.
    """
    told = chunk_folder.read_stream(output)
    if told is None or not _is_published(fresh_names(output)):
        return
    if (key := _differs(told["config"], config)) is not None:
        raise ForeignArtefactError(
            f"{output} holds a stream made with {key} {told['config'].get(key)!r}, not {config.get(key)!r}",
            hint="use the options it was begun with, or another folder",
        )


def _differs(held: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The first option that two streams have not alike."""
    return next((key for key in sorted({*config, *held}) if held.get(key) != config.get(key)), None)


# --------------------------------------------------------------------------------------------
# The marks of a stream: what it is (`stream.json`, first), what is refused before that, and its `END`
# --------------------------------------------------------------------------------------------
def check_apart(inputs: Path, output: Path) -> None:
    """InputError where chunks would come to lie among other things.

    Among the raw shards they would be taken for raw shards; a folder of another kind holds another job.
    """
    chunk_folder.check_folder(output, writing=True)
    raw, out = inputs.resolve(), output.resolve()
    if raw == out or raw in out.parents:
        raise InputError(
            f"the output {output} {'is' if raw == out else 'lies in'} the input {inputs}",
            hint="choose an output folder beside the input",
        )


def check_least(least: int, **values: int | None) -> None:
    """InputError for an option below its least value; None is no value."""
    for name, value in values.items():
        if value is not None:
            whole(name, value, least)


def stream_config(
    spec: PlanSpec, template: Template, open_shard: Callable[[Path], Source], **more: Any
) -> dict[str, Any]:
    """What decides the samples, the packs and their bytes, as plain JSON.

    An `open_shard` says by its method `config()` how it reads; one without may change unseen.
    """
    named = {key: value for key, value in spec.to_dict().items() if key != "skip"}
    told: dict[str, Any] = getattr(open_shard, "config", dict)()
    if told:
        named["reading"] = json.loads(json.dumps(told, default=str))
    return {**named, "template": files.digest_json(template.config()), **more}


def begun_with(output: Path) -> dict[str, Any]:
    """Options of the stream in `output`; empty where none was begun."""
    told = chunk_folder.read_stream(output)
    return {} if told is None else dict(told["config"])


def read_checked(output: Path, config: Mapping[str, Any]) -> str | None:
    """The id of the stream in `output`; None where none was begun.

    One that was begun with other options is forgotten, while it has no chunk that anybody could have read.

    Raises:
        ForeignArtefactError: it was made with other options.
    """
    told = chunk_folder.read_stream(output)
    if told is None:
        return None
    refuse_other(output, config)
    if (key := _differs(told["config"], config)) is not None and undo_beginning(output):
        logger.warning("%s: begun anew, it was begun with %s %r", output, key, told["config"].get(key))
        return None
    return str(told["stream"])


def publish_again(output: Path, config: Mapping[str, Any], journal: Journal, number: int) -> str:
    """Write a lost or torn `stream.json` anew, where options and first raw shard give the id that the chunks
    have; returns it.

    Raises:
        ForeignArtefactError: they give another.
    """
    last = (output / chunk_folder.chunk_name(number - 1)).with_suffix(".json")
    told = files.read_json(last)["meta"]["stream"]
    if not journal.shards or _stream_id(config, journal.shards[0].sha256) != told:
        raise ForeignArtefactError(
            f"{output / chunk_folder.STREAM} is gone or torn, "
            "and the chunks were not made with these options",
            hint="use the options it was begun with, or another folder",
        )
    return publish_stream(output, config, journal.shards[0].sha256)


def packs_before(output: Path, number: int) -> list[int]:
    """Packs of the chunks before `number`, removed ones too.

    Raises:
        FormatError: one of them is torn or gone, and no index tells its packs: slots behind it would move.
    """
    view = chunk_folder.View(output)
    view.refresh()
    if len(view.counts) < number:
        raise FormatError(
            f"{view.fault}, though later chunks are there",
            hint="copy it again from where it was produced, or produce into a new folder",
        )
    return view.counts[:number]


def _stream_id(config: Mapping[str, Any], first: str) -> str:
    """Depends on the options and on the bytes of the first raw shard."""
    return files.digest_json({"config": dict(config), "first": first})


def publish_stream(output: Path, config: Mapping[str, Any], first: str) -> str:
    """Begin a stream; returns its id."""
    stream = _stream_id(config, first)
    marker = {"schema": chunk_folder.STREAM_SCHEMA, "stream": stream, "config": dict(config)}
    files.publish_json(output / chunk_folder.STREAM, sealed(marker))
    return stream


def chunk_meta(
    stream: str, number: int, packs: int, stats: ProduceStats, ledger: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the manifest of a chunk says of the stream; `stats` count the chunk's `packs` already."""
    told = {"stream": stream, "chunk": number, "packs_before": stats.packs - packs}
    return {**told, "ledger": ledger, "stats": stats.to_dict()}


def publish_end(output: Path, stream: str, stats: ProduceStats, ledger: list[dict[str, Any]]) -> None:
    """Say that nothing follows."""
    counts = {"chunks": stats.chunks, "packs": stats.packs, "stats": stats.to_dict()}
    told = {"schema": chunk_folder.STREAM_SCHEMA, "stream": stream, **counts, "ledger": ledger}
    files.publish_json(output / chunk_folder.END, sealed(told))


def is_whole_end(output: Path) -> bool:
    return chunk_folder.is_sealed(fresh_json(output / chunk_folder.END))


def has_ended(output: Path) -> bool:
    """Is END there, whole? A torn one is removed: it is made again from the state behind the last chunk."""
    if is_whole_end(output):
        return True
    if (output / chunk_folder.END).exists():
        files.remove(output / chunk_folder.END)
    return False


def check_ended(output: Path, journal: Journal) -> ProduceStats:
    """The counts of a stream that has ended.

    Raises:
        InputError: the input holds shards that are not in it.
    """
    new = [name for name in journal.raw.visible() if journal.is_new(name)]
    if new:
        raise InputError(
            f"{output} has ended, and {new[0]} ({counted(len(new), 'raw shards')} in all) is not in it",
            hint="produce new shards into another folder",
        )
    return ProduceStats.of_dict(files.read_json(output / chunk_folder.END)["stats"])
