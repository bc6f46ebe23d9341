"""Raw shards of encoded rows, and producers over them: small, exact, without a tokenizer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.export import PackingProducer
from packtrain.sources.encoded import EncodedTemplate


class Dies(EncodedTemplate):
    """Kills its process once, at the 20th sample that some process encodes."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.seen = mark, 0

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        self.seen += 1
        if self.seen == 20 and not self.mark.exists():
            self.mark.touch()
            os._exit(9)
        return super().encode(sample)


class Hangs(EncodedTemplate):
    """Writes down the processes that encode, and takes for ever."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        with open(self.told, "a", encoding="utf-8") as handle:
            handle.write(f"{os.getpid()}\n")
        time.sleep(600)
        return super().encode(sample)


def row(length: int, number: int = 0) -> dict[str, Any]:
    ids = [1 + (number + place) % 200 for place in range(length)]
    return {"input_ids": ids, "labels": ids}


def put(folder: Path, name: str, lengths: list[int], first: int = 0) -> Path:
    """A raw shard with samples of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(length, first + number) for number, length in enumerate(lengths)]
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def producer(folder: Path, output: Path, **options: Any) -> PackingProducer:
    settings: dict[str, Any] = {"pack_length": 100, "packs_per_chunk": 4, "window": 40, "kind": "encoded"}
    return PackingProducer(folder, output, EncodedTemplate(), **{**settings, **options})


def lengths_of(count: int, start: int = 0) -> list[int]:
    return [(number * 37) % 90 + 2 for number in range(start, start + count)]


if __name__ == "__main__":  # words_in.py IN OUT FILE: a producer that hangs in two workers
    from words_in import Hangs as Picklable

    template = Picklable(Path(sys.argv[3]))
    PackingProducer(
        sys.argv[1], sys.argv[2], template, pack_length=50, packs_per_chunk=4, kind="encoded", workers=2
    ).run()
