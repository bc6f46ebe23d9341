"""A directory of chunks that grows: its layout, and what a reader sees of it.

    OUT/stream.json                what is produced: pack length, media, template, and the stream's id;
    never changed
        chunk_00000000.arrow       chunks, numbered without holes (`store.chunks`; the manifest comes last)
        chunk_00000000.json
        index.json                 packs of each chunk so far, rewritten now and then; also of removed chunks
        END                        totals; nothing follows
        journal/                   the producer's own: raw shards and the state after each chunk
        producer/                  the producer's claim and heartbeat (`waiting.claim`)
        readers/5f….json           a run that reads here registered, and names the folder of its marks

The marks of a run lie in its own folder (`RUN/consumed/STREAM/`), those of a reader without one in OUT:

    acks/w00004_r00001.json        how far rank 1 of 4 has acknowledged; only ever further (launches that
                                   began behind slot 0 have files of their own: w00004_o00004_s…_r00001.json)
    chunk_00000000.arrow.completed the rank that reads this chunk has used it and saved a checkpoint

A chunk is there when its manifest can be read, is as it was written, and its file has the manifest's size.
Readers list the folder at every look and never compare clocks. Order of reading: chunk c belongs to rank c
% W, so a *slot* m * W + q is the m-th pack of the chunks of rank q. Slots are what cursors count.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .. import files
from ..errors import ForeignArtefactError, FormatError, InputError
from ..remote.copies import present, size_of
from ..remote.outputs import sending
from ..waiting.poll import Clock, SystemClock, Watch, fresh_json, fresh_names
from ._chunk_reader import CHUNK_SCHEMA
from ._folders import sealed
from .shards import FOLDER as EXPORTED

STREAM_SCHEMA = "packtrain-stream-1"
STREAM, INDEX, END = "stream.json", "index.json", "END"
JOURNAL, PRODUCER, ACKS, READERS = "journal", "producer", "acks", "readers"
COMPLETED = ".completed"

#: What a producer says while `max_ahead` holds it back.
HELD_BACK = "waiting for readers"

#: Names by which folders of other kinds are known: lengths (also unfinished), plans, runs, exports.
_OTHERS = ("lengths.json", "partial", "plan.json", "run.json", EXPORTED, "trainer_state.json")

#: Seconds without a change after which a torn or missing chunk before a whole one is an error.
TORN_S = 60.0


def chunk_name(number: int) -> str:
    """File of chunk `number`."""
    return f"chunk_{number:08d}.arrow"


def number_of(name: str) -> int | None:
    """Chunk number of a manifest's name; None for other files."""
    stem, _, suffix = name.partition(".")
    digits = stem.removeprefix("chunk_")
    return int(digits) if suffix == "json" and digits != stem and digits.isdecimal() else None


def is_sealed(value: Any) -> bool:
    """Is this a marker as it was written?"""
    if not isinstance(value, Mapping):
        return False
    return sealed({name: part for name, part in value.items() if name != "seal"}) == dict(value)


def read_stream(folder: Path) -> dict[str, Any] | None:
    """`stream.json`; None while it is not there.

    Raises:
        FormatError: it is there and is none.
    """
    told = fresh_json(folder / STREAM)
    if told is None:
        return None
    if told.get("schema") != STREAM_SCHEMA or not is_sealed(told):
        raise FormatError(f"{folder / STREAM} is not what a producer wrote ({STREAM_SCHEMA})")
    return told


def check_folder(folder: Path, *, writing: bool = False) -> None:
    """Refuse a folder that holds something else of packtrain, and no stream.

    Args:
        writing: chunks without a stream are something else too (a network listing may show a reader chunks
            before their stream).

    Raises:
        ForeignArtefactError: lengths, a plan, a run, or exported packs lie there.
    """
    names = set(fresh_names(folder))
    if {STREAM, JOURNAL} & names:
        return
    for name in sorted(names):
        if name in _OTHERS or (writing and name.startswith("chunk_")):
            raise ForeignArtefactError(
                f"{folder} is no folder of a stream: it holds {name}",
                hint="exported packs are trained with data.kind: exported"
                if name == EXPORTED
                else "name a folder that `packtrain produce` writes, or a new one",
            )


def register(folder: Path, stream: str, marks: Path) -> None:
    """Say that a run reads the stream in `folder` and keeps its marks in `marks`."""
    files.make_folder(marks)
    path = folder / READERS / f"{files.digest_json(str(marks))[:16]}.json"
    told = {"stream": stream, "marks": str(marks)}
    if fresh_json(path) != told:
        with sending(folder):
            files.publish_json(path, told)


