"""Figures, histograms and pictures against plain loops."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.pipeline.page import training_of
from packtrain.report import contents, html, plots
from packtrain.report.numbers import (
    Training,
    curves,
    fill_histogram,
    length_histogram,
    report_figures,
    token_slots,
)

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
    assert slots.packed == slots.real <= slots.batched  # rows are as long as their packs
    assert slots.filled == plan.stats()["slots"] >= slots.real
    longest = int(plan.pack_tokens.max(initial=1))
    assert token_slots(lengths.tokens, plan, longest).packed == len(plan) * longest


@pytest.mark.parametrize(
    ("options", "padded_to", "packed", "saved", "words"),
    [
        ({}, None, 210, 0.4167, "packed, rows are not padded"),
        ({}, 120, 240, 0.3333, "packed, rows are padded to 120 tokens"),
        ({"multiple_of": 8}, None, 224, 0.3778, "packed, rows are not padded"),
    ],
)
def test_card_bar_and_figures_share_one_count_of_slots(
    options: dict[str, int], padded_to: int | None, packed: int, saved: float, words: str
) -> None:
    """Samples of 100, 20, 80 and 10 tokens in packs of 128; batches of two rows take 360 slots."""
    lengths = pt.Lengths([100, 20, 80, 10])
    plan = pt.plan(lengths, pack_length=128, **options)
    assert len(plan) == 2
    figures = report_figures(plan, lengths, Training(padded_to=padded_to))
    told = figures["slots"]
    assert (told["real"], told["packed"], told["batched"], told["filled"]) == (210, packed, 360, 256)
    assert told["saved_batched"] == 1 - packed / 360 == pytest.approx(saved, abs=1e-4)
    bar = contents.slot_rows(told)[-1]
    assert bar["name"] == words
    assert bar["note"].startswith(f"{packed} slots, {contents.percent(1 - 210 / packed)} padding")
    assert ("padded to the pack length: 256 slots" in bar["note"]) == (padded_to is None)
    (card,) = (tile for tile in contents.headline(figures) if tile["name"] == "Padding saved")
    assert card["value"] == contents.percent(saved) and words.removeprefix("packed, ") in card["note"]


@pytest.mark.parametrize("padded", [10**40, 1 << 63, -1, 0, True, 120.0, "120", [120], {}])
def test_an_edited_padded_length_of_a_run_is_none(padded: Any) -> None:
    lengths = pt.Lengths([100, 20, 80, 10])
    plan = pt.plan(lengths, pack_length=128)
    run = training_of({}, {"padded_to": padded}, [])
    assert report_figures(plan, lengths, run)["slots"]["packed"] == 210


def test_medians_of_even_counts_are_means_of_the_middle_two() -> None:
    rows = [{"step": k, "step_s": s, "tokens_per_s": t} for k, (s, t) in enumerate([(8.0, 128), (4.0, 256)])]
    assert contents.speed_words(curves(rows)) == "6 s, 192 tokens a second (medians)"
    lengths = pt.Lengths([1, 2, 5, 9])
    assert report_figures(pt.plan(lengths, 9), lengths)["sample_tokens"]["median"] == 3.5


@settings(deadline=None)
@given(lengths_of, st.integers(1, 200))
def test_histograms_hold_every_sample_and_pack_in_its_bin(tokens: list[int], cap: int) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, pack_length=cap, long_samples="drop")
    kept = pt.plan(lengths, pack_length=cap)
    fills = [int(t) * 100 / cap for t in kept.pack_tokens]
    over = [t for t in tokens if t > cap]
    packed = [t for t in tokens if 0 < t <= cap]
    for found, parts in (
        (length_histogram(lengths, plan), {"packed": packed, "ledger": over}),
        (fill_histogram(kept), {"packs": fills}),
    ):
        told = found.to_dict()
        for name, values in parts.items():
            bins = [*zip(told["edges"], told["edges"][1:], strict=False)]
            for k, (low, high) in enumerate(bins):
                last = k == len(bins) - 1
                inside = sum(low <= v < high or (last and v == high) for v in values)
                assert told["counts"][name][k] == inside
            bins = [*zip(told["over_edges"], told["over_edges"][1:], strict=False)]
            for k, (low, high) in enumerate(bins):
                assert told["over_counts"][name][k] == sum(low < v <= high for v in values)
            counted = sum(told["counts"][name]) + sum(told["over_counts"].get(name, []))
            assert counted == len(values)
    assert sum(fill_histogram(kept).to_dict()["over_counts"].get("packs", [])) == len(over)


@pytest.mark.parametrize(
    ("value", "scale", "words"),
    [(0, None, "0"), (1200, None, "1,200"), (34_000, None, "34k"), (5000, 2e4, "5k"), (2.5e9, None, "2.5G")],
)
def test_compact(value: float, scale: float | None, words: str) -> None:
    assert plots.compact(value, scale) == words


def test_percent_never_rounds_up_to_all() -> None:
    assert [contents.percent(x) for x in (0.9996, 1.0, 0.974, 0.0)] == [
        "99.9 %",
        "100.0 %",
        "97.4 %",
        "0.0 %",
    ]


def test_curves_are_the_rows_of_a_log() -> None:
    log = [
        {"n_raw_packs": 3},
        {"loss": 5.0, "step": 1, "step_s": 0.5, "data_wait_s": 0.1, "tokens_per_s": 90, "grad_norm": 1.0},
        {"eval_loss": 4.0, "eval_b_loss": 3.0, "step": 1, "eval_packs": 3},
        {"loss": math.nan, "step": 2, "step_s": 0.25},
        {"train_runtime": 3.0, "train_loss": 2.0, "step": 2},
    ]
    assert curves(log) == {
        "loss": [[1, 5.0]],
        "step_s": [[1, 0.5], [2, 0.25]],
        "data_wait_s": [[1, 0.1]],
        "tokens_per_s": [[1, 90.0]],
        "eval_loss": [[1, 4.0]],
        "eval_b_loss": [[1, 3.0]],
    }
    assert curves(None) == {} and curves([]) == {}


@pytest.mark.parametrize(
    "points", [[(1, 2.0)], [(1, -2.0), (5, -3.0)], [(k, 1.0 / (k + 1)) for k in range(999)]]
)
def test_curves_are_whole_svg_with_named_axes(points: Any) -> None:
    svg = plots.curve({"loss": points}, label="Loss over steps", y_label="loss a token")
    words = [text.text for text in ET.fromstring(svg).iter("text")]
    assert {"optimizer step", "loss a token"} <= set(words)
    titles = [title.text for title in ET.fromstring(svg).iter("title")]
    assert titles == ([] if len(points) > 120 else [f"loss, step {x}: {y:.4g}" for x, y in points])
    assert svg == plots.curve({"loss": points}, label="Loss over steps", y_label="loss a token")


def test_nothing_of_a_name_is_markup() -> None:
    evil = "</title><script>&"
    svg = plots.curve({evil: [(1, 2.0), (2, 1.0)]}, label=evil, y_label=evil)
    assert "<script>" not in svg and ET.fromstring(svg).get("aria-label") == evil
    assert f"{evil}, step 1: 2" in [title.text for title in ET.fromstring(svg).iter("title")]


def test_thinned_curve_keeps_ends_and_mean() -> None:
    points = [(float(k), float(k % 7)) for k in range(10_000)]
    found = plots.thin(points, 100)
    assert len(found) == 100 and found[0] == points[0] and found[-1] == points[-1]
    assert np.mean([y for _, y in found]) == pytest.approx(np.mean([y for _, y in points]), rel=0.01)


def test_comparison() -> None:
    found = contents.comparison_rows({"packed": 2.0, "unpacked": 2.5, "tolerance": 1e-4})
    assert found is not None and found["holds"] is False
    assert dict(found["rows"])["difference"] == "-0.5"
    unknown = contents.comparison_rows({"packed": 2.0, "unpacked": 2.0})
    assert unknown is not None and unknown["holds"] is None
    assert contents.comparison_rows(None) is None


def test_comparison_that_is_not_a_number_does_not_hold() -> None:
    found = contents.comparison_rows({"packed": math.nan, "unpacked": 2.0, "tolerance": 1e-4})
    assert found is not None and found["holds"] is False


def test_ledger_counts_are_the_plans_even_when_rows_are_few(made: Any) -> None:
    _, plan, rows = made(2000)
    groups = contents.ledger_groups(plan.ledger.counts(), rows[:3], str)
    assert {group["reason"]: group["count"] for group in groups} == plan.ledger.counts()
    assert sum(len(group["rows"]) + group["rest"] for group in groups) == len(plan.ledger.ids)


def test_long_details_are_cut_and_say_so(made: Any) -> None:
    _, plan, rows = made()
    told = [{**row, "detail": "x" * 5000} for row in rows]
    (group, *_) = contents.ledger_groups(plan.ledger.counts(), told, str)
    assert group["rows"][0]["detail"].endswith("… (4,600 more characters)")


def rows_of(plan: Any, lengths: Any) -> dict[str, Any]:
    return html.pack_rows(plan, lengths.tokens, lambda i: "k", lambda i: "", str, str)


def test_segments_fill_their_packs(made: Any) -> None:
    """Widths of a pack's segments add up to its tokens; those too thin to see are joined."""
    lengths, plan, _ = made(3000, cap=20_000)
    found = rows_of(plan, lengths)
    assert found["cap"] == 100
    assert [row["pack"] for row in found["rows"]] == html.chosen_packs(len(plan))
    for row in found["rows"]:
        widths = [float(part["width"]) for part in row["segments"]]
        assert sum(widths) == pytest.approx(
            100 * int(plan.pack_tokens[row["pack"]]) / 20_000, abs=0.005 * len(widths)
        )
        assert min(widths[:-1]) >= 0.25
    kinds = {part["kind"] for row in found["rows"] for part in row["segments"]}
    assert kinds == {"k", "k-run"}


