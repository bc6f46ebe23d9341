"""PackingProducer: raw shards that arrive over time become numbered chunks of packs for `LazyShardedDataset`.

    raw shards ──complete──► ids ──measured──► windows with carry ──► packs ──encoded──► chunk, manifest,
    ledger

Samples are measured from metadata when their window is planned and encoded when their chunk is written, so
what waits is numbers only. A window is `window` samples, or what is there when nothing more has come for
`flush_s`; packs that are not full enough give their samples back to the next window, at most `max_age` times.
Everything a restart needs lies in the journal (`_journal`): after a stop at any point the same command goes
on with the same ids, packs and chunk numbers.

Law: read = packed + dropped by reason + waiting. A sample whose media fail while it is encoded leaves its
pack and goes into the ledger of the chunk; none takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..checks import number, one_of
from ..errors import ConfigError, InputError, SampleError, counted
from ..extend import Source, Template
from ..measuring.run import CUT
from ..moved import also_named, renamed
from ..planning.spec import PlanSpec
from ..planning.window import MAX_AGE, WindowPacker
from ..remote.outputs import look_again, writable
from ..remote.outputs import output as writing
from ..remote.places import spelled
from ..store import chunk_folder
from ..store._folders import sealed
from ..store.chunks import DEFAULT_MEDIA, MEDIA, ChunkWriter
from ..waiting.claim import Claim
from ..waiting.poll import Clock, SystemClock, fresh_names
from . import _stream as marks
from ._intake import Encoding, Intake, Opener, is_full
from ._journal import Journal, ProduceStats, RawFolder

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# What a producer does with chunks that were published: index them, count what readers lag behind, remove
# --------------------------------------------------------------------------------------------
#: Chunks between two rewrites of `index.json`.
_INDEX_EVERY = 64

#: The newest chunks stay: a restart goes on behind them.
KEPT = 2


class Housekeeping:
    """Chunks of one stream.

    Attributes:
        packs: packs of every chunk that was published, removed ones too.
    """

    def __init__(self, output: Path, stream: str, packs: list[int]) -> None:
        self.output = output
        self.stream = stream
        self.packs = packs
        self._read: dict[Path, _Read] = {}
        self._told: set[Path] = set()

    def add(self, packs: int) -> None:
        """One more chunk was published."""
        self.packs.append(packs)
        if len(self.packs) % _INDEX_EVERY == 0:
            self.publish_index()

    def publish_index(self) -> None:
        """Rewrite `index.json`."""
        told = sealed({"stream": self.stream, "packs": self.packs})
        files.publish_json(self.output / chunk_folder.INDEX, told)

    def used_up(self) -> set[int]:
        """Chunks that lie wholly before what every reader has acknowledged; none where nobody reads."""
        used: list[set[int]] = []
        for place, cursor in chunk_folder.readers(self.output, self.stream).items():
            if cursor is None:
                self._tell_of(place)
                return set()
            world = int(cursor["order_world"])
            if place not in self._read or self._read[place].order.world != world:
                self._read[place] = _Read(world)
            used.append(self._read[place].until(int(cursor["slots"]), self.packs))
        return set.intersection(*used) if used else set()

    def ahead(self) -> int:
        """Chunks that are published and not used up."""
        return len(self.packs) - len(self.used_up())

    def _tell_of(self, marks: Path) -> None:
        """One line, once, for a registered run whose marks nobody can see: it holds back the clean-up."""
        if marks not in self._told and not marks.exists():
            self._told.add(marks)
            logger.warning(
                "%s: no chunk counts as used: the marks of a run that registered, %s, are not to be seen; "
                "if it will not go on, remove the file that names them in %s",
                self.output,
                marks,
                self.output / chunk_folder.READERS,
            )

    def clean(self, keep: int) -> list[int]:
        """Remove chunks that are used up and marked, but the newest `keep` of these; returns their numbers.

        The mark goes last, so that a removal that was stopped is finished by the next one.
        """
        marks = chunk_folder.readers(self.output, self.stream)
        here = {chunk_folder.number_of(f"{name.partition('.')[0]}.json") for name in fresh_names(self.output)}
        marked = set.intersection(*map(chunk_folder.completed, marks)) & here if marks else set()
        allowed = {number for number in marked & self.used_up() if number < len(self.packs) - KEPT}
        newest = sorted(marked)[len(marked) - keep :] if keep else []
        gone = sorted(allowed - set(newest))
        if gone:
            self.publish_index()
        for one in gone:
            path = self.output / chunk_folder.chunk_name(one)
            files.remove(path)
            files.remove(path.with_suffix(".json"))
            files.remove(path.with_name(f"{path.name}{chunk_folder.COMPLETED}"))
        if gone:
            logger.info("%s: removed %d acknowledged chunks", self.output, len(gone))
        return gone


class _Read:
    """Chunks that one reader has used up, in its order."""

    def __init__(self, world: int) -> None:
        self.order = chunk_folder.Order(world)
        self._used: set[int] = set()
        self._next = list(range(world))

    def until(self, slots: int, packs: list[int]) -> set[int]:
        """Those that lie wholly before `slots`; only ever more."""
        order = self.order
        for count in packs[order.chunks :]:
            order.append(count)
        for rank, chunk in enumerate(self._next):  # of each rank the first chunk that is not used up
            while chunk < order.chunks and order.end_of(chunk) <= slots:
                self._used.add(chunk)
                chunk += order.world
            self._next[rank] = chunk
        return self._used


# --------------------------------------------------------------------------------------------
# PackingProducer: raw shards that arrive over time become numbered chunks of packs for `LazyShardedDataset`
# --------------------------------------------------------------------------------------------
#: Seconds between two looks at raw shards that were taken: whether they were written again.
_DEEP_S = 60.0

#: A window that no input fills.
ALL = 1 << 62

_ALONE = {"refuse": True, "hint": "stop the other producer, or choose another folder"}


class PackingProducer:
    """Packs raw shards into chunks.

    Args:
        inputs: folder that raw shards come to (or one file).
        output: folder of the chunks, or its URL.
        template: measures and encodes; `HFTemplate(processor)` for Hugging Face processors.
        pack_length: cap of a pack in tokens.
        packs_per_chunk, chunk_mb: a chunk is full with so many packs, or MiB; only the last one is not full.
        window: samples planned together; `all`: everything that is there when the input ends (with
            `packer="ffd"`: first fit decreasing over the global view).
        packer, seed, limits, max_samples, multiple_of: as in `packtrain.plan`.
        long_samples: as in `packtrain.plan`; `drop` gives packs of one size. None: what `output` was begun
            with, else the default of a plan.
        media: `uint8`, `tensor` or `source`, see `store.chunks`. None: what `output` was begun with, else
            the default of chunks.
        ready: when a raw shard is complete: `rename`, `marker` or `stable` (for `stable_s` seconds).
        max_age: windows after which a carried sample is packed whatever the fill.
        flush_s: with `watch`, plan what is there when nothing has come for so long; packs and a chunk that
            are not full wait on for more, or the end. 0: only full windows.
        max_ahead: stop while so many chunks are not acknowledged (back-pressure); None: never.
        keep_completed: remove acknowledged chunks but the newest so many; None: remove none.
        open_shard: path -> Source of what the template takes; default: `open_source`, then `ChatSource`.
        chat: options of `ChatSource`.
        kind, source_options: as of `open_source`.
        workers: processes that encode; chunks do not depend on it.
        poll_s: seconds between two looks at the input.
        clock: this process's time.
        progress: called with (samples published or dropped, samples read).
        stop_after_failures: stop when the first so many records all fail for one reason, or all records of
            the input fail: the fault of the options, most likely. 0: they go to the ledger, however many.

    Raises:
        PlanError: `limits` names a cost that the template does not measure.
        ForeignArtefactError: `output` holds a stream that was made with other options; names them.
        InputError: another producer is at work in `output`.
        SourceError: a raw shard was written again after it was read, or is gone while it is still needed.
        UnreadKeys: more than 1 % of the records hold a key that changes training and is not read.
    """

    @renamed("poll_interval")
    @also_named("PackingProducer")
    def __init__(
        self,
        inputs: str | Path,
        output: str | Path,
        template: Template | Callable[[], Template],
        *,
        pack_length: int,
        packs_per_chunk: int = 100,
        chunk_mb: int = 1024,
        window: int | str = 1000,
        packer: str = "auto",
        seed: int | None = None,
        limits: Mapping[str, int] | None = None,
        max_samples: int | None = None,
        multiple_of: int = 1,
        long_samples: str | None = None,
        media: str | None = None,
        ready: str = "rename",
        stable_s: float = 5.0,
        max_age: int = MAX_AGE,
        flush_s: float = 10.0,
        max_ahead: int | None = None,
        keep_completed: int | None = None,
        open_shard: Callable[[Path], Source] | None = None,
        chat: Mapping[str, Any] | None = None,
        kind: str | None = None,
        source_options: Mapping[str, Any] | None = None,
        workers: int = 1,
        poll_s: float = 1.0,
        clock: Clock | None = None,
        progress: Callable[[int, int], None] | None = None,
        stop_after_failures: int = marks.STOP_AFTER,
    ) -> None:
        marks.check_least(
            1, packs_per_chunk=packs_per_chunk, chunk_mb=chunk_mb, workers=workers, max_ahead=max_ahead
        )
        marks.check_least(
            0, max_age=max_age, keep_completed=keep_completed, stop_after_failures=stop_after_failures
        )
        if window == "all":
            window, flush_s = ALL, 0.0
        if isinstance(window, str):
            raise InputError(f"window is {window!r}", hint="a number of samples, or all")
        self.output = writable(output)
        begun = marks.begun_with(self.output)
        asked: Any = begun.get("long_samples") if long_samples is None else long_samples
        policy: dict[str, Any] = {} if asked is None else {"long_samples": asked}
        self.spec = PlanSpec(
            pack_length=pack_length,
            packer=packer,
            seed=seed,
            limits=dict(limits or {}),
            max_samples=max_samples,
            multiple_of=multiple_of,
            window=window,
            **policy,
        )
        self.stop_after_failures = stop_after_failures
        marks.check_apart(Path(inputs), self.output)
        number("poll_s", poll_s, 0, without=(0,))
        if flush_s != math.inf:
            number("flush_s", flush_s, 0, hint="0: only full windows")
        self._full = (packs_per_chunk, chunk_mb << 20)
        self.media = begun.get("media", DEFAULT_MEDIA) if media is None else media
        one_of("media", self.media, MEDIA)
        self.max_age = max_age
        self.flush_s, self.max_ahead, self.keep_completed = flush_s, max_ahead, keep_completed
        self.workers, self.poll_s, self.progress = workers, poll_s, progress
        self._clock = clock or SystemClock()
        self._raw = RawFolder(inputs, ready=ready, stable_s=stable_s, clock=self._clock)
        made: Any = template if hasattr(template, "measure") else template()
        marks.check_limits(self.spec.limits, getattr(made, "cost_names", None))
        self._setup = (made, open_shard or Opener(chat or {}, kind, source_options or {}))
        self._claim: Claim | None = None
        self._reset()

    def _reset(self) -> None:
        self.stats = ProduceStats(self.spec.pack_length)
        self._journal = Journal(self.output, self._raw)
        self._intake = Intake(self._journal, *self._setup)
        self._encoding = Encoding(self._intake, self._setup, self.workers, self.spec.pack_length)
        self._packer = WindowPacker(self.spec, max_age=self.max_age)
        self._pending: list[list[int]] = []
        self._ledger: list[dict[str, Any]] = []
        self._house: Housekeeping | None = None

    # --------------------------------------------------------------------------------------- run
    def run(self, *, watch: bool = False, end: bool = True) -> ProduceStats:
        """Produce until the input ends.

        Args:
            watch: go on looking for new shards until a file END (or _END) lies in the input; otherwise take
                what is there, once.
            end: say that nothing follows. False: what is there is packed, and a later run goes on behind it.

        Returns:
            The counts; `output/END` holds them too.
        """
        with writing(self.output):
            self._refuse(watch)
            with Claim.take(
                self.output / chunk_folder.PRODUCER, what=spelled(self.output), **_ALONE
            ) as self._claim:
                look_again(self.output)
                marks.refuse_other(self.output, self._config())  # another may have come and gone meanwhile
                self._recover()
                if marks.has_ended(self.output):
                    self.stats = marks.check_ended(self.output, self._journal)
                else:
                    with contextlib.closing(self._encoding):
                        self._work(watch, end or watch)
        self._claim = None
        return self.stats

    def _refuse(self, watch: bool) -> None:
        """Refuse what does not fit before it is claimed: the claim still tells of the run that made it."""
        marks.refuse_other(self.output, self._config())
        if not self._raw.visible() and not watch and not marks.begun_with(self.output):
            raise marks.no_shard(self._raw.folder)
        if marks.is_whole_end(self.output):
            self._reset()
            self._journal.load()
            marks.check_ended(self.output, self._journal)

    def _work(self, watch: bool, end: bool) -> None:
        window = self.spec.window or 1
        came, checked = self._clock.now(), -math.inf
        while True:
            if self._house is None and self._journal.shards:
                stream = marks.publish_stream(self.output, self._config(), self._journal.shards[0].sha256)
                self._house = Housekeeping(self.output, stream, [])
            backlog = self._journal.read - self.stats.read
            if backlog >= window:
                self._plan(window)
                continue
            last, now = not watch or self._raw.says_last, self._clock.now()
            deep = now - checked >= _DEEP_S
            checked = now if deep else checked
            if self._intake.admit(self._say, deep=deep):
                came = self._clock.now()
                marks.check_readable(
                    self.output, self._journal, least=self.stop_after_failures and marks.FAULTY
                )
            elif last and not self._journal.all_taken():
                checked = -math.inf
                self._idle("waiting for raw shards")
            elif last:
                self._finish(backlog, end or self._raw.says_last)
                return
            elif backlog and self.flush_s and self._clock.now() - came >= self.flush_s:
                self._plan(backlog)
            else:
                self._idle("waiting for raw shards")

    def _idle(self, why: str) -> None:
        self._say(why)
        if self._house is not None and self.keep_completed is not None:
            self._house.clean(self.keep_completed)
        self._clock.sleep(self.poll_s)

    def where(self, sample_id: int) -> str:
        """Raw shard and record of a sample: `part-3.jsonl:17`."""
        return self._intake.where(sample_id)

    def _say(self, stage: str) -> None:
        done = self.stats.packed + sum(self.stats.dropped.values())
        if self._claim is not None:
            self._claim.say(stage, done, self._journal.read)
        if self.progress is not None:
            self.progress(done, self._journal.read)

    # ----------------------------------------------------------------------------- begin and end
    def _recover(self) -> None:
        """Go on behind the newest whole chunk."""
        files.remove_leftovers(self.output)
        self._reset()
        stream = marks.read_checked(self.output, self._config())
        self._journal.load()
        number, state = self._journal.newest()
        if stream is None and number:
            stream = marks.publish_again(self.output, self._config(), self._journal, number)
        if stream is not None:
            self._house = Housekeeping(self.output, stream, marks.packs_before(self.output, number))
        if state is not None:
            self.stats = ProduceStats.of_dict(state["stats"])
            self._packer.load_state_dict(state["packer"])
            self._pending = [list(pack) for pack in state["pending"]]
            logger.info("%s: going on behind chunk %d", self.output, number - 1)

    def _config(self) -> dict[str, Any]:
        packs, size = self._full
        more: dict[str, Any] = {"packs_per_chunk": packs, "chunk_mb": size >> 20, "media": self.media}
        return marks.stream_config(self.spec, *self._setup, max_age=self.max_age, **more)

    def _finish(self, backlog: int, end: bool) -> None:
        """Pack what waits, and say that nothing follows (with `end`)."""
        marks.check_readable(self.output, self._journal)
        assert self._house is not None  # there is a shard
        if backlog or len(self._packer.waiting):
            self._plan(backlog, last=True)
        marks.check_account(self.output, self.stats, self._ledger, last=True)
        self._write_chunks(last=True)
        self._check_usable(last=True)
        self._house.publish_index()
        if not end:
            self._say("stopped where the input stops")
            return
        self._journal.forget_states(self.stats.chunks - 1)
        self._journal.count(self.stats)
        assert self._claim is not None
        self._claim.confirm()
        marks.publish_end(self.output, self._house.stream, self.stats, self._ledger)
        self._say("ended")

    # ------------------------------------------------------------------------- windows and chunks
    def _plan(self, count: int, *, last: bool = False) -> None:
        """Plan the next `count` samples with those that wait."""
        first = self.stats.read
        self._say(f"measuring from sample {first}")
        try:
            lengths = self._intake.measure(first, first + count)
        except ConfigError:  # of the template: it drops something, say
            marks.undo_beginning(self.output)
            raise
        planned = marks.limited(lengths, self.spec.limits, check=not first)
        made = self._packer.push(np.arange(first, first + count), planned, last=last)
        self.stats.read += count
        for sample_id, reason in sorted(made.left_out.items()):
            reason = lengths.reasons.get(sample_id - first, reason)
            self._leave_out(sample_id, reason, self._intake.details.get(sample_id, ""))
        for sample_id, detail in sorted(self._intake.details.items()):
            if sample_id - first not in lengths.reasons and sample_id not in made.left_out:
                self._ledger.append(self._row(sample_id, CUT, detail))
                self.stats.truncated += 1
        self.stats.tell(self._intake.keys)
        marks.check_account(self.output, self.stats, self._ledger, last=False)
        bounds, ids = made.offsets.tolist(), made.ids.tolist()
        self._pending += [ids[a:b] for a, b in itertools.pairwise(bounds)]
        self._check_usable()
        self._write_chunks()

    def _check_usable(self, *, last: bool = False) -> None:
        if not self._pending and not len(self._packer.waiting):
            row = next((row for row in self._ledger if row["reason"] != CUT), None)
            marks.check_usable(self.output, self.stats, self.stop_after_failures, row, last=last)

    def _leave_out(self, sample_id: int, reason: str, detail: str) -> None:
        row = self._row(sample_id, reason, detail)
        self.stats.drop(reason)
        self._ledger.append(row)
        logger.info(
            "sample %d (%s, record %d) is left out: %s", sample_id, row["shard"], row["row"] + 1, reason
        )

    def _row(self, sample_id: int, reason: str, detail: str) -> dict[str, Any]:
        shard = self._journal.shard_of(sample_id)
        place = {"id": sample_id, "shard": shard.name, "row": sample_id - shard.start}
        return {**place, "reason": reason, "detail": detail}

    def _write_chunks(self, *, last: bool = False) -> None:
        """Write chunks while there are packs enough; at the end also a smaller one."""
        while len(self._pending) >= self._full[0] or (last and self._pending):
            assert self._house is not None
            while self.max_ahead is not None and self._house.ahead() >= self.max_ahead:
                self._idle(f"{chunk_folder.HELD_BACK}: {counted(self._house.ahead(), 'chunks')} ahead")
            if not self._write_chunk(last):
                return
            if self.keep_completed is not None:
                self._house.clean(self.keep_completed)

    def _write_chunk(self, last: bool) -> bool:
        """Encode and publish one chunk; False when too few packs were left after samples that failed."""
        assert self._house is not None
        number = self.stats.chunks
        writer = ChunkWriter(self.output / chunk_folder.chunk_name(number), media=self.media)
        failed: dict[int, SampleError] = {}
        try:
            doing = functools.partial(self._say, f"encoding chunk {number}")
            used = self._encoding.fill(writer, self._pending, self._full, failed, doing)
        except BaseException:
            writer.discard()
            raise
        self._intake.check_unchanged()
        for sample_id, error in failed.items():
            self._leave_out(sample_id, error.reason, error.message)
        if writer.packs and (last or is_full(writer, self._full)):
            self._pending = self._pending[used:]
            self._commit(writer, number)
            return True
        writer.discard()
        kept = ([one for one in pack if one not in failed] for pack in self._pending)
        self._pending = [pack for pack in kept if pack]
        self._check_usable()
        return False

    def _commit(self, writer: ChunkWriter, number: int) -> None:
        """Write the state behind the chunk, the chunk, and its manifest, in this order."""
        assert self._house is not None
        stats = self.stats
        stats.chunks, stats.packs = number + 1, stats.packs + writer.packs
        stats.packed, stats.tokens = stats.packed + writer.segments, stats.tokens + writer.tokens
        stats.beyond += sum(max(0, size - self.spec.pack_length) for size in writer.sizes)
        assert self._claim is not None
        self._claim.confirm()  # another process may have taken over while this one stood still
        self._journal.write_state(number, stats, self._packer.state_dict(), self._pending)
        writer.meta = marks.chunk_meta(self._house.stream, number, writer.packs, stats, self._ledger)
        writer.close()
        self._ledger = []
        self._house.add(writer.packs)
        self._journal.forget_states(number)
        logger.info("%s: chunk %d, %s", self.output, number, counted(writer.packs, "packs"))
