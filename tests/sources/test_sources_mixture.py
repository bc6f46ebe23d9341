"""Several sources as one, by fixed weights."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError, SourceError, UnknownNameError
from packtrain.extend import Source
from packtrain.media.location import media_refs
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.sources.mixture import Mixture, Part, mix

Write = Callable[..., Path]


class Numbers:
    folder = "/media"

    def __init__(self, size: int, name: str = "n") -> None:
        self.size, self.fingerprint = size, f"{name}{size}"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"n": index, "of": self.fingerprint}

    def where(self, index: int) -> str:
        return f"{self.fingerprint}:{index}"


def chats(name: str, count: int) -> list[dict[str, Any]]:
    return [{"instruction": f"{name}{n}?", "output": "b"} for n in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 4)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_every_sample_its_times(parts: list[tuple[int, float]], seed: int, shuffle: bool) -> None:
    """Whole repeats hold every sample; the rest is a subset without doubles; every id is one place."""
    parts = [(size, weight) for size, weight in parts if int(size * weight + 0.5)]
    if not parts:
        return
    mixture = mix(
        [Numbers(s, str(i)) for i, (s, _) in enumerate(parts)],
        [w for _, w in parts],
        seed=seed,
        shuffle=shuffle,
    )
    places = [mixture.place(index) for index in range(len(mixture))]
    assert len(set(places)) == len(places)
    for number, (size, weight) in enumerate(parts):
        times = Counter(row for part, row, _ in places if part == number)
        count = int(size * weight + 0.5)
        assert sum(times.values()) == count == mixture.parts[number].count
        low = count // size
        assert all(times[row] in (low, low + 1) for row in range(size))
    if not shuffle:
        assert [part for part, _, _ in places] == sorted(part for part, _, _ in places)


def test_the_order_is_seeded() -> None:
    sources = [Numbers(50, "a"), Numbers(30, "b")]
    orders = {seed: [m["n"] for m in mix(sources, seed=seed)] for seed in (0, 0, 1)}
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert [m["n"] for m in mix(sources, shuffle=False)] == [*range(50), *range(30)]
    prints = {mix(sources, seed=s, shuffle=h).fingerprint for s in (0, 1) for h in (True, False)}
    assert len(prints) == 4
    assert mix(sources, [1, 2]).fingerprint != mix(sources).fingerprint
    golden = mix([Numbers(5, "a"), Numbers(3, "b")], [1, 2], seed=42)
    assert sorted((m["of"], m["n"]) for m in golden) == sorted(
        [("a5", n) for n in range(5)] + [("b3", n) for n in (0, 1, 2)] * 2
    )


def test_a_mixture_file(write: Write, tmp_path: Path) -> None:
    write("a/a.jsonl", chats("a", 10))
    write("b.json", [{"q": "<img>b?", "r": "b", "pics": ["1.jpg"]}] * 4)
    spec = {
        "seed": 3,
        "sources": [
            {"path": "a/a.jsonl", "weight": 1.5},
            {
                "path": "b.json",
                "name": "pictures",
                "samples": 6,
                "chat": {
                    "columns": {"prompt": "q", "response": "r", "images": "pics"},
                    "placeholders": ["<img>"],
                },
            },
        ],
    }
    path = write("mix.yaml", yaml.safe_dump(spec).encode())
    mixture = open_source(path)
    assert isinstance(mixture, Mixture) and isinstance(mixture, Source)
    assert len(mixture) == 15 + 6 and [part.name for part in mixture.parts] == ["a.jsonl", "pictures"]
    chat = ChatSource(mixture)
    found = Counter()
    for index in range(len(chat)):
        sample = chat[index]
        found[len(media_refs(sample))] += 1
        assert sample["messages"][1]["content"][0]["text"] == "b"
        assert media_refs(sample) in ([], [str(tmp_path / "1.jpg")])
    assert found == {0: 15, 1: 6}
    wheres = [mixture.where(i) for i in range(len(mixture))]
    assert "pictures: b.json[0]" in wheres and "a.jsonl: a.jsonl:1" in wheres
    assert sum("(repeat 1)" in where for where in wheres) == 5 + 2
    again = pickle.loads(pickle.dumps(chat))
    assert [again[i] for i in range(21)] == [chat[i] for i in range(21)]
    assert again.fingerprint == chat.fingerprint
    json.dumps(chat.fields())
    as_json = write("mix.json", json.dumps(spec).encode())
    assert open_source(as_json).fingerprint == mixture.fingerprint


def test_placeholders_are_not_read_twice(write: Write) -> None:
    write("a.jsonl", [{"instruction": "what is <image>?", "output": "b"}])
    spec = {"sources": [{"path": "a.jsonl", "chat": {"placeholders": []}}]}
    chat = ChatSource(open_source(write("m.yaml", yaml.safe_dump(spec).encode())))
    assert chat[0]["messages"][0]["content"] == [{"type": "text", "text": "what is <image>?"}]
    first = chat[0]
    first["messages"][0]["content"].clear()
    assert chat[0]["messages"][0]["content"]


def test_containment_holds_for_mixtures(write: Write, tmp_path: Path) -> None:
    write("a.jsonl", [{"instruction": "<image>", "output": "b", "image": "/elsewhere/1.jpg"}])
    mixture = open_source(write("m.yaml", b"sources: [a.jsonl]"))
    assert media_refs(ChatSource(mixture)[0]) == ["/elsewhere/1.jpg"]
    with pytest.raises(SampleError) as error:
        ChatSource(mixture, media_root=tmp_path)[0]
    assert error.value.reason == "outside_media_root"


def test_real_sets_mix(data: Path, write: Write) -> None:
    spec = {
        "sources": [
            {"path": str(data / "detection/lvis_val_100.json"), "weight": 2},
            {"path": str(data / "text_sft/alpaca_en_demo.json"), "samples": 100},
            {"path": str(data / "mllm_demo/mllm_video_audio_demo.json")},
            {"path": str(data / "audio"), "samples": 5},
        ]
    }
    mixture = open_source(write("m.yaml", yaml.safe_dump(spec).encode()))
    assert len(mixture) == 308
    kinds: Counter[str] = Counter()
    for index in range(len(mixture)):
        try:
            sample = mixture[index]
        except SampleError:
            continue
        kinds.update({part["type"] for message in sample["messages"] for part in message["content"]})
    assert kinds["image"] == 200 and kinds["video"] == 3 and kinds["text"] >= 300


def test_mixtures_nest_but_not_in_circles(write: Write) -> None:
    write("a.jsonl", chats("a", 4))
    write("inner.yaml", b"sources: [a.jsonl]")
    outer = open_source(write("outer.yaml", b"sources: [{path: inner.yaml, weight: 2}, a.jsonl]"))
    assert len(outer) == 12
    with pytest.raises(ConfigError, match="holds itself"):
        open_source(write("self.yaml", b"sources: [self.yaml]"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sources: []", "not a list of sources"),
        ("- a.jsonl", "no mixture"),
        ("sources: [{weight: 1}]", "has no path"),
        ("sources: [{path: a.jsonl, wieght: 1}]", "'wieght'.*did you mean 'weight'"),
        ("sources: [{path: a.jsonl, weight: 0}]", "weight is 0"),
        ("sources: [{path: a.jsonl, weight: .nan}]", "weight is nan"),
        ("sources: [{path: a.jsonl, weight: 0.01}]", "leaves none of its 4"),
        ("sources: [{path: a.jsonl, weight: yes}]", "weight is True"),
        ("sources: [{path: a.jsonl, samples: 2.5}]", "samples is 2.5"),
        ("sources: [{path: a.jsonl, weight: 1, samples: 2}]", "weight and a number"),
        ("sources: [a.jsonl, a.jsonl]", "two sources named"),
        ("sources: [a.jsonl]\nseed: -1", "seed is -1"),
        ("sources: [a.jsonl]\nresample: true", "static plan"),
        ("sources: [{path: a.jsonl, temperature: 2}]", "static plan"),
        ("sources: [a.jsonl]\nshuffle: 1", "shuffle is 1"),
        ("sources: [{path: a.jsonl, chat: [x]}]", "chat is list"),
        ("sources: [", "not valid"),
        ("sources: [{path: a.jsonl, options: {cach_dir: x}}]", "no option 'cach_dir'"),
    ],
)
def test_bad_mixtures(write: Write, spec: str, message: str) -> None:
    write("a.jsonl", chats("a", 4))
    with pytest.raises(ConfigError, match=message):
        open_source(write("m.yaml", spec.encode()))


def test_missing_sources(write: Write, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        open_source(write("m.yaml", b"sources: [none.jsonl]"))
    with pytest.raises(SourceError, match="cannot be opened"):
        open_source(tmp_path / "none.yaml")
    write("a.jsonl", chats("a", 1))
    with pytest.raises(UnknownNameError):
        open_source(write("k.yaml", b"sources: [{path: a.jsonl, kind: josnl}]"))
    with pytest.raises(SourceError):
        Mixture([])
    with pytest.raises(ConfigError):
        mix([Numbers(1)], [1, 2])
    assert len(Mixture([Part("a", Numbers(3), 7)])) == 7


def test_a_key_of_chats_beside_the_path_is_told_with_its_place(write: Write) -> None:
    """Every keyword of `ChatSource`; what the hint says opens."""
    write("a.jsonl", chats("a", 4))
    for key, value in (
        ("media_root", "."),
        ("columns", "{}"),
        ("allow_remote", "true"),
        ("ignore_keys", "[x]"),
    ):
        wrong = f"sources: [{{path: a.jsonl, {key}: {value}}}]".encode()
        with pytest.raises(ConfigError, match=f"unknown key '{key}'") as refused:
            open_source(write("m.yaml", wrong))
        assert refused.value.hint == f"write it under chat: {{{key}: …}}"
        right = f"sources: [{{path: a.jsonl, chat: {{{key}: {value}}}}}]".encode()
        assert len(open_source(write("n.yaml", right))) == 4
    with pytest.raises(ConfigError, match="expected an integer") as refused:
        open_source(write("p.yaml", b"sources: [{path: a.jsonl, samples: 0.5}]"))
    assert refused.value.hint == "a part of them is a weight"
    assert len(open_source(write("q.yaml", b"sources: [{path: a.jsonl, weight: 0.5}]"))) == 2