def test_an_over_long_pack_breaks_the_axis() -> None:
    """The others keep their width, and its figures stay true."""
    lengths = pt.Lengths([40, 60, 299_217, 110])
    plan = pt.plan(lengths, pack_length=100)
    found = rows_of(plan, lengths)
    assert found["cap"] == 80
    both, long, wider = found["rows"]
    assert [part["width"] for part in both["segments"]] == ["32.00", "48.00"]
    assert not both["over"] and not both["cut"] and both["fill"] == "100.0 %"
    assert [part["width"] for part in long["segments"]] == ["100.00"] and long["cut"] and long["over"]
    assert long["fill"] == "299,217 %" and long["listed"][0]["tokens"] == long["used"] == 299_217
    assert [part["width"] for part in wider["segments"]] == ["88.00"] and wider["over"] and not wider["cut"]


@pytest.mark.spec(
    "003",
    "hash buckets and phases in the report of a run",
    key="`report.html`",
    api="`report.html.write_report`",
)
def test_length_classes_and_phases_in_their_order() -> None:
    lengths = pt.Lengths([64] * 8 + [33] * 5 + [32] * 4 + [20] * 6 + [1] * 16)
    told = contents.buckets(report_figures(pt.plan(lengths, pack_length=64, packer="diverse"), lengths))
    assert told["classes"][0] == ("33 - 64", "13", "677", "33.3 %")
    assert [row[0] for row in told["phases"]] == ["powers", "seeds", "rest", "finalise"]
    assert sum(int(row[2]) for row in told["phases"]) == 39
    assert contents.buckets(report_figures(pt.plan(lengths, pack_length=64), lengths))["phases"] == []
