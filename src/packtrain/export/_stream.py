"""The marks of a stream: what it is (`stream.json`, first) and that it has ended (`END`, last)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..checks import whole
from ..errors import ForeignArtefactError, FormatError, InputError
from ..extend import Source, Template
from ..planning.spec import PlanSpec
from ..store._folders import sealed
from ..store.growing import END, STREAM, STREAM_SCHEMA, View, check_folder, chunk_name, is_sealed, read_stream
from ..waiting.poll import fresh_json
from ._beginning import undo_beginning
from ._journal import Journal
from ._produce_stats import ProduceStats

__all__ = [
    "begun_with",
    "check_apart",
    "check_ended",
    "check_least",
    "check_times",
    "chunk_meta",
    "has_ended",
    "packs_before",
    "publish_again",
    "publish_end",
    "publish_stream",
    "read_checked",
    "stream_config",
]

logger = logging.getLogger(__name__)


def check_apart(inputs: Path, output: Path) -> None:
    """InputError where chunks would come to lie among other things.

    Among the raw shards they would be taken for raw shards; a folder of another kind holds another job.
    """
    check_folder(output, writing=True)
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


def check_times(poll_s: float, flush_s: float, stable_s: float) -> None:
    """InputError for seconds that nobody can wait."""
    if not 0 < poll_s < math.inf or not flush_s >= 0 or not stable_s >= 0:
        raise InputError(
            f"poll_s is {poll_s}, flush_s {flush_s}, stable_s {stable_s}",
            hint="seconds: poll_s > 0, flush_s >= 0 (0 = only full windows), stable_s >= 0",
        )


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
    told = read_stream(output)
    return {} if told is None else dict(told["config"])


def read_checked(output: Path, config: Mapping[str, Any]) -> str | None:
    """The id of the stream in `output`; None where none was begun.

    One that was begun with other options is forgotten, while it has no chunk that anybody could have read.

    Raises:
        ForeignArtefactError: it was made with other options.
    """
    told = read_stream(output)
    if told is None:
        return None
    held = told["config"]
    for key in sorted({*config, *held}):
        if held.get(key) != config.get(key):
            if undo_beginning(output):
                logger.warning("%s: begun anew, it was begun with %s %r", output, key, held.get(key))
                return None
            raise ForeignArtefactError(
                f"{output} holds a stream made with {key} {held.get(key)!r}, not {config.get(key)!r}",
                hint="use the options it was begun with, or another folder",
            )
    return str(told["stream"])


def publish_again(output: Path, config: Mapping[str, Any], journal: Journal, number: int) -> str:
    """Write a lost or torn `stream.json` anew, where options and first raw shard give the id that the chunks
    have; returns it.

    Raises:
        ForeignArtefactError: they give another.
    """
    told = files.read_json((output / chunk_name(number - 1)).with_suffix(".json"))["meta"]["stream"]
    if not journal.shards or stream_id(config, journal.shards[0].sha256) != told:
        raise ForeignArtefactError(
            f"{output / STREAM} is gone or torn, and the chunks were not made with these options",
            hint="use the options it was begun with, or another folder",
        )
    return publish_stream(output, config, journal.shards[0].sha256)


def packs_before(output: Path, number: int) -> list[int]:
    """Packs of the chunks before `number`, removed ones too.

    Raises:
        FormatError: one of them is torn or gone, and no index tells its packs: slots behind it would move.
    """
    view = View(output)
    view.refresh()
    if len(view.counts) < number:
        raise FormatError(
            f"{view.fault}, though later chunks are there",
            hint="copy it again from where it was produced, or produce into a new folder",
        )
    return view.counts[:number]


def stream_id(config: Mapping[str, Any], first: str) -> str:
    """Depends on the options and on the bytes of the first raw shard."""
    return files.digest_json({"config": dict(config), "first": first})


def publish_stream(output: Path, config: Mapping[str, Any], first: str) -> str:
    """Begin a stream; returns its id."""
    stream = stream_id(config, first)
    marker = {"schema": STREAM_SCHEMA, "stream": stream, "config": dict(config)}
    files.publish_json(output / STREAM, sealed(marker))
    return stream


def chunk_meta(
    stream: str, number: int, packs: int, stats: ProduceStats, ledger: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the manifest of a chunk says of the stream; `stats` count the chunk's `packs` already."""
    before = stats.packs - packs
    return {
        "stream": stream,
        "chunk": number,
        "packs_before": before,
        "ledger": ledger,
        "stats": stats.to_dict(),
    }


def publish_end(output: Path, stream: str, stats: ProduceStats, ledger: list[dict[str, Any]]) -> None:
    """Say that nothing follows."""
    told = {"schema": STREAM_SCHEMA, "stream": stream, "chunks": stats.chunks, "packs": stats.packs}
    files.publish_json(output / END, sealed({**told, "stats": stats.to_dict(), "ledger": ledger}))


def has_ended(output: Path) -> bool:
    """Is END there, whole? A torn one is removed: it is made again from the state behind the last chunk."""
    if is_sealed(fresh_json(output / END)):
        return True
    if (output / END).exists():
        files.remove(output / END)
    return False


def check_ended(output: Path, journal: Journal) -> ProduceStats:
    """The counts of a stream that has ended.

    Raises:
        InputError: the input holds shards that are not in it.
    """
    new = [name for name in journal.raw.visible() if journal.is_new(name)]
    if new:
        raise InputError(
            f"{output} has ended, and {new[0]} ({len(new)} raw shards in all) is not in it",
            hint="produce new shards into another folder",
        )
    return ProduceStats.of_dict(files.read_json(output / END)["stats"])