def readers(folder: Path, stream: str) -> dict[Path, Mapping[str, Any] | None]:
    """Folders of the marks of all readers, and what each has acknowledged (see `acknowledged`).

    Those are the runs that registered, and `folder` itself where a reader without a run has marked.
    """
    found = {folder} if fresh_names(folder / ACKS) else set()
    for name in fresh_names(folder / READERS):
        told = fresh_json(folder / READERS / name) if name.endswith(".json") else None
        if told is not None and told.get("stream") == stream and isinstance(told.get("marks"), str):
            found.add(Path(told["marks"]))
    return {marks: acknowledged(marks, stream) for marks in sorted(found)}


def completed(marks: Path) -> set[int]:
    """Numbers of the chunks that are marked in a folder of marks."""
    ends = f".arrow{COMPLETED}"
    numbers = (number_of(name.replace(ends, ".json")) for name in fresh_names(marks) if name.endswith(ends))
    return {number for number in numbers if number is not None}


def acknowledged(folder: Path, stream: str) -> Mapping[str, Any] | None:
    """What all ranks of a launch have acknowledged: the least of their cursors, of the launch that got
    furthest.

    Returns:
        A reader's state with `slots`, the slots that are used up; None where not all ranks of a launch have
        acknowledged anything.
    """
    launches: dict[tuple[int, int, int], dict[int, Mapping[str, Any]]] = {}
    for name in fresh_names(folder / ACKS):
        told = fresh_json(folder / ACKS / name) if name.startswith("w") else None
        if is_cursor(told) and told["stream"] == stream:
            key = (int(told["order_world"]), int(told["start"]), int(told["world_size"]))
            launches.setdefault(key, {})[int(told["rank"])] = told
    best: Mapping[str, Any] | None = None
    for (_, _, world), ranks in sorted(launches.items()):
        if len(ranks) < world:
            continue
        least = min(ranks.values(), key=lambda told: int(told["slots"]))
        if best is None or int(least["slots"]) > int(best["slots"]):
            best = least
    return best


