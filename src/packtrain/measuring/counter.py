"""Fast text counters: the tokens of many texts at once, used only after they proved equal.

A counter is another implementation of the same byte-level BPE: `words` (the tokens of every word are looked
up once in the tokenizer's own model and remembered), `tiktoken`, rebuilt from the tokenizer's merges, or
`gigatoken`; the last two are optional packages. Before one is used it counts a seeded sample of the texts
at hand and a list of hard ones (every character outside of CJK, marks that compose, special tokens in odd
places, white space); one token id that differs from the Hugging Face tokenizer and it is not used, with a
warning. What it cannot do exactly (a text that NFC would change, a tokenizer that strips or prefixes) is left
to Hugging Face, text by text.

Trained tokens are counted too: byte-level tokens cover their bytes without gaps, so the byte range of every
token follows from the lengths of the tokens before it.
"""

from __future__ import annotations

import json
import logging
import random
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of
from ..errors import MissingExtraError, one_line

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Implementations of a byte-level BPE, made from the content of a `tokenizer.json`
# --------------------------------------------------------------------------------------------
# Each is a function from texts to token ids. Which tokenizers they can hold at all is told by `unfit`; that
# they are equal is proven before use (`counter`), since the libraries differ in their regular expressions and
# in the order of merges.
I64 = NDArray[np.int64]

_WORDS = 500_000  # words remembered

_BYTE_LEVEL_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of use_regex=True
)


#: A backend: texts -> ids of all of them, and the first id of each (int64[n+1]).
Encoder = Callable[[Sequence[str]], tuple[NDArray[Any], I64]]


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
    ranks = {bytes([value]): value for value in range(256)}
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
    split = regex.compile("(" + "|".join(map(regex.escape, sorted(added, key=len, reverse=True))) + ")")
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


# --------------------------------------------------------------------------------------------
# Fast text counters: the tokens of many texts at once, used only after they proved equal
# --------------------------------------------------------------------------------------------
Span = tuple[int, int]

#: Option names of `text_counter`.
COUNTERS = ("auto", "hf", "words", "tiktoken", "gigatoken")

_FASTEST_FIRST = ("gigatoken", "tiktoken", "words")
_SAMPLED = 64  # texts of the caller that are compared
_LONGEST = 20_000  # characters of each


@dataclass(frozen=True)
class Counts:
    """What counting a batch gives, one entry a text.

    Attributes:
        tokens: int64[n].
        trained: int64[n], tokens that overlap the text's spans; runs of media and the first token not.
        runs: int64[n], media tokens.
    """

    tokens: I64
    trained: I64
    runs: I64


class TextCounter:
    """Counts texts with a proven backend.

    Args:
        name: `tiktoken` or `gigatoken`.
        encoder: the backend.
        sizes: int64[V], UTF-8 bytes of each token id.
        normalizes: the tokenizer brings texts to NFC first.
    """

    def __init__(self, name: str, encoder: Encoder, sizes: I64, *, normalizes: bool) -> None:
        self.name, self._encoder = name, encoder
        self._sizes, self._normalizes = sizes, normalizes

    def takes(self, text: str) -> bool:
        """Whether this text can be counted here."""
        return text.isascii() or not self._normalizes or unicodedata.is_normalized("NFC", text)

    def ids(self, texts: Sequence[str]) -> tuple[NDArray[Any], I64]:
        """Ids of all texts in one array, and where each begins (int64[n+1])."""
        return self._encoder(texts)

    def count(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], media_ids: Collection[int]
    ) -> Counts:
        """Counts of texts that `takes` allows.

        Args:
            texts: rendered texts, media runs written once.
            spans: of each text its trained character ranges, ascending.
            media_ids: ids of media tokens.
        """
        ids, begins = self._encoder(texts)
        bounds = np.zeros(len(ids) + 1, dtype=np.int64)  # byte at which each token begins
        np.cumsum(self._sizes[ids], out=bounds[1:])
        lows, highs, owners = self._byte_spans(texts, spans, bounds[begins])
        first = np.searchsorted(bounds[1:], lows, side="right")
        last = np.searchsorted(bounds[:-1], highs, side="left")
        first = np.maximum(first, begins[owners] + 1)  # the first token is never trained
        # two ranges that share a token count it once
        first[1:] = np.maximum(first[1:], np.where(owners[1:] == owners[:-1], last[:-1], 0))
        n = len(texts)
        runs = np.zeros(n, dtype=np.int64)
        each = np.maximum(last - first, 0)
        if media_ids:
            is_run = np.isin(ids, list(media_ids))
            before = np.zeros(len(ids) + 1, dtype=np.int64)
            np.cumsum(is_run, out=before[1:])
            runs = before[begins[1:]] - before[begins[:-1]]
            each = each - np.where(each > 0, before[last] - before[first], 0)
        trained = np.zeros(n, dtype=np.int64)
        np.add.at(trained, owners, each)
        return Counts(begins[1:] - begins[:-1], trained, runs)

    def _byte_spans(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]], bases: I64
    ) -> tuple[I64, I64, I64]:
        """Ranges as bytes of all texts in a row, and whose they are.

        Raises:
            ValueError: the tokens do not cover a text's bytes (never after the proof).
        """
        lows: list[int] = []
        highs: list[int] = []
        owners: list[int] = []
        for place, (text, mine) in enumerate(zip(texts, spans, strict=True)):
            base, end = int(bases[place]), int(bases[place + 1])
            if text.isascii():
                size = len(text)
                lows += [base + a for a, _ in mine]
                highs += [base + b for _, b in mine]
            else:
                size = len(text.encode())
                at = byte = 0
                for a, b in mine:
                    byte += len(text[at:a].encode())
                    lows.append(base + byte)
                    byte += len(text[a:b].encode())
                    highs.append(base + byte)
                    at = b
            owners += [place] * len(mine)
            if end - base != size:
                raise ValueError(f"{self.name}: tokens cover {end - base} of {size} bytes")
        low, high, owner = (np.asarray(values, dtype=np.int64) for values in (lows, highs, owners))
        return low, high, owner


