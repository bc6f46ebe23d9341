"""write_report: one file, self-contained, escaped, small, deterministic, and true to the plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.report.html import write_report

LOSS = [(step, 8.0 / (1 + step / 20)) for step in range(1, 101)]


def write(path: Path, made: Any, **changes: Any) -> Path:
    lengths, plan, rows = made
    values: dict[str, Any] = {
        "title": "packtrain run",
        "stats": plan.stats(),
        "plan": plan,
        "lengths": lengths,
        "ledger_rows": rows,
        "loss": LOSS,
        "comparison": {"packed": 3.25, "unpacked": 3.2500001, "tolerance": 1e-4},
        "config": {"training": {"learning_rate": 1e-4, "hub_token": "hf_abcdef"}},
    }
    return write_report(path, **{**values, **changes})


def test_page_is_whole_and_loads_nothing(tmp_path: Path, made: Any, read_page: Any) -> None:
    page = read_page(write(tmp_path / "report.html", made()))
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "xlink:href", "style")]
    assert not re.search(r"https?:|url\(|@import", page.source)
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert len(page.pictures()) == 5
    assert "prefers-color-scheme: dark" in page.source


def test_figures_are_the_plans(tmp_path: Path, made: Any, read_page: Any) -> None:
    lengths, plan, rows = made()
    text = read_page(write(tmp_path / "report.html", (lengths, plan, rows))).text
    stats = plan.stats()
    assert (
        f"{stats['read']:,} read = {stats['samples']:,} packed + {stats['dropped']:,} in the ledger" in text
    )
    assert f"{stats['tokens']:,} real tokens in {stats['slots']:,} slots" in text
    assert f"{100 * stats['efficiency']:.1f} %" in text
    assert plan.checksum in text and lengths.digest in text and str(plan.packer) in text
    for reason, count in plan.ledger.counts().items():
        assert f"{reason} · {count}" in text
    for row in rows:
        assert f"{row['id']} {row['where']} {row['detail']}" in text
    assert "train loss 7.619 to 1.333 (-82.5 %) over 100 steps" in text
    assert "equal within tolerance" in text and "learning_rate: 0.0001" in text


def test_every_packed_sample_has_its_segment(tmp_path: Path, made: Any, read_page: Any) -> None:
    lengths, plan, rows = made()
    titles = " ".join(read_page(write(tmp_path / "report.html", (lengths, plan, rows))).words)
    found = {
        (int(i), int(t.replace(",", ""))) for i, t in re.findall(r"sample (\d+): ([\d,]+) tokens", titles)
    }
    assert found == {(i, int(lengths.tokens[i])) for i in plan.indices.tolist()}


def test_secrets_are_masked_and_lookalikes_kept(tmp_path: Path, made: Any) -> None:
    config = {
        "hub_token": "hf_abc",
        "push": [{"api_key": "k-123"}],
        "pad_token": "<pad>",
        "loss_reduction": "token",
    }
    text = write(tmp_path / "report.html", made(), config=config).read_text(encoding="utf-8")
    assert "hf_abc" not in text and "k-123" not in text
    assert "pad_token: &lt;pad&gt;" in text and "loss_reduction: token" in text


def test_nothing_from_a_sample_is_markup(tmp_path: Path, made: Any, read_page: Any) -> None:
    lengths, plan, rows = made()
    evil = "</td></svg><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'{{ 7 * 7 }}"
    rows = [{**row, "where": evil, "detail": evil} for row in rows]
    page = read_page(
        write(
            tmp_path / "report.html",
            (lengths, plan, rows),
            title=evil,
            config={evil: evil},
            loss={evil: LOSS},
            comparison={evil: evil},
            stats={evil: evil},
        )
    )
    assert not {"script", "img"} & set(page.tags)
    assert page.words.count(evil) >= 2 * len(rows) + 3
    assert len(page.pictures()) == 5


def test_equal_runs_give_equal_bytes(tmp_path: Path, made: Any) -> None:
    first = write(tmp_path / "a.html", made())
    assert write(tmp_path / "b.html", made()).read_bytes() == first.read_bytes()


def test_without_training_and_ledger(tmp_path: Path, read_page: Any) -> None:
    lengths = pt.Lengths([40] * 10)
    plan = pt.plan(lengths, pack_length=80)
    path = write(tmp_path / "r.html", (lengths, plan, []), loss=None, comparison=None, config=None)
    page = read_page(path)
    assert "Every sample that was read is in the plan." in page.text
    assert "provably the fewest: bound 5, gap 0" in page.text
    assert "Training" not in page.text and "Configuration" not in page.text
    assert len(page.pictures()) == 4


@pytest.mark.parametrize("tokens", [[7], [7, 0], [500], [1] * 3000])
def test_odd_plans(tmp_path: Path, read_page: Any, tokens: list[int]) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, pack_length=100)  # 500 is a single long pack
    assert read_page(write(tmp_path / "r.html", (lengths, plan, []))).pictures()


def test_plan_without_packs(tmp_path: Path, read_page: Any) -> None:
    lengths = pt.Lengths([0, 0])
    plan = pt.plan(lengths, pack_length=100)
    page = read_page(write(tmp_path / "r.html", (lengths, plan, [])))
    assert "empty · 2" in page.text and "2 samples, not listed here" in page.text


def test_large_plan_stays_small(tmp_path: Path, made: Any, read_page: Any) -> None:
    lengths, plan, rows = made(800_000, images=True)
    assert len(plan) > 80_000 and len(rows) > 10_000
    path = write(tmp_path / "r.html", (lengths, plan, rows), loss=[(k, 1 / k) for k in range(1, 100_001)])
    assert path.stat().st_size < 1_000_000
    page = read_page(path)
    assert f"60 of {len(plan):,} packs, evenly spaced" in page.text
    counts = plan.ledger.counts()
    assert f"and {counts['empty'] - 40:,} more" in page.text


def test_huge_packs_of_tiny_samples_stay_small(tmp_path: Path) -> None:
    lengths = pt.Lengths(np.ones(400_000, dtype=np.int32) * 3)
    plan = pt.plan(lengths, pack_length=16_384)
    path = write(tmp_path / "r.html", (lengths, plan, []))
    assert path.stat().st_size < 3_000_000


def test_saved_and_loaded_plan_gives_the_same_report(tmp_path: Path, made: Any) -> None:
    lengths, plan, rows = made()
    plan.save(tmp_path / "plan")
    lengths.save(tmp_path / "lengths")
    again = (pt.Lengths.load(tmp_path / "lengths"), pt.PackPlan.load(tmp_path / "plan"), rows)
    first, second = write(tmp_path / "a.html", (lengths, plan, rows)), write(tmp_path / "b.html", again)
    assert first.read_bytes() == second.read_bytes()
