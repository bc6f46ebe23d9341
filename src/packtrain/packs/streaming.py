"""StreamingPackedDataset: packs from a source whose lengths nobody measured, with exact resume.

    stream = StreamingPackedDataset(source, template, pack_length=8192, window=1000, shuffle_buffer=10_000)
    for pack in stream:              # a list of encoded samples
        ...
    state = stream.state_dict()      # behind the last pack that was handed out

Samples are read by place (`_readers`), shuffled, encoded (`encode_workers` processes, order kept), and
planned `window` at a time by the same packers as everything else; packs that are not full give their samples
back to the next window, at most `max_carry` times (`planning.window`). What the stream gives depends on
source, settings, epoch, rank and the number of readers alone: `encode_workers` may change at any time.

Readers are ranks times the workers of a torch DataLoader. Each packs its own part of the stream, so a state
belongs to a number of readers; another one is refused with the reason. To change the number of processes
freely, leave the loader without workers and use `encode_workers`.

A state holds places, not samples: those that wait (shuffle buffer, window, carry, packs ready to go) are read
again. Where the source can be indexed that costs the same anywhere; another iterable is read from its start.

Ranks take equal numbers of steps (`equal_steps`): in the main process of a run with torch.distributed this
happens here; around a loader with workers wrap the loader in `EqualSteps`.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..collate import is_filler
from ..errors import ConfigError, ForeignArtefactError, InputError
from ..files import append_line, digest_json
from ..measuring.run import CUT
from ..moved import also_named
from ..planning.spec import PlanSpec
from ..planning.window import MAX_AGE, WindowPacker
from ..world import World, world
from ._keywords import flag, may_drop, whole
from ._readers import reader_of
from ._sharded_again import check_not_sharded
from ._shared_epoch import SharedEpoch
from ._stream_run import Run
from ._stream_state import check_run
from .equal_steps import EqualSteps
from .handed_out import HandedOut
from .loader import SourceLoader
from .pack import Pack

__all__ = ["StreamingPackedDataset"]

logger = logging.getLogger(__name__)

_STATE = 1
_HISTORY = 4096  # packs that were handed out and may still be counted back
_LAST_EPOCH = (1 << 63) - 1  # workers are told the epoch in an int64

Sample = dict[str, Any]


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
        encode_workers: processes that encode; 0 = this one.
        cyclic: begin the next epoch at the end of one, for ever.
        exhausted: what a rank does that runs out before others: `fill` or `first` (see `EqualSteps`).
        on_error: `raise`, or `skip`: a sample that cannot be encoded (None, nothing, or an error) is left out
            and written down.
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
        encode_workers: int = 0,
        cyclic: bool = False,
        exhausted: str = "fill",
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
        skip: Iterable[int] | None = None,
        ledger_file: str | Path | None = None,
    ) -> None:
        here = world()
        place = World(here.rank if rank is None else rank, here.size if world_size is None else world_size)
        max_carry, shuffle_buffer = (
            whole("max_carry", max_carry, 0),
            whole("shuffle_buffer", shuffle_buffer, 0),
        )
        seed, encode_workers = whole("seed", seed, 0), whole("encode_workers", encode_workers, 0)
        if not isinstance(ledger_file, str | Path | None):
            raise InputError(f"ledger_file is {ledger_file!r}", hint="name a JSON lines file")
        if on_error not in ("raise", "skip"):
            raise InputError(f"on_error is {on_error!r}", hint="use 'raise' or 'skip'")
        self.skip = frozenset(skip or ())
        if ledger_file is None and (self.skip or on_error == "skip" or may_drop(long_samples)):
            raise InputError(
                "samples that are left out must be written down",
                hint="name a ledger_file (a JSON lines file)",
            )
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
        self.reader = reader_of(source, shuffled=shuffle_buffer > 0, seed=seed)
        self.encode = getattr(template, "encode", template)
        self.place = World(int(place.rank), int(place.size))
        self.max_carry, self.shuffle_buffer, self.seed = max_carry, shuffle_buffer, seed
        self.encode_workers, self.cyclic, self.exhausted = encode_workers, flag("cyclic", cyclic), exhausted
        if max_skip_fraction is not None and not 0 <= max_skip_fraction < 1:
            raise InputError(f"max_skip_fraction is {max_skip_fraction!r}, expected a number in 0..1")
        if max_skip_fraction is not None and on_error != "skip":
            raise InputError(
                "max_skip_fraction has no effect with on_error 'raise'", hint="use on_error='skip'"
            )
        self.on_error, self.max_skip_fraction = on_error, max_skip_fraction
        self.ledger_file = None if ledger_file is None else Path(ledger_file)
        self.epoch = 0
        self._chosen = SharedEpoch()
        self.left_out: dict[str, int] = {}
        self._told_cut = False
        self.settings: dict[str, Any] = {}  # further ones that a state depends on
        self._state: dict[str, Any] | None = None  # to begin at, once
        self._run: Run | None = None
        self._ended = False  # the last pass came to its end
        self._was_ended = False  # so it was in the state that this loader worker was given
        self._is_chosen = False  # `set_epoch` was called, and no pass begun since
        self._then: int | None = None  # so it was when a state of another epoch was loaded: its successor
        self._ahead: deque[tuple[Run, Sequence[int]]] = deque()  # packs that were planned and not handed out
        # handed out; None: a filler
        self._given: deque[tuple[Run, Sequence[int]] | None] = deque(maxlen=_HISTORY)
        self._count = 0  # handed out in this pass
        self.handed = HandedOut(
            "use stream.loader(collate, num_workers=…) or encode_workers: this process then reads; of "
            "workers of the loader, torchdata's StatefulDataLoader keeps the states"
        )

    kind = "stream"
    state_file = "stream.{rank}.json"
    per_rank_state = True
    begins_at = 0

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
        epoch = whole("epoch", epoch, 0, _LAST_EPOCH)
        self._is_chosen, self._then = True, None
        if epoch != self.epoch:
            self._begin(epoch)
            self._chosen.choose(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._state, self._run, self._ended = epoch, None, None, False
        self._ahead.clear()
        self.handed.restart()

    def __iter__(self) -> Iterator[Pack]:
        info = get_worker_info()
        check_not_sharded(self.world_size)
        self.handed.begin_pass()
        if info is not None and isinstance(self.reader.source, IterableDataset):
            raise InputError(
                "the source divides itself among loader workers, and would be divided twice",
                hint="use encode_workers instead of workers of the loader",
            )
        chosen = self._chosen.news()
        if chosen is not None:
            self._begin(chosen)
        was_ended, self._was_ended, self._is_chosen = self._was_ended, False, False
        if was_ended and self._ended:
            return iter(())  # other workers go on, this one has nothing left
        self._ended = False
        if self._state is not None:
            self._refuse_foreign(self._state)  # loaded in the main process, and this may be a worker
        self._run = None  # a state that is taken before the first pack is the beginning, not the last pass
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
        self._run, self._ended = None, True  # from here on a state is the beginning of the next pass
        if self._then is not None:
            self.epoch, self._then = self._then, None
        self._ahead.clear()

    @property
    def is_shared(self) -> bool:
        """Do several processes of a torch.distributed run read this stream?"""
        import torch.distributed as dist

        return self.place.size > 1 and dist.is_available() and dist.is_initialized()

    def _packs(self) -> Iterator[Pack]:
        state, self._state = self._state, None
        self._ahead.clear()
        while True:
            run = self._run = Run(self, self.epoch, state)
            for places, pack in run:
                self._ahead.append((run, array("q", places)))  # a list would keep every number alive
                yield Pack(pack)
            if not self.cyclic:
                return
            if run.read == 0:
                raise InputError("this reader got no sample: a cyclic stream would never give a pack")
            state = None
            if self.epoch == run.epoch:  # another was chosen in the middle of this one
                self.epoch += 1

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
        run = pending[0][0] if pending else self._run
        if run is None:
            ended = {"ended": True} if self._ended else {}
            return self._state or {**self._identity(), "epoch": self.epoch, "run": None, **ended}
        ahead = [places for held, places in pending if held is run]
        return {**self._identity(), "epoch": run.epoch, "run": run.state(ahead)}

    def _behind(self, step: int | None) -> list[tuple[Run, Sequence[int]] | None]:
        """What was handed out after `step` packs of this pass."""
        back = 0 if step is None else self._count - step
        if not 0 <= back <= len(self._given):
            raise InputError(
                f"step {step} of a pass that has handed out {self._count} packs",
                hint=f"ask for a state at most {_HISTORY} packs back",
            )
        return list(self._given)[len(self._given) - back :]

    def acknowledge(self, state: Mapping[str, Any] | None = None) -> None:
        """Nothing waits for it."""

    def peek(self, count: int) -> list[Pack]:
        """The next packs of this reader; read apart, so that it does not move."""
        apart = copy.copy(self)
        apart.encode_workers, apart.left_out = 0, {}
        apart.leave_out = _not_written  # type: ignore[method-assign, assignment]
        apart.tell_cut = _not_written  # type: ignore[method-assign, assignment]
        apart.load_state_dict(self.state_dict())
        return list(itertools.islice(apart._packs(), count))

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        """A DataLoader of batches of one pack each. `num_workers` processes encode; the order is kept."""
        self.encode_workers = num_workers or self.encode_workers
        return SourceLoader(self, self, None, collate, **options)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would; change nothing."""
        if not isinstance(state, Mapping):
            raise ForeignArtefactError(
                f"a {type(state).__name__} is no state of a stream", hint="pass what state_dict() gave"
            )
        self._refuse_foreign(state)
        epoch, run = state.get("epoch"), state.get("run", 0)
        if type(epoch) is not int or not 0 <= epoch <= _LAST_EPOCH:
            raise ForeignArtefactError(
                f"the saved stream has epoch {epoch!r}", hint="pass the whole of what state_dict() gave"
            )
        if run is not None:
            own = self._identity()
            readers = own["world_size"] * own["workers"]
            reader = own["rank"] * own["workers"] + own["worker"]
            check_run(run, self.make_packer(), first=reader, step=readers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass begins where `state` stands.

        An epoch that was chosen before follows when the resumed one has ended: a loader may load a state
        only when the pass begins.

        Raises:
            ForeignArtefactError: it was saved with other settings or another number of readers.
        """
        self.check_state(state)
        epoch, run = state["epoch"], state.get("run", 0)
        self._ended = run is None and state.get("ended") is True
        self._was_ended = self._ended and get_worker_info() is not None
        chosen = self.epoch if self._is_chosen else epoch
        self._then = chosen if run is not None and chosen != epoch else None
        self.epoch = chosen if self._ended else epoch
        self._is_chosen = False
        self._state = dict(state) if run is not None else None
        self._run = None
        self.handed.restart()
        self._ahead.clear()

    def _refuse_foreign(self, state: Mapping[str, Any]) -> None:
        for key, value in self._identity().items():
            if state.get(key) == value:
                continue
            hint = "resume with the settings of the saved stream, or start anew"
            if key in ("world_size", "workers", "worker", "rank"):
                hint = (
                    "each reader packs its own part; change encode_workers instead, which may change freely"
                )
            raise ForeignArtefactError(
                f"the saved stream has {key} {state.get(key)!r}, this one {value!r}", hint=hint
            )

    def _identity(self) -> dict[str, Any]:
        info = get_worker_info()
        settings = {
            "spec": self.spec.to_dict(),
            "max_carry": self.max_carry,
            "shuffle": bool(self.shuffle_buffer) if self.reader.can_seek else self.shuffle_buffer,
            "on_error": self.on_error,
            **({"skip": sorted(self.skip)} if self.skip else {}),
            **self.settings,
        }
        return {
            "version": _STATE,
            "settings": digest_json(settings),
            "seed": self.seed,
            "rank": self.place.rank,
            "world_size": self.place.size,
            "worker": 0 if info is None else info.id,
            "workers": 1 if info is None else info.num_workers,
        }

    def make_packer(self) -> Any:
        """What decides which samples share a pack: a `WindowPacker`, or one with its interface."""
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
            "_run": None,
            "_ahead": deque(),
            "_given": deque(maxlen=_HISTORY),
            "_count": 0,
        }

    def leave_out(self, sample_id: Any, reason: str, detail: str) -> None:
        """Write down a sample that is in no pack."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        self._write_line(sample_id, reason, detail)

    def tell_cut(self, sample_id: Any, note: str) -> None:
        """Say of a sample that is trained which of its answers truncation removed, or cut short."""
        if not self._told_cut:
            more = "" if self.ledger_file is None else f"; all of them: {self.ledger_file}"
            logger.warning("sample %s is trained without all of its answers, %s%s", sample_id, note, more)
        self._told_cut = self.ledger_file is not None
        if self._told_cut:
            self._write_line(sample_id, CUT, note)

    def _write_line(self, sample_id: Any, reason: str, detail: str) -> None:
        assert self.ledger_file is not None  # checked in __init__
        known = int(sample_id) if isinstance(sample_id, Integral) else str(sample_id)
        row = {"sample_id": known, "reason": reason, "detail": detail}
        append_line(self.ledger_file, json.dumps(row, ensure_ascii=False))


def _not_written(sample_id: Any, *told: str) -> None:
    """What a look ahead leaves out is written down when it is read in earnest."""
