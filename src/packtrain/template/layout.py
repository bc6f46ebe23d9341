"""Where the tokens of a sample are, before and after runs of media tokens are written out; their positions.

Measuring and encoding both work on this value: one entry per token of the short text, each with the
number of tokens it becomes. So their lengths, labels and cuts come from the same lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, counted
from ..measuring.expansion import Block, Spliced
from ..measuring.text import TokenizedText, supervised_mask

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: What to do with samples over max_length: leave them (the plan decides), or cut one side.
TRUNCATIONS = ("error", "left", "right")


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens of one sample, runs of media tokens written once.

    Attributes:
        ids: int64[K] token ids.
        width: int64[K] tokens each becomes (1, or the length of a run of media tokens).
        trained: bool[K], inside a trained range and nothing that comes from media.
        media: bool[K], media tokens and what stands between those of one medium.
        runs: int64[R], which entries are runs.
        blocks: grid of each run.
        scale: float32[K] weight of each token in the loss, 0 where it is not trained; None: all weigh 1.
        owner: int64[K] message of each token in a trained range, -1 outside; None: nobody asks.
    """

    ids: I64
    width: I64
    trained: Mask
    media: Mask
    runs: I64
    blocks: tuple[Block | None, ...] = ()
    scale: NDArray[np.float32] | None = None
    owner: I64 | None = None

    @property
    def total(self) -> int:
        """Tokens after expansion."""
        return int(self.width.sum())

    def expand(self, values: NDArray[Any]) -> NDArray[Any]:
        """One entry per token after expansion (a fresh array)."""
        return np.repeat(values, self.width)

    def cut(self, truncation: str, max_length: int | None) -> tuple[int, int]:
        """First and one-past-last expanded token that stay.

        Raises:
            SampleError: `truncation_cuts_media`, when tokens of a medium would go.
        """
        total = self.total
        if truncation == "error" or max_length is None or total <= max_length:
            return 0, total
        begin, end = (0, max_length) if truncation == "right" else (total - max_length, total)
        media = self.expand(self.media)
        if media[:begin].any() or media[end:].any():
            raise SampleError(
                "truncation_cuts_media",
                f"cutting {total} tokens to max_length {max_length} on the {truncation} would cut a medium",
                hint="raise max_length, or use truncation: error and a long-sample policy",
            )
        return begin, end

    def answers(self, begin: int, end: int) -> tuple[list[int], list[int]]:
        """(messages of which a cut to [begin, end) leaves nothing to train, those of which it leaves a part).

        The first token that stays is never trained.
        """
        if self.owner is None or end - begin == self.total:
            return [], []
        trained = self.expand(self.trained)
        trained[:1] = False
        owner = self.expand(self.owner)
        whole = Counter(owner[trained].tolist())
        trained[: begin + 1] = trained[end:] = False
        left = Counter(owner[trained].tolist())
        return (
            [message for message in sorted(whole) if not left[message]],
            [message for message in sorted(left) if left[message] < whole[message]],
        )


def media_layout(tokens: TokenizedText, spliced: Spliced, media_ids: Collection[int]) -> Layout:
    """Layout of a sample; runs of media tokens stand once each in the text.

    Args:
        tokens: the text of `spliced` as tokens.
        spliced: its trained ranges, and the width and block of each run.
        media_ids: ids of the media tokens.

    Raises:
        SampleError: `placeholder_mismatch`, when the tokens hold more or fewer runs.
    """
    trained = supervised_mask(tokens, spliced.spans)
    scale = None
    if spliced.weights:
        scale = np.zeros(len(tokens.ids), dtype=np.float32)
        for span, weight in zip(spliced.spans, spliced.weights, strict=True):
            scale[supervised_mask(tokens, [span])] = weight
    owner = None
    if spliced.owners:
        owner = np.full(len(tokens.ids), -1, dtype=np.int64)
        for span, message in zip(spliced.spans, spliced.owners, strict=True):
            owner[supervised_mask(tokens, [span])] = message
    is_run = np.isin(tokens.ids, list(media_ids)) if media_ids else np.zeros(len(tokens.ids), dtype=bool)
    runs = np.flatnonzero(is_run)
    if len(runs) != len(spliced.widths):
        raise runs_mismatch(len(runs), len(spliced.widths))
    media = is_run | supervised_mask(tokens, spliced.inserted) if spliced.inserted else is_run
    width = np.ones(len(tokens.ids), dtype=np.int64)
    width[runs] = spliced.widths
    return Layout(tokens.ids, width, trained & ~media, media, runs, spliced.blocks, scale, owner)


