"""Real sets for round trips: the demo of LLaMA-Factory, chats about real images, text with tool calls."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from packtrain.media.location import media_refs, read_bytes
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

__all__ = ["KINDS", "RealSet", "facts_of", "row_facts"]

#: name -> pack length
KINDS = {"mllm_demo": 700, "images_real": 1600, "text_sft": 2048}
_TEXTS = ("alpaca_zh_demo.json", "glaive_toolcall_en_demo.json", "identity.json")


class RealSet:
    """A set, measured and planned.

    Attributes:
        source, template, plan, plan_folder: as their names say.
        want: sample id -> what must come back (`facts_of`).
        tokens: sample id -> token ids and labels.
    """

    def __init__(self, kind: str, data: Path, folder: Path, template: Any) -> None:
        self.folder, self.template = folder, template
        self.source = {"mllm_demo": _demo, "images_real": _chats, "text_sft": _text}[kind](data, folder)
        lengths = measure(self.source, template, folder / "lengths", workers=1)
        self.plan_folder = folder / "plan"
        self.plan = plan_lengths(
            lengths, self.plan_folder, lengths_folder=folder / "lengths", pack_length=KINDS[kind]
        )
        assert len(self.plan.indices) == len(self.source) and len(self.plan) > 1
        self.want = {i: facts_of(self.source[i]) for i in range(len(self.source))}
        self.encoded = {
            i: {**template.encode(self.source[i]), "sample_id": i} for i in range(len(self.source))
        }
        self.tokens = {
            i: (one["input_ids"].tolist(), one["labels"].tolist()) for i, one in self.encoded.items()
        }


def facts_of(sample: Any) -> list[Any]:
    """All of a sample but its id: fields, roles, parts in order, media by the digest of their bytes."""
    digests = iter([hashlib.sha256(read_bytes(ref)).hexdigest() for ref in media_refs(sample)])
    messages = [
        {
            **message,
            "content": [
                part if part["type"] == "text" else {**part, part["type"]: next(digests)}
                for part in message["content"]
            ],
        }
        for message in sample["messages"]
    ]
    others = {key: value for key, value in sample.items() if key not in ("messages", "sample_id")}
    return [messages, others]


def row_facts(row: Any) -> dict[str, Any]:
    """A packed row as plain JSON; pixels by their digest."""
    told = {
        "ids": list(row.sample_ids),
        "tokens": row["input_ids"].reshape(-1).tolist(),
        "labels": row["labels"].reshape(-1).tolist(),
        "positions": row["position_ids"].reshape(-1).tolist(),
        "lengths": list(row.lengths),
    }
    for name in ("pixel_values", "image_grid_thw"):
        if name in row:
            told[name] = hashlib.sha256(row[name].contiguous().numpy().tobytes()).hexdigest()
    return told


def _demo(data: Path, folder: Path) -> ChatSource:
    return ChatSource(open_source(data / "mllm_demo" / "mllm_demo.json"))


def _chats(data: Path, folder: Path, count: int = 16) -> ChatSource:
    """A generated chat about each of some real images; every fourth about two."""
    root = data / "images_real"
    rows = [json.loads(line) for line in (root / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["width"] * row["height"] < 400_000 and (root / row["file"]).is_file()]
    chats = []
    for i, row in enumerate(rows[:count]):
        pair = [row["file"], rows[(i + 1) % count]["file"]] if i % 4 == 0 else [row["file"]]
        turns = [
            ("user", "<image>" * len(pair) + f"Where is {row['path']} from?"),
            ("assistant", row["repo"]),
            ("user", "How large is it?"),
            ("assistant", f"{row['width']} x {row['height']}, {row['mode']}"),
        ]
        chats.append({"messages": [{"role": r, "content": t} for r, t in turns], "images": pair})
    return ChatSource(open_source(_written(folder, chats)), media_root=root)


def _text(data: Path, folder: Path) -> ChatSource:
    rows: list[Any] = []
    for name in _TEXTS:
        rows += json.loads((data / "text_sft" / name).read_text(encoding="utf-8"))[:30]
    return ChatSource(open_source(_written(folder, rows)))


def _written(folder: Path, rows: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
