"""What a media placeholder becomes: its text with each run of media tokens written once, and their widths.

Processors replace a placeholder by text: one token k times for an image, times and marks between the
frames of a video. Tokenising that text in full would be as slow as it is long, so every run of one media
token stands in it once and its length beside it. Media tokens are added tokens: the tokenizer cuts the
text around them, so the text between them is split exactly as in the full one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter

from ..errors import SampleError, counted

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Grid of one run of media tokens, for its positions.

    Attributes:
        time, height, width: tokens along each axis; the run has their product (or a part of it).
        step: positions from one time index to the next (not yet rounded).
        start: first token of the grid that this run holds, for a grid that is dealt out in runs.
        anchor: 0 = the run starts at the current position; k > 0 = at the start of the run k before.
        sound: the run is a line of audio tokens beside a grid that is dealt out in runs.
        opens, closes: the two marks before (behind) the run share one position.
    """

    time: int
    height: int
    width: int
    step: float = 1.0
    start: int = 0
    anchor: int = 0
    sound: bool = False
    opens: bool = False
    closes: bool = False


@dataclass(frozen=True)
class Expansion:
    """One medium in the text.

    Attributes:
        text: replaces the placeholder; `len(widths)` media tokens stand in it.
        widths: tokens of each of them, >= 1.
        costs: what the medium costs besides tokens, for example `{"images": 1, "patches": 1024}`.
        blocks: grid of each run, or None for a run that is positioned like text.
        grid: patches along time, height and width, where the processor tells them.
    """

    text: str
    widths: tuple[int, ...]
    costs: Mapping[str, int] = field(default_factory=dict, hash=False)
    blocks: tuple[Block | None, ...] = ()
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Spliced:
    """A rendered text whose placeholders are expanded.

    Attributes:
        text: see `Expansion.text`.
        spans: the trained character ranges, moved along.
        inserted: character ranges that come from media (never trained); empty where each medium is one
            bare token, since those are told by their ids.
        widths, blocks: of all runs in order.
        weights: weight of each span in the loss; empty: all weigh 1.
        owners: message of each span; empty: nobody asks.
    """

    text: str
    spans: tuple[Span, ...]
    inserted: tuple[Span, ...] = ()
    widths: tuple[int, ...] = ()
    blocks: tuple[Block | None, ...] = ()
    weights: tuple[float, ...] = ()
    owners: tuple[int, ...] = ()


def splice(
    text: str,
    spans: Sequence[Span],
    tokens: Mapping[str, str],
    expansions: Mapping[str, Sequence[Expansion]],
    weights: tuple[float, ...] = (),
    owners: tuple[int, ...] = (),
) -> Spliced:
    """Put expansions in place of their placeholders.

    Args:
        text: rendered text.
        spans: ascending trained character ranges of it.
        tokens: kind (`image`, `video`, `audio`) -> placeholder.
        expansions: kind -> expansions in order of appearance.
        weights: of the spans; empty: all weigh 1.
        owners: messages of the spans; empty: nobody asks.

    Raises:
        SampleError: `placeholder_mismatch`, when a kind has more or fewer placeholders than media.
    """
    for kind, token in tokens.items():
        found, wanted = text.count(token), len(expansions.get(kind, ()))
        if found != wanted:
            raise SampleError(
                "placeholder_mismatch",
                f"the rendered text has {counted(found, f'{kind} placeholders')} ({token}) for "
                f"{counted(wanted, f'{kind}s')}",
                hint=f"write {kind}s as parts, not as {token} in the text",
            )
    if not any(expansions.values()):
        return Spliced(text, tuple(spans), weights=weights, owners=owners)
    pattern = _pattern(tuple(tokens.items()))
    following = {kind: iter(items) for kind, items in expansions.items()}
    pieces: list[str] = []
    edits: list[tuple[int, int]] = []  # end of a placeholder in the old text -> growth up to there
    inserted: list[Span] = []
    widths: list[int] = []
    blocks: list[Block | None] = []
    last = growth = 0
    for match in pattern.finditer(text):
        kind = str(match.lastgroup)
        item = next(following[kind])
        pieces += [text[last : match.start()], item.text]
        if item.text != match.group():
            begin = match.start() + growth
            inserted.append((begin, begin + len(item.text)))
            growth += len(item.text) - len(match.group())
            edits.append((match.end(), growth))
        widths += item.widths
        blocks += item.blocks or (None,) * len(item.widths)
        last = match.end()
    pieces.append(text[last:])
    moved = tuple((_moved(first, edits), _moved(end, edits)) for first, end in spans)
    return Spliced("".join(pieces), moved, tuple(inserted), tuple(widths), tuple(blocks), weights, owners)


@lru_cache(maxsize=64)
def _pattern(tokens: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Matches a placeholder; the group names its kind."""
    return re.compile("|".join(f"(?P<{kind}>{re.escape(token)})" for kind, token in tokens))


def _moved(place: int, edits: Sequence[tuple[int, int]]) -> int:
    """Where a character boundary of the old text is in the new one."""
    before = bisect_right(edits, place, key=itemgetter(0))
    return place + (edits[before - 1][1] if before else 0)
