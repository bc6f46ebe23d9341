"""Real samples as rows {"messages", "images"}: texts, mllm_demo, pictures with made chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["Row", "demo_rows", "picture_rows", "real_rows", "text_rows"]

Row = dict[str, Any]


def text_rows(data: Path, count: int) -> list[Row]:
    rows = []
    with (data / "text_sft" / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": row["question"]},
                        {"role": "assistant", "content": row["answer"]},
                    ],
                    "images": [],
                }
            )
    return rows


def demo_rows(data: Path) -> list[Row]:
    folder = data / "mllm_demo"
    held = json.loads((folder / "mllm_demo.json").read_text(encoding="utf-8"))
    return [{**row, "images": [str(folder / image) for image in row["images"]]} for row in held]


def picture_rows(data: Path, count: int) -> list[Row]:
    folder = data / "images_real"
    listed = [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]
    here = [row for row in listed if (folder / row["file"]).is_file() and row["bytes"] < 80_000]
    rows = []
    for number in range(count):
        chosen = [here[number % len(here)]]
        if number % 5 == 0:
            chosen.append(here[(number * 7 + 3) % len(here)])
        sizes = " and ".join(f"{picture['width']} by {picture['height']}" for picture in chosen)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": "<image>" * len(chosen) + f"What size is picture {number}?"},
                    {"role": "assistant", "content": f"It is {sizes} pixels, from {chosen[0]['repo']}."},
                ],
                "images": [str(folder / picture["file"]) for picture in chosen],
            }
        )
    return rows


def real_rows(data: Path, count: int = 200, pictures: int = 60) -> list[Row]:
    """`count` samples: mllm_demo, pictures, and texts for the rest."""
    held = [*demo_rows(data), *picture_rows(data, pictures)]
    return [*held, *text_rows(data, count - len(held))]
