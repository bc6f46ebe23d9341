"""Text-only families on real rows: lengths and ids equal the tokenizer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.template import HFTemplate


@pytest.fixture(scope="module")
def qwen2(processor) -> HFTemplate:
    return HFTemplate(processor("qwen2_vl").tokenizer)


def alpaca(data: Path) -> list[dict[str, Any]]:
    rows = json.loads((data / "text_sft" / "alpaca_en_demo.json").read_text())
    return [
        {
            "prompt": row["instruction"] + ("\n" + row["input"] if row.get("input") else ""),
            "answer": row["output"],
        }
        for row in rows
    ]


def gsm8k(data: Path) -> list[dict[str, Any]]:
    lines = (data / "text_sft" / "gsm8k_train.jsonl").read_text().splitlines()
    return [{"prompt": r["question"], "answer": r["answer"]} for r in map(json.loads, lines)]


@pytest.mark.parametrize("rows", [alpaca, gsm8k])
def test_lengths_equal_the_tokenizer(rows: Any, data: Path, qwen2: HFTemplate, chat) -> None:
    chosen = rows(data)[:400]
    samples = [chat(row["prompt"], row["answer"]) for row in chosen]
    measured = qwen2.measure_batch(samples)
    tokenizer = qwen2.tokenizer
    for row, sample, length in zip(chosen, samples, measured, strict=True):
        plain = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        theirs = tokenizer.apply_chat_template(
            plain, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = qwen2.encode(sample)
        assert length == len(theirs["input_ids"])
        assert encoded["input_ids"].tolist() == theirs["input_ids"]
        assert (encoded["labels"] != -100).tolist() == [bool(flag) for flag in theirs["assistant_masks"]]
        assert length.costs == {"supervised": sum(theirs["assistant_masks"])}
        assert encoded["position_ids"].tolist() == list(range(length))
        assert set(encoded) == {"input_ids", "labels", "position_ids"}


def test_batch_equals_one_by_one(data: Path, qwen2: HFTemplate, chat) -> None:
    samples = [chat(row["prompt"], row["answer"]) for row in alpaca(data)[:64]]
    batch = qwen2.measure_batch(samples)
    single = [qwen2.measure(sample) for sample in samples]
    assert [(int(m), m.costs) for m in batch] == [(int(m), m.costs) for m in single]
    assert qwen2.measure_batch([]) == []


def test_lengths_of_the_shipped_table(data: Path, qwen2: HFTemplate, chat) -> None:
    """The recorded lengths of GSM8K were made by another program with the same template."""
    recorded = np.load(data / "lengths" / "gsm8k_train.npy")[:300]
    rows = gsm8k(data)[:300]
    measured = qwen2.measure_batch([chat(row["prompt"], row["answer"]) for row in rows])
    assert np.abs(np.array([int(m) for m in measured]) - recorded).max() <= 1
