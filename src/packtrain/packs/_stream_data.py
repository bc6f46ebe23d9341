"""What a stream's state says of the data that it belongs to, and whether a source still has them.

    {"fingerprint": …, "records": n, "size"?: …, "sha256"?: …}                    of files
    {"weights": [[name, share], …], "stopping": …, "sources": {name: …, …}}       a mixture; parts as above,
                                                                    of samples in memory their number alone

Nobody knows what an iterable or a function gives, so nothing is told of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ForeignArtefactError, counted

Data = dict[str, Any]


def data_of(source: Any) -> Data | None:
    """What a state says of a source; None: nothing is known of it."""
    if callable(getattr(source, "mixture", None)):
        told = source.mixture()
        parts = {name: _part_of(part) for name, part in _parts(source).items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return {**told, "sources": known}
    held = _of_files(source)
    if held is None:
        return None
    rows = held.fields().get("files") or []
    one = rows[0] if len(rows) == 1 else {}
    return {"fingerprint": held.fingerprint, "records": len(held), **one}


def check_data(source: Any, saved: Any) -> None:
    """Refuse other content than a state was saved with. At the end of files there may be more.

    Args:
        saved: what `data_of` was; None: the state is of an earlier version, or nothing was known.

    Raises:
        ForeignArtefactError: the file changed; or the mixture is another one.
    """
    now = data_of(source)
    if not isinstance(saved, Mapping) or now is None:
        return
    if "weights" in now and "weights" in saved:
        _check_mixture(source, saved, now)
    elif "weights" in now or "weights" in saved or not _goes_on(source, saved, now):
        raise _changed(source, saved, now)


def _check_mixture(source: Any, saved: Mapping[str, Any], now: Data) -> None:
    for key in ("stopping", "weights"):
        before, here = _told(saved.get(key)), _told(now[key])
        if saved.get(key) != now[key]:
            raise ForeignArtefactError(
                f"the saved stream has a mixture of {key} {before}, this one {here}",
                hint="mix the sources as the saved stream did, or start anew",
            )
    held = saved.get("sources")
    for name, part in _parts(source).items():
        was, is_now = held.get(name) if isinstance(held, Mapping) else None, now["sources"].get(name)
        if not isinstance(was, Mapping) or is_now is None:
            continue
        if now["stopping"] != "first" and was.get("records") != is_now.get("records"):
            raise ForeignArtefactError(
                f"source {name} had {was.get('records')!r} samples when the state was saved and now has "
                f"{is_now.get('records')!r}: it comes again at other places",
                hint="restore the source, or start anew",
            )
        if "fingerprint" in was or "weights" in was:
            check_data(part, was)


def _parts(mixture: Any) -> dict[str, Any]:
    return {str(name): source for name, source in mixture.sources.items()}


def _part_of(source: Any) -> Data | None:
    """Of a part of a mixture."""
    told = data_of(source)
    if callable(source) or not hasattr(source, "__len__"):
        return told
    return {"records": len(source), **(told or {})}


def _goes_on(source: Any, saved: Mapping[str, Any], now: Data) -> bool:
    """Whether the files are those of before, or begin with them."""
    if saved.get("fingerprint") == now.get("fingerprint"):
        return True
    held = _of_files(source)
    size, sha256, records = (saved.get(name) for name in ("size", "sha256", "records"))
    if held is None or type(records) is not int:
        return False
    if hasattr(held, "begins_with") and type(size) is int and isinstance(sha256, str):
        return bool(held.begins_with(size, sha256, records))
    return hasattr(held, "beginnings") and saved.get("fingerprint") in held.beginnings(records)


def _changed(source: Any, saved: Mapping[str, Any], now: Data) -> ForeignArtefactError:
    records = saved.get("records")
    of = f"{counted(records, 'records')} of " if type(records) is int else ""
    return ForeignArtefactError(
        f"the file changed: the stream was saved over {of}data {str(saved.get('fingerprint'))[:12]}, "
        f"{source!r} holds {str(now.get('fingerprint', 'a mixture'))[:12]}",
        hint="restore the data, or start anew",
    )


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in value)
    return repr(value)


def _of_files(source: Any) -> Any:
    """The source of raw records below wrappers, where it knows the digests of its files; else None."""
    while callable(getattr(source, "fields", None)) and hasattr(source, "source"):
        source = source.source
    known = callable(getattr(source, "fields", None)) and isinstance(source.fingerprint, str)
    return source if known else None