def is_cursor(told: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Is this what a rank acknowledged? Anything else counts as nothing acknowledged."""
    names = {"order_world": 1, "world_size": 1, "start": 0, "rank": 0, "step": 0, "slots": 0}
    return (
        told is not None
        and "stream" in told
        and all(isinstance(told.get(name), int) and told[name] >= least for name, least in names.items())
    )


def raw_place(folder: Path, sample_id: int) -> tuple[str, int]:
    """(raw shard, record from 0) of a sample, from the producer's journal.

    Raises:
        InputError: no shard of the stream has it.
    """
    names = [name for name in fresh_names(folder / JOURNAL) if name.startswith("shard_")]

    def start_of(name: str) -> int:
        return int(files.read_json(folder / JOURNAL / name)["start"])

    for name in reversed(names[: bisect.bisect_right(names, sample_id, key=start_of)]):
        told = files.read_json(folder / JOURNAL / name)
        if told["rows"]:
            if 0 <= sample_id - told["start"] < told["rows"]:
                return str(told["name"]), sample_id - int(told["start"])
            break
    raise InputError(f"no sample {sample_id} in {folder}", hint="ids are those of `sample_ids`")


class Order:
    """Which pack is in which slot, for `world` ranks. Grows as chunks are seen, not with the ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.chunks = 0
        self._stops: dict[int, list[int]] = {}  # rank -> local packs up to the end of each of its chunks

    def append(self, packs: int) -> None:
        """The next chunk has so many packs."""
        stops = self._stops.setdefault(self.chunks % self.world, [])
        stops.append((stops[-1] if stops else 0) + packs)
        self.chunks += 1

    def place(self, slot: int) -> tuple[int, int] | None:
        """(chunk, row) of a slot; None when no chunk that was seen holds it."""
        local, owner = divmod(slot, self.world)
        stops = self._stops.get(owner, [])
        turn = bisect.bisect_right(stops, local)
        if turn == len(stops):
            return None
        return turn * self.world + owner, local - (stops[turn - 1] if turn else 0)

    @property
    def whole_rounds(self) -> int:
        """Rounds of `world` slots that every rank can take."""
        whole = len(self._stops) == self.world
        return min(stops[-1] for stops in self._stops.values()) if whole else 0

    @property
    def last_rounds(self) -> int:
        """Rounds until the rank with most packs has none left."""
        return max((stops[-1] for stops in self._stops.values()), default=0)

    def end_of(self, chunk: int) -> int:
        """One past the slot of the last pack of a chunk that was seen."""
        turn, owner = divmod(chunk, self.world)
        return (self._stops[owner][turn] - 1) * self.world + owner + 1


class View:
    """What is visible of a growing directory. `refresh` looks again.

    Attributes:
        counts: packs of the chunks 0, 1, … without a hole.
        end: the contents of END, or None.
        names: names in the folder at the last look.

    Raises (refresh):
        FormatError: a chunk is torn or missing although later ones are there, and has been so for TORN_S.
        ForeignArtefactError: END or a chunk is of another stream.
    """

    def __init__(self, folder: str | Path, clock: Clock | None = None) -> None:
        self.folder = Path(folder)
        self.counts: list[int] = []
        self.end: dict[str, Any] | None = None
        self.stream: dict[str, Any] | None = None
        self.names: frozenset[str] = frozenset()
        self._fault = ""
        self._watch = Watch(clock or SystemClock())

    def refresh(self) -> None:
        """Look again."""
        self.names = frozenset(fresh_names(self.folder))
        if not self.counts:  # while it has no chunk, the producer may begin it anew
            self.stream = read_stream(self.folder) or self.stream
        n = len(self.counts)
        if INDEX in self.names and (not n or (self._later(n) and chunk_name(n) not in self.names)):
            self._read_index()  # at first, and where chunks were removed meanwhile
        self._fault = ""
        while (packs := self._packs_of(len(self.counts))) is not None:
            self.counts.append(packs)
        if self.end is None and END in self.names:
            told = fresh_json(self.folder / END)
            if told is not None and is_sealed(told):
                self._check_stream(told, END)
                self.end = told
        self._check_holes()

    @property
    def is_complete(self) -> bool:
        """Every chunk of the stream is visible."""
        return self.end is not None and len(self.counts) >= int(self.end["chunks"])

    @property
    def fault(self) -> str:
        """Why the first chunk that is not visible is not, at the last look."""
        return self._fault or f"{self.folder / chunk_name(len(self.counts))} is missing"

    def _read_index(self) -> None:
        told = fresh_json(self.folder / INDEX)
        if told is not None and is_sealed(told):
            self._check_stream(told, INDEX)
            self.counts += [int(packs) for packs in told["packs"][len(self.counts) :]]

    def _packs_of(self, number: int) -> int | None:
        """Packs of a chunk that is whole; None while it is not."""
        name = chunk_name(number)
        manifest = Path(name).with_suffix(".json").name
        if manifest not in self.names:
            if name in self.names:
                self._fault = f"{self.folder / manifest} is missing"
            return None
        told = _listed_json(self.folder / manifest)
        if told is None or told.get("schema") != CHUNK_SCHEMA or not is_sealed(told):
            self._fault = f"{self.folder / manifest} is torn or was edited"
            return None
        self._check_stream(told["meta"], manifest)
        try:
            size = size_of(self.folder / name)
        except OSError:
            self._fault = f"{self.folder / name} is missing"
            return None
        if size != told["bytes"]:
            self._fault = f"{self.folder / name} has {size:,} bytes, its manifest says {told['bytes']:,}"
            return None
        return int(told["packs"])

    def _check_stream(self, told: Mapping[str, Any], name: str) -> None:
        mine = None if self.stream is None else self.stream["stream"]
        if mine is not None and told.get("stream") != mine:
            raise ForeignArtefactError(
                f"{self.folder / name} is of stream {str(told.get('stream'))[:12]}, not {mine[:12]}",
                hint="two producers wrote here at different times: read each output from its own folder",
            )

    def _later(self, n: int) -> bool:
        """Are there chunks behind chunk n?"""
        return any((number := number_of(name)) is not None and number > n for name in self.names)

    def _check_holes(self) -> None:
        """A chunk that stays torn or missing while later ones are there will not come any more."""
        n = len(self.counts)
        later = self._later(n)
        lacking = later or (self.end is not None and n < int(self.end["chunks"]))
        if self._watch.quiet((n, lacking and self.fault)) >= TORN_S and lacking:
            raise FormatError(
                f"{self.fault}, though {'later chunks are there' if later else 'the stream has ended'}",
                hint="copy it again from where it was produced",
            )


def _listed_json(path: Path) -> dict[str, Any] | None:
    """`fresh_json` of a file whose folder was just listed: thousands of names are not listed again."""
    try:
        present(path)
        told = files.parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
