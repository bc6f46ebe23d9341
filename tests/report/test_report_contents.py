"""Figures, histograms and pictures against plain loops."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.report import contents, plots
from packtrain.report.numbers import fill_histogram, length_histogram, token_slots
from packtrain.report.svg import Canvas, compact, ticks

lengths_of = st.lists(st.integers(0, 300), min_size=1, max_size=60)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 200))
def test_token_slots_are_what_a_plain_loop_counts(tokens: list[int], cap: int) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, pack_length=cap)
    slots = token_slots(lengths.tokens, plan)
    mine = [t for t in tokens if t > 0]
    assert slots.real == sum(mine)
    assert slots.capped == sum(max(t, cap) for t in mine)
    rows = [mine[k : k + slots.batch] for k in range(0, len(mine), slots.batch)]
    assert slots.batched == sum(max(row) * len(row) for row in rows)
    assert slots.packed == plan.stats()["slots"]
    assert slots.real <= slots.batched and slots.real <= slots.packed <= max(slots.capped, slots.packed)


@settings(deadline=None)
@given(lengths_of, st.integers(1, 200))
def test_histograms_hold_every_sample_and_pack(tokens: list[int], cap: int) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, pack_length=cap, long_samples="drop")
    found = length_histogram(lengths, plan)
    assert found.parts["packed"].sum() == len(plan.indices)
    assert found.parts["ledger"].sum() == sum(t > cap for t in tokens)
    assert found.beyond == (max(tokens) > found.edges[-1])
    fill = fill_histogram(plan)
    assert fill.parts["packed"].sum() == len(plan)
    assert fill.edges[0] >= 0 and fill.edges[-1] >= 100


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_round_few_and_inside(low: float, span: float, about: int) -> None:
    found = ticks(low, low + span, about)
    assert len(found) <= about * 4 / 3 + 2
    slack = span * 1e-6 + 1e-9 * (abs(low) + span)
    assert all(low - slack <= value <= low + span + slack for value in found)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("value", "scale", "words"),
    [(0, None, "0"), (1200, None, "1,200"), (34_000, None, "34k"), (5000, 2e4, "5k"), (2.5e9, None, "2.5G")],
)
def test_compact(value: float, scale: float | None, words: str) -> None:
    assert compact(value, scale) == words


def test_percent_never_rounds_up_to_all() -> None:
    assert [contents.percent(x) for x in (0.9996, 1.0, 0.974, 0.0)] == [
        "99.9 %",
        "100.0 %",
        "97.4 %",
        "0.0 %",
    ]


def test_curves_of_every_form() -> None:
    log = [{"loss": 5.0, "step": 1}, {"eval_loss": 4.0, "step": 1}, {"train_runtime": 3.0, "step": 1}]
    assert contents.curves(log) == {"train": [(1.0, 5.0)], "eval": [(1.0, 4.0)]}
    assert contents.curves([(1, 2), (2, 1)]) == {"train": [(1.0, 2.0), (2.0, 1.0)]}
    assert contents.curves({"train": [(1, 2)], "eval": []}) == {"train": [(1.0, 2.0)]}
    assert contents.curves(None) == {} and contents.curves([]) == {}


def test_curve_with_values_that_are_not_finite() -> None:
    svg = plots.curve({"train": [(1, math.nan), (2, 3.0), (3, math.inf)]}, label="loss")
    assert "nan" not in svg and "inf" not in svg
    ET.fromstring(svg)
    assert "no finite loss" in plots.curve({"train": [(1, math.nan)]}, label="loss")
    ET.fromstring(plots.curve({"train": [(1, 2.0)]}, label="loss"))
    ET.fromstring(plots.curve({"train": [(1, -2.0), (5, -3.0)]}, label="loss"))


def test_thinned_curve_keeps_ends_and_mean() -> None:
    points = [(float(k), float(k % 7)) for k in range(10_000)]
    found = plots.thin(points, 100)
    assert len(found) == 100 and found[0] == points[0] and found[-1] == points[-1]
    assert np.mean([y for _, y in found]) == pytest.approx(np.mean([y for _, y in points]), rel=0.01)


def test_comparison() -> None:
    found = contents.comparison_rows({"packed": 2.0, "unpacked": 2.5, "tolerance": 1e-4})
    assert found is not None and found["holds"] is False
    assert dict(found["rows"])["difference"] == "0.5"
    unknown = contents.comparison_rows({"packed": 2.0, "unpacked": 2.0})
    assert unknown is not None and unknown["holds"] is None
    assert contents.comparison_rows(None) is None


def test_comparison_that_is_not_a_number_does_not_hold() -> None:
    found = contents.comparison_rows({"packed": math.nan, "unpacked": 2.0, "tolerance": 1e-4})
    assert found is not None and found["holds"] is False


def test_ledger_counts_are_the_plans_even_when_rows_are_few(made: Any) -> None:
    _, plan, rows = made(2000)
    groups = contents.ledger_groups(plan, rows[:3])
    assert {group["reason"]: group["count"] for group in groups} == plan.ledger.counts()
    assert sum(len(group["rows"]) + group["rest"] for group in groups) == len(plan.ledger.ids)


def test_long_details_are_cut_and_say_so(made: Any) -> None:
    _, plan, rows = made()
    (group, *_) = contents.ledger_groups(plan, [{**row, "detail": "x" * 5000} for row in rows])
    assert group["rows"][0]["detail"].endswith("… (4,600 more characters)")


def test_segments_fill_their_packs(made: Any) -> None:
    """Widths of a pack's segments add up to its tokens, thin ones joined."""
    lengths, plan, _ = made(3000, cap=20_000)
    svg = ET.fromstring(plots.packs(plan, lengths.tokens, lambda i: "k", lambda i: ""))
    rows: dict[str, float] = {}
    for rect in svg.iter("rect"):
        if str(rect.get("class")).startswith("seg"):
            rows[str(rect.get("y"))] = rows.get(str(rect.get("y")), 0.0) + float(str(rect.get("width")))
    wanted = [884 * int(t) / 20_000 for t in plan.pack_tokens[plots.chosen_packs(len(plan))]]
    assert list(rows.values()) == pytest.approx(wanted, abs=0.06 * 300)
    assert re.search(r"samples \d+ to \d+: \d+ samples", ET.tostring(svg, encoding="unicode"))


def test_canvas_escapes() -> None:
    canvas = Canvas(10, 10, 'a "<b>')
    canvas.text(0, 0, "<script>")
    canvas.rect(0, 0, 1, 1, "k", title="</title>&")
    assert ET.fromstring(canvas.render()).get("aria-label") == 'a "<b>'


@pytest.mark.spec(
    "003",
    "hash buckets and phases in the report of a run",
    key="`report.html`",
    api="`report.html.write_report`",
)
def test_length_classes_and_phases_in_their_order() -> None:
    lengths = pt.Lengths([64] * 8 + [33] * 5 + [32] * 4 + [20] * 6 + [1] * 16)
    told = contents.buckets(pt.plan(lengths, pack_length=64, packer="diverse"), lengths)
    assert told["classes"][0] == ("33 - 64", "13", "677", "33.3 %")
    assert [row[0] for row in told["phases"]] == ["powers", "seeds", "rest", "finalise"]
    assert sum(int(row[2]) for row in told["phases"]) == 39
    assert contents.buckets(pt.plan(lengths, pack_length=64), lengths)["phases"] == []
