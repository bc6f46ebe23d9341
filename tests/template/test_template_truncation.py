"""What truncation takes: each answer that a cut removes, or leaves a part of, is told with its message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli._show import ledger_of, lengths_figures
from packtrain.cli.verify import verify_stream
from packtrain.data import StreamingPackedDataset
from packtrain.errors import SampleError
from packtrain.export import PackingProducer
from packtrain.measuring.run import CUT
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import ledger_rows, plan_lengths, told_truncated
from packtrain.report.html import write_report
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate, load_processor
from packtrain.template.account import stretches
from packtrain.train.opened import Checked

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}], **more}


def samples(image: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Kind -> (processor, sample). Answers are apart from each other."""
    talk = [say("user", "one"), say("assistant", "a b c"), say("user", "two"), say("assistant", "d e f g")]
    seen = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}
    called = [{"type": "function", "function": {"name": "f", "arguments": {"q": 1}}}]
    use = [
        say("user", "go"),
        say("assistant", "", tool_calls=called),
        say("tool", "2"),
        say("assistant", "It is 2."),
    ]
    return {
        "text": ("qwen2_5_vl", {"messages": [say("system", "Be brief."), *talk]}),
        "masked": ("qwen3_vl", {"messages": [talk[0], {**talk[1], "loss": False}, *talk[2:], *talk]}),
        "weighed": ("qwen3_vl", {"messages": [talk[0], {**talk[1], "loss": 0.5}, *talk[2:]]}),
        "pictures first": ("qwen2_5_vl", {"messages": [seen, *talk[1:]]}),
        "pictures last": ("internvl3", {"messages": [*talk[:2], seen, say("assistant", "A red car.")]}),
        "by encoding": ("llava_onevision", {"messages": [seen, *talk[1:]]}),
        "tools": ("qwen3_vl", {"messages": [*use, *talk], "tools": TOOLS}),
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", list(samples("")))
def test_every_answer_that_a_cut_takes_is_told(kind: str, side: str, data: Path, processor) -> None:
    """At every length, against the labels of the whole sample: removed, cut short, or nothing left."""
    name, sample = samples(str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg"))[kind]
    template = HFTemplate(processor(name), **({"chat_template": CALLS} if kind == "tools" else {}))
    labels = template.encode(sample)["labels"].numpy()
    own = [
        k for k, m in enumerate(sample["messages"]) if m["role"] == "assistant" and m.get("loss") is not False
    ]
    parts = dict(zip(own, stretches(labels), strict=True))
    total = len(labels)
    seen = set()
    template.truncation = side
    for length in [*range(total, total - 60, -2), 40, 9] if total > 130 else range(total, 0, -1):
        begin, end = (0, length) if side == "right" else (total - length, total)
        left = {k: len(range(max(a, begin + 1), min(b, end))) for k, (a, b) in parts.items()}
        template.max_length = length
        try:
            measured = template.measure(sample)
        except SampleError as error:
            assert error.reason == "truncation_cuts_media" or not any(left.values())
            seen.add(error.reason)
            continue
        removed = [k for k, kept in left.items() if not kept]
        short = [k for k, (a, b) in parts.items() if 0 < left[k] < b - a]
        costs = measured.costs
        assert (costs["answers_removed"], costs["answers_cut"]) == (len(removed), len(short))
        assert costs["truncated"] == (length < total) and costs["supervised"] == sum(left.values()) > 0
        found = {
            what: [int(n) for n in re.findall(r"\d+", numbers)]
            for what, numbers in re.findall(
                r"(removed|cut short): the answers? in message ([\d, ]+)", measured.note
            )
        }
        assert found == {w: ks for w, ks in (("removed", removed), ("cut short", short)) if ks}
        seen |= set(found)
    stopped = {("pictures first", "left"), ("by encoding", "left"), ("pictures last", "right")}
    assert {"removed", "cut short"} <= seen or ((kind, side) in stopped and "truncation_cuts_media" in seen)


def _folder(tmp_path: Path, rows: int = 30) -> Path:
    records = []
    for number in range(rows):
        turns = 3 if number % 10 == 4 else 1
        talk = [say("user", "q"), say("assistant", "word " * 6)] * turns
        records.append(
            {"messages": talk if number % 10 != 7 else [say("user", "q " * 300), say("assistant", "a")]}
        )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return tmp_path / "in" / "a.jsonl"


def _cutting(folder: Path) -> HFTemplate:
    """Cuts the third answer of `_folder`'s records away, and no other."""
    processor = load_processor(str(folder))
    cap = HFTemplate(processor).measure({"messages": [say("user", "q"), say("assistant", "word " * 6)] * 2})
    return HFTemplate(processor, truncation="right", max_length=int(cap) + 3)


def test_they_stand_beside_the_ledger_and_are_not_left_out(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Lengths, plan, report and figures name the sample and its messages; nothing more is left out."""
    path = _folder(tmp_path)
    template = _cutting(tokenizer_folder)
    source = ChatSource(open_source(path))
    lengths = measure(source, template, tmp_path / "l", workers=1)
    assert lengths.reasons == {7: "unsupervised", 17: "unsupervised", 27: "unsupervised"}
    plan = plan_lengths(lengths, tmp_path / "p", lengths_folder=tmp_path / "l", pack_length=800)
    assert plan.ledger.counts() == {"unsupervised": 3} and {4, 14, 24} <= set(plan.indices.tolist())
    rows = ledger_rows(plan, tmp_path / "l", source.where)
    cut = [row for row in rows if row["reason"] == CUT]
    assert [row["id"] for row in cut] == [4, 14, 24] and len(rows) == 6
    assert len({row["tokens"] for row in cut}) == 1 and cut[0]["where"] == "a.jsonl:5"
    assert all("removed: the answer in message 5" in row["detail"] for row in cut)
    figures = lengths_figures(tmp_path / "l", lengths)
    assert figures["truncation"]["rows"] == cut and figures["truncation"]["samples"] == 3
    assert figures["truncation"]["answers_removed"] == 3 and figures["unusable"] == {"unsupervised": 3}
    told = told_truncated(tmp_path / "l", lengths)
    assert told.startswith("3 samples trained without 3 answers") and "a.jsonl:5 (id 4): removed" in told
    page = tmp_path / "r.html"
    write_report(page, title="t", plan=plan, lengths=lengths, ledger_rows=rows)
    shown = page.read_text(encoding="utf-8")
    assert "trained without these answers" in shown and "removed: the answer in message 5" in shown


@pytest.mark.parametrize("grown", [False, True])
def test_they_outlive_more_records(grown: bool, tokenizer_folder: Path, tmp_path: Path) -> None:
    path = _folder(tmp_path)
    template = _cutting(tokenizer_folder)
    if grown:
        measure(ChatSource(open_source(path)), template, tmp_path / "l", workers=1)
        text = path.read_text()
        path.write_text(text + text)
    lengths = measure(ChatSource(open_source(path)), template, tmp_path / "l", workers=1, append=grown)
    fresh = measure(ChatSource(open_source(path)), template, tmp_path / "m", workers=1)
    assert lengths == fresh
    for name in ("details.jsonl", "reasons.jsonl"):
        assert (tmp_path / "l" / name).read_bytes() == (tmp_path / "m" / name).read_bytes()


def test_a_producer_tells_them(tokenizer_folder: Path, tmp_path: Path) -> None:
    _folder(tmp_path)
    template = _cutting(tokenizer_folder)
    out = tmp_path / "out"
    stats = PackingProducer(tmp_path / "in", out, template, pack_length=800, window=8).run()
    cut = [row for row in ledger_of(out) if row["reason"] == CUT]
    assert [row["id"] for row in cut] == [4, 14, 24] and all("message 5" in row["detail"] for row in cut)
    assert stats.truncated == 3 and stats.dropped == {"unsupervised": 3} and stats.packed == 27
    assert verify_stream(out)["partition"].startswith("27 packed and 3 in the ledger")


@pytest.mark.parametrize("written", [False, True])
def test_a_stream_tells_them(written: bool, tokenizer_folder: Path, tmp_path: Path, caplog: Any) -> None:
    """In the log, and where there is a ledger file, in it."""
    source = ChatSource(open_source(_folder(tmp_path)))
    template = Checked(_cutting(tokenizer_folder))
    file = tmp_path / "left_out.jsonl"
    on = {"on_error": "skip", "ledger_file": file}
    rows = source if written else [source[i] for i in range(30) if i % 10 != 7]
    stream = StreamingPackedDataset(rows, template, pack_length=800, window=8, **(on if written else {}))
    packs = list(stream)
    assert all("truncated_answers" not in sample for pack in packs for sample in pack)
    assert "is trained without all of its answers, removed: the answer in message 5" in caplog.text
    if written:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        told = [line["sample_id"] for line in lines if line["reason"] == CUT]
        assert told == [4, 14, 24] and stream.left_out == {"unsupervised": 3}
