"""The planted faults, told by an oracle of their own: nothing here asks packtrain what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from packtrain.testing.demo import DemoSet
from packtrain.testing.demo.make import PACK_LENGTH

Record = dict[str, Any]


def texts(record: Record) -> list[tuple[str, str]]:
    """(role, text with `<image>` marks) of every turn."""
    if "instruction" in record:
        return [("user", record["instruction"]), ("assistant", record["output"])]
    out = []
    for turn in record.get("messages", record.get("conversations", [])):
        role = {"human": "user", "gpt": "assistant"}.get(
            turn.get("from"), turn.get("role") or turn.get("from")
        )
        content = turn.get("content", turn.get("value"))
        if not isinstance(content, str):
            content = "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)
        out.append((role, content))
    return out


def pictures(record: Record) -> list[str]:
    found = list(record.get("images", []))
    for turn in record.get("messages", []):
        if isinstance(turn["content"], list):
            for part in turn["content"]:
                if part["type"] == "image":
                    found.append(part["image"])
                elif part["type"] == "image_url":
                    found.append(part["image_url"]["url"])
    return found


def fault(record: Record, folder: Path, tokenizer: Tokenizer) -> str:
    turns = texts(record)
    for role in ("user", "assistant"):
        if not any(text.strip() for who, text in turns if who == role):
            return "empty"
    marks = sum(text.count("<image>") for _, text in turns)
    if marks != len(pictures(record)):
        return "placeholder_mismatch"
    for name in pictures(record):
        if not (folder / name).is_file():
            return "missing_media"
        try:
            with Image.open(folder / name) as picture:
                picture.load()
        except (OSError, SyntaxError):
            return "truncated_media"
    least = sum(len(tokenizer.encode(text.replace("<image>", "")).ids) for _, text in turns) + 6 * marks
    return "over_long" if least >= PACK_LENGTH else ""


def test_oracle_finds_the_planted_faults_and_no_other(demo: DemoSet, records: list[Record]) -> None:
    tokenizer = Tokenizer.from_file(str(demo.processor_dir / "tokenizer.json"))
    found: dict[str, list[int]] = {reason: [] for reason in demo.faults}
    for i, record in enumerate(records):
        reason = fault(record, demo.train_jsonl.parent, tokenizer)
        if reason:
            found[reason].append(i)
    assert found == demo.faults
    assert all(len(ids) >= 2 for ids in demo.faults.values())
    stored = json.loads((demo.train_jsonl.parent / "faults.json").read_text(encoding="utf-8"))
    assert stored == demo.faults


def test_val_has_no_fault(demo: DemoSet) -> None:
    tokenizer = Tokenizer.from_file(str(demo.processor_dir / "tokenizer.json"))
    lines = demo.val_jsonl.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 32
    assert [fault(json.loads(line), demo.val_jsonl.parent, tokenizer) for line in lines] == [""] * 32


def test_measured_and_planned_the_ledger_equals_the_planted_faults(demo: DemoSet) -> None:
    import packtrain as pt
    from packtrain.errors import SampleError
    from packtrain.extend import measure_many
    from packtrain.sources import open_source
    from packtrain.sources.chat import ChatSource
    from packtrain.template import HFTemplate, load_processor

    source = ChatSource(open_source(demo.train_jsonl))
    template = HFTemplate(load_processor(demo.processor_dir))
    tokens, status, reasons = [0] * len(source), [0] * len(source), {}
    for i in range(len(source)):
        try:
            (measured,) = measure_many(template, [source[i]])
        except SampleError as error:
            measured = error
        if isinstance(measured, SampleError):
            status[i], reasons[i] = (1 if measured.reason == "empty" else 2), measured.reason
        else:
            tokens[i] = int(measured)
    lengths = pt.Lengths(tokens, status=status, reasons=reasons)
    plan = pt.plan(lengths, pack_length=PACK_LENGTH, long_samples="drop", long_rule=">=")
    ledger: dict[str, list[int]] = {reason: [] for reason in demo.faults}
    for i, reason in plan.ledger:
        ledger[reason].append(i)
    assert ledger == demo.faults
    fits = [t for t in tokens if 0 < t < PACK_LENGTH]
    assert max(fits) > 0.85 * PACK_LENGTH, "the tail ends close to the pack length"
    assert sorted(fits)[len(fits) // 2] < 0.15 * PACK_LENGTH
    assert min(t for t in tokens if t >= PACK_LENGTH) > 1.1 * PACK_LENGTH
    assert plan.stats()["efficiency"] > 0.95
