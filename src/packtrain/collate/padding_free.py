"""PaddingFreeCollator: packs -> one row without padding, boundaries as data.

    batch = PaddingFreeCollator(model)([pack, …]);  model(**batch)

All samples of all packs of a call are laid end to end in one row [1,T], in linear time. The row
holds `input_ids`, `labels` (the first label of every segment is -100, so no target crosses a
boundary), `position_ids`, the boundary arguments this model may get, `use_cache=False`, and the
family's media tensors in placeholder order (absent when there are none). It never holds an
`attention_mask`: transformers switches packed detection off for any 2-D mask, even all ones.

Positions are those of each sample alone: [1,T] for text families; [4,1,T] for mRoPE families, the
restarting text row first, then t, h, w. The text row is asserted to restart at every boundary, since
sdpa and eager derive their block mask from it alone.

A pad tail (`pad_to_length`, `pad_multiple`) is exactly one further segment: pad ids, labels -100,
positions 0, 1, 2, …; boundaries are computed after it. Context parallelism pads inside every
segment; `dummy_media` keeps idle towers running (`collate.media`). Every step is linear in T.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..checks import whole
from ..errors import InputError, one_line
from ..families import Family
from ..moved import also_named
from .fields import (
    IGNORE,
    MEDIA_TYPES,
    TOKEN_FIELDS,
    Segment,
    check_token_fields,
    media_rules,
    mrope_keys,
    read_sample,
)
from .media import check_placeholders, dummies_of, join_media, placeholders_of
from .model_traits import check_row, choose_kwargs, family_for, rotations_of
from .pack_batch import NO_SAMPLE, PackBatch, members_of, offsets


# --------------------------------------------------------------------------------------------
# Padding inside segments (context parallelism), and what follows from it
# --------------------------------------------------------------------------------------------
# Context parallelism over N ranks cuts every segment into 2 N equal chunks; rank r computes chunks r and
# 2 N - 1 - r, so that causal work is even. A segment is therefore padded to a multiple of 2 N *inside
# itself*: pad tokens go on in its positions, are not trained and stand after its real tokens, so no real
# token attends to them. A plan counts them with `multiple_of=segment_multiple(N)`; a row then never
# grows past `pack_length`.
#
#     lengths            padded, they sum to T             cu_seqlens_q_padded
#     unpadded           as encoded                        cu_seqlens_q
def segment_multiple(context_parallel: int) -> int:
    """What every segment is padded to a multiple of; give it to `packtrain.plan` as `multiple_of`."""
    return 2 * context_parallel if context_parallel > 1 else 1


def full(length: int, value: int | float) -> torch.Tensor:
    """`length` pad values; an int makes int64, a float float32."""
    return torch.full((length,), value, dtype=torch.float32 if isinstance(value, float) else torch.int64)


def pad_segments(
    segments: Sequence[Segment], multiple: int, token_fields: Mapping[str, int | float]
) -> list[Segment]:
    """Segments of a length divisible by `multiple`; given ones are not changed."""
    if multiple == 1:
        return list(segments)
    return [_padded(segment, -segment.length % multiple, token_fields) for segment in segments]


def _padded(segment: Segment, more: int, token_fields: Mapping[str, int | float]) -> Segment:
    if not more:
        return segment
    positions = segment.positions
    if positions is not None:
        steps = torch.arange(1, more + 1)
        positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    return replace(
        segment,
        length=segment.length + more,
        tokens={
            name: torch.cat([values, full(more, token_fields[name])])
            for name, values in segment.tokens.items()
        },
        positions=positions,
    )


def padding_mask(lengths: Sequence[int], real: Sequence[int]) -> torch.Tensor:
    """bool [1,T], True on padding (Megatron's convention for mixture-of-experts routers).

    Args:
        lengths: tokens of each segment in the row.
        real: how many of them, from the front, are data.
    """
    flags = np.tile([False, True], len(lengths))
    counts = [count for length, own in zip(lengths, real, strict=True) for count in (own, length - own)]
    return torch.from_numpy(np.repeat(flags, counts))[None]


# --------------------------------------------------------------------------------------------
# Positions of a row: those of each sample alone, laid end to end
# --------------------------------------------------------------------------------------------
# sdpa and eager derive their block mask from the text row alone: a step other than 1 begins a segment.
# So the text row must step by 1 inside every segment and by anything else at every boundary; this is
# asserted on the whole row at once.
def join_positions(segments: Sequence[Segment], mrope: bool, tail: int) -> torch.Tensor:
    """int64 [1,T], or with mRoPE [4,1,T]: text row, then t, h, w. A tail counts 0, 1, 2, … in all rows.

    Raises:
        InputError: a sample's text positions do not step by 1, or run on from the sample before.
    """
    lengths = [segment.length for segment in segments] + ([tail] if tail else [])
    if not mrope and all(segment.positions is None for segment in segments):
        return torch.from_numpy(_counted(lengths))[None]
    count = torch.arange(max(lengths))
    given = [segment.positions for segment in segments] + ([None] if tail else [])
    text = []
    for own, length in zip(given, lengths, strict=True):
        known = own is not None and (own.ndim == 1 or own.shape[0] != 3)  # three rows are t, h, w alone
        part = own if known and own is not None else count[:length]
        text.append(part if part.ndim == 1 else part[0])
    row = torch.cat(text)
    _check_steps(row, lengths, segments)
    if not mrope:
        return row[None]
    axes = [
        part.expand(3, -1) if own is None or own.ndim == 1 else own[-3:]
        for own, part in zip(given, text, strict=True)
    ]
    return torch.cat([row[None], torch.cat(axes, dim=1)])[:, None]


def _counted(lengths: Sequence[int]) -> NDArray[np.int64]:
    """0, 1, 2, … anew in every segment: what `_check_steps` asks for, by construction."""
    sizes = np.array(lengths, dtype=np.int64)
    ends = sizes.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)


def check_starts(positions: torch.Tensor, starts: NDArray[np.int32], segments: Sequence[Segment]) -> None:
    """Every segment begins at the same position: for models that get no `cu_seq_lens_q`.

    The flash path of transformers then takes each place with the smallest position of the row for a
    boundary, so a segment that begins higher is joined to the one before it.

    Raises:
        InputError: two segments of the row begin at different positions.
    """
    first = positions.reshape(-1, positions.shape[-1])[0].numpy()[starts]
    other = first != first[0]
    if not other.any():
        return
    at = int(other.argmax())
    where = segments[at].where if at < len(segments) else "the pad tail"
    raise InputError(
        f"positions of {where} start at {int(first[at])}, those of {segments[0].where} at {int(first[0])}",
        hint="begin every sample at 0: this model is told its boundaries by positions alone",
    )


def check_labels(labels: torch.Tensor, lengths: Sequence[int], segments: Sequence[Segment]) -> None:
    """A label is a token id or -100; another negative one ends a GPU run with an assertion of the device.

    Raises:
        InputError: names the sample, the token and the label.
    """
    array = labels.numpy()
    wrong = (array < 0) & (array != IGNORE)
    if not wrong.any():
        return
    at = int(wrong.argmax())
    index, place = _place(at, lengths)
    raise InputError(
        f"{segments[index].where}: the label of token {place} is {int(labels[at])}",
        hint=f"a token that is not trained has the label {IGNORE}",
    )


def _place(at: int, lengths: Sequence[int]) -> tuple[int, int]:
    """Segment of a token of the row, and its place there."""
    ends = list(itertools.accumulate(lengths))
    index = bisect.bisect_right(ends, at)
    return index, at - ends[index] + lengths[index]


def _check_steps(row: torch.Tensor, lengths: list[int], segments: Sequence[Segment]) -> None:
    ends = list(itertools.accumulate(lengths))
    breaks: list[int] = ((row[1:] - row[:-1] != 1).nonzero().flatten() + 1).tolist()
    if breaks == ends[:-1]:
        return
    at = min(set(breaks) ^ set(ends[:-1]))
    index, place = _place(at, lengths)
    before, here = int(row[at - 1]), int(row[at])
    where = segments[index].where if index < len(segments) else "the pad tail"
    told = f"{where}: text positions go from {before} to {here} at token {place}"
    hint = "an already packed row loses its boundaries here; hand over its samples one by one"
    if not place:
        told = f"positions of {where} start at {here}, right after those of {segments[index - 1].where}"
        hint = "positions restart in every sample; otherwise transformers joins the two samples"
    raise InputError(told, hint=hint)


# --------------------------------------------------------------------------------------------
# PaddingFreeCollator: packs -> one row without padding, boundaries as data
# --------------------------------------------------------------------------------------------
class PaddingFreeCollator:
    """Joins packs into one row. Picklable: it keeps facts about the model, never the model.

    Args:
        model: what will consume the batch: a transformers model, its config or `model_type`. It
            decides position rows and boundary arguments. None: every flash argument is given, and a row
            gets mRoPE positions when one of its samples has them, so pass the model for Qwen-VL.
        pad_to_length: pad the row to exactly this length; a longer row is an error.
        pad_multiple: pad the row up to a multiple of this.
        context_parallel: size N of the context-parallel group: every segment is padded, inside itself, to a
            multiple of 2 N. Plan with `multiple_of=2 * N`, so that rows keep to `pack_length`.
        boundary_kwargs: "auto", or the names to put into the batch (`cu_seq_lens_q`,
            `cu_seq_lens_k`, `max_length_q`, `max_length_k`, `seq_idx`).
        pad_token_id: id of pad tokens.
        token_fields: further per-token fields: name -> pad value (an int pads int64, a float float32).
        padding_mask: add `padding_mask`, bool [1,T], True on padding (mixture-of-experts routers).
        dummy_media: add a weightless segment with the smallest medium for every tower that the row would
            leave idle: True, or encoded samples with one medium each (`template.dummy_samples`).

    Raises:
        InputError: a sample breaks a rule of `collate.fields`, or a row is longer than `pad_to_length`.
        IsolationError: a wanted boundary argument breaks this model on its backend; of a call: the model's
            rotations would differ from those of a sample alone (`collate.model_traits`).
    """

    @also_named("PaddingFreeCollator")
    def __init__(
        self,
        model: Any = None,
        pad_to_length: int | None = None,
        pad_multiple: int | None = None,
        context_parallel: int = 1,
        boundary_kwargs: str | Iterable[str] = "auto",
        *,
        pad_token_id: int = 0,
        token_fields: Mapping[str, int | float] | None = None,
        padding_mask: bool = False,
        dummy_media: bool | Mapping[str, Any] | Sequence[Mapping[str, Any]] = False,
    ) -> None:
        _check_padding(pad_to_length, pad_multiple, context_parallel)
        hint = "any id of the vocabulary: pad tokens are never trained; leave it out for 0"
        whole("pad_token_id", pad_token_id, 0, hint=hint)
        self.pad_to_length = pad_to_length
        self.pad_multiple = pad_multiple
        self.context_parallel = context_parallel
        self.padding_mask = padding_mask
        self.pad_token_id = pad_token_id
        self.family: Family | None = family_for(model)
        self.boundary_kwargs = choose_kwargs(boundary_kwargs, model)
        self._media = media_rules(self.family)
        declared = check_token_fields({} if token_fields is None else token_fields, self._media)
        self.token_fields = {**TOKEN_FIELDS, **declared, "input_ids": pad_token_id}
        self._mrope = mrope_keys(self.family)
        self._placeholders = placeholders_of(model)
        self._rotations = rotations_of(model)
        self._dummies = dummies_of(dummy_media, model, self.family)

    def __call__(self, packs: Sequence[Any]) -> PackBatch:
        """One row of all samples of `packs` (a list of packs; a flat list of samples is one pack)."""
        segments = self._read(members_of(packs))
        self._same_fields(segments)
        dummies = self._idle(segments)
        segments += dummies
        unpadded = [segment.length for segment in segments]
        segments = pad_segments(segments, segment_multiple(self.context_parallel), self.token_fields)
        tail = self._tail(sum(segment.length for segment in segments))
        ending = [tail] if tail else []
        lengths = tuple([segment.length for segment in segments] + ending)
        if self._rotations is not None:
            check_row(self._rotations, lengths, [None if s.weightless else s.where for s in segments])
        batch = PackBatch(self._tokens(segments, tail))
        batch.per_token = tuple(batch)
        boundaries = offsets(lengths)
        starts = boundaries[:-1].numpy()
        batch["labels"][0].numpy()[starts] = IGNORE
        check_labels(batch["labels"][0], lengths, segments)
        batch["position_ids"] = join_positions(segments, self._has_mrope(segments), tail)
        if "cu_seq_lens_q" not in self.boundary_kwargs:
            check_starts(batch["position_ids"], starts, segments)
        batch.update(self._boundaries(boundaries, lengths))
        batch["use_cache"] = False
        check_placeholders(segments, batch["input_ids"][0], self._placeholders)
        batch.update(join_media(segments, self._media))
        batch.lengths, batch.unpadded, batch.tail = lengths, tuple(unpadded + ending), tail
        samples = [segment for segment in segments if segment.is_sample]
        batch.filler = not samples
        batch.dummies = len(dummies)
        batch.sample_ids = tuple(segment.sample_id for segment in samples)
        numbers = itertools.accumulate(segment.is_sample for segment in segments)
        own = [n - 1 if s.is_sample else NO_SAMPLE for n, s in zip(numbers, segments, strict=True)]
        batch.segment_sources = tuple(own + [NO_SAMPLE] * len(ending))
        named = dict.fromkeys(name for segment in samples for name in segment.values)
        batch.sample_values = {name: tuple(s.values.get(name) for s in samples) for name in named}
        if self.padding_mask:
            data = [0 if s.weightless else own for s, own in zip(segments, unpadded, strict=True)]
            batch["padding_mask"] = padding_mask(lengths, data + [0] * len(ending))
        return batch

    def _idle(self, segments: list[Segment]) -> list[Segment]:
        """Dummies of the towers that no segment feeds."""
        if not self._dummies:
            return []
        fed = {key for segment in segments for key in segment.media}
        return [
            read_sample(sample, "the dummy medium", token_fields=self.token_fields, media=self._media)
            for keys, sample in self._dummies
            if fed.isdisjoint(keys)
        ]

    def _read(self, packs: Sequence[Any]) -> list[Segment]:
        if isinstance(packs, Mapping) or not hasattr(packs, "__len__") or not len(packs):
            raise InputError("the collator got no packs", hint="pass a non-empty list of packs")
        if isinstance(packs[0], Mapping):
            packs = [packs]
        segments = []
        for number, pack in enumerate(packs):
            if isinstance(pack, Mapping) or not hasattr(pack, "__len__") or not len(pack):
                raise InputError(
                    f"pack {number} of the call holds no samples", hint="a pack is a list of samples"
                )
            for member, sample in enumerate(pack):
                where = f"member {member} of pack {number} of the call"
                segments.append(read_sample(sample, where, token_fields=self.token_fields, media=self._media))
        return segments

    def _same_fields(self, segments: list[Segment]) -> None:
        """A per-token field or explicit positions in one member must be in all of them.

        A sample without `loss_scale` beside one with it weighs 1: templates give it only where a record
        weighs its answers. One without media has media types of 0.
        """
        full = [segment for segment in segments if not segment.weightless]
        present = set().union(*(segment.tokens for segment in full))
        if "loss_scale" in present:
            for segment in full:
                segment.tokens.setdefault("loss_scale", torch.ones(segment.length))
        if MEDIA_TYPES in present:
            for segment in (segment for segment in full if not segment.media):
                segment.tokens.setdefault(MEDIA_TYPES, torch.zeros(segment.length, dtype=torch.int64))
        for segment in full:
            if len(segment.tokens) < len(present):
                name = next(name for name in sorted(present) if name not in segment.tokens)
                other = next(s.where for s in full if name in s.tokens)
                raise InputError(
                    f"{segment.where} has no {name}, but {other} in the same row has",
                    hint="give the field to every sample, or to none",
                )
        placed = [segment for segment in full if segment.positions is not None]
        if placed and len(placed) < len(full):
            lacking = next(segment for segment in full if segment.positions is None)
            raise InputError(
                f"{lacking.where} has no position_ids, but {placed[0].where} in the same row has",
                hint="give position_ids to every sample, or to none",
            )

    def _tail(self, tokens: int) -> int:
        if self.pad_to_length is not None:
            if tokens > self.pad_to_length:
                raise InputError(
                    f"a row of {tokens} tokens is longer than pad_to_length {self.pad_to_length}",
                    hint="plan with pack_length <= pad_to_length, drop long samples, or raise it",
                )
            return self.pad_to_length - tokens
        if self.pad_multiple is not None:
            return -tokens % self.pad_multiple
        return 0

    def _tokens(self, segments: list[Segment], tail: int) -> dict[str, torch.Tensor]:
        names = dict.fromkeys(chain.from_iterable(segment.tokens for segment in segments))
        names.setdefault("labels")
        row = {}
        for name in names:
            pad = self.token_fields[name]
            parts = [
                segment.tokens[name] if name in segment.tokens else full(segment.length, pad)
                for segment in segments
            ]
            try:
                row[name] = torch.cat([*parts, full(tail, pad)] if tail else parts)[None]
                why = None if row[name].is_cpu else "expected the CPU"
            except RuntimeError as error:
                why = one_line(error)
            if why is not None:
                devices = ", ".join(sorted({str(part.device) for part in parts}))
                raise InputError(
                    f"{name} of the samples (on {devices}) cannot be joined: {why}",
                    hint="hand over samples on the CPU; the trainer moves the row",
                )
        return row

    def _has_mrope(self, segments: list[Segment]) -> bool:
        """Declared by the family; without one, true as soon as a sample has t, h, w rows."""
        given = [s.positions is not None and s.positions.ndim > 1 for s in segments]
        mrope = self.family.position_rows == 3 if self.family is not None else any(given)
        for segment, own in zip(segments, given, strict=True):
            if own and not mrope:
                raise InputError(
                    f"{segment.where} has t, h, w positions, the model takes one row",
                    hint="encode samples with the template of the model that trains",
                )
            if not own and not self._mrope.isdisjoint(segment.media):
                raise InputError(
                    f"{segment.where} has media but no t, h, w positions, which its family needs",
                    hint="give position_ids [3,tokens] of the sample alone (the template makes them)",
                )
        return mrope

    def _boundaries(self, boundaries: torch.Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
        longest = max(lengths)
        every = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries.clone(),
            "max_length_q": longest,
            "max_length_k": longest,
        }
        if "seq_idx" in self.boundary_kwargs:
            numbers = np.arange(len(lengths), dtype=np.int32)
            every["seq_idx"] = torch.from_numpy(np.repeat(numbers, lengths))[None]
        return {name: every[name] for name in self.boundary_kwargs}


def _check_padding(to_length: int | None, multiple: int | None, context_parallel: int) -> None:
    for name, value in (
        ("pad_to_length", to_length),
        ("pad_multiple", multiple),
        ("context_parallel", context_parallel),
    ):
        if value is not None:
            whole(name, value, 1, hint="leave it out for none")
    if to_length is not None and multiple is not None and to_length % multiple:
        raise InputError(f"pad_to_length {to_length} is not a multiple of pad_multiple {multiple}")
    inside = segment_multiple(context_parallel)
    for name, value in (("pad_to_length", to_length), ("pad_multiple", multiple)):
        if value is not None and value % inside:
            raise InputError(
                f"{name} {value} is not a multiple of {inside}, which context_parallel {context_parallel} "
                "needs",
                hint="the tail is a segment too: it is cut into 2 x context_parallel chunks",
            )
