"""A small mixed set: captions, questions, several turns, several images, no image, names that clash."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

from PIL import Image

from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

__all__ = ["NAMES", "Set", "Slow", "Words", "captions", "records"]

#: Names that file systems, tars and readers of keys trip over.
NAMES = [
    "café.jpg",
    unicodedata.normalize("NFD", "café.jpg"),
    "a.b.c.jpg",
    "with space.jpg",
    "x" * 240 + ".jpg",
    "one/0001.jpg",
    "two/0001.jpg",
    "0001.jpg",
    "0001.JPG",
    "0001_1.jpg",
    "deep/" * 12 + "y" * 240 + ".png",
    "日本.jpg",
]


class Words:
    """A template that counts: a token a word, nine an image."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        import torch

        ids = []
        for message in sample["messages"]:
            ids.append({"user": 1, "assistant": 2, "system": 3, "tool": 4}[message["role"]])
            for part in message["content"]:
                if part["type"] == "text":
                    ids += [10 + sum(map(ord, word)) % 500 for word in part["text"].split()]
                else:
                    ids += [9] * 9
        tensor = torch.tensor(ids, dtype=torch.int64)
        labels = torch.where(tensor == 9, -100, tensor)
        labels[0] = -100
        return {"input_ids": tensor, "labels": labels, "position_ids": torch.arange(len(ids))}

    def measure(self, sample: dict[str, Any]) -> int:
        return len(self.encode(sample)["input_ids"])

    def config(self) -> dict[str, Any]:
        return {"template": "words"}


def records(names: list[str], count: int) -> list[dict[str, Any]]:
    """Records of every kind, `names` used in turn."""
    out: list[dict[str, Any]] = []
    for i in range(count):
        name = names[i % len(names)]
        words = " ".join(f"w{j}" for j in range(1 + i * 7 % 11))
        if i % 5 == 4:
            turns = [
                ("user", f"How are you {i}?"),
                ("assistant", "fine"),
                ("user", words),
                ("assistant", "é日"),
            ]
            row: dict[str, Any] = {"messages": [{"role": r, "content": t} for r, t in turns], "images": []}
        elif i % 5 == 3:
            turns = [
                ("system", "be brief"),
                ("user", f"before <image> after <image> {i}"),
                ("assistant", words),
            ]
            row = {
                "messages": [{"role": r, "content": t} for r, t in turns],
                "images": [name, names[(i + 1) % len(names)]],
            }
        else:
            asked = "<image>" if i % 5 == 0 else f"<image>\nwhat about {i}?"
            row = {
                "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": words}],
                "images": [name],
            }
        out.append(row)
    return out


def captions(names: list[str], count: int, prompt: str = "") -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": "<image>" + prompt},
                {"role": "assistant", "content": f"a picture of {i}"},
            ],
            "images": [names[i % len(names)]],
        }
        for i in range(count)
    ]


class Slow(ChatSource):
    """Takes a moment for each sample, so that kills meet it at work."""

    pause = 0.0

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.pause)
        return super().__getitem__(index)


class Set:
    """A measured and planned set."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]], cap: int, names: list[str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = "PNG" if name.lower().endswith("png") else "JPEG"
            Image.new("RGB", (8 + number, 9), (number * 9, 40, 90)).save(path, kind)
        self.path = folder / "train.jsonl"
        self.path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        self.template = Words()
        self.source = self.open()
        self.lengths = measure(self.source, self.template, folder / "lengths", workers=1)
        self.plan_folder = folder / "plan"
        self.plan = plan_lengths(
            self.lengths, self.plan_folder, lengths_folder=folder / "lengths", pack_length=cap
        )

    def open(self) -> ChatSource:
        return ChatSource(open_source(self.path))
