"""StreamingPackedDataset: packs from a source whose lengths nobody measured, with exact resume.

    stream = StreamingPackedDataset(source, template, pack_length=8192, window=1000, shuffle_buffer=10_000)
    for pack in stream:              # a list of encoded samples
        ...
    state = stream.state_dict()      # behind the last pack that was handed out

Samples are read by place (`_readers`), shuffled, encoded (`encode_workers` processes, order kept), and
planned `window` at a time by the same packers as everything else; packs that are not full give their samples
back to the next window, at most `max_carry` times (`planning.window`). What the stream gives depends on
source, settings, epoch and the number of splits alone: `encode_workers` may change at any time.

A stream is a fixed number of splits, each with a shuffle, a packer and a cursor of its own, and readers
(ranks times the workers of a torch DataLoader) own splits (`_readers`, where the order of all packs is
defined). Saved by any number of readers it goes on with any other that divides the splits: the same packs,
in the same order.

A state holds places, not samples: those that wait (shuffle buffer, window, carry, packs ready to go) are read
again. Where the source can be indexed that costs the same anywhere; another iterable is read from its start.

Ranks take equal numbers of steps (`equal_steps`): in the main process of a run with torch.distributed this
happens here; around a loader with workers wrap the loader in `EqualSteps`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..checks import flag, whole
from ..collate import is_filler
from ..errors import ConfigError, ForeignArtefactError, InputError, counted
from ..files import digest_json
from ..measuring.encoding import encoder_of
from ..measuring.run import CUT
from ..moved import also_named
from ..planning.spec import PlanSpec
from ..planning.window import MAX_AGE, WindowPacker
from ..workers import freeze
from ..world import World, world
from ._readers import MOST, Reader, Splits, check_divides, reader_of
from ._stream_run import Run, Slot, StreamPass
from ._stream_state import (
    LAST_EPOCH,
    VERSION,
    check_data,
    check_held,
    check_moment,
    data_of,
    differing,
    joined,
    of_reader,
    saved_ranks,
    upgraded,
    written,
)
from .equal_steps import EqualSteps
from .handed_out import HandedOut, SharedEpoch, check_not_sharded
from .ledger_file import check_policy, need_ledger, write_row
from .loader import SourceLoader
from .pack import Pack

logger = logging.getLogger(__name__)

_HISTORY = 4096  # packs that were handed out and may still be counted back

Sample = dict[str, Any]
States = Mapping[str, Any] | Sequence[Any]  # of one reader, or of all: also those of a rank as a list
Given = tuple[Slot, Run, Sequence[int]]  # a pack: the split that gave it, in which epoch, its places


class StreamingPackedDataset(IterableDataset[Pack]):  # type: ignore[misc]
    """Iterable over packs. Picklable when source and template are.

    Args:
        source: sequence or iterable of samples, or a function that makes an iterable. Encoded samples are
            mappings with `input_ids`; their other keys are left alone.
        template: an `extend.Template`, or a function sample -> encoded sample; None: encoded already.
        pack_length: hard cap of a pack of several samples, in tokens; None: the template's `max_length`.
        window: samples that are planned together.
        max_carry: windows a sample may wait over.
        packer, long_samples, multiple_of, max_samples: as in `packtrain.plan`.
        shuffle_buffer: 0: source order. Above 0 an indexable source is permuted as a whole, and any other
            goes through a buffer of so many samples.
        seed: of the shuffle.
        rank, world_size: this reader's place; None: from the launcher.
        splits: parts of the stream, which ranks times loader workers have to divide, now and after any
            resume; `window` and `shuffle_buffer` are then of the whole stream, and a split has its part (at
            least 256). None: as many as readers at the first start, each with the whole of both.
        encode_workers: processes that encode; 0 = this one.
        cyclic: begin the next epoch at the end of one, for ever.
        exhausted: what a rank does that runs out before others: `fill` or `first` (see `EqualSteps`).
        on_error: `raise`; or `skip`, which is `zero` here, as no plan holds a place to keep: a sample that
            cannot be encoded (None, nothing, or an error) is left out and written to `ledger_file`.
        max_skip_fraction: stop where a larger share of the samples read is left out; None: no limit.
        skip: ids of samples that are left out before they are encoded.
        ledger_file: JSON lines file of what is left out; needed for `skip` (both) and `long_samples="drop"`.

    Attributes:
        left_out: reason -> samples left out in this epoch.
    """

    @also_named("StreamingPackedDataset")
    def __init__(
        self,
        source: Any,
        template: Any = None,
        *,
        pack_length: int | None = None,
        window: int = 1000,
        max_carry: int = MAX_AGE,
        packer: str = "auto",
        long_samples: str = "single",
        multiple_of: int = 1,
        max_samples: int | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        splits: int | None = None,
        encode_workers: int = 0,
        cyclic: bool = False,
        exhausted: str = "fill",
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
        skip: Iterable[int] | None = None,
        ledger_file: str | Path | None = None,
    ) -> None:
        place = world(rank, world_size)
        self.max_carry = whole("max_carry", max_carry, 0)
        self.shuffle_buffer = whole("shuffle_buffer", shuffle_buffer, 0)
        self.seed = whole("seed", seed, 0)
        if not isinstance(ledger_file, str | Path | None):
            raise InputError(f"ledger_file is {ledger_file!r}", hint="name a JSON lines file")
        check_policy(on_error, max_skip_fraction, ledger_file)
        on_error = "raise" if on_error == "raise" else "skip"  # no plan holds a place to keep
        self.skip = frozenset(skip or ())
        if self.skip:
            need_ledger(ledger_file, "skip")
        if "drop" in (long_samples.values() if isinstance(long_samples, Mapping) else [long_samples]):
            need_ledger(ledger_file, "long_samples 'drop'")
        pack_length = getattr(template, "max_length", None) if pack_length is None else pack_length
        if pack_length is None:
            raise ConfigError("no pack length is set", hint="set pack_length, or the template's max_length")
        self.spec = PlanSpec(
            pack_length=pack_length,
            packer=packer,
            long_samples=long_samples,
            multiple_of=multiple_of,
            max_samples=max_samples,
            window=window,
        )
        EqualSteps((), exhausted=exhausted)  # refuses an unknown word here, not at the first epoch
        self.name = secrets.token_hex(8)  # the same in all loader workers
        self.source_mark: str | None = None  # of an iterable: the same in all ranks of a node
        self.reader = reader_of(source, shuffled=self.shuffle_buffer > 0, seed=self.seed)
        self.encode = encoder_of(template)
        self.place = World(int(place.rank), int(place.size))
        self.splits = None if splits is None else whole("splits", splits, 1, MOST)
        if self.splits is not None:
            check_divides(self.splits, self.place.size, 1)
        self.encode_workers, self.cyclic = whole("encode_workers", encode_workers, 0), flag("cyclic", cyclic)
        self.exhausted = exhausted
        self.on_error, self.max_skip_fraction = on_error, max_skip_fraction
        self.ledger_file = None if ledger_file is None else Path(ledger_file)
        self.epoch = self.passes = 0
        self._chosen = SharedEpoch()
        self.left_out: dict[str, int] = {}
        self._told_cut = False
        self.settings: dict[str, Any] = {}  # further ones that a state depends on
        self._state: Mapping[str, Any] | None = None  # to begin at, once
        self._divided: Splits | None = None  # by the state that was loaded
        self._reading: StreamPass | None = None
        self._had: list[int] | None = None  # splits of the pass that has ended
        self.asked = (0, 0)  # how often an epoch was chosen, and which one last
        self._ended = False  # the last pass came to its end
        self._was_ended = False  # so it was in the state that this loader worker was given
        self._is_chosen = False  # `set_epoch` was called, and no pass begun since
        self._then: int | None = None  # so it was when a state of another epoch was loaded: its successor
        self._ahead: deque[Given] = deque()  # packs that were planned and not handed out
        self._given: deque[Given | None] = deque(maxlen=_HISTORY)  # handed out; None: a filler
        self._count = 0  # handed out in this pass
        self.handed = HandedOut(
            "use stream.loader(collate, num_workers=…) or encode_workers: this process then reads; of "
            "workers of the loader, torchdata's StatefulDataLoader keeps the states"
        )

    tells = True  # in the log: samples left out, keys that the source does not read
    kind = "stream"
    state_file = "stream.{rank}.json"
    per_rank_state = True
    begins_at = 0

    @property
    def samples(self) -> Any:
        """The samples by the ids that packs hold; None where the source has no index."""
        return self.reader.source if self.reader.can_seek else None

    ranks_of = staticmethod(saved_ranks)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.size

    @property
    def pack_length(self) -> int:
        """Tokens of a full pack."""
        return self.spec.pack_length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. Naming another one starts it from its first sample.

        Loader workers follow, also those that run already (`persistent_workers`).
        """
        epoch = whole("epoch", epoch, 0, LAST_EPOCH)
        self._is_chosen, self._then = True, None
        if epoch != self.epoch:
            self._begin(epoch)
            self._chosen.choose(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._state, self._reading, self._ended = epoch, None, None, False
        self.asked = (self.asked[0] + 1, epoch)
        self._ahead.clear()
        self.handed.restart()

    def __iter__(self) -> Iterator[Pack]:
        info = get_worker_info()
        self.passes += 1
        check_not_sharded(self.world_size)
        self.handed.begin_pass()
        if info is not None and isinstance(self.reader.source, IterableDataset):
            raise InputError(
                "the source divides itself among loader workers, and would be divided twice",
                hint="use encode_workers instead of workers of the loader",
            )
        freeze(info is not None)
        chosen = self._chosen.news()
        if chosen is not None:
            self._begin(chosen)
        was_ended, self._was_ended, self._is_chosen = self._was_ended, False, False
        if was_ended and self._ended:
            return iter(())  # other workers go on, this one has nothing left
        self._ended = False
        here = Reader.here(self.place)
        if self._state is not None:
            self._state = of_reader(self._state, here)  # loaded in the main process, and this may be a worker
        else:
            check_divides(self._layout(here).count, here.ranks, here.workers)
        self._reading = None  # a state before the first pack is the beginning, not the last pass
        self._ahead.clear()
        self._given.clear()
        self._count = 0
        packs = self._packs()
        if info is None and self.is_shared:
            packs = iter(EqualSteps(packs, exhausted=self.exhausted, filler=Pack.filler()))
        return self._handed_out(packs)

    def _handed_out(self, packs: Iterator[Pack]) -> Iterator[Pack]:
        for pack in packs:
            planned = not is_filler(pack) and self._ahead  # none after `set_epoch` in the middle of a pass
            self._given.append(self._ahead.popleft() if planned else None)
            self._count += 1
            yield pack
        self._ended = True  # from here on a state is the beginning of the next pass
        self._had = [slot.split for slot in self._reading.slots] if self._reading else None
        if self._then is not None:
            self.epoch, self._then = self._then, None
        self._ahead.clear()

    @property
    def is_shared(self) -> bool:
        """Do several processes of a torch.distributed run read this stream?"""
        import torch.distributed as dist

        return self.place.size > 1 and dist.is_available() and dist.is_initialized()

    def _packs(self) -> Iterator[Pack]:
        here = Reader.here(self.place)
        divided = self._layout(here)
        state, self._state = self._state, None
        self._ahead.clear()
        reading = StreamPass(self, divided, self._beginning(here) if state is None else state["held"])
        self._reading = reading
        for slot, run, (places, pack) in reading.packs():
            self._ahead.append((slot, run, places))
            yield Pack(pack)

    def began(self, reading: StreamPass) -> None:
        """A split of a cyclic stream began another epoch."""
        self._reading = reading

    def _layout(self, here: Reader) -> Splits:
        """How the stream is divided: by the state it goes on from, as was asked, or by the readers."""
        if self._divided is not None:
            return self._divided
        return Splits.of(self.splits, here.readers, self.planned_together, self.shuffle_buffer)

    def _beginning(self, here: Reader, splits: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The splits of a reader at the beginning of the epoch; None: those it has where nothing was read."""
        first, step = here.rank + here.ranks * here.worker, here.readers
        own = range(first, self._layout(here).count, step) if splits is None else splits
        return [{"split": split, "epoch": self.epoch, "turn": 0, "run": None} for split in own]

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where this reader stands, behind the last pack it handed out: plain values, a few windows long.

        Args:
            step: behind so many packs of this pass, where a loader has taken more of them ahead.

        Once a pass has ended, the beginning of the next one; a loader worker that ended before the others
        gives nothing more in the pass that is resumed (as torchdata's loader expects it).
        """
        if step is None:
            self.handed.step(self._count)
        pending = [one for one in self._behind(step) if one is not None] + list(self._ahead)
        reading, here = self._reading, Reader.here(self.place)
        if reading is None or (self._ended and not pending):
            if self._state is not None:
                return written(self._state)
            if self._ended:  # other readers may have splits left: these are none of theirs
                return self._told(here, self.epoch, self._beginning(here, self._had), {"ended": True})
            return self._told(here, self.epoch, self._beginning(here), {})
        given: dict[int, list[tuple[Run, Sequence[int]]]] = {}
        for slot, run, places in pending:
            given.setdefault(slot.split, []).append((run, places))
        held = [slot.record(given.get(slot.split, ())) for slot in reading.slots]
        return self._told(here, max(one["epoch"] for one in held), held, {})

    def _told(self, here: Reader, epoch: int, held: list[Any], ended: dict[str, bool]) -> dict[str, Any]:
        data, divided = data_of(self.reader.source), self._layout(here)
        known = {"splits": divided.count, "window": divided.window, "buffer": divided.buffer}
        told = {**self._identity(), "of": self._settings(skipped=False), **known, "reader": list(here)}
        if data is not None:
            told["data"] = data
        return written({**told, "epoch": epoch, **ended, "held": held})

    def _behind(self, step: int | None) -> list[Given | None]:
        """What was handed out after `step` packs of this pass."""
        back = 0 if step is None else self._count - step
        if not 0 <= back <= len(self._given):
            raise InputError(
                f"step {step} of a pass that has handed out {counted(self._count, 'packs')}",
                hint=f"ask for a state at most {counted(_HISTORY, 'packs')} back",
            )
        return list(self._given)[len(self._given) - back :]

    def acknowledge(self, state: Mapping[str, Any] | None = None) -> None:
        """Nothing waits for it."""

    def peek(self, count: int) -> list[Pack]:
        """The next packs of this reader; read apart, so that it does not move."""
        apart = copy.copy(self)
        apart.encode_workers, apart.left_out, apart.tells = 0, {}, False
        apart.load_state_dict(self.state_dict())
        return list(itertools.islice(apart._packs(), count))

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        """A DataLoader of batches of one pack each. `num_workers` processes encode; the order is kept."""
        self.encode_workers = num_workers or self.encode_workers
        return SourceLoader(self, self, None, collate, **options)

    def check_state(self, state: States) -> None:
        """Raise what `load_state_dict` would; change nothing."""
        self._own(state)

    def _own(self, state: Any) -> Mapping[str, Any]:
        """This reader's part of a state, or of the states of all readers."""
        here = Reader.here(self.place)
        states = [self._checked(one) for one in _flat(state)]
        whole = joined(states, cyclic=self.cyclic)
        check_moment(whole)
        check_data(self.reader.source, whole.get("data"))
        return of_reader(whole, here)

    def _checked(self, state: Any) -> Mapping[str, Any]:
        """A state of one reader, as one of this version."""
        if not isinstance(state, Mapping):
            raise ForeignArtefactError(
                f"a {type(state).__name__} is no state of a stream", hint="pass what state_dict() gave"
            )
        told: Mapping[str, Any] = upgraded(state, self.planned_together, self.shuffle_buffer)
        known = {**self._identity(), **({} if self.splits is None else {"splits": self.splits})}
        for key, value in known.items():
            if told.get(key) != value:
                said = differing(told.get("of"), self._settings(skipped=False)) if key == "settings" else ""
                raise ForeignArtefactError(
                    f"the saved stream has {said or f'{key} {told.get(key)!r}, this one {value!r}'}",
                    hint="resume with the settings of the saved stream, or start anew",
                )
        epoch = told.get("epoch")
        if type(epoch) is not int or not 0 <= epoch <= LAST_EPOCH:
            raise ForeignArtefactError(
                f"the saved stream has epoch {epoch!r}", hint="pass the whole of what state_dict() gave"
            )
        check_held(told, self.make_packer, cyclic=self.cyclic)
        return told

    def load_state_dict(self, state: States) -> None:
        """The next pass begins where `state` stands.

        An epoch that was chosen before follows when the resumed one has ended: a loader may load a state
        only when the pass begins.

        Args:
            state: of this reader; or, saved by any number of ranks and loader workers, a list of the states
                of all of them at one step (see `loader_position` for loaders with workers).

        Raises:
            ForeignArtefactError: it was saved with other settings, or lacks splits of this reader.
            InputError: ranks times loader workers do not divide the splits; names numbers that do.
        """
        own = self._own(state)
        epoch, begun = own["epoch"], any(one["run"] or one.get("done") for one in own["held"])
        self._ended = not begun and own.get("ended") is True
        self._was_ended = self._ended and get_worker_info() is not None
        chosen = self.epoch if self._is_chosen else epoch
        self._then = chosen if begun and chosen != epoch else None
        self.epoch = chosen if self._ended else epoch
        self._is_chosen = False
        self._state = None if self._ended else dict(own)
        self._had = [one["split"] for one in own["held"]]
        self._divided = Splits(own["splits"], own["window"], own["buffer"])
        self._reading = None
        self.handed.restart()
        self._ahead.clear()

    def _settings(self, *, skipped: bool = True) -> dict[str, Any]:
        """What packs depend on, as a digest covers it; without `skipped` how many, for people."""
        return {
            "spec": self.spec.to_dict(),
            "max_carry": self.max_carry,
            "shuffle": self.shuffle_buffer if self.reader.in_order else bool(self.shuffle_buffer),
            "on_error": self.on_error,
            **({"skip": sorted(self.skip) if skipped else len(self.skip)} if self.skip else {}),
            **self.settings,
        }

    def _identity(self) -> dict[str, Any]:
        return {"version": VERSION, "settings": digest_json(self._settings()), "seed": self.seed}

    @property
    def planned_together(self) -> int:
        """Samples of the stream that are planned together."""
        return self.spec.window or 1

    def make_packer(self, samples: int) -> Any:
        """What decides which samples share a pack: a `WindowPacker`, or one with its interface.

        Args:
            samples: that a split plans together.
        """
        return WindowPacker(self.spec, max_age=self.max_carry)

    def costs_of(self, samples: list[Sample]) -> dict[str, list[int]]:
        """Costs beside tokens that the packer needs."""
        return {}

    def is_full(self, pack: list[Sample]) -> bool:
        """May this pack be the last of an epoch?"""
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_reading": None,
            "_ahead": deque(),
            "_given": deque(maxlen=_HISTORY),
            "_count": 0,
        }

    def leave_out(self, sample_id: Any, reason: str, detail: str, *counts: dict[str, int]) -> None:
        """Write down a sample that is in no pack, and count it in `left_out`, or where `counts` says."""
        if not self.tells:
            return  # a look ahead: it is counted and written down when it is read in earnest
        for count in counts or (self.left_out,):
            count[reason] = count.get(reason, 0) + 1
        assert self.ledger_file is not None  # checked in __init__
        write_row(self.ledger_file, sample_id, reason, detail)

    def tell_cut(self, sample_id: Any, note: str) -> None:
        """Say of a sample that is trained which of its answers truncation removed, or cut short."""
        if not self.tells:
            return  # as above
        if not self._told_cut:
            more = "" if self.ledger_file is None else f"; all of them: {self.ledger_file}"
            logger.warning("sample %s is trained without all of its answers, %s%s", sample_id, note, more)
        if self.ledger_file is not None:
            self._told_cut = True
            write_row(self.ledger_file, sample_id, CUT, note)


def _flat(state: Any) -> list[Any]:
    """The states of all readers, of which those of a rank may be a list of their own; or the one state."""
    if not isinstance(state, list | tuple):
        return [state]
    return [one for part in state for one in (part if isinstance(part, list | tuple) else [part])] or [state]