# ------------------------------------------------------------------------------------------ opening
def open_counter(name: str, tokenizer: Any, texts: Sequence[str]) -> TextCounter | None:
    """The counter of that name, proven on a sample of `texts`; None = Hugging Face counts.

    Args:
        name: `auto` takes the fastest that is installed and equal, `hf` none.
        tokenizer: a Hugging Face tokenizer backed by the tokenizers library.
        texts: texts that will be counted.

    Raises:
        UnknownNameError: no such counter.
        MissingExtraError: it was asked for by name and is not installed.
    """
    one_of("text counter", name, COUNTERS)
    if name == "hf":
        return None
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    problem = unfit(spec)
    if problem is not None:
        (logger.info if name == "auto" else logger.warning)("Hugging Face counts texts: %s", problem)
        return None
    for candidate in _FASTEST_FIRST if name == "auto" else (name,):
        try:
            encoder = OPENERS[candidate](spec, tokenizer)
        except ImportError:
            if name != "auto":
                raise MissingExtraError(candidate, "fast-text") from None
            continue
        except Exception as error:
            logger.warning("%s cannot hold this tokenizer: %s", candidate, one_line(error, 200))
            continue
        counter = TextCounter(
            candidate, encoder, token_sizes(spec), normalizes=spec["normalizer"] is not None
        )
        difference = _difference(counter, tokenizer, texts)
        if difference is None:
            return counter
        logger.warning(
            "%s counts other tokens than the tokenizer (%s); it is not used", candidate, difference
        )
    return None


def _difference(counter: TextCounter, tokenizer: Any, texts: Sequence[str]) -> str | None:
    """The first text of a sample on which the ids differ, or None."""
    chosen = list(texts) if len(texts) <= _SAMPLED else random.Random(0).sample(list(texts), _SAMPLED)
    sample = [text[:_LONGEST] for text in chosen] + hard_texts(tuple(tokenizer.get_added_vocab()))
    sample += _every_character()
    sample = [text for text in sample if text and counter.takes(text)]
    theirs = tokenizer(sample, add_special_tokens=False, padding=False, truncation=False, verbose=False)
    try:
        ids, begins = counter.ids(sample)
        counter.count(sample, [[(0, len(text))] for text in sample], ())
    except Exception as error:
        return one_line(error, 200)
    for place, text in enumerate(sample):
        if ids[begins[place] : begins[place + 1]].tolist() != theirs["input_ids"][place]:
            return repr(text[:60])
    return None


def hard_texts(added: Sequence[str]) -> list[str]:
    """Texts on which tokenizers differ: scripts, marks, digits, white space, contractions, added tokens."""
    ranges = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1E00, 0x2000))
    wide = ((0x2000, 0x2C00), (0x3000, 0x3200), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFB00, 0xFFF0))
    high = ((0x10300, 0x10350), (0x1D400, 0x1D480), (0x1F300, 0x1F680), (0x20000, 0x20040))
    draw = random.Random(7)
    out = [
        "I'LL they'Ve we're DON'T 'S",
        "a  b   c\n\n\n d\t\t e \r\n\r\n f ",
        " \n \n",
        "1234567 12,345.678 ١٢٣ ①②",
        "x" * 300 + " " * 300 + "!" * 300 + "\n" * 300,
        "e\u0301 \u1100\u1161\u11a8 \u0915\u093f \u200d\ufe0f 👩\u200d👩\u200d👧",
        "\x00\x01\x7f\x85\u2028\u2029\ufeff",
        "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x**2}\n",
    ]
    for first, last in (*ranges, *wide, *high):
        out += ["".join(chr(draw.randrange(first, last)) for _ in range(60)) for _ in range(3)]
        out.append(" ".join(chr(draw.randrange(first, last)) * draw.randrange(1, 5) for _ in range(30)))
    out += [f"{one}a {one} {one}{one}\n{one}\n\n{one[:-1]} {one[1:]}b" for one in added[:400]]
    return [unicodedata.normalize("NFC", text) for text in out]


def _every_character() -> list[str]:
    """Texts with every character outside of CJK and Hangul, beside letters, digits and spaces.

    Libraries differ in the Unicode version by which they call a character a letter or a digit.
    """
    blocks = ((0x80, 0x3400), (0xA000, 0xAC00), (0xF900, 0x12600), (0x16800, 0x17000), (0x1B000, 0x1FC00))
    more = ((0x2A6D0, 0x2A700), (0x2B730, 0x2B750), (0x31340, 0x31360))
    pieces = [f"{chr(c)}a {chr(c)}1 " for first, last in (*blocks, *more) for c in range(first, last)]
    texts = ("".join(pieces[i : i + 500]) for i in range(0, len(pieces), 500))
    return [unicodedata.normalize("NFC", text) for text in texts]
