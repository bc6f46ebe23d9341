"""Token counts of rendered texts, many at once, through the tokenizer that training uses.

A text is tokenised before its media placeholders are expanded: a placeholder is an added token, so
the tokenizer cuts the text around it and the rest is split as in the expanded text. One media
placeholder of k tokens then adds k - 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Characters tokenised in one call: bounds the memory of a batch of long texts.
_CALL_CHARACTERS = 1_000_000

#: Characters from which a text is cut into pieces.
_LONG = 800_000

_CUT = re.compile(r"(?<=\S)\n(?=[^\W\d_])|(?<=[A-Za-z])(?= [A-Za-z])")


class TokenizedText(NamedTuple):
    """One text as tokens: `ids` int64[T] and the character range of each token, `offsets` int64[T,2]."""

    ids: I64
    offsets: I64


def check_text(text: str) -> None:
    """Refuse a text that no tokenizer can take: one with a lone surrogate (half a character).

    Raises:
        SampleError: `malformed_record`.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleError(
            "malformed_record",
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            hint="the record was cut inside a character; repair its encoding",
        ) from None


def tokenize(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenizedText]:
    """Tokenise texts in few calls, without truncation or padding.

    Args:
        tokenizer: a Hugging Face tokenizer backed by the tokenizers library.
        texts: rendered texts, already passed by `check_text`.
        add_special_tokens: what the template's own call would say.
    """
    out: list[TokenizedText] = []
    for first, last in _groups(texts):
        if len(texts[first]) > _LONG and last == first + 1:
            out.append(_in_pieces(tokenizer, texts[first], add_special_tokens))
            continue
        batch = tokenizer(
            list(texts[first:last]),
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        out += [
            TokenizedText(
                np.asarray(encoding.ids, dtype=np.int64),
                np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            )
            for encoding in batch.encodings
        ]
    return out


def _in_pieces(tokenizer: Any, text: str, add_special_tokens: bool) -> TokenizedText:
    """A very long text, cut where no token can run across: its encoding in one go takes 200 bytes a byte.

    Cuts are made behind a line end between a visible character and a letter, and before a space between two
    letters. That no token of this tokenizer
    runs across them is checked on the beginning of the text; where one does, the text is not cut.
    """
    head = text[: _LONG // 4]
    cuts = _cuts(head, 2_000)
    whole = tokenize(tokenizer, [head], add_special_tokens=False)[0]
    parts = tokenize(tokenizer, [head[a:b] for a, b in cuts], add_special_tokens=False)
    safe = np.array_equal(whole.ids, np.concatenate([part.ids for part in parts]))
    cuts = [(0, len(text))] if add_special_tokens or not safe else _cuts(text, _LONG // 2)
    ids: list[I64] = []
    offsets: list[I64] = []
    for a, b in cuts:
        encoding = tokenizer._tokenizer.encode(text[a:b], add_special_tokens=add_special_tokens)
        ids.append(np.asarray(encoding.ids, dtype=np.int64))
        offsets.append(np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2) + a)
    return TokenizedText(np.concatenate(ids), np.concatenate(offsets))


def _cuts(text: str, size: int) -> list[tuple[int, int]]:
    """Ranges of about `size` characters (longer where there is no place to cut)."""
    ranges: list[tuple[int, int]] = []
    first = 0
    while len(text) - first > size:
        found = _CUT.search(text, first + size)
        if found is None:
            break
        ranges.append((first, found.end()))
        first = found.end()
    return [*ranges, (first, len(text))]


def _groups(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Cut texts into consecutive groups of bounded size."""
    first = size = 0
    for place, text in enumerate(texts):
        if place > first and (size + len(text) > _CALL_CHARACTERS or len(text) > _LONG):
            yield first, place
            first, size = place, 0
        size += len(text)
    if first < len(texts):
        yield first, len(texts)


def supervised_mask(tokens: TokenizedText, spans: Sequence[tuple[int, int]]) -> Mask:
    """Which tokens overlap one of the character ranges `spans` (ascending): bool[T].

    The rule is that of `return_assistant_tokens_mask` in transformers: a token that straddles the edge
    of a range belongs to it, an added token without characters (at 0..0) to none.
    """
    mask = np.zeros(len(tokens.ids), dtype=bool)
    start, end = tokens.offsets[:, 0], tokens.offsets[:, 1]
    for first, last in spans:
        mask |= (start < last) & (end > first)
    return mask
