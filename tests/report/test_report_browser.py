"""The page in a real browser: nothing scrolls sideways, no label is cut, keys and pointer reach all of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser

import packtrain as pt
from packtrain.pipeline.page import step_figures
from packtrain.planning.balance import Balance
from packtrain.planning.epoch_order import EpochOrder
from packtrain.report.html import write_report
from packtrain.report.numbers import Training, report_figures

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

WIDTHS = (360, 390, 768, 1440, 1920)

#: What lies outside of the window, scrolls sideways, is cut by its box, is too small to read, or overlaps.
FAULTS = """
(() => {
  const faults = [], width = innerWidth, seen = (e) => e.checkVisibility();
  if (document.documentElement.scrollWidth > width) faults.push("the page scrolls sideways");
  const words = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node; (node = words.nextNode()); ) {
    const box = node.parentElement;
    if (!node.data.trim() || !seen(box) || box.closest("title, .skip")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const r = range.getBoundingClientRect(), text = node.data.trim().slice(0, 60);
    if (!r.width) continue;
    if (r.left < 0 || r.right > width + 0.5) faults.push(`outside: ${text}`);
    const card = (box.closest("svg") || box).closest(".card, .tile, header, footer").getBoundingClientRect();
    if (r.left < card.left - 0.5 || r.right > card.right + 0.5) faults.push(`beyond its card: ${text}`);
    for (let e = box; e && !e.closest("svg"); e = e.parentElement) {
      const hides = getComputedStyle(e).overflowX !== "visible";
      if (hides && e.scrollWidth > e.clientWidth) faults.push(`cut: ${text}`);
    }
  }
  for (const svg of document.querySelectorAll("svg")) {
    const labels = [...svg.querySelectorAll("text")].filter(seen);
    const boxes = labels.map((label) => label.getBoundingClientRect());
    labels.forEach((label, k) => {
      const scale = label.getScreenCTM(), size = parseFloat(getComputedStyle(label).fontSize);
      if (size * Math.hypot(scale.a, scale.b) < 7.5) faults.push(`too small: ${label.textContent}`);
      for (let other = 0; other < k; other++) {
        const a = boxes[k], b = boxes[other];
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        const both = `${label.textContent} / ${labels[other].textContent}`;
        if (across > 1 && down > 3) faults.push(`overlap: ${both}`);
      }
    });
  }
  return faults;
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """(page, lengths, plan): over-long packs, a ledger, records, training on two ranks, long words."""
    rng = np.random.default_rng(0)
    tokens = np.exp(rng.normal(4.6, 0.8, 300)).astype(np.int64) + 4
    status = np.zeros(300, dtype=np.uint8)
    status[7::60] = 2
    tokens[status > 0] = 0
    tokens[[11, 111, 112]] = 40_000, 1200, 299_217
    reasons = {int(i): "missing_media" for i in np.flatnonzero(status)}
    lengths = pt.Lengths(tokens, costs={"images": rng.integers(0, 4, 300)}, status=status, reasons=reasons)
    plan = pt.plan(lengths, pack_length=1024)
    long = "/mnt/some/very/long/path/without/a/single/blank/that/could/be/broken/train.jsonl"
    history = [
        {"step": step, "loss": 8 / step, "step_s": 0.5 + 0.01 * step, "data_wait_s": 1e-4 * step,
         "tokens_per_s": 123_456 + step, **({"eval_loss": 9 / step} if step % 5 == 0 else {})}
        for step in range(1, 11)
    ]  # fmt: skip
    order = EpochOrder(plan.align(2), seed=1, grad_accum=2, balance=Balance(grad_accum=2, sync="step"))
    figures = report_figures(
        plan,
        lengths,
        Training(
            history=history,
            steps=step_figures(order, history),
            consumed={"packs": 40, "samples": 250, "tokens": 39_999, "pack_length": 1024},
            proof=8,
            comparison={"packed": 3.25, "unpacked": 3.2500001, "tolerance": 1e-4},
            validation={**plan.stats(), "packing_length": 1024, "fill": 0.987654},
        ),
    )
    page = write_report(
        tmp_path_factory.mktemp("page") / "report.html",
        title=f"packtrain run of {long}",
        plan=plan,
        lengths=lengths,
        ledger_rows=[
            {"id": i, "reason": reason, "where": f"{long}:{i + 1}", "detail": "x" * 300}
            for i, reason in plan.ledger
        ],
        figures=figures,
        config={"custom": {"train_jsonl": long * 3}},
        artefact=f"{long}/plan",
        where=lambda i: f"{long}:{i + 1}",
        record=lambda i: json.dumps({"id": i, "text": "y" * 500}),
    )
    return page, lengths, plan


@pytest.mark.parametrize(
    ("width", "dark"), [*((width, False) for width in WIDTHS), (360, True), (1440, True)]
)
def test_nothing_scrolls_sideways_and_no_label_is_cut(
    width: int, dark: bool, browser: Browser, shown: Any, tmp_path: Path
) -> None:
    browser.open(shown[0], width, dark=dark)
    assert browser.run(FAULTS) == []
    browser.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert browser.run(FAULTS) == []
    assert browser.errors == []
    ink = browser.run("getComputedStyle(document.querySelector('svg text')).fill.match(/\\d+/g).map(Number)")
    assert (min(ink) > 120) == dark


@pytest.mark.parametrize("width", [360, 390, 768, 1440])
def test_the_page_of_a_training_without_a_plan(width: int, browser: Browser, tmp_path: Path) -> None:
    history = [
        {
            "step": k,
            "loss": 8 / k,
            "eval_chat_loss": 9 / k,
            "step_s": 0.5,
            "data_wait_s": 0.1,
            "tokens_per_s": 9e4,
        }
        for k in range(1, 11)
    ]
    rows = [{"id": f"{'long-' * 30}{k}", "reason": "over_long", "detail": "x" * 200} for k in range(9)]
    counts = {"packs": 69, "samples": 12_345, "tokens": 987_654_321, "slots": 1_234_567_890}
    over = {"over_long_packs": 13, "longest_pack": 299_217, "pack_length": 2048}
    shares = {"efficiency": 0.8, "samples_per_pack": 178.91}
    told = {"metrics": {"steps": 10}, "left_out": {"over_long": 9}, "proof": 8}
    figures = report_figures(
        None, None, Training(history=history, consumed={**counts, **over, **shares}, **told)
    )
    page = tmp_path / "page.html"
    write_report(page, title="Run", plan=None, lengths=None, ledger_rows=rows, figures=figures)
    browser.open(page, width)
    assert browser.run(FAULTS) == [] and browser.errors == []
    shown = browser.run("document.body.innerText")
    assert "made no plan" in shown and "9 samples left out" in shown and "NaN" not in shown
    assert browser.run("document.querySelectorAll('svg').length") == 4
    for words in ("13 of 69", "longest 299,217", "12,345", "987,654,321 real tokens", "8 comparisons"):
        assert words in shown, words


def test_the_tab_key_reaches_every_control_in_order(browser: Browser, shown: Any) -> None:
    browser.open(shown[0], 768)
    wanted = browser.run(
        "[...document.querySelectorAll('a[href], button, summary')].filter((e) => e.checkVisibility())"
        ".map((e, k) => { e.dataset.place = k; return k; }).length"
    )
    reached = []
    for _ in range(wanted):
        browser.press("Tab")
        reached.append(browser.run("Number(document.activeElement.dataset.place ?? -1)"))
    assert reached == list(range(wanted)) and wanted > 50
    browser.run("document.querySelector('.packs summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('.packs details').open")
    assert browser.run("document.querySelector('.packs .entry .mono').checkVisibility()")


def test_pointing_at_a_pack_names_its_samples_and_lengths(browser: Browser, shown: Any) -> None:
    page, lengths, plan = shown
    for width in (360, 1440):
        browser.open(page, width)
        for k in (0, len(plan) // 2):
            browser.point(f".packs li:nth-child({k + 1}) summary")
            tips = browser.run(
                "[...document.querySelectorAll('.tip')].filter((e) => e.checkVisibility())"
                ".map((e) => [e.textContent, e.getBoundingClientRect()])"
                ".map(([text, r]) => [text, r.left, r.right])"
            )
            ((told, left, right),) = tips
            listed = ", ".join(f"{i} ({int(lengths.tokens[i]):,})" for i in plan[k].tolist()[:24])
            assert told.startswith(f"pack {k}: ") and listed in told
            assert left >= 0 and right <= width


def test_checksums_are_copied_by_a_button(browser: Browser, shown: Any) -> None:
    browser.open(shown[0], 768)
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0")
    browser.run("document.querySelector('header button.copy').focus()")
    browser.press("Enter")
    assert browser.run("window.copied") == shown[2].checksum
    digests = browser.run("[...document.querySelectorAll('button.copy')].map((e) => e.dataset.copy)")
    assert shown[1].digest in digests and browser.errors == []


def test_on_paper_it_is_light_whatever_the_screen_is(browser: Browser, shown: Any) -> None:
    browser.open(shown[0], 768, dark=True, media="print")
    assert browser.run("getComputedStyle(document.body).color") == "rgb(23, 26, 33)"
    assert not browser.run("document.querySelector('button.copy').checkVisibility()")
    paper = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF") and len(paper) > 20_000
