"""Foreign bytes, damaged in every way: errors of packtrain or the truth, in bounded time and memory."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
from edits import edited, text
from foreign import READERS, VALUES
from limits import bounded, damaged, rounds

from packtrain.template.account import Piece
from packtrain.template.marked import Placed
from packtrain.template.skeleton import _SLOT, cut, slot
from packtrain.template.turns import Span, check_spans, owners_of, without_media


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", sorted(READERS))
def test_damaged_bytes(name: str, tmp_path: Path) -> None:
    reader = READERS[name]()
    for seed in reader.seeds:
        reader.read(seed, tmp_path)  # imports and tables that are made once
        with bounded():
            reader.read(seed, tmp_path)
    assert rounds(lambda data: reader.read(data, tmp_path), damaged(reader.seeds)) >= 40


@pytest.mark.parametrize("name", sorted(VALUES))
def test_edited_values(name: str, tmp_path: Path) -> None:
    """Whole JSON and YAML with a value of another kind somewhere, which damaged bytes seldom make."""
    reader = READERS[name]()
    reader.read(reader.seeds[0], tmp_path)
    assert rounds(lambda value: reader.read(text(value), tmp_path), edited(VALUES[name]())) >= 40


NAMES = [f"k{number}" for number in range(60_000)]
KEYS = ", ".join(f'"{name}": 1' for name in NAMES)
MANY = {
    "jsonl": [f"{{{KEYS}}}\n", f'{{{KEYS}, "k59999": 2}}\n'],
    "json": [f"[{{{KEYS}}}]", f'[{{{KEYS}, "k59999": 2}}]'],
    "coco": [f'{{"images": [], "annotations": [], "categories": [], {KEYS}}}'],
    "mixture": [
        "sources:\n" + "".join(f"- {{path: a.jsonl, name: {name}}}\n" for name in [*NAMES[:20_000], "k19999"])
    ],
    "config": ["\n".join(f"{name}: 1" for name in [*NAMES, "k59999"])],
    "lengths.csv": [",".join(NAMES) + "\n" + "1," * len(NAMES) + "\n", "tokens\n" + "1\n" * 100_000],
    "lengths.json": [f"[{{{KEYS}}}]", json.dumps([{"tokens": 1, name: 1} for name in NAMES])],
    "lengths.jsonl": [f"{{{KEYS}}}\n", "".join(f'{{"tokens": 1, "{name}": 1}}\n' for name in NAMES)],
}


@pytest.mark.parametrize("name", sorted(MANY))
def test_names_by_the_ten_thousand(name: str, tmp_path: Path) -> None:
    """All different, which pieces put in again and again never are: none is looked for among all others."""
    reader = READERS[name]()
    reader.read(reader.seeds[0], tmp_path)
    for held in MANY[name]:
        with bounded():
            reader.read(held.encode(), tmp_path)


def test_turns_by_the_ten_thousand() -> None:
    """Where the turns of a long conversation stand is found without a look at all others for each."""
    turns = range(30_000)
    text = "".join(f"<u>{slot(2 * n)}</u><a>{slot(2 * n + 1)}</a>" for n in turns)
    ends = list(accumulate(len(f"<u>{slot(2 * n)}</u><a>{slot(2 * n + 1)}</a>") for n in turns))
    ranges = [(end - len(f"{slot(2 * n + 1)}</a>"), end) for n, end in zip(turns, ends, strict=True)]
    spans = [Span(a, b, 2 * n + 1) for n, (a, b) in enumerate(ranges)]
    leaves = tuple(Piece("text", n, ("user", "assistant")[n % 2], ("t",)) for n in range(2 * len(turns)))
    where = sorted((found.start(), found.end(), int(found[1])) for found in _SLOT.finditer(text))
    placed = Placed(text, leaves, tuple(where))
    with bounded():
        skeleton = cut(text, ranges)
        check_spans(spans, placed, {2 * n + 1 for n in turns}, "this")
        owners = owners_of([(a, b) for a, b in ranges[1:]], [{"role": "user"}] * len(leaves), placed)
        shorter = without_media(spans, text, re.compile("</a>"))
    assert skeleton is not None and skeleton.fill(["x"] * len(leaves))[0] == "<u>x</u><a>x</a>" * len(turns)
    assert [span.owner for span in owners] == [span.owner for span in spans[1:]]
    assert [(span.first, span.last) for span in shorter] == [(a, b - 4) for a, b in ranges]
