"""Real data through real templates: plan → format → back, the same ids, bytes, token ids and logits."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, open_packs
from packtrain.media.location import read_bytes
from packtrain.pipeline.export import export
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.pipeline.verify_export import verify_export
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource, media_refs


@pytest.fixture(scope="module")
def qwen(data: Path) -> Any:
    from packtrain.template import HFTemplate, load_processor

    return HFTemplate(load_processor(str(data / "processors" / "qwen2_5_vl")))


def prepared(source: Any, template: Any, folder: Path, cap: int) -> tuple[Any, Path]:
    lengths = measure(source, template, folder / "lengths", workers=1)
    plan = plan_lengths(lengths, folder / "plan", lengths_folder=folder / "lengths", pack_length=cap)
    return plan, folder / "plan"


def chats_about(data: Path, folder: Path, count: int, pixels: int) -> ChatSource:
    """A generated chat about each of some real images; every fourth about two."""
    rows = [json.loads(line) for line in (data / "images_real" / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["width"] * row["height"] < pixels]
    there = [row for row in rows if (data / "images_real" / row["file"]).is_file()]
    chats = []
    for i, row in enumerate(there[:count]):
        pair = [row["file"], there[(i + 1) % count]["file"]] if i % 4 == 0 else [row["file"]]
        asked = "<image>" * len(pair) + f"Where is {row['path']} from?"
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": row["repo"]},
                    {"role": "user", "content": "How large is it?"},
                    {"role": "assistant", "content": f"{row['width']} x {row['height']}, {row['mode']}"},
                ],
                "images": pair,
            }
        )
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return ChatSource(open_source(path), media_root=data / "images_real")


def same_rows(plan: Any, source: Any, template: Any, out: Path) -> None:
    packs, direct = open_packs(out, template.encode), PackedDataset(plan, source, template.encode)
    collate = PaddingFreeCollator()
    for number in range(len(plan)):
        ours, want = collate([packs[number]]), collate([direct[number]])
        assert ours.keys() == want.keys() and list(ours.sample_ids) == plan[number].tolist()
        for name, value in want.items():
            assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value


def media_in(out: Path) -> list[bytes]:
    found = []
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(i).read() for i in tar if not i.name.endswith(".json")]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("fmt", ["webdataset", "chunks"])
def test_llama_factory_demo(data: Path, qwen: Any, tmp_path: Path, fmt: str) -> None:
    source = ChatSource(open_source(data / "mllm_demo" / "mllm_demo.json"))
    plan, folder = prepared(source, qwen, tmp_path, 3000)
    export(folder, tmp_path / "out", format=fmt, source=source, template=qwen, maxcount=2)
    same_rows(plan, source, qwen, tmp_path / "out")
    done = verify_export(tmp_path / "out", source=source, template=qwen)
    assert f"{len(source)} planned" in done["samples"]


def test_real_images(data: Path, qwen: Any, tmp_path: Path) -> None:
    source = chats_about(data, tmp_path, 16, 400_000)
    plan, folder = prepared(source, qwen, tmp_path, 4096)
    export(folder, tmp_path / "out", source=source, maxcount=3)
    assert media_in(tmp_path / "out") == [
        read_bytes(ref) for pack in plan for i in pack.tolist() for ref in media_refs(source[i])
    ]
    same_rows(plan, source, qwen, tmp_path / "out")


def test_text(data: Path, qwen: Any, tmp_path: Path) -> None:
    """Tool calls, system turns and several languages come back exactly, through every format."""
    rows = []
    for name in ("alpaca_zh_demo.json", "glaive_toolcall_en_demo.json", "identity.json"):
        rows += json.loads((data / "text_sft" / name).read_text(encoding="utf-8"))[:40]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ChatSource(open_source(path))
    plan, folder = prepared(source, qwen, tmp_path, 4096)
    for fmt in ("raw", "webdataset", "energon", "chunks"):
        export(folder, tmp_path / fmt, format=fmt, source=source, template=qwen, maxcount=5)
        same_rows(plan, source, qwen, tmp_path / fmt)
        verify_export(tmp_path / fmt, source=source, template=qwen)


def test_packed_forward_from_shards_equals_unpacked(data: Path, qwen: Any, tmp_path: Path) -> None:
    from packtrain.train.tiny import tiny_model

    source = chats_about(data, tmp_path, 3, 51_000)
    plan, folder = prepared(source, qwen, tmp_path, 4096)
    export(folder, tmp_path / "out", source=source)
    packs = open_packs(tmp_path / "out", qwen.encode)
    model = tiny_model("tiny:qwen2_5_vl", qwen.processor).eval()
    collate = PaddingFreeCollator(model=model)
    number = max(range(len(plan)), key=lambda i: len(plan[i]))
    assert len(plan[number]) > 1
    with torch.no_grad():
        row = model(**collate([packs[number]])).logits[0]
        start = 0
        for sample_id in plan[number].tolist():
            alone = model(**collate([[{**qwen.encode(source[sample_id]), "sample_id": sample_id}]])).logits[0]
            torch.testing.assert_close(row[start : start + len(alone)], alone, rtol=1e-4, atol=1e-4)
            start += len(alone)
