"""write_report: one file, self-contained, escaped, small, deterministic, and true to the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import SampleError
from packtrain.report.contents import plan_words
from packtrain.report.html import write_report
from packtrain.report.numbers import Training, report_figures
from packtrain.report.plots import compact

HISTORY = [
    {
        "step": step,
        "loss": 8.0 / (1 + step / 20),
        "step_s": 0.5,
        "data_wait_s": 0.1,
        "tokens_per_s": 100 + step,
    }
    for step in range(1, 101)
]
OF_TRAINING = {"history": HISTORY, "comparison": {"packed": 3.25, "unpacked": 3.2500001, "tolerance": 1e-4}}


def write(path: Path, made: Any, training: Any = OF_TRAINING, **changes: Any) -> Path:
    lengths, plan, rows = made
    values: dict[str, Any] = {
        "title": "packtrain run",
        "plan": plan,
        "lengths": lengths,
        "ledger_rows": rows,
        "figures": report_figures(plan, lengths, Training(**training)),
        "config": {"training": {"learning_rate": 1e-4, "hub_token": "hf_abcdef"}},
    }
    return write_report(path, **{**values, **changes})


def test_page_is_whole_and_loads_nothing(tmp_path: Path, made: Any, read_page: Any) -> None:
    page = read_page(write(tmp_path / "report.html", made()))
    assert not {"link", "img", "iframe", "object", "image"} & set(page.tags)
    inside = [a for a in page.attributes if a[1] in ("src", "href", "srcset", "xlink:href")]
    assert all(str(value).startswith("#") for _, _, value in inside)
    assert not re.search(r"https?:|url\([^#]|@import", re.sub(r'xmlns="[^"]*"', "", page.source))
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert len(page.pictures()) == 6
    assert "prefers-color-scheme: dark" in page.source and "@media print" in page.source
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_page_holds_the_figures_that_it_shows(tmp_path: Path, made: Any, read_page: Any) -> None:
    """Bars, points and tables are those of its JSON."""
    lengths, plan, rows = made()
    page = read_page(write(tmp_path / "report.html", (lengths, plan, rows)))
    told = json.loads(re.search(r'id="figures">(.*?)</script>', page.source, re.S)[1])
    assert told == json.loads(json.dumps(report_figures(plan, lengths, Training(**OF_TRAINING))))
    titles = [title.text for svg in page.pictures() for title in svg.iter("title")]
    for name, unit in (("lengths", ""), ("fill", " %")):
        edges = told[name]["edges"]
        for part, counts in told[name]["counts"].items():
            for low, high, count in zip(edges, edges[1:], counts, strict=False):
                bar = f"{compact(low)} to {compact(high)}{unit}: {count:,} {part}"
                assert (bar in titles) == (count > 0)
    for name in ("loss", "step_s", "data_wait_s", "tokens_per_s"):
        assert len(told["curves"][name]) == 100
        assert all(f"{name}, step {x}: {y:.4g}" in titles for x, y in told["curves"][name])
    for row in told["classes"]:
        assert f"{row['class']} {row['samples']:,} {row['tokens']:,}" in page.text
    for key in ("capped", "batched", "packed"):
        assert f"{told['slots'][key]:,} slots" in page.text


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
        assert f"{row['id']} {row['where']}" in text and row["detail"] in text
    assert "train loss 7.619 to 1.333 (-82.5 %) over 100 steps" in text
    assert "equal within tolerance" in text and "learning_rate: 0.0001" in text


def test_every_pack_names_its_samples_and_their_lengths(tmp_path: Path, made: Any, read_page: Any) -> None:
    lengths, plan, rows = made()
    page = read_page(write(tmp_path / "report.html", (lengths, plan, rows), artefact="runs/a"))
    tips = [word for word in page.words if re.match(r"pack \d+: ", word)]
    assert len(tips) == len(plan)
    for k, tip in enumerate(tips):
        ids = plan[k].tolist()
        head = f"pack {k}: {int(plan.pack_tokens[k]):,} of 1,024 tokens, {len(ids):,} sample"
        assert tip.startswith(head)
        found = re.findall(r"(\d+) \(([\d,]+)\)", tip)
        assert found == [(str(i), f"{int(lengths.tokens[i]):,}") for i in ids[:24]]
        assert (f"and {len(ids) - 24} more" in tip) == (len(ids) > 24)
    assert "packtrain show runs/a --sample ID" in page.text


def test_records_are_on_the_page_until_it_would_grow_too_large(
    tmp_path: Path, made: Any, read_page: Any
) -> None:
    lengths, plan, rows = made(1000)
    asked: list[int] = []

    def record(i: int) -> str:
        asked.append(i)
        if i == rows[0]["id"]:
            raise SampleError("broken", "line 3 is broken")
        return f"<record {i}> " + "x" * 700

    page = read_page(
        write(tmp_path / "r.html", (lengths, plan, rows), where=lambda i: f"a.jsonl:{i}", record=record)
    )
    assert len(asked) == 400 and {row["id"] for row in rows} <= set(asked)
    shown = [word for word in page.words if word.startswith("<record ")]
    assert len(shown) == len(asked) - 1 and all("more characters" in word for word in shown)
    assert "line 3 is broken" in page.words
    assert f"a.jsonl:{int(plan.indices[0])}" in page.words


def test_the_validation_plan_has_its_lines(tmp_path: Path, made: Any, read_page: Any) -> None:
    """As the table of the run tells them; a plan without validation samples has none."""
    held = made()
    plan = held[1]
    validation = {**plan.stats(), "packing_length": plan.spec.pack_length, "fill": 0.987654}
    page = read_page(write(tmp_path / "r.html", held, {**OF_TRAINING, "validation": validation}))
    assert "Validation plan" in page.words
    assert {words for _, words in plan_words(validation)} <= set(page.words)
    assert "98.77% of slots" in page.text
    assert "Validation plan" not in read_page(write(tmp_path / "n.html", held)).words


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
            artefact=evil,
            where=lambda i: evil,
            record=lambda i: evil,
            training={"history": [{"step": 1, f"eval_{evil}_loss": 2.0}], "comparison": {evil: evil}},
        )
    )
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert page.words.count(evil) >= 2 * len(rows) + 3
    assert len(page.pictures()) == 3


def test_equal_runs_give_equal_bytes(tmp_path: Path, made: Any) -> None:
    first = write(tmp_path / "a.html", made())
    assert write(tmp_path / "b.html", made()).read_bytes() == first.read_bytes()


def test_without_training_and_ledger(tmp_path: Path, read_page: Any) -> None:
    lengths = pt.Lengths([40] * 10)
    plan = pt.plan(lengths, pack_length=80)
    path = write(tmp_path / "r.html", (lengths, plan, []), training={}, config=None)
    page = read_page(path)
    assert "Every sample that was read is in the plan." in page.text
    assert "provably the fewest: bound 5, gap 0" in page.text
    assert "Training" not in page.text and "Configuration" not in page.text
    assert len(page.pictures()) == 2


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
    long = [{"step": k, "loss": 1 / k} for k in range(1, 20_001)]
    path = write(tmp_path / "r.html", (lengths, plan, rows), training={"history": long})
    assert path.stat().st_size < 3_000_000
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
