"""Real plans of made-up lengths, and a strict reader of report pages."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == [], f"unclosed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def pictures(self) -> list[ET.Element]:
        """Every inline SVG, parsed as XML."""
        return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.source, re.S)]


@pytest.fixture
def read_page() -> Any:
    def read(path: Path) -> Page:
        return Page(path.read_text(encoding="utf-8"))

    return read


@pytest.fixture(scope="session")
def made() -> Any:
    """(lengths, plan, ledger rows) of n samples; some empty, some without their media, some too long."""

    def make(n: int = 300, cap: int = 1024, seed: int = 0, images: bool = True) -> Any:
        rng = np.random.default_rng(seed)
        tokens = np.exp(rng.normal(4.6, 0.8, n)).astype(np.int64) + 4
        status = np.zeros(n, dtype=np.uint8)
        status[5::50], status[7::60] = 1, 2
        tokens[status > 0] = 0
        tokens[11::70] = cap + 5
        status[11::70] = 0
        reasons = {int(i): "missing_media" for i in np.nonzero(status == 2)[0]}
        costs = {"images": rng.integers(0, 4, n)} if images else None
        lengths = pt.Lengths(tokens, costs=costs, status=status, reasons=reasons)
        plan = pt.plan(lengths, pack_length=cap, long_samples="drop", long_rule=">=")
        rows = [
            {"id": i, "reason": reason, "where": f"train.jsonl:{i + 1}", "detail": f"detail of {i}"}
            for i, reason in plan.ledger
        ]
        return lengths, plan, rows

    return make
