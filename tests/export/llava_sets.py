"""Rows that the encoders of LLaVA-OneVision-1.5 read: captions, questions about one image, several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

__all__ = ["CAPTIONS", "MIXED", "NAMES", "SAID", "VQA", "Row", "planned", "talk"]

Row = dict[str, Any]
NAMES = ["a.jpg", "b.png", "c"]  # theirs are all called `imgI.jpg`


def talk(*turns: str, images: list[str] | None = None, roles: str = "ua") -> Row:
    named = {"u": "user", "a": "assistant", "s": "system"}
    order = [named[roles[i % len(roles)]] for i in range(len(turns))]
    return {
        "messages": [{"role": r, "content": t} for r, t in zip(order, turns, strict=True)],
        "images": images or [],
    }


CAPTIONS = [{"captions": [{"content": f"a picture of {i}"}], "images": [NAMES[i % 3]]} for i in range(5)]
SAID = [talk(f"a picture of {i}", images=[NAMES[i % 3]], roles="a") for i in range(5)]
VQA = [
    talk(
        "<image>\nWhat about this?" if i % 2 else f"What is it, {i}? <image>",
        f"It is {i}.",
        images=[NAMES[i % 3]],
    )
    for i in range(6)
]
MIXED = [
    *VQA,
    talk("How are you?", "Fine.", "And you, 你好?", "日本 é"),
    talk("<image>Who?", "She.", "Where?", "There.", images=["b.png"]),
    talk("Hello.", "Hi.", "Now look: <image> well?", "A colour.", images=["c"]),
]


def planned(folder: Path, rows: list[Row], template: Any) -> tuple[ChatSource, Any, Path]:
    """(source, lengths, plan folder) of rows with the images of `NAMES`."""
    folder.mkdir()
    for number, name in enumerate(NAMES):
        picture = Image.new("RGB", (120 + 90 * number, 150), (number * 70, 90, 140))
        picture.save(folder / name, "PNG" if number else "JPEG")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = ChatSource(open_source(folder / "train.jsonl"))
    lengths = measure(source, template, folder / "lengths", workers=1)
    plan_lengths(lengths, folder / "plan", lengths_folder=folder / "lengths", pack_length=600)
    return source, lengths, folder / "plan"
