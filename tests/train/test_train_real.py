"""Real processor, real images, real conversations: isolated in one row, on both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.template import HFTemplate, load_processor
from packtrain.testing.tiny import tiny_model
from packtrain.train.proof import prove_isolation

#: Processor -> backends (eager adds nothing new after the first).
CASES = {"qwen2_5_vl": ("sdpa", "eager"), "qwen3_vl": ("sdpa",)}


def conversation(text: str, images: list[str], answer: str) -> dict[str, Any]:
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    turns = [("user", content), ("assistant", [{"type": "text", "text": answer}])]
    return {"messages": [{"role": role, "content": parts} for role, parts in turns]}


@pytest.mark.parametrize("name", CASES)
def test_real_samples_are_isolated(name: str, data: Path) -> None:
    processor = load_processor(str(data / "processors" / name), min_pixels=4096, max_pixels=30_000)
    template = HFTemplate(processor)
    images = sorted(str(path) for path in (data / "mllm_demo" / "mllm_demo_data").glob("*.jpg"))[:2]
    text = json.loads((data / "text_sft" / "identity.json").read_text())[0]
    records = [
        conversation("What is in the picture?", images[:1], "A football team."),
        conversation(text["instruction"], [], text["output"]),
        conversation("Compare the two.", images[:2], "They differ."),
    ]
    samples = [{**template.encode(record), "sample_id": i} for i, record in enumerate(records)]
    assert all(len(s["input_ids"]) == template.measure(r) for s, r in zip(samples, records, strict=True))
    model = tiny_model(f"tiny:{name}", template.processor, seed=1)
    report = prove_isolation(model, samples, CASES[name], gradients=False)
    assert report.ok, report.first_leak
