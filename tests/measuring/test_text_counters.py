"""Fast counters: equal to the tokenizer wherever they are used, refused where they are not."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import MissingExtraError, UnknownNameError
from packtrain.measuring import counter as counters
from packtrain.measuring.counter import hard_texts, open_counter
from packtrain.measuring.text import _cuts, supervised_mask, tokenize
from packtrain.template import HFTemplate

FAST = [
    name for name in ("words", "tiktoken", "gigatoken") if name == "words" or importlib.util.find_spec(name)
]


@pytest.fixture(scope="module")
def tokenizer(processor: Any) -> Any:
    return processor("qwen2_vl").tokenizer


@pytest.fixture(scope="module")
def tokenized(tokenizer: Any) -> Any:
    """Text -> its tokens; the fast counters are compared with the same texts."""
    return lru_cache(maxsize=None)(lambda text: tokenize(tokenizer, [text], add_special_tokens=False)[0])


@pytest.fixture(scope="module")
def opened(tokenizer: Any) -> Any:
    return lru_cache(maxsize=None)(lambda name: open_counter(name, tokenizer, ["some text"]))


def conversations(data: Path) -> list[dict[str, Any]]:
    out = []
    for name in ("alpaca_zh_demo.json", "alpaca_en_demo.json", "gpteacher_codegen-instruct.json"):
        for row in json.loads((data / "text_sft" / name).read_text())[:300]:
            asked, said = f"{row['instruction']}\n{row['input']}", row.get("output") or row.get("response")
            turns = [("user", asked), ("assistant", said), ("user", said), ("assistant", asked)]
            out.append(
                {"messages": [{"role": r, "content": [{"type": "text", "text": t}]} for r, t in turns]}
            )
    return out


@pytest.fixture(scope="module")
def by_the_tokenizer(processor: Any, data: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """Samples and what the tokenizer measures."""
    samples = conversations(data)
    image = str(data / "mllm_demo" / "mllm_demo_data" / "1.jpg")
    for place in (0, 400, 700):
        samples[place]["messages"][0]["content"].insert(0, {"type": "image", "image": image})
        samples[place + 1]["messages"][1]["content"].append({"type": "image", "image": image})
    samples[5]["messages"][0]["content"][0]["text"] += "<|image_pad|>"
    samples[6]["messages"][0]["content"][0]["text"] += "e\u0301"  # NFC changes it: left to the tokenizer
    return samples, HFTemplate(processor("qwen2_5_vl"), text_counter="hf").measure_batch(samples)


@pytest.mark.parametrize("name", FAST)
def test_lengths_and_trained_tokens(name: str, processor: Any, by_the_tokenizer: Any) -> None:
    samples, plain = by_the_tokenizer
    fast_template = HFTemplate(processor("qwen2_5_vl"), text_counter=name)
    fast = fast_template.measure_batch(samples)
    assert fast_template._measurer._counter.name == name
    rendered = [fast_template.rendered(sample) for sample in samples[7:]]
    spliced = {
        place: fast_template.spliced(item, fast_template.expansions({0: item.media})[0])
        for place, item in enumerate(rendered)
    }
    assert len(fast_template._measurer._quick(spliced)) > 0.95 * len(rendered)  # not left to the tokenizer
    for a, b in zip(plain, fast, strict=True):
        assert type(a) is type(b) and (getattr(a, "reason", a), getattr(a, "costs", 0)) == (
            getattr(b, "reason", b),
            getattr(b, "costs", 0),
        )


@pytest.mark.parametrize("name", FAST)
def test_spans_at_every_edge(name: str, opened: Any, tokenizer: Any, tokenized: Any) -> None:
    counter = opened(name)
    texts = [t for t in hard_texts(("<|im_end|>",)) if counter.takes(t)]
    rng = np.random.default_rng(1)
    spans = []
    for text in texts:
        edges = np.sort(rng.integers(0, len(text) + 1, 6)).tolist()
        spans.append([(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a])
    media = {int(tokenizer.convert_tokens_to_ids("<|im_end|>"))}
    counts = counter.count(texts, spans, media)
    for place, tokens in enumerate(map(tokenized, texts)):
        is_run = np.isin(tokens.ids, list(media))
        assert counts.tokens[place] == len(tokens.ids) and counts.runs[place] == is_run.sum()
        assert counts.trained[place] == (supervised_mask(tokens, spans[place]) & ~is_run)[1:].sum()


def test_an_unequal_counter_is_not_used(tokenizer: Any, monkeypatch: Any, caplog: Any) -> None:
    """A backend of other merges is found by the proof, and the next one takes over."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["merges"] = spec["model"]["merges"][:20_000]
    from tokenizers import Tokenizer

    class Other:
        backend_tokenizer = Tokenizer.from_str(json.dumps(spec))

    wrong = counters.OPENERS["words"]
    monkeypatch.setitem(counters.OPENERS, "words", lambda content, _: wrong(content, Other()))
    with caplog.at_level(logging.WARNING):
        assert open_counter("words", tokenizer, ["a b c"]) is None
    assert "counts other tokens than the tokenizer" in caplog.text


def test_which_tokenizers_are_left_alone(processor: Any, tokenizer: Any, monkeypatch: Any) -> None:
    assert open_counter("hf", tokenizer, []) is None
    with pytest.raises(UnknownNameError, match="text counter"):
        open_counter("fast", tokenizer, [])
    template = HFTemplate(processor("qwen2_vl"), text_counter="words")
    assert template.config() == HFTemplate(template.processor, text_counter="hf").config()

    def absent(*_: Any) -> None:
        raise ImportError

    monkeypatch.setitem(counters.OPENERS, "tiktoken", absent)
    with pytest.raises(MissingExtraError, match="tiktoken"):
        open_counter("tiktoken", tokenizer, [])
    from tokenizers import Tokenizer, models

    class WordLevel:
        backend_tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))

    assert open_counter("auto", WordLevel(), ["a"]) is None


def test_long_texts_in_pieces(tokenizer: Any) -> None:
    text = "".join(f"Line {i}: some words, 漢字 and\n\n  more.\nnext\n" for i in range(24_000))
    assert len(text) > 1_000_000
    (pieces,) = tokenize(tokenizer, [text], add_special_tokens=False)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    assert pieces.ids.tolist() == whole["input_ids"]
    assert pieces.offsets[::997].tolist() == [list(pair) for pair in whole["offset_mapping"][::997]]
    ranges = _cuts(text, 5000)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(text) and len(ranges) > 100
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
