"""Token counts of rendered texts, many at once, through the tokenizer that training uses.

A text is tokenised before its media placeholders are expanded: a placeholder is an added token, so
the tokenizer cuts the text around it and the rest is split as in the expanded text. One media
placeholder of k tokens then adds k - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError

__all__ = ["TokenizedText", "check_text", "supervised_mask", "tokenize"]

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Characters tokenised in one call: bounds the memory of a batch of long texts.
_CALL_CHARACTERS = 4_000_000


class TokenizedText:
    """One text as tokens: `ids` int64[T] and the character range of each token, `offsets` int64[T,2]."""

    __slots__ = ("ids", "offsets")

    def __init__(self, ids: I64, offsets: I64) -> None:
        self.ids = ids
        self.offsets = offsets


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


def _groups(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Cut texts into consecutive groups of bounded size."""
    first = size = 0
    for place, text in enumerate(texts):
        if place > first and size + len(text) > _CALL_CHARACTERS:
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
    if not len(mask):
        return mask
    start, end = tokens.offsets[:, 0], tokens.offsets[:, 1]
    for first, last in spans:
        mask |= (start < last) & (end > first)
    return mask
