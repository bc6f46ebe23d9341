"""Implementations of a byte-level BPE, made from the content of a `tokenizer.json`.

Each is a function from texts to token ids. Which tokenizers they can hold at all is told by `unfit`; that
they are equal is proven before use (`counter`), since the libraries differ in their regular expressions and
in the order of merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["OPENERS", "Encoder", "token_sizes", "unfit"]

I64 = NDArray[np.int64]

_WORDS = 500_000  # words remembered

_BYTE_LEVEL_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of use_regex=True
)


class Encoder(Protocol):
    """A backend: texts -> ids of all of them, and the first id of each (int64[n+1])."""

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[Any], I64]: ...


def unfit(spec: dict[str, Any]) -> str | None:
    """Why a tokenizer cannot be counted by another byte-level BPE, or None."""
    model, normalizer, post = spec["model"], spec["normalizer"], spec["post_processor"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return "its model is no plain byte-level BPE"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its tokens carry a prefix or suffix"
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return "its normalizer is not NFC"
    if _pattern(spec) is None:
        return "its pre-tokenizer is not a split and a byte level"
    if post is not None and (post["type"] != "ByteLevel" or post.get("trim_offsets")):
        return "its post-processor adds tokens or trims"
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in spec["added_tokens"]):
        return "an added token takes white space with it"
    return None


def _pattern(spec: dict[str, Any]) -> str | None:
    """The regular expression by which texts are split, or None for any other pre-tokenizer."""
    steps = spec["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps]) if steps.get("type") == "Sequence" else [steps]
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _BYTE_LEVEL_SPLIT if last.get("use_regex", True) else None
    split = steps[0]
    plain = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    if len(steps) != 2 or not plain or last.get("use_regex", True):
        return None
    found = split["pattern"].get("Regex")
    return None if found is None else str(found)


def _byte_of() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable stand-in -> byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in kept}
    others = [value for value in range(256) if value not in set(kept)]
    return {**table, **{chr(256 + place): value for place, value in enumerate(others)}}


def _token_bytes(spec: dict[str, Any]) -> dict[bytes, int]:
    alphabet = _byte_of()
    added = {token["content"] for token in spec["added_tokens"]}
    return {
        bytes(alphabet[letter] for letter in token): number
        for token, number in spec["model"]["vocab"].items()
        if token not in added
    }


def token_sizes(spec: dict[str, Any]) -> I64:
    """int64[V]: UTF-8 bytes of each token id."""
    tokens = {number: len(value) for value, number in _token_bytes(spec).items()}
    tokens.update({token["id"]: len(token["content"].encode()) for token in spec["added_tokens"]})
    sizes = np.zeros(max(tokens) + 1, dtype=np.int64)
    sizes[list(tokens)] = list(tokens.values())
    return sizes


# ----------------------------------------------------------------------------------------- backends
def _open_tiktoken(spec: dict[str, Any], tokenizer: Any) -> Encoder:
    """tiktoken with the tokenizer's merges as ranks; its ids are mapped back."""
    import tiktoken

    alphabet = _byte_of()
    numbers = _token_bytes(spec)
    ranks: dict[bytes, int] = {}
    for value in range(256):
        ranks[bytes([value])] = len(ranks)
    for merge in spec["model"]["merges"]:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        token = bytes(alphabet[letter] for letter in "".join(pair))
        ranks.setdefault(token, len(ranks))
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {content: len(ranks) + place for place, content in enumerate(added)}
    table = np.zeros(len(ranks) + len(special), dtype=np.int64)
    for token, rank in ranks.items():
        table[rank] = numbers[token]
    for content, rank in special.items():
        table[rank] = added[content]
    encoding = tiktoken.Encoding(
        "packtrain", pat_str=str(_pattern(spec)), mergeable_ranks=ranks, special_tokens=special
    )

    allowed = set(special)

    def encode(texts: Sequence[str]) -> tuple[NDArray[Any], I64]:
        parts = [
            encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=()) for text in texts
        ]
        begins = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=begins[1:])
        joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)
        return table[joined], begins

    return encode


def _open_gigatoken(spec: dict[str, Any], tokenizer: Any) -> Encoder:
    """gigatoken on this thread (workers are processes)."""
    import awkward  # type: ignore[import-untyped,unused-ignore]
    import gigatoken

    backend = gigatoken.Tokenizer.from_json(json.dumps(spec))

    def encode(texts: Sequence[str]) -> tuple[NDArray[Any], I64]:
        found = backend.encode_batch(list(texts), parallel=False)
        begins = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(awkward.num(found).to_numpy(), out=begins[1:])
        return awkward.flatten(found).to_numpy(), begins

    return encode


def _open_words(spec: dict[str, Any], tokenizer: Any) -> Encoder:
    """A dictionary from words to their tokens, filled from the tokenizer's own model."""
    import regex  # type: ignore[import-untyped,unused-ignore]

    model = tokenizer.backend_tokenizer.model
    letters = {value: letter for letter, value in _byte_of().items()}
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    longest_first = sorted(added, key=len, reverse=True)
    split = regex.compile("(" + "|".join(regex.escape(token) for token in longest_first) + ")")
    words = regex.compile(str(_pattern(spec)))
    known: dict[str, tuple[int, ...]] = {}

    def learn(word: str) -> tuple[int, ...]:
        if len(known) >= _WORDS:
            known.clear()
        mapped = "".join(map(letters.__getitem__, word.encode()))
        ids = tuple(token.id for token in model.tokenize(mapped))
        if len(word) <= 64:
            known[word] = ids
        return ids

    def encode(texts: Sequence[str]) -> tuple[NDArray[Any], I64]:
        begins = [0]
        flat: list[int] = []
        for text in texts:
            for piece in split.split(text) if added else (text,):
                if piece in added:
                    flat.append(added[piece])
                    continue
                for word in words.findall(piece):
                    flat += known.get(word) or learn(word)
            begins.append(len(flat))
        return np.asarray(flat, dtype=np.int64), np.asarray(begins, dtype=np.int64)

    return encode


#: Name -> opener: (content of tokenizer.json, tokenizer) -> encoder.
OPENERS: dict[str, Callable[[dict[str, Any], Any], Encoder]] = {
    "words": _open_words,
    "tiktoken": _open_tiktoken,
    "gigatoken": _open_gigatoken,
}
