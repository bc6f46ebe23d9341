"""The account of a rendering, on what is trained: the decoded ids of an encoded sample.

A rendering that holds everything may still lose some of it on the way to ids (a tokenizer without a token for
a character), and ranges of characters are not yet labels. So for each audited sample the ids are decoded:
everything the sample says has to appear, in order, and the trained stretches have to hold the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .account import Piece, missing

__all__ = ["check_decoded", "stretches"]

_BETWEEN = "\n\x00\n"  # between stretches: no text runs across


def check_decoded(
    tokenizer: Any,
    name: str,
    encoded: Mapping[str, Any],
    pieces: Sequence[Piece],
    trained: Collection[int],
    media_ids: Collection[int],
) -> None:
    """Everything appears in the decoded ids, and the answers in the trained ones.

    Args:
        name: of the tokenizer, for errors.
        encoded: `input_ids` int64[T], `labels` int64[T].
        pieces: what has to appear (`account.pieces_of`), without what the template may drop.
        trained: messages that are trained.
        media_ids: ids of media tokens, which are left out.

    Raises:
        ConfigError: names the tokenizer and what it loses.
    """
    ids = np.asarray(encoded["input_ids"]).reshape(-1)
    labels = np.asarray(encoded["labels"]).reshape(-1)
    shown = ids[~np.isin(ids, list(media_ids))] if media_ids else ids
    said = [piece for piece in pieces if piece.place in trained and piece.kind in ("text", "tool_calls")]
    whole = _decoded(tokenizer, shown)
    answers = _BETWEEN.join(_decoded(tokenizer, ids[a:b]) for a, b in stretches(labels))
    for text, wanted, where in ((whole, pieces, "decoded ids"), (answers, said, "trained ids")):
        lost = missing(text, wanted)
        lost = missing(text, [_as_read(tokenizer, piece) for piece in wanted]) if lost else lost
        if lost:
            first = lost[0]
            what = first.texts[0] if isinstance(first.texts[0], str) else first.texts[0][0]
            raise ConfigError(
                f"the {first.kind.replace('_', ' ')} of message {first.place} ({first.role}), "
                f"{' '.join(what.split())[:60]!r}, is not in the {where} of {name}",
                hint="the tokenizer or the chat template loses it: use the ones the model was published with",
            )


def stretches(labels: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(first, one past the last) of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels != -100, [0]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _as_read(tokenizer: Any, piece: Piece) -> Piece:
    """A piece as the tokenizer reads it (brought to NFC, say); one that it has no tokens for stays."""
    texts: list[str | tuple[str, ...]] = []
    for text in piece.texts:
        if isinstance(text, str):
            ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
            if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
                text = _decoded(tokenizer, ids).strip() or text
        texts.append(text)
    return Piece(piece.kind, piece.place, piece.role, tuple(texts))


def _decoded(tokenizer: Any, ids: NDArray[Any]) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