def cut_answers(removed: Sequence[int], cut: Sequence[int]) -> str:
    """One line on the answers that a cut removed, and those it left a part of; "" for none."""
    told = []
    for messages, what in ((removed, "removed"), (cut, "cut short")):
        if messages:
            numbers = ", ".join("?" if message < 0 else str(message) for message in messages)
            told.append(f"{what}: the answer{'s' * (len(messages) > 1)} in message {numbers}")
    return "; ".join(told)


def check_supervised(layout: Layout, supervised: int, begin: int, end: int) -> None:
    """Refuse a sample of which a cut left nothing to train.

    Raises:
        SampleError: `unsupervised`.
    """
    if supervised == 0 and end - begin < layout.total and layout.trained[1:].any():
        raise SampleError(
            "unsupervised",
            f"cutting {layout.total} tokens to {end - begin} leaves no answer to train",
            hint="raise max_length, cut the other side, or use truncation: error",
        )


def runs_mismatch(found: int, wanted: int) -> SampleError:
    """The text holds other media tokens than those of its media."""
    return SampleError(
        "placeholder_mismatch",
        f"the text has {found} media tokens for {wanted} runs of its media",
        hint="media tokens may not stand in the text itself",
    )


def aligned(layout: Layout, theirs: I64) -> Layout:
    """The layout whose media take what is left of `theirs` between the texts around them.

    For processors of which only a whole encoding is known. A token of the text that melted into a medium
    beside it counts as part of that medium.

    Args:
        layout: every medium as one token.
        theirs: int64[T], the tokens of the processor.

    Raises:
        SampleError: `prefix_mismatch`, where a text between media is not found.
    """
    edges = [-1, *layout.runs.tolist(), len(layout.ids)]
    width = layout.width.copy()
    cursor = 0
    for k in range(len(edges) - 1):
        first, last = edges[k] + 1, edges[k + 1]
        found = _find(theirs, layout.ids[first:last], cursor, head=k == 0, tail=k == len(edges) - 2)
        if found is None:
            raise SampleError(
                "prefix_mismatch",
                "the processor changes the text around its media, so trained tokens cannot be located",
            )
        place, left, right = found
        width[first : first + left] = 0
        width[last - right : last] = 0
        if k:
            width[edges[k]] = place - cursor
        cursor = place + (last - first) - left - right
    return replace(layout, width=width)


def _find(theirs: I64, piece: I64, start: int, *, head: bool, tail: bool) -> tuple[int, int, int] | None:
    """(place, tokens left out in front, and behind) of a piece of text at or after `start`."""
    for left in (0,) if head else (0, 1):
        for right in (0,) if tail else (0, 1):
            if len(piece) < left + right:
                continue
            wanted = piece[left : len(piece) - right]
            size = len(wanted)
            if head:
                places: Any = (start,)
            elif tail:
                places = (len(theirs) - size,)
            else:
                places = range(start + 1, len(theirs) - size + 1)
            for place in places:
                if place >= start and np.array_equal(theirs[place : place + size], wanted):
                    return place, left, right
    return None


# --------------------------------------------------------------------------------------------
# Positions of one sample alone, starting at 0
# --------------------------------------------------------------------------------------------
# Text counts 0, 1, 2 … on every row. An image takes a grid: all its tokens share the time index, and
# height and width count from the current position; the text after it goes on at the largest of them
# plus one. The time index of a video grows by the step of its block. Positions are made per sample and
# concatenated, never computed on a packed row: a row is not one sample, and every image after the first
# would get wrong coordinates.
def text_positions(length: int) -> I64:
    """int64[T]: 0 .. T-1."""
    return np.arange(length, dtype=np.int64)


