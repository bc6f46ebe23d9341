"""Sizes in the data are trusted only where a sample of them is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packtrain.errors import DriftError
from packtrain.measuring.audit import audit_hints
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource


def chats(folder: Path, width: int, count: int = 5) -> ChatSource:
    Image.new("RGB", (640, 480)).save(folder / "a.png")
    part = {"type": "image", "image": "a.png", "width": width, "height": 480}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a cat"}]
    lines = [json.dumps({"messages": turns}) for _ in range(count)] + ["{broken"]
    (folder / "s.jsonl").write_text("\n".join(lines))
    return ChatSource(open_source(folder / "s.jsonl"))


def test_true_hints_pass(tmp_path: Path) -> None:
    assert audit_hints(chats(tmp_path, 640)) == 5


def test_false_hints_stop_and_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DriftError, match=r"s\.jsonl:1: width is 64 in the data and 640 in the medium.*and 2 more"
    ):
        audit_hints(chats(tmp_path, 64))


def test_measuring_with_false_hints_publishes_nothing(tmp_path: Path, processor: Any) -> None:
    import packtrain as pt
    from packtrain.template import HFTemplate

    template = HFTemplate(processor("qwen2_5_vl"), trust_hints=True)
    with pytest.raises(DriftError, match="not those of the media"):
        pt.measure(chats(tmp_path, 64), template, tmp_path / "l")
    assert not (tmp_path / "l").exists()
    lengths = pt.measure(chats(tmp_path, 640), template, tmp_path / "l")
    plain = HFTemplate(template.processor)
    assert lengths.tokens[0] == len(plain.encode(chats(tmp_path, 640)[0])["input_ids"])
