"""A ten-line template and source: one token a word; small enough to stop at every write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.errors import SampleError
from packtrain.extend import Measured


class Words:
    """One token a word. A sample `{"text": …}`; the word BROKEN fails, an empty text is empty."""

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        words = sample["text"].split()
        if not words:
            raise SampleError("empty", "no words")
        if "BROKEN" in words:
            raise SampleError("template_error", "a broken word")
        ids = np.asarray([len(word) for word in words], dtype=np.int64)
        return {"input_ids": ids, "labels": ids.copy(), "position_ids": np.arange(len(ids))}

    def measure(self, sample: Mapping[str, Any]) -> Measured:
        tokens = len(self.encode(sample)["input_ids"])
        return Measured(tokens, supervised=tokens) if tokens % 2 else Measured(tokens)

    def config(self) -> dict[str, Any]:
        return {"kind": "words", "version": self.version}


class Texts:
    """Texts in memory. `pause` seconds per read, for tests that stop a process on its way."""

    def __init__(self, texts: list[str], pause: float = 0.0) -> None:
        self.texts = texts
        self.pause = pause

    @property
    def fingerprint(self) -> str:
        return str(hash(tuple(len(text) for text in self.texts)))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.pause:
            time.sleep(self.pause)
        return {"text": self.texts[index]}

    def where(self, index: int) -> str:
        return f"texts[{index}]"


def many(count: int, pause: float = 0.0) -> Texts:
    """Texts of 0..9 words; every 97th is broken."""
    return Texts(["BROKEN" if i % 97 == 5 else " ".join(["w"] * (i % 10)) for i in range(count)], pause)
