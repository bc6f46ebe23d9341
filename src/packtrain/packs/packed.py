"""PackedDataset: one item per pack, each a list of encoded samples.

Every fetch checks the Truth law: the encoded lengths are the lengths the plan was made with, so no
row grows past its cap unseen and no boundary moves. What cannot be encoded any more (a file was
removed, a disk failed) is never replaced by another sample: it stops the run, or, with
`on_error="zero"`, a weightless segment stands in its place and the run's ledger file gets a line.

Trade-off: items are encoded when they are fetched, in the loader's process; `cache` reads those that were
encoded ahead (`data.encode_cache`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..checks import one_of
from ..collate import FILLER, IGNORE
from ..errors import ConfigError, DriftError, InputError, counted
from ..measuring.eligibility import probe_once, set_epoch, where_in
from ..measuring.encoding import encoded, encoder_of
from ..measuring.run import measure_range
from ..moved import also_named
from ..planning.align import AlignedPlan
from ..planning.build import plan
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..sources._memory import InMemory
from .encode_cache import EncodeCache
from .handed_out import SharedEpoch
from .ledger_file import Skipping
from .pack import Pack, length_of

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# A plan of rows in memory: what `PackedDataset(dataset, template, packing_length=…)` makes of them
# --------------------------------------------------------------------------------------------
def plan_rows(samples: Any, template: Any, pack_length: int | None, lengths: Any) -> tuple[PackPlan, Any]:
    """The plan of indexable samples, and the lengths it was made from.

    Args:
        template: an `extend.Template`, a function sample -> encoded sample, or None: encoded already.
        pack_length: None: the template's `max_length`.
        lengths: None: the column `length` of the samples, else what the template measures, else what it
            encodes to.

    Raises:
        ConfigError: there is no cap.
        InputError: the samples cannot be indexed, or none of them can be used.

    Samples that are left out are one warning; `plan.ledger` has each of them.
    """
    pack_length = getattr(template, "max_length", None) if pack_length is None else pack_length
    if pack_length is None:
        raise ConfigError(
            "PackedDataset has neither a plan nor a pack length",
            hint="PackedDataset(plan, samples, encode), or PackedDataset(samples, template, pack_length=…)",
        )
    if isinstance(samples, str | Path | Mapping):
        raise InputError(
            f"a {type(samples).__name__} is no dataset", hint="packtrain.open_chats(path) opens a file"
        )
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise InputError(
            f"a {type(samples).__name__} cannot be indexed", hint="StreamingPackedDataset packs what streams"
        )
    encoder_of(template)  # refuses what is none
    why = ""
    if lengths is None and "length" in (getattr(samples, "column_names", None) or ()):
        lengths = samples["length"]
    if lengths is None:
        measures: Any = template if hasattr(template, "measure") else _ByEncoding(template)
        found = measure_range((InMemory(samples), measures), (0, len(samples)))
        lengths = Lengths(found.tokens, found.costs or None, found.status, found.reasons or None)
        why = next((f"; the first: {line}" for line in found.details.values()), "")
    made = plan(lengths, pack_length)
    if not len(made):
        raise InputError(
            f"none of {counted(len(samples), 'samples')} can be packed: {made.ledger.counts()}{why}",
            hint="records as they are in files become samples through packtrain.open_chats",
        )
    if len(made.ledger):
        logger.warning(
            "%d of %d samples are left out: %s%s", len(made.ledger), len(samples), made.ledger.counts(), why
        )
    return made, lengths


class _ByEncoding:
    """Measures a sample by encoding it."""

    def __init__(self, template: Any) -> None:
        self.encode = encoder_of(template)

    def measure(self, sample: Any) -> int:
        encoded = sample if self.encode is None else self.encode(sample)
        if "input_ids" not in encoded:
            raise InputError("the samples have no input_ids", hint="pass the template that encodes them")
        return length_of(encoded)


# --------------------------------------------------------------------------------------------
# PackedDataset: one item per pack, each a list of encoded samples
# --------------------------------------------------------------------------------------------


class PackedDataset(Dataset[Pack]):  # type: ignore[misc]
    """Map-style dataset over a plan. Picklable when `samples` and `encode` are.

    Args:
        plan_or_aligned: a PackPlan (items are its packs) or an AlignedPlan (items are aligned positions).
            Without one the samples are measured and planned here: `PackedDataset(samples, template,
            pack_length=8192)`.
        samples: anything indexable by sample id.
        encode: sample -> encoded sample, or a template; None when `samples` already holds encoded samples.
        pack_length: without a plan: cap of a pack of several samples; None: the template's `max_length`.
        lengths: the Lengths (or int[n]) of the plan: checks each sample rather than the pack's sum.
        on_error: "raise"; "skip": a sample that cannot be encoded is left out of its pack; or "zero": it
            becomes a weightless segment of its planned length (of 1 token when `lengths` is not given). A
            pack of which nothing would be left keeps one such segment.
        max_skip_fraction: stop where a larger share of the planned samples cannot be encoded; None: no limit.
        ledger_file: JSON lines file that "skip" and "zero" add {sample_id, reason, detail} to; needed for
            these. A sample that fails in every epoch stands in it once.
        repeat_loss: "keep", or "zero": packs that an aligned plan repeats carry no label, so that every
            sample weighs once an epoch.
        replan: the plans of the epochs, as given to `PackSampler`: `set_epoch` then chooses the plan too.
        cache: packs that were encoded ahead (`EncodeCache` of the raw plan); a pack that it lacks is encoded.

    Attributes:
        epoch: the epoch that `set_epoch` named last.

    Position -1 is the filler pack. Other negative positions are refused: no position is an alias.
    """

    @also_named("PackedDataset")
    def __init__(
        self,
        plan_or_aligned: PackPlan | AlignedPlan | Any = None,
        samples: Any = None,
        encode: Callable[[Any], Mapping[str, Any]] | Any = None,
        *,
        pack_length: int | None = None,
        lengths: Lengths | Any | None = None,
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
        ledger_file: str | Path | None = None,
        repeat_loss: str = "keep",
        replan: EpochPlans | None = None,
        cache: EncodeCache | None = None,
    ) -> None:
        if cache is not None and replan is not None:
            raise InputError(
                "an encode cache holds the packs of one plan, replan makes others every epoch",
                hint="use one of the two",
            )
        one_of("repeat_loss", repeat_loss, ("keep", "zero"))
        skipping = Skipping(None, ledger_file, on_error, max_skip_fraction)
        if not isinstance(plan_or_aligned, PackPlan | AlignedPlan):
            given = [one for one in (plan_or_aligned, samples, encode) if one is not None]
            if len(given) > 2:
                raise ConfigError(
                    f"the first argument is a {type(plan_or_aligned).__name__}, no plan",
                    hint="PackedDataset(plan, samples, encode)",
                )
            samples, encode = (*given, None, None)[:2]
            plan_or_aligned, lengths = plan_rows(samples, encode, pack_length, lengths)
        elif pack_length is not None:
            raise ConfigError(
                f"pack_length is {pack_length}, and a plan says the packs", hint="leave pack_length out"
            )
        self.packs = plan_or_aligned
        self.plan = plan_or_aligned.plan if isinstance(plan_or_aligned, AlignedPlan) else plan_or_aligned
        self.samples = samples
        self.encode: Any = encoder_of(encode)
        self.lengths: Any = None if lengths is None else getattr(lengths, "tokens", lengths)
        self.on_error = on_error
        self.ledger_file = None if ledger_file is None else Path(ledger_file)
        self.repeat_loss, self.replan, self.cache = repeat_loss, replan, cache
        self.epoch = 0
        self._cannot_plan = False  # a copy in a worker, without the plans of the epochs that follow
        self._still = False  # nobody looked yet whether the samples move
        self._chosen = SharedEpoch()
        skipping.total = len(self.plan.indices)
        self._skipping = skipping

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def packed_idx(self) -> list[list[int]]:
        """Sample ids of every pack."""
        return [pack.tolist() for pack in self.packs]

    @property
    def packed_length(self) -> list[int]:
        """Tokens of every pack."""
        tokens = self.plan.pack_tokens
        return [int(tokens[self.pack_id(position)]) for position in range(len(self))]

    def pack_id(self, position: int) -> int:
        """Raw pack id of a position; -1 for the filler."""
        if position == FILLER:
            return FILLER
        return self.packs.pack_id(position) if isinstance(self.packs, AlignedPlan) else position

    def __getitem__(self, position: int) -> Pack:
        """Encoded samples of a pack in plan order, each with its `sample_id`.

        Raises:
            DriftError: an encoded length is not the planned one.
            SampleError: a sample cannot be encoded (on_error="raise").
            InputError: a loader worker was started before `set_epoch` changed the plan.
        """
        position = operator.index(position)
        if self._chosen.is_missed:
            self._begin(None)
        if position != FILLER and not 0 <= position < len(self):
            raise IndexError(f"position {position} of {counted(len(self), 'packs')}")
        pack = self.pack_id(position)
        if pack == FILLER:
            logger.info("position %d is a filler: one untrained token", position)
            return Pack.filler()
        members = self._cached(position)
        if members is None:
            members = [self._fetch(sample_id) for sample_id in self.packs[position].tolist()]
        self._check_sum(position, members)
        members = self._skipping.without(members)
        if self.repeat_loss == "zero" and self.is_repeat(position):
            members = [
                {**member, "labels": torch.full((length_of(member),), IGNORE, dtype=torch.int64)}
                for member in members
            ]
        return Pack(members, pack_id=pack)

    def over(self, view: AlignedPlan) -> PackedDataset:
        """The same samples over another view of the plan. This dataset stays as it is."""
        other = PackedDataset.__new__(type(self))
        other.__dict__.update(self.__dict__, packs=view, plan=view.plan, _chosen=SharedEpoch())
        return other

    def _cached(self, position: int) -> list[dict[str, Any]] | None:
        """The pack as it was encoded ahead, checked like one that is encoded now."""
        members = None if self.cache is None else self.cache.get(self.pack_id(position))
        if members is None:
            return None
        planned = self.packs[position].tolist()
        held = [member.get("sample_id") for member in members]
        if held != planned:
            raise DriftError(
                f"pack {self.pack_id(position)} holds samples {planned}, the encode cache has {held}",
                hint="remove the cache's folder; it is made again",
            )
        for member in members:
            self._check_one(member["sample_id"], length_of(member))
        return members

    def check_still(self) -> None:
        """Refuse samples that move: others in another order of reading, or resampled in the next epoch.

        A few are encoded, once for these samples. What was encoded ahead lies still, lists of encoded samples
        too.

        Raises:
            InputError: they are not as many as the plan is of; a plan cannot describe them, see
                `measuring.eligibility`.
        """
        planned = len(self.plan.indices) + len(self.plan.ledger)
        if hasattr(self.samples, "__len__") and len(self.samples) != planned:
            raise InputError(
                f"the plan is of {counted(planned, 'samples')}, there are {len(self.samples)}",
                hint="measure and plan these samples",
            )
        still = self.encode is None and isinstance(self.samples, list | tuple)
        if not self._still and not still and self.cache is None:
            probe_once(self.samples, self.encode)
        self._still = True

    def is_repeat(self, position: int) -> bool:
        """Does this position hold a pack that another position of the epoch holds too?"""
        return isinstance(self.packs, AlignedPlan) and position >= self.packs.kept

    def set_epoch(self, epoch: int) -> None:
        """Tell the samples, where they listen, which epoch begins. With `replan`: read its plan from now on.

        Loader workers follow; those that were sent the plan of one epoch, and run already, refuse another.
        """
        self.epoch = epoch
        if self._begin(epoch) or self.replan is not None:
            self._chosen.choose(epoch)

    def _begin(self, epoch: int | None) -> bool:
        """Samples and plan of an epoch, None: of the one chosen elsewhere; whether the samples listen."""
        if self._cannot_plan:
            raise InputError(
                "set_epoch was called while a loader worker kept the plan of the epoch before",
                hint="leave out persistent_workers: the workers of the next pass are started anew",
            )
        epoch = self._chosen.news() or 0 if epoch is None else epoch
        listening = set_epoch(self.samples, epoch)
        if self.replan is not None:
            self.plan = self.replan.plan(epoch)
            if isinstance(self.packs, AlignedPlan):
                self.packs = self.plan.align(self.packs.world_size, self.packs.drop_last, self.packs.multiple)
            else:
                self.packs = self.plan
        return listening

    def __getstate__(self) -> dict[str, Any]:
        """A worker reads the plan of the epoch it was started in, and needs no lengths to plan anew."""
        sent = {"replan": None, "_cannot_plan": self.replan is not None, "lengths": _as_file(self.lengths)}
        return {**self.__dict__, **sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state["lengths"]
        self.__dict__.update(state, lengths=held() if isinstance(held, partial) else held)

    def _fetch(self, sample_id: int) -> dict[str, Any]:
        try:
            sample = self.samples[sample_id]
            made = encoded(self.encode, sample)
        except Exception as error:  # what sources and libraries raise
            length = 1 if self.lengths is None else int(self.lengths[sample_id])
            return self._skipping.failed(sample_id, error, where_in(self.samples, sample_id), length)
        if "input_ids" not in made:
            raise InputError(f"{self._where(sample_id)} has no input_ids", hint="pass encode=template.encode")
        carried = made.setdefault("sample_id", sample_id)
        if carried != sample_id:
            raise DriftError(f"{self._where(sample_id)} came back as sample {carried}", hint=_DRIFT)
        self._check_one(sample_id, length_of(made))
        return made

    def _check_one(self, sample_id: int, tokens: int) -> None:
        if self.lengths is not None and tokens != int(self.lengths[sample_id]):
            raise DriftError(
                f"{self._where(sample_id)} was measured with {int(self.lengths[sample_id])} tokens "
                f"but encodes to {tokens}",
                hint=_DRIFT,
            )

    def _check_sum(self, position: int, members: list[dict[str, Any]]) -> None:
        pack = self.pack_id(position)
        planned = int(self.plan.pack_tokens[pack])
        tokens = sum(length_of(member) for member in members)
        guessed = self.lengths is None and any(member.get("stand_in") for member in members)
        if tokens > planned if guessed else tokens != planned:
            each = ", ".join(f"sample {m['sample_id']}: {length_of(m)}" for m in members)
            raise DriftError(
                f"pack {pack} was measured with {planned} tokens but encodes to {tokens} ({each})",
                hint=_DRIFT,
            )

    def _where(self, sample_id: int) -> str:
        place = where_in(self.samples, sample_id)
        return f"sample {sample_id}" + (f" ({place})" if place else "")


_DRIFT = "the source, template or processor changed since it was measured; measure and plan again"


def _as_file(array: Any) -> Any:
    """What maps an array again that maps all of a file, read-only; anything else as it is.

    numpy pickles a map as a copy: for each worker, of what all could map.
    """
    if not isinstance(array, np.memmap) or array.filename is None or array.flags.writeable:
        return array
    base = array.base
    whole = not isinstance(base, np.memmap) or (base.shape == array.shape and base.dtype == array.dtype)
    if not whole or not array.flags.c_contiguous:
        return array
    return partial(np.memmap, str(array.filename), array.dtype, "r", int(array.offset), tuple(array.shape))
