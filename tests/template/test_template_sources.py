"""The whole line on real files: source -> chat -> template -> range -> workers -> audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import ConfigError, DriftError
from packtrain.execute.local import map_shards
from packtrain.measuring.audit import audit
from packtrain.measuring.run import Part, measure_range
from packtrain.planning.lengths import Lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate


def joined(parts: list[Part]) -> Lengths:
    names = sorted({name for part in parts for name in part.costs})
    return Lengths(
        np.concatenate([part.tokens for part in parts]),
        {
            name: np.concatenate([p.costs.get(name, np.zeros(len(p.tokens), np.int64)) for p in parts])
            for name in names
        },
        status=np.concatenate([part.status for part in parts]),
        reasons={i: reason for part in parts for i, reason in part.reasons.items()},
    )


def whole(source: Any, template: Any) -> Lengths:
    return joined([measure_range((source, template), (0, len(source)))])


def test_mllm_demo(data: Path, template, tmp_path: Path) -> None:
    source = ChatSource(open_source(data / "mllm_demo" / "mllm_demo.json", cache_dir=tmp_path))
    lengths = whole(source, template("qwen2_5_vl"))
    assert lengths.tokens[:3].tolist() == [195, 140, 181]
    assert set(lengths.costs) == {"images", "patches", "supervised", "video_frames"}
    assert lengths.costs["images"][:3].tolist() == [2, 1, 1] and not lengths.status.any()
    report = audit(source, lengths, template("qwen2_5_vl").encode)
    assert len(report.ids) == len(source) and report.failed == {}
    with pytest.raises(DriftError, match="tokens: measured"):  # lengths of another processor
        audit(source, whole(source, template("qwen3_vl")), template("qwen2_5_vl").encode)


@pytest.mark.parametrize(
    ("file", "images"),
    [("multi_turn_multi_images", True), ("single_turn_single_image", True), ("only_text", False)],
)
def test_xcomposer(file: str, images: bool, data: Path, template, tmp_path: Path) -> None:
    rows = json.loads((data / "mllm_demo" / "xcomposer" / f"{file}_example.json").read_text())
    for row in rows:  # the shipped paths are relative to another folder
        if images:
            listed = [row["image"]] if isinstance(row["image"], str) else row["image"]
            row["image"] = [str(data / "mllm_demo" / "xcomposer" / "images" / Path(p).name) for p in listed]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    source = ChatSource(open_source(path), placeholders=("<ImageHere>",), media_without_placeholder="prepend")
    lengths = whole(source, template("qwen2_vl"))
    assert lengths.reasons == {} and (lengths.costs["images"] > 0).all() == images
    assert audit(source, lengths, template("qwen2_vl").encode).failed == {}


@pytest.mark.parametrize(
    "file", ["alpaca_en_demo.json", "alpaca_zh_demo.json", "glaive_toolcall_en_demo.json", "identity.json"]
)
def test_text_sets(file: str, data: Path, template, processor, tmp_path: Path) -> None:
    source = ChatSource(open_source(data / "text_sft" / file, cache_dir=tmp_path))
    chosen = template("qwen3_vl")
    if file.startswith("glaive"):  # the template knows nothing of tools: said, or allowed
        with pytest.raises(ConfigError, match="drops the tool"):
            whole(source, chosen)
        chosen = HFTemplate(processor("qwen3_vl"), allow_dropped=["tools", "tool_calls"])
    lengths = whole(source, chosen)
    assert set(lengths.reasons.values()) <= {"empty"}
    assert len(audit(source, lengths, chosen.encode, count=60).ids) == 60


def test_workers_equal_serial_with_faults(data: Path, template, tmp_path: Path) -> None:
    """Ranges in worker processes give the bytes of one range here; every fault has reason and place."""
    image = str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(Path(image).read_bytes()[:5000])
    rows: list[Any] = []
    for i in range(60):
        messages = [
            {"role": "user", "content": f"<image>What is in number {i}?"},
            {"role": "assistant", "content": "Two men. " * (i % 7 + 1)},
        ]
        rows.append({"messages": messages, "images": [image]})
    rows[5]["images"] = [str(tmp_path / "lost.jpg")]
    rows[17]["images"] = [str(cut)]
    rows[29]["images"] = []
    rows[41]["messages"] = rows[41]["messages"][:1]
    rows[53]["messages"][1]["content"] = "  "
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    source = ChatSource(open_source(path))
    context = (source, template("qwen2_5_vl"))
    shards = [(start, start + 15) for start in range(0, 60, 15)]
    serial = [measure_range(context, (0, 60))]
    parallel = list(map_shards(measure_range, shards, workers=2, context=context))
    one, many = joined(serial), joined(parallel)
    assert one.digest == many.digest
    assert one.tokens.tobytes() == many.tokens.tobytes() and one.reasons == many.reasons
    assert one.reasons == {
        5: "missing_media",
        17: "truncated_media",
        29: "placeholder_mismatch",
        41: "no_assistant_turn",
        53: "empty",
    }
    assert np.flatnonzero(one.status).tolist() == [5, 17, 29, 41, 53] and one.status[53] == 1
    for i, line in serial[0].details.items():
        assert line.count(f"rows.jsonl:{i + 1}:") == 1
    assert sorted({row for part in parallel for row in part.media}) == list(serial[0].media)
