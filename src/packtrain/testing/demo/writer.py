"""Writes the files of a demo set: pictures, records, processor and the list of planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ... import files
from .draws import Draws
from .faults import REASONS, cut, empty_record, mismatch_record
from .maths import problem
from .pictures import encode_picture, variant_of
from .processor import save_processor, train_tokenizer
from .records import Record, record_of, shape_of
from .schedule import Job, lesson, make_talk, schedule
from .talks import Talk

__all__ = ["Writer"]

_MORE_PROBLEMS = 1000  # word problems the tokenizer sees beside the samples' text


@dataclass
class Writer:
    """One pass over a set. Pictures are written as they are drawn, so memory stays small.

    Attributes:
        sizes: bytes of every file written, by its path in the folder.
    """

    folder: Path
    seed: str
    total: int
    progress: Callable[[int, int], None] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    _corpus: list[str] = field(default_factory=list)
    _done: int = 0

    def train(self, samples: int) -> None:
        """train.jsonl, faults.json, processor. Lessons come last: their length needs the tokenizer."""
        jobs = schedule(self.seed, samples)
        records: list[Record] = [{}] * samples
        for i, job in enumerate(jobs):
            if job.kind != "lesson":
                records[i] = self._sample(i, job)
                self._tick()
        count = self._processor()
        for i, job in enumerate(jobs):
            if job.kind == "lesson":
                talk = lesson(self._draws("train", i), job.tokens, count, over=bool(job.reason))
                records[i] = self._record("train", i, talk)
                self._tick()
        self._jsonl("train.jsonl", records)
        faults = {reason: [i for i, job in enumerate(jobs) if job.reason == reason] for reason in REASONS}
        files.publish_json(self.folder / "faults.json", faults)
        self._remember("faults.json")

    def val(self, samples: int) -> None:
        """val.jsonl: the same kinds of samples, without faults."""
        records = []
        for i in range(samples):
            records.append(self._record("val", i, make_talk(self._draws("val", i))))
            self._tick()
        self._jsonl("val.jsonl", records)

    def _draws(self, split: str, i: int) -> Draws:
        return Draws(f"{self.seed}/{split}/{i}")

    def _processor(self) -> Callable[[str], int]:
        """Train and write the processor; returns the token count of a text."""
        pool = Draws(f"{self.seed}/corpus")
        more = [text for _ in range(_MORE_PROBLEMS) for text in problem(pool)]
        more += [f" {number} [{number}," for number in range(1000) for _ in range(3)]  # box coordinates
        more += [f"{role}\n" for role in ("user", "assistant", "system") for _ in range(100)]
        tokenizer = train_tokenizer(self._corpus + more)
        for name in save_processor(self.folder / "processor", tokenizer):
            self._remember(f"processor/{name}")
        return lambda text: len(tokenizer.encode(text).ids)

    def _sample(self, i: int, job: Job) -> Record:
        """A plain sample, or one with its fault."""
        d = self._draws("train", i)
        if job.reason == "empty":
            return empty_record(d, job.copy)
        talk = make_talk(d, job.kind)
        self._corpus += [turn.text for turn in talk.turns]
        if job.reason == "placeholder_mismatch":
            return mismatch_record(talk, self._pictures("train", i, talk), job.copy)
        return self._record("train", i, talk, fault=job.reason)

    def _record(self, split: str, i: int, talk: Talk, fault: str = "") -> Record:
        return record_of(talk, shape_of(i, talk), self._pictures(split, i, talk, fault))

    def _pictures(self, split: str, i: int, talk: Talk, fault: str = "") -> list[str]:
        """Write a talk's pictures, cut short or left out where the fault says so; returns their paths."""
        paths = []
        for k, picture in enumerate(talk.pictures):
            variant = variant_of(i, k, colour_matters=not talk.kind.startswith("formula"))
            suffix, data = encode_picture(picture, variant, i)
            paths.append(f"images/{split}_{i:05d}_{k}{suffix}")
            if fault != "missing_media":
                self._bytes(paths[-1], cut(data) if fault == "truncated_media" else data)
        return paths

    def _bytes(self, name: str, data: bytes) -> None:
        with files.publish(self.folder / name) as handle:
            handle.write(data)
        self._remember(name)

    def _jsonl(self, name: str, records: list[Record]) -> None:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        files.publish_text(self.folder / name, "".join(lines))
        self._remember(name)

    def _remember(self, name: str) -> None:
        self.sizes[name] = (self.folder / name).stat().st_size

    def _tick(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self.total)
