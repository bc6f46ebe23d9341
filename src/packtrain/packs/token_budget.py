"""TokenBudgetDataset: micro batches by tokens instead of by samples, from a stream or from known lengths.

    data = TokenBudgetDataset(source, template, micro_batch_size=2, max_seq_len=4096)   # dyn_bsz: 8192 tokens
    for batch in data:                           # a list of encoded samples, one packed row
        model(**collate([batch]))

With `dyn_bsz` a batch takes as many samples as fit `micro_batch_size * max_seq_len` tokens; without it,
exactly `micro_batch_size` samples, whatever their length. Both are rows of packed samples without padding
between them. Keywords may have VeOmni's names (`dyn_bsz_count_mode`, `bsz_warmup_ratio`, …).

By default the buffer is packed by packtrain's packers (`order="packed"`, windows with carry): on real chat
lengths under 0.1 % more batches than the bound, where taking samples as they arrive costs several percent.
`order="arrival"` is what trainers with dynamic batching do, for comparison. Where `lengths` are known the
whole epoch is planned: the number of batches is known and equal on all ranks, and `balance` evens them out.

State, epochs, ranks, errors and equal steps are those of `StreamingPackedDataset`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..checks import flag, number, one_of, whole
from ..errors import InputError, counted
from ..extend import I64
from ..moved import also_named
from ..planning.build import plan
from ..planning.lengths import Lengths, as_lengths
from ..planning.raw_plan import PackerId
from ..planning.window import MAX_AGE, WindowPacker, WindowPacks
from ..world import world
from .ledger_file import need_ledger
from .pack import Pack
from .packed import PackedDataset
from .source import PlannedSource
from .streaming import States, StreamingPackedDataset

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Packers of a token-budget stream: the interface of `WindowPacker`, other rules
# --------------------------------------------------------------------------------------------
# All are functions of what was pushed; `state_dict` holds numbers, no samples.
class WarmUp:
    """The budget of batch b: from `first` to `full` tokens over `steps` batches, then `full`.

    >>> [WarmUp(1000, 10, 200).budget(b) for b in (0, 1, 10, 11)]
    [200, 280, 1000, 1000]
    """

    def __init__(self, full: int, steps: int = 0, first: int | None = None) -> None:
        self.full, self.steps, self.first = full, steps, full if first is None else first

    def budget(self, batch: int) -> int:
        if batch >= self.steps:
            return self.full
        return self.first + (self.full - self.first) * batch // self.steps


class ArrivalPacker:
    """Samples in the order they came, as trainers with dynamic batching do it: from a buffer, whatever still
    fits the budget is taken in order; under a warm-up the budget grows.

    Args:
        buffer: samples that are held before batches are made.
        warm_up: budget of each batch, in counted tokens.
        cap: hard cap of the tokens of a batch of several samples.
        counted: cost that the budget counts; None: tokens.
    """

    def __init__(self, buffer: int, warm_up: WarmUp, cap: int, counted: str | None = None) -> None:
        self.buffer, self.warm_up, self.cap, self.counted = buffer, warm_up, cap, counted
        self.batches = 0
        self._held: list[tuple[int, int, int]] = []  # id, tokens, counted tokens

    @property
    def waiting(self) -> I64:
        return np.array([row[0] for row in self._held], dtype=np.int64)

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        self._held += _rows(ids, lengths, self.counted)
        batches: list[list[int]] = []
        while self._held and (last or len(self._held) >= self.buffer):
            batches.append(self._take())
        return _packs(batches, "arrival")

    def first_batches(self, ids: I64, lengths: Lengths) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        """Batches while the warm-up lasts, and what is left over: (id, tokens, counted tokens)."""
        self._held += _rows(ids, lengths, self.counted)
        batches = []
        while self._held and self.batches < self.warm_up.steps:
            batches.append(self._take())
        rest, self._held = self._held, []
        return batches, rest

    def _take(self) -> list[int]:
        budget = self.warm_up.budget(self.batches)
        self.batches += 1
        taken: list[int] = []
        rest: list[tuple[int, int, int]] = []
        total = counted = 0
        for row in self._held:
            fits = total + row[1] <= self.cap and counted + row[2] <= budget
            if not taken or (fits and counted < budget):
                taken.append(row[0])
                total, counted = total + row[1], counted + row[2]
            else:
                rest.append(row)
        self._held = rest
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "ids": [row[0] for row in self._held],
            "tokens": [row[1] for row in self._held],
            "counted": [row[2] for row in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = int(state["batches"])
        self._held = list(zip(state["ids"], state["tokens"], state["counted"], strict=True))


class FixedPacker:
    """So many samples a batch, whatever their length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._held: list[tuple[int, int]] = []

    @property
    def waiting(self) -> I64:
        return np.array([row[0] for row in self._held], dtype=np.int64)

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        self._held += list(zip(ids.tolist(), lengths.tokens.tolist(), strict=True))
        batches = []
        while len(self._held) >= self.samples or (last and self._held):
            batches.append([row[0] for row in self._held[: self.samples]])
            self._held = self._held[self.samples :]
        return _packs(batches, "fixed")

    def state_dict(self) -> dict[str, Any]:
        return {"ids": [row[0] for row in self._held], "tokens": [row[1] for row in self._held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = list(zip(state["ids"], state["tokens"], strict=True))


class WarmUpPacker:
    """The first `warm_up.steps` batches in order of arrival, under their own budgets; then `after`."""

    def __init__(self, before: ArrivalPacker, after: WindowPacker) -> None:
        self.before, self.after = before, after

    @property
    def _is_warm(self) -> bool:
        return self.before.batches >= self.before.warm_up.steps

    @property
    def waiting(self) -> I64:
        return self.after.waiting if self._is_warm and not len(self.before.waiting) else self.before.waiting

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        if self._is_warm and not len(self.before.waiting):
            return self.after.push(ids, lengths, last=last)
        made, rest = self.before.first_batches(ids, lengths)
        counted = self.before.counted
        further = Lengths([row[1] for row in rest], {counted: [row[2] for row in rest]} if counted else None)
        done = self.after.push(np.array([row[0] for row in rest], dtype=np.int64), further, last=last)
        warm = _packs(made, "arrival")
        offsets = np.concatenate([warm.offsets, done.offsets[1:] + len(warm.ids)])
        return WindowPacks(offsets, np.concatenate([warm.ids, done.ids]), done.left_out, done.packer)

    def state_dict(self) -> dict[str, Any]:
        before, after = self.before.state_dict(), self.after.state_dict()
        merged = {key: [*before[key], *after[key]] for key in ("ids", "tokens")}
        return {**merged, "before": before, "after": after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before.load_state_dict(state["before"])
        self.after.load_state_dict(state["after"])


def _rows(ids: I64, lengths: Lengths, counted: str | None) -> list[tuple[int, int, int]]:
    tokens = lengths.tokens.tolist()
    costs = tokens if counted is None else lengths.costs[counted].tolist()
    return list(zip(ids.tolist(), tokens, costs, strict=True))


def _packs(batches: list[list[int]], name: str) -> WindowPacks:
    ids = [i for batch in batches for i in sorted(batch)]
    offsets = np.cumsum([0, *map(len, batches)]).astype(np.int64)
    return WindowPacks(offsets, np.array(ids, dtype=np.int64), {}, PackerId(name, 1, {}))


# --------------------------------------------------------------------------------------------
# TokenBudgetDataset: micro batches by tokens instead of by samples
# --------------------------------------------------------------------------------------------
_EFFECTIVE = "effective"
_LOOKED = 256  # samples after which a count that never decides is told
_MAX_SEQ_LEN = 2048
_FIRST_TOKENS = 200  # of the first row of a warm-up that names none


class TokenBudgetDataset(StreamingPackedDataset):
    """Iterable over micro batches. Further keywords: those of `StreamingPackedDataset`.

    Args:
        source, template: as there.
        micro_batch_size, max_seq_len: their product is the budget in tokens.
        dyn_bsz: False: exactly `micro_batch_size` samples a batch.
        buffer_size: samples that are looked at together.
        count_mode: what the budget counts: `total` tokens, or `effective` (supervised) ones.
        overflow_ratio: with `effective`, the hard cap in tokens is ceil(budget * overflow_ratio).
        order: `packed` or `arrival`.
        warmup_steps, warmup_tokens: over so many batches of a split (by default: of a reader) the budget
            grows from `warmup_tokens`.
        warmup_ratio, train_steps: instead of `warmup_steps`: this share of so many batches; from
            `warmup_tokens`, or 200.
        pad_packed_input: rows are padded to `pad_to_length` by the collator; a sample that is longer stops
            the stream (`long_samples="error"`).
        pad_to_length: a number asks for padding; None: the most tokens that a row may have. True and False
            are `pad_packed_input`.
        drop_last: leave the last batch of an epoch out where it is not full, into the ledger (needs one).
        lengths: Lengths (or int[n]) of an indexable source: the epoch is planned, with `dyn_bsz` by total
            tokens, without it as rows of `micro_batch_size` samples.
        balance, grad_accum: with `lengths`, how batches are rearranged so that ranks finish together; see
            `PackSampler`.
        global_batch_size: instead of `grad_accum`: samples (with `dyn_bsz`: rows times `micro_batch_size`)
            of a step over all ranks.
        options: keywords of `StreamingPackedDataset` (`rank`, `world_size`, `seed`, `shuffle_buffer`, …).

    Attributes:
        budget: tokens of a batch.
        pad_to_length: what `PaddingFreeCollator` has to be given, or None.
        grad_accum: batches of a step on this rank.
    """

    @also_named("TokenBudgetDataset", StreamingPackedDataset.__init__, but=("pack_length", "window"))
    def __init__(
        self,
        source: Any,
        template: Any = None,
        *,
        micro_batch_size: int = 1,
        max_seq_len: int | None = None,
        dyn_bsz: bool = True,
        buffer_size: int = 500,
        count_mode: str = "total",
        overflow_ratio: float = 1.5,
        order: str = "packed",
        warmup_steps: int = 0,
        warmup_tokens: int | None = None,
        warmup_ratio: float = 0.0,
        train_steps: int | None = None,
        pad_packed_input: bool | None = None,
        pad_to_length: int | bool | None = None,
        drop_last: bool = False,
        lengths: Any = None,
        balance: str | None = None,
        grad_accum: int = 1,
        global_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        micro_batch_size = whole("micro_batch_size", micro_batch_size, 1)
        buffer_size = whole("buffer_size", buffer_size, 1)
        longest = _MAX_SEQ_LEN if max_seq_len is None else whole("max_seq_len", max_seq_len, 1)
        self.budget = micro_batch_size * longest
        self.warm_up = _warm_up(self.budget, warmup_steps, warmup_tokens, warmup_ratio, train_steps)
        grad_accum = whole("grad_accum", grad_accum, 1)
        flag("dyn_bsz", dyn_bsz)
        flag("drop_last", drop_last)
        if not isinstance(balance, str | None):
            raise InputError(f"balance is {balance!r}", hint="see PackSampler for its words")
        one_of("count_mode", count_mode, ("total", "effective"))
        one_of("order", order, ("packed", "arrival"))
        number("overflow_ratio", overflow_ratio, 1)
        cap = math.ceil(self.budget * overflow_ratio) if count_mode == _EFFECTIVE else self.budget
        self.pad_to_length = _padded(pad_packed_input, pad_to_length, cap, dyn_bsz)
        if max_seq_len is not None and not dyn_bsz and self.pad_to_length is None and world().is_writer:
            logger.warning("max_seq_len %s has no effect with dyn_bsz off: a row is so many samples", longest)
        if not dyn_bsz and (count_mode != "total" or order != "packed" or self.warm_up.steps):
            raise InputError(
                "count_mode, order and the warm-up are of the token budget, and dyn_bsz is off",
                hint="set dyn_bsz=True, or leave them out",
            )
        if self.pad_to_length is not None:
            options["long_samples"] = _fitting(options.get("long_samples"))
        if not dyn_bsz or order != "packed" or self.warm_up.steps:
            if self.pad_to_length is not None and options["long_samples"] == "error":
                del options["long_samples"]  # checked for every sample
            _refuse_packer_options(options)
        self.dyn_bsz, self.micro_batch_size, self.order = dyn_bsz, micro_batch_size, order
        self.count_mode, self.drop_last = count_mode, drop_last
        if lengths is None:
            _check_stream(drop_last, options.get("ledger_file"), balance, grad_accum)
        self._share, self._looked = 0.0, 0
        windowed = dyn_bsz and order == "packed"
        super().__init__(source, template, pack_length=cap, window=buffer_size if windowed else 1, **options)
        if count_mode == _EFFECTIVE:
            self.spec = replace(self.spec, limits={_EFFECTIVE: self.budget})
        self.buffer_size = buffer_size
        self.settings = {
            "dyn_bsz": dyn_bsz,
            "samples": micro_batch_size,
            "order": order,
            "count_mode": count_mode,
            "warm_up": [self.warm_up.steps, self.warm_up.first],
            "drop_last": drop_last,
        }
        if global_batch_size is not None:
            grad_accum = _accumulation(global_batch_size, grad_accum, micro_batch_size * self.place.size)
        self.grad_accum = grad_accum
        self._planned = None if lengths is None else self._plan_ahead(source, lengths, balance, grad_accum)

    kind = "token_budget"

    # -- streams -----------------------------------------------------------------------------
    @property
    def planned_together(self) -> int:
        return self.buffer_size

    def make_packer(self, samples: int) -> Any:
        if not self.dyn_bsz:
            return FixedPacker(self.micro_batch_size)
        counted = _EFFECTIVE if self.count_mode == _EFFECTIVE else None
        arrival = ArrivalPacker(samples, self.warm_up, self.spec.pack_length, counted)
        if self.order == "arrival":
            return arrival
        windows = WindowPacker(self.spec, max_age=self.max_carry)
        return WarmUpPacker(arrival, windows) if self.warm_up.steps else windows

    def costs_of(self, samples: list[dict[str, Any]]) -> dict[str, list[int]]:
        limit = self.pad_to_length
        for sample in samples if limit is not None else ():
            if len(sample["input_ids"]) > (limit or 0):
                raise InputError(
                    f"sample {sample.get('sample_id')} has {len(sample['input_ids'])} tokens, and rows are "
                    f"padded to {limit}",
                    hint="raise pad_to_length (or max_seq_len), or shorten the sample",
                )
        if self.count_mode != _EFFECTIVE:
            return {}
        found = [_supervised(sample) for sample in samples]
        self._told_of_effect(samples, found)
        return {_EFFECTIVE: found}

    def _told_of_effect(self, samples: list[dict[str, Any]], supervised: list[int]) -> None:
        """Say once where rows are always full of tokens before they are full of supervised ones."""
        if self._looked >= _LOOKED:
            return
        shares = (count / max(1, _tokens(sample)) for sample, count in zip(samples, supervised, strict=True))
        self._share, self._looked = max(self._share, *shares, 0.0), self._looked + len(samples)
        if (
            self._looked >= _LOOKED
            and self._share * self.spec.pack_length < self.budget
            and self.place.is_writer
        ):
            logger.warning(
                "count_mode 'effective' has no effect on the first %d samples: at most %.0f %% of a sample's "
                "tokens are supervised, and overflow_ratio lets a row hold %.3g times the budget",
                self._looked, 100 * self._share, self.spec.pack_length / self.budget,
            )  # fmt: skip

    def is_full(self, pack: list[dict[str, Any]]) -> bool:
        """May this batch be the last of an epoch under `drop_last`?"""
        if not self.drop_last:
            return True
        if not self.dyn_bsz:
            return len(pack) == self.micro_batch_size
        counted = _supervised if self.count_mode == _EFFECTIVE else _tokens
        return sum(map(counted, pack)) * 10 >= self.budget * 9

    # -- planned -----------------------------------------------------------------------------
    def _check_planned(self) -> None:
        """Refuse what an epoch that is planned cannot do, and tell what has no effect on it."""
        why = hint = ""
        if not self.reader.can_seek:
            why, hint = "lengths are of no use: the source cannot be indexed", "pass a sequence"
        elif self.count_mode != "total" or self.order != "packed" or self.warm_up.steps:
            why = "with lengths the epoch is planned by total tokens"
            hint = "leave count_mode, order and warmup_steps at their defaults, or lengths out"
        elif self.cyclic:
            why, hint = "a planned epoch has an end: cyclic has no effect", "use set_epoch"
        elif self.on_error == "skip":
            why = "with lengths every sample has its place: on_error='skip' has no effect"
            hint = "leave failed samples out when measuring, or lengths out here"
        if why:
            raise InputError(why, hint=hint)
        idle = {"encode_workers": 0, "max_carry": MAX_AGE, "splits": None}
        for name in (name for name, default in idle.items() if getattr(self, name) != default):
            logger.warning("with lengths the epoch is planned: %s has no effect", name)

    def _plan_ahead(self, source: Any, lengths: Any, balance: str | None, grad_accum: int) -> PlannedSource:
        self._check_planned()
        spec, checked = self.spec, as_lengths(lengths)
        if len(checked) != len(source):
            raise InputError(
                f"lengths are of {counted(len(checked), 'samples')}, the source has {len(source)}",
                hint="measure this source",
            )
        same = ("pack_length", "packer", "long_samples", "multiple_of", "max_samples")
        how: dict[str, Any] = {name: getattr(spec, name) for name in same}
        if not self.dyn_bsz:
            how = {  # rows of exactly so many samples (the last one: what is left), of any length
                "pack_length": self.micro_batch_size * checked.max_tokens + 1,
                "packer": "random_fit" if self.shuffle_buffer else "sequential",
                "max_samples": self.micro_batch_size,
            }
        made = plan(checked, **how, skip=tuple(self.skip))
        if self.ledger_file is not None and self.place.is_writer:
            for sample_id, reason in zip(made.ledger.ids.tolist(), made.ledger.reasons, strict=True):
                self.leave_out(sample_id, reason, f"pack_length {spec.pack_length}")
        view = made.align(self.place.size, self.drop_last)
        data = PackedDataset(view, source, self.encode, lengths=lengths, repeat_loss="zero")
        return PlannedSource(
            data,
            rank=self.place.rank,
            seed=self.seed,
            shuffle=self.shuffle_buffer > 0,
            balance=balance,
            grad_accum=grad_accum,
        )

    def __len__(self) -> int:
        """Batches of an epoch on this rank, where lengths are known.

        Raises:
            TypeError: they are not (what `len` of a stream raises everywhere).
        """
        if self._planned is None:
            raise TypeError("a stream has no length: pass lengths to have the epoch planned")
        return len(self._planned)

    def _source(self) -> Any:
        """What gives the batches: the planned epoch, or the stream."""
        return super() if self._planned is None else self._planned

    def __iter__(self) -> Iterator[Pack]:
        return self._source().__iter__()  # type: ignore[no-any-return]

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self._planned is not None:
            self._planned.set_epoch(self.epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        return self._source().state_dict(step)  # type: ignore[no-any-return]

    def check_state(self, state: States) -> None:
        self._source().check_state(self._alike(state))

    def load_state_dict(self, state: States) -> None:
        self._source().load_state_dict(self._alike(state))
        if self._planned is not None:
            self.epoch = self._planned.epoch

    def _alike(self, state: Any) -> Any:
        """The position of a planned epoch, which every rank saves alike."""
        planned = self._planned is not None and isinstance(state, list | tuple)
        return state[0] if planned and state else state

    def peek(self, count: int) -> list[Pack]:
        return self._source().peek(count)  # type: ignore[no-any-return]

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        return self._source().loader(collate, num_workers=num_workers, **options)


def _padded(pad: bool | None, length: int | bool | None, cap: int, is_capped: bool) -> int | None:
    """Tokens that rows are padded to; None: they are not padded. A length that is a bool says `pad`.

    Args:
        is_capped: no row has more than `cap` tokens; False: nobody knows.
    """
    if isinstance(length, bool):
        pad, length = pad or length, None
    if length is not None:
        length = whole("pad_to_length", length, 1)
    if not flag("pad_packed_input", length is not None if pad is None else pad):
        if length is not None:
            raise InputError(
                "pad_to_length has no effect: pad_packed_input is False", hint="keep one of them"
            )
        return None
    if length is not None and is_capped and length < cap:
        raise InputError(f"pad_to_length is {length}, a batch may have {cap} tokens")
    return cap if length is None else length


def _fitting(long_samples: Any) -> Any:
    """What becomes of a sample that is longer than a padded row."""
    if long_samples == "single":
        raise InputError(
            "long_samples is 'single', and a longer sample would not fit a row that is padded",
            hint="use 'error' (the default beside padding) or 'drop', or leave pad_packed_input out",
        )
    return "error" if long_samples is None else long_samples


def _check_stream(drop_last: bool, ledger_file: Any, balance: str | None, grad_accum: int) -> None:
    if drop_last:
        need_ledger(ledger_file, "drop_last")
    if balance is not None or grad_accum != 1:
        raise InputError("balance and grad_accum need lengths: a stream has no step to rearrange")


def _warm_up(budget: int, steps: int, tokens: int | None, ratio: float, train_steps: int | None) -> WarmUp:
    if ratio:
        number("warmup_ratio", ratio, 0, 1, without=(0,))
        if steps or train_steps is None:
            why, hint = "warmup_steps and warmup_ratio both say how long", "keep one of them"
            if not steps:
                why = "warmup_ratio is a share of the run, and nobody says how long that is"
                hint = "give train_steps (batches of the run on a rank), or warmup_steps"
            raise InputError(why, hint=hint)
        steps = math.ceil(ratio * whole("train_steps", train_steps, 1))
        tokens = min(_FIRST_TOKENS, budget) if tokens is None else tokens
    steps = whole("warmup_steps", steps, 0)
    if (steps == 0) != (tokens is None):
        raise InputError("warmup_steps and warmup_tokens belong together", hint="give both, or none")
    return WarmUp(budget, steps, None if tokens is None else whole("warmup_tokens", tokens, 1, budget))


def _accumulation(global_batch_size: int, grad_accum: int, unit: int) -> int:
    steps, rest = divmod(whole("global_batch_size", global_batch_size, 1), unit)
    if rest or grad_accum not in (1, steps):
        raise InputError(
            f"global_batch_size {global_batch_size} is not grad_accum times {unit} "
            "(micro_batch_size times ranks)",
            hint=f"use a multiple of {unit}, without grad_accum",
        )
    return steps


def _refuse_packer_options(options: Mapping[str, Any]) -> None:
    """Batches that are taken in order of arrival, or by number, follow no other rule."""
    rules = {"packer": "auto", "multiple_of": 1, "max_samples": None, "long_samples": "single"}
    for name, default in rules.items():
        if options.get(name, default) != default:
            raise InputError(
                f"{name} has no effect with dyn_bsz off, order='arrival' or a warm-up",
                hint="leave it out, or use dyn_bsz=True, order='packed' without warm-up",
            )


def _tokens(sample: Mapping[str, Any]) -> int:
    return len(sample["input_ids"])


def _supervised(sample: Mapping[str, Any]) -> int:
    labels = sample.get("labels")
    if labels is None:
        raise InputError(
            f"sample {sample.get('sample_id')} has no labels, which count_mode 'effective' counts",
            hint="use count_mode='total'",
        )
    return int((np.asarray(labels) != -100).sum())
