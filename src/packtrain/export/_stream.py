"""The marks of a stream: what it is (`stream.json`, first) and that it has ended (`END`, last)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ForeignArtefactError, InputError
from ..extend import Template
from ..planning.spec import PlanSpec
from ..store._folders import sealed
from ..store.growing import END, STREAM, STREAM_SCHEMA, read_stream
from ._journal import Journal
from ._produce_stats import ProduceStats

__all__ = ["check_ended", "check_least", "publish_end", "publish_stream", "read_checked", "stream_config"]


def check_least(**values: tuple[int | None, int]) -> None:
    """InputError for an option below its least value; None is no value."""
    for name, (value, least) in values.items():
        if value is not None and value < least:
            raise InputError(f"{name} is {value}, expected >= {least}")


def stream_config(spec: PlanSpec, template: Template, **more: Any) -> dict[str, Any]:
    """What decides the packs and their bytes, as plain JSON."""
    named = {key: value for key, value in spec.to_dict().items() if key != "skip"}
    return {**named, "template": files.digest_json(template.config()), **more}


def read_checked(output: Path, config: Mapping[str, Any]) -> str | None:
    """The id of the stream in `output`; None where none was begun.

    Raises:
        ForeignArtefactError: it was made with other options.
    """
    told = read_stream(output)
    if told is None:
        return None
    held = told["config"]
    for key in sorted(config):
        if held.get(key) != config[key]:
            raise ForeignArtefactError(
                f"{output} holds a stream made with {key} {held.get(key)!r}, not {config[key]!r}",
                hint="use the options it was begun with, or another folder",
            )
    return str(told["stream"])


def publish_stream(output: Path, config: Mapping[str, Any], first: str) -> str:
    """Begin a stream; its id depends on the options and on the bytes of the first raw shard."""
    stream = files.digest_json({"config": dict(config), "first": first})
    marker = {"schema": STREAM_SCHEMA, "stream": stream, "config": dict(config)}
    files.publish_json(output / STREAM, sealed(marker))
    return stream


def publish_end(output: Path, stream: str, stats: ProduceStats, ledger: list[dict[str, Any]]) -> None:
    """Say that nothing follows."""
    told = {"schema": STREAM_SCHEMA, "stream": stream, "chunks": stats.chunks, "packs": stats.packs}
    files.publish_json(output / END, sealed({**told, "stats": stats.to_dict(), "ledger": ledger}))


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
