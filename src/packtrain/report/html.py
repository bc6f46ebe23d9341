"""One self-contained HTML file about a run: no script, no external address, light and dark.

The page is a pure function of its arguments (no time, no machine), so equal runs give equal bytes.
Its size stays below about 3 MB whatever the plan: 60 packs are drawn, ledgers and curves are capped.
All text is escaped by the template engine or by the SVG canvas; nothing from a sample is markup.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import MissingExtraError
from . import contents, plots
from .numbers import Slots, fill_histogram, length_histogram, token_slots

__all__ = ["write_report"]


def write_report(
    path: str | Path,
    *,
    title: str,
    stats: Mapping[str, Any],
    plan: Any,
    lengths: Any,
    ledger_rows: Iterable[Mapping[str, Any]],
    loss: Any = None,
    comparison: Mapping[str, Any] | None = None,
    config: Any = None,
) -> Path:
    """Write the report of a plan, and of the training on it where there was one.

    Args:
        title: heading of the page.
        stats: `plan.stats()`, or more.
        plan: a `PackPlan`.
        lengths: the `Lengths` it was made of; costs `images` colour the packs.
        ledger_rows: mappings with id, reason, where, detail; the counts come from the plan's ledger.
        loss: points (step, loss); or a mapping name -> points; or a Trainer's log history.
        comparison: packed and unpacked loss: `packed`, `unpacked`, optionally `difference`,
            `tolerance` and more figures; shown in this order.
        config: the run's configuration, plain or pydantic; keys that name a secret are masked.

    Raises:
        MissingExtraError: jinja2 is not installed (extra `report`).
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingExtraError("jinja2", "report") from None
    slots = token_slots(lengths.tokens, plan)
    lines = contents.curves(loss)
    kinds, legend, words = _kinds(lengths)
    drawn = len(plots.chosen_packs(len(plan.offsets) - 1))
    pictures = {
        "slots": plots.slot_bars(_slot_rows(slots), slots.real),
        "lengths": plots.histogram(
            length_histogram(lengths, plan),
            label="Histogram of sample lengths",
            x_label="tokens per sample",
            mark=plan.spec.pack_length,
        ),
        "fill": plots.histogram(
            fill_histogram(plan),
            label="Histogram of pack fill",
            x_label="percent of pack length in use",
            mark=None,
            unit=" %",
        ),
        "packs": plots.packs(plan, lengths.tokens, kinds, words),
        "loss": plots.curve(lines, label="Loss over steps") if lines else "",
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = importlib.resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    text = environment.from_string(page).render(
        title=title,
        headline=contents.headline(plan, slots, len(lengths.tokens)),
        pictures={name: Markup(svg) for name, svg in pictures.items()},
        length_words=contents.spread(lengths.tokens[plan.indices], "tokens"),
        fill_words=contents.spread(plan.pack_tokens, "tokens in a pack"),
        ledger=contents.ledger_groups(plan, ledger_rows),
        in_ledger=len(plan.ledger.ids),
        legend=legend,
        lines=list(lines),
        loss_words=contents.loss_words(lines),
        comparison=contents.comparison_rows(comparison),
        facts=contents.facts(plan, stats),
        buckets=contents.buckets(plan, lengths),
        checksum=plan.checksum,
        config=contents.config_text(config),
        drawn=drawn,
        packs=len(plan.offsets) - 1,
    )
    files.publish_text(path, text)
    return Path(path)


def _slot_rows(slots: Slots) -> list[tuple[str, int, str]]:
    def note(count: int) -> str:
        padding = contents.percent(1 - slots.real / count) if count else "0 %"
        return f"{count:,} slots, {padding} padding"

    batch = f"one sample a row in file order, batches of {slots.batch:,} padded to their longest"
    return [
        ("one sample a row, padded to the pack length", slots.capped, note(slots.capped)),
        (batch, slots.batched, note(slots.batched)),
        ("packed", slots.packed, note(slots.packed)),
    ]


def _kinds(lengths: Any) -> tuple[Any, list[tuple[str, str]], Any]:
    """How segments are coloured: by images where the lengths count them, else by length."""
    images = lengths.costs.get("images") if lengths.costs else None
    if images is not None and len(images) and int(images.max()):
        legend = [("k-a", "text only"), ("k-b", "1 image"), ("k-c", "2 images and more")]

        def by_images(i: int) -> str:
            return "k-a" if not images[i] else "k-b" if images[i] == 1 else "k-c"

        def words(i: int) -> str:
            return f"{int(images[i])} image{'' if images[i] == 1 else 's'}"

        return by_images, legend, words
    return (lambda i: f"k-{'ad'[i % 2]}"), [], (lambda i: "")
