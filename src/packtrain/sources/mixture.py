"""Several sources as one, by fixed weights: a YAML or JSON file names them.

    seed: 42                 # of the order and of partial repeats; default 0
    shuffle: true            # one seeded order over all samples; false: source after source
    sources:
      - path: lvis.json      # relative to this file; anything `open_source` opens, or another mixture
        name: lvis           # default: the file's name
        weight: 1.5          # times each sample occurs: every one once, a seeded half of them twice
        kind: coco           # and `options:` for that kind, where the path does not tell
        options: {order: file}
        chat: {media_root: /data/coco}         # ChatSource options of this source
      - {path: chat.jsonl, samples: 20000}     # instead of a weight: exactly so many

Items are normalised chat samples, so sources of different shapes, media roots and placeholders mix; wrapping
a mixture in `ChatSource` passes them through. An id is one place in the mixture: a sample that occurs twice
has two ids. Ids are a function of (the sources' sizes, weights, seed) alone, found in O(1) memory by seeded
permutations; nothing is drawn anew per epoch, because a static plan needs samples that stay (a key that
asks for it is refused). Aggregates only: nothing is tracked per source beyond `where` and `parts`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

from ..checks import flag, number, whole
from ..errors import ConfigError, SourceError, counted, meant, one_line
from ..extend import Source
from ..files import MOST_YAML, StrPath, digest_json, parse_yaml
from ..moved import also_named
from ..planning.permutation import Permutation
from ..remote.copies import bring
from ..remote.ranges import is_remote
from ._handles import contents
from ._records import InParts, Parts, loads, numbered, twice
from .chat import ChatSource

SUFFIXES = (".yaml", ".yml")

#: Sections of the YAML of a run, which is no mixture.
_OF_A_RUN = ("global_max_length", "model", "template", "data", "custom", "training")

_TOP = ("sources", "seed", "shuffle")
_ENTRY = ("path", "name", "kind", "options", "chat", "weight", "samples")
#: How the records of an entry are read: the keys of its `chat`.
_OF_CHATS = tuple(signature(ChatSource).parameters)[1:]
_MOVING = (
    *("resample", "resample_each_epoch", "per_epoch", "epoch"),
    *("temperature", "probabilities", "streaming"),
)


@dataclass(frozen=True)
class Part:
    """One source in a mixture.

    Attributes:
        name: how `where` calls it.
        source: normalised samples.
        count: how many ids of the mixture it fills.
    """

    name: str
    source: Source
    count: int


class Mixture(InParts):
    """Samples of several sources. Picklable when its sources are."""

    kind, normalised = "mixture", True

    def __init__(
        self, parts: Sequence[Part], *, seed: int = 0, shuffle: bool = True, folder: str = "."
    ) -> None:
        self.folder, self.parts = os.path.abspath(folder), tuple(parts)
        self.seed, self.shuffle = seed, shuffle
        self._parts = Parts(f"mixture in {self.folder}", [part.count for part in self.parts])
        if not len(self):
            raise SourceError("a mixture holds no samples", hint="name sources with a weight above 0")
        self._order = Permutation(len(self), seed, 0) if shuffle else None
        self._rows = [
            Permutation(len(part.source), seed, number + 1) if part.count % len(part.source) else None
            for number, part in enumerate(self.parts)
        ]

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return digest_json(self._identity())

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON, and the names."""
        return {**self._identity(), "kind": "mixture", "names": [part.name for part in self.parts]}

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number, row, _ = self.place(index)
        return self.parts[number].source[row]

    def place(self, index: int) -> tuple[int, int, int]:
        """(part, id in its source, how often that sample came before) of an id."""
        number = numbered(index, len(self), self._parts.name)
        spot = number if self._order is None else int(self._order[number])
        part, within = self._parts.of(spot)
        again, row = divmod(within, len(self.parts[part].source))
        chosen = self._rows[part]
        if chosen is not None and again == self.parts[part].count // len(self.parts[part].source):
            row = int(chosen[row])  # the repeat that is not whole takes a seeded subset
        return part, row, again

    def where(self, index: int) -> str:
        """`lvis: lvis.json[17]`, and which repeat it is."""
        number, row, again = self.place(index)
        told = f"{self.parts[number].name}: {self.parts[number].source.where(row)}"
        return f"{told} (repeat {again})" if again else told

    def _identity(self) -> dict[str, Any]:
        parts = [
            {"fingerprint": part.source.fingerprint, "records": len(part.source), "count": part.count}
            for part in self.parts
        ]
        return {"seed": self.seed, "shuffle": self.shuffle, "parts": parts}


@also_named("mix")
def mix(
    sources: Sequence[Source], weights: Sequence[float] | None = None, *, seed: int = 0, shuffle: bool = True
) -> Mixture:
    """A mixture of sources that are open already; items as the sources give them.

    Args:
        sources: normalised chat samples.
        weights: times each sample of a source occurs; 1 by default.
        seed: of the order and of partial repeats.
        shuffle: one seeded order over all; else source after source.
    """
    given = [1.0] * len(sources) if weights is None else list(weights)
    if len(given) != len(sources):
        raise ConfigError(f"{len(given)} weights for {len(sources)} sources")
    parts = [
        Part(str(number), source, _count(len(source), {"weight": weight}, f"source {number}"))
        for number, (source, weight) in enumerate(zip(sources, given, strict=True))
    ]
    return Mixture(parts, seed=seed, shuffle=shuffle)