def layout_positions(layout: Layout, *, behind_time: bool = False) -> I64:
    """Three-row positions of a sample with media.

    Args:
        layout: its tokens, and the block of each run of media tokens.
        behind_time: text after a video starts behind its last time index (Omni), not behind its height
            and width alone (Qwen-VL, as transformers 5.24 counts).

    Returns:
        int64[3,T]: time, height and width rows, T = `layout.total`.
    """
    begins = np.cumsum(layout.width) - layout.width
    total = layout.total
    rows = np.empty((3, total), dtype=np.int64)
    cursor = position = 0  # token index, next position of text
    bases: list[int] = []
    hold = False  # two closing marks share a position

    def text(end: int) -> None:
        nonlocal cursor, position, hold
        count = end - cursor
        if count > 0:
            values = position + np.arange(count)
            if hold:
                values[1:] -= 1
            rows[:, cursor:end] = values
            position, cursor, hold = int(values[-1]) + 1, end, False

    for run, block in zip(layout.runs.tolist(), layout.blocks, strict=True):
        if block is None:
            bases.append(position)
            continue
        begin, width = int(begins[run]), int(layout.width[run])
        text(begin)
        if block.opens:
            position -= 1
            rows[:, begin - 1] = position - 1
        base = bases[-block.anchor] if block.anchor else position
        bases.append(base)
        place = rows[:, begin : begin + width]
        place[:] = base + _inside(block, width)
        cursor = begin + width
        if behind_time:
            position = int(place.max()) + 1
        else:
            position = base + max(block.height, block.width)
        hold = block.closes
    text(total)
    return rows


def _inside(block: Block, width: int) -> I64:
    """int64[3,width]: positions of a run's tokens in its block."""
    place = np.arange(block.start, block.start + width, dtype=np.int64)
    if block.sound:
        return np.broadcast_to(place, (3, width))
    area = block.height * block.width
    # the library multiplies in float32 and cuts off
    time = (np.arange(block.time).astype(np.float32) * np.float32(block.step)).astype(np.int64)
    inside = place % area
    return np.stack([time[place // area], inside // block.width, inside % block.width])


def mrope_positions(is_image: NDArray[np.bool_], grids: Sequence[tuple[int, int]] | I64, merge: int) -> I64:
    """Three-row positions of a sample with images.

    Args:
        is_image: bool[T], which tokens are image tokens.
        grids: patches (height, width) of each image in order of appearance.
        merge: patches per token along each side.

    Returns:
        int64[3,T]: time, height and width rows.

    Raises:
        SampleError: `placeholder_mismatch`, when the image tokens are not those of the grids.
    """
    edges = np.diff(is_image.astype(np.int8), prepend=0, append=0)
    starts, lengths = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    blocks = [Block(1, int(high) // merge, int(wide) // merge) for high, wide in grids]
    runs: list[int] = []
    widths = [block.height * block.width for block in blocks]
    left = iter(zip(starts.tolist(), lengths.tolist(), strict=True))
    begin = length = 0
    for width in widths:  # neighbouring images form one run
        if length == 0:
            begin, length = next(left, (0, 0))
        if width > length:
            raise _mismatch(int(is_image.sum()), grids, merge)
        runs.append(begin)
        begin, length = begin + width, length - width
    if length or next(left, None) is not None:
        raise _mismatch(int(is_image.sum()), grids, merge)
    kept = ~is_image
    kept[runs] = True
    each = np.ones(len(is_image), dtype=np.int64)
    each[runs] = widths
    entries = np.flatnonzero(kept)
    places = np.searchsorted(entries, np.asarray(runs, dtype=np.int64))
    nothing = np.zeros(len(entries), dtype=bool)
    return layout_positions(Layout(entries, each[entries], nothing, nothing, places, tuple(blocks)))


def _mismatch(found: int, grids: Sequence[tuple[int, int]] | I64, merge: int) -> SampleError:
    wanted = sum(int(h) * int(w) for h, w in grids) // merge**2
    return SampleError(
        "placeholder_mismatch",
        f"the sample has {found} image tokens, its {counted(len(grids), 'images')} take {wanted}",
        hint="each image needs its own run of image tokens",
    )