def open_source(
    path: StrPath,
    *,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
    within: tuple[str, ...] = (),
) -> Mixture:
    """Open the mixture that a YAML or JSON file describes.

    Args:
        path: the file.
        cache_dir: passed to its sources.
        verify_content: passed to its sources.
        within: mixtures this one is part of; used to find one that holds itself.

    Raises:
        ConfigError: an unknown key, a weight that is none, a mixture within itself.
        SourceError: the file or a source cannot be opened.
    """
    full = os.path.abspath(os.fspath(path))
    if full in within:
        raise ConfigError(f"the mixture {full} holds itself")
    spec = read_spec(full, "is no mixture", "it needs the key sources: a list of sources")
    _check_keys(spec, _TOP, full)
    seed, shuffle, entries = spec.get("seed", 0), spec.get("shuffle", True), spec.get("sources")
    whole(f"{full}: seed", seed, 0, error=ConfigError)
    flag(f"{full}: shuffle", shuffle, error=ConfigError)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{full}: sources is not a list of sources")
    shared = {"cache_dir": cache_dir, "verify_content": verify_content}
    asked = [_entry(entry, f"{full}: source {n}") for n, entry in enumerate(entries)]
    again = twice(map(_name, asked))
    if again is not None:
        raise ConfigError(f"{full} has two sources named {again!r}", hint="give each a name of its own")
    parts = [_part(entry, f"{full}: source {n}", full, shared, within) for n, entry in enumerate(asked)]
    return Mixture(parts, seed=seed, shuffle=shuffle, folder=os.path.dirname(full))


# --------------------------------------------------------------------------------------------
def _entry(entry: Any, what: str) -> Mapping[str, Any]:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise ConfigError(f"{what} has no path")
    _check_keys(entry, _ENTRY, what)
    return entry


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or os.path.basename(entry["path"].rstrip("/")) or entry["path"])


def _part(
    entry: Mapping[str, Any], what: str, full: str, shared: Mapping[str, Any], within: tuple[str, ...]
) -> Part:
    from ._open import kind_of
    from ._open import open_source as open_any

    options = {**shared, **_mapping(entry, "options", what)}
    path = entry["path"] if is_remote(entry["path"]) else os.path.join(os.path.dirname(full), entry["path"])
    path = bring(path, options.get("cache_dir"))
    kind = entry.get("kind") or kind_of(path)
    if kind == "mixture":
        options["within"] = (*within, full)
    if kind == "encoded":
        raise ConfigError(f"{what} is encoded rows: they do not mix with chats")
    chat = ChatSource(open_any(path, kind=kind, **options), **_mapping(entry, "chat", what))
    return Part(_name(entry), chat, _count(len(chat), entry, what))


def _count(size: int, entry: Mapping[str, Any], what: str) -> int:
    """Ids a source fills: weight times its size, rounded half up; or the number asked for."""
    weight, samples = entry.get("weight"), entry.get("samples")
    if weight is not None and samples is not None:
        raise ConfigError(f"{what} has a weight and a number of samples", hint="give one of them")
    if samples is not None:
        part = "a part of them is a weight" if isinstance(samples, float) and 0 < samples < 1 else None
        return whole(f"{what}: samples", samples, 1, hint=part, error=ConfigError)
    weight = 1 if weight is None else weight
    left = "leave the source out" if weight == 0 else None
    number(f"{what}: weight", weight, 0, without=(0,), hint=left, error=ConfigError)
    count = math.floor(weight * size + 0.5)
    if not count:
        raise ConfigError(f"{what}: weight {weight} leaves none of its {counted(size, 'samples')}")
    return count


def read_spec(full: str, otherwise: str, hint: str | None = None) -> Mapping[str, Any]:
    """What a YAML or JSON file says of sources.

    Raises:
        ConfigError: it is malformed, or says nothing: `otherwise`.
    """
    as_json = full.lower().endswith(".json")
    data = contents(full) if as_json else contents(full, 4 * MOST_YAML + 1)
    try:
        text = data.decode("utf-8-sig")
        spec = loads(text) if as_json else parse_yaml(text, full)
    except ValueError as error:
        raise ConfigError(f"{full} is not valid: {one_line(error)}") from None
    if not isinstance(spec, Mapping) or not spec:
        raise ConfigError(f"{full} {otherwise}", hint=hint)
    return spec


def _mapping(entry: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
    value = entry.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: {key} is {type(value).__name__}, not a mapping")
    return dict(value)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in given:
        if key in _MOVING:
            raise ConfigError(
                f"{what} asks for {key!r}: samples that change from epoch to epoch have no static plan",
                hint="use fixed weights, one mixture a run",
            )
        if key not in known:
            hint = meant(str(key), known, f"keys: {', '.join(known)}")
            if known is _ENTRY and key in _OF_CHATS:
                hint = f"write it under chat: {{{key}: …}}"
            elif key in _OF_A_RUN:
                hint = "the YAML of a run is read by packtrain run and train; name its data.path"
            raise ConfigError(f"{what} has the unknown key {key!r}", hint=hint)
