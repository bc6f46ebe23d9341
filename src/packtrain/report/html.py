"""One self-contained HTML file about a run: no external address, light, dark and on paper.

The page is a pure function of its arguments (no time, no machine), so equal runs give equal bytes. It holds
its figures as JSON too, equal to `packtrain show --json`. Its only script copies texts. Its size stays below
about 3 MB whatever the plan: 60 packs are drawn, ledgers, records and curves are capped. All text is
escaped; nothing from a sample is markup.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import PacktrainError, optional
from ..remote.places import typed
from . import contents, plots
from .contents import percent
from .numbers import report_figures

# --------------------------------------------------------------------------------------------
# Packs as rows of a page: a bar of segments, one a sample, with ids, lengths and records behind it
# --------------------------------------------------------------------------------------------
# Rows of large plans stay small: packs are an evenly spaced choice, thin segments are drawn as one, and of
# each pack the first samples are listed.
_SHOWN_PACKS = 60
_SEGMENTS = 12_000  # most segments of a report
_THIN = 0.25  # percent of the widest bar: narrower segments are drawn together with their neighbours
_LISTED = 24  # samples listed of a pack
_WIDER = 1.25  # an over-long pack of more than so many pack lengths is cut


def chosen_packs(count: int, shown: int = _SHOWN_PACKS) -> list[int]:
    """All packs, or `shown` of them evenly spaced from first to last.

    >>> chosen_packs(3), chosen_packs(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= shown:
        return list(range(count))
    return [k * (count - 1) // (shown - 1) for k in range(shown)]


def pack_rows(
    plan: Any,
    tokens: Any,
    kind_of: Callable[[int], str],
    words_of: Callable[[int], str],
    where: Callable[[int], str],
    record: Callable[[int], str],
) -> dict[str, Any]:
    """Rows of the chosen packs.

    Args:
        tokens: int[n], lengths by sample id.
        kind_of: sample id -> CSS class of its segment.
        words_of: sample id -> what to say beside its length.
        where, record: sample id -> where it stands in its source, and its text; "" where that is not at hand.

    Returns:
        rows, and `cap`: the place of the pack length in percent of a bar. A row: pack, used, samples, fill,
        over (longer than the pack length), cut (longer than its bar), segments (kind, width in percent),
        listed (id, tokens, words, where, record), rest (samples that are not listed).
    """
    cap = int(plan.spec.pack_length)
    chosen = chosen_packs(len(plan.offsets) - 1)
    widest = max([cap, *(int(plan.pack_tokens[p]) for p in chosen)])
    shown = min(widest, int(cap * _WIDER))
    rows, drawn = [], 0
    for p in chosen:
        ids = [int(i) for i in plan.indices[int(plan.offsets[p]) : int(plan.offsets[p + 1])]]
        used = int(plan.pack_tokens[p])
        segments = _segments(ids, tokens, kind_of, shown) if drawn < _SEGMENTS else []
        drawn += len(segments)
        listed = [
            {"id": i, "tokens": int(tokens[i]), "words": words_of(i), "where": where(i), "record": record(i)}
            for i in ids[:_LISTED]
        ]
        rows.append(
            {
                "pack": p,
                "used": used,
                "samples": len(ids),
                "fill": f"{100 * used / cap:,.0f} %" if used > cap else percent(used / cap),
                "over": used > cap,
                "cut": used > shown,
                "segments": segments,
                "listed": listed,
                "rest": len(ids) - len(listed),
            }
        )
    return {"rows": rows, "cap": 100 * cap / shown}


def _segments(
    ids: list[int], tokens: Any, kind_of: Callable[[int], str], widest: int
) -> list[dict[str, str]]:
    """Segments of one pack; neighbours that are too thin to see become one of kind `k-run`."""
    made, held, start, left = [], 0, 0, 100.0
    for k, i in enumerate(ids):
        held += int(tokens[i])
        width = 100 * held / widest
        if width < _THIN and k < len(ids) - 1:
            continue
        shown = min(width, left)
        made.append({"kind": kind_of(i) if start == k else "k-run", "width": f"{shown:.2f}"})
        held, start, left = 0, k + 1, left - shown
    return made


# --------------------------------------------------------------------------------------------
# One self-contained HTML file about a run: no external address, light, dark and on paper
# --------------------------------------------------------------------------------------------
_RECORDS = 400  # records whose text is on the page
_RECORD = 600  # characters of each

#: Lines that share a chart -> its title and the name of its y-axis.
_CHARTS = {
    "loss": ("Loss", "loss a token"),
    "step_s": ("Step time", "seconds a step"),
    "tokens_per_s": ("Throughput", "tokens a second"),
    "data_wait_s": ("Waiting for data", "seconds a step"),
}


def write_report(
    path: str | Path,
    *,
    title: str,
    plan: Any,
    lengths: Any,
    ledger_rows: Iterable[Mapping[str, Any]],
    figures: Mapping[str, Any] | None = None,
    config: Any = None,
    artefact: str | None = None,
    where: Callable[[int], str] | None = None,
    record: Callable[[int], str] | None = None,
) -> Path:
    """Write the report of a plan, and of the training on it where there was one.

    Args:
        title: heading of the page.
        plan: a `PackPlan`; None: the run's packs were not planned, and the page is of its training alone.
        lengths: the `Lengths` it was made of; costs `images` colour the packs.
        ledger_rows: mappings with id, reason, where, detail; the counts come from the plan's ledger.
        figures: from `numbers.report_figures`; None: those of the plan alone.
        config: the run's configuration, plain or pydantic; keys that name a secret are masked.
        artefact: folder that `packtrain show` takes, for the command that prints a record.
        where: sample id -> where it stands in its source.
        record: sample id -> the text of its record.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed (extra `report`).
    """
    optional("matplotlib", "matplotlib", "report")
    optional("jinja2", "jinja2", "report")
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    told = dict(figures or report_figures(plan, lengths))
    text_of = _texts(record)
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, undefined=StrictUndefined, **blocks)
    page = importlib.resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    plain = json.dumps(told, sort_keys=True, ensure_ascii=True)
    text = environment.from_string(page).render(
        title=title,
        headline=contents.headline(told),
        charts=[(name, y_label, Markup(svg), lines) for name, y_label, svg, lines in _charts(told)],
        ledger=contents.ledger_groups(
            told["ledger"], ledger_rows, lambda i: "" if record is None else text_of(int(i))
        ),
        in_ledger=told["stats"]["dropped"] if "stats" in told else sum(told["ledger"].values()),
        loss_words=contents.loss_words(told["curves"]),
        trained=contents.trained_words(told),
        step_rows=contents.step_rows(told["steps"]),
        comparison=contents.comparison_rows(told["comparison"]),
        validation=contents.plan_words(told["validation"] or {}),
        facts=contents.facts(plan, {**told.get("stats", {}), "keys": told["keys"]}),
        config=contents.config_text(config),
        planned=None if plan is None else _planned(plan, lengths, told, where, text_of),
        artefact=None if artefact is None else typed(artefact),
        json=Markup(plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")),
        figures=told,
    )
    files.publish_text(path, text)
    return Path(path)


def _planned(
    plan: Any,
    lengths: Any,
    told: Mapping[str, Any],
    where: Callable[[int], str] | None,
    text_of: Callable[[int], str],
) -> dict[str, Any]:
    """What a page says of a plan: layouts, histograms, packs, classes."""
    from markupsafe import Markup

    kinds, legend, words = _kinds(lengths)
    drawn = {
        "lengths": plots.histogram(
            told["lengths"],
            "Histogram of sample lengths",
            "tokens per sample",
            "samples",
            told["pack_length"],
        ),
        "fill": plots.histogram(
            told["fill"], "Histogram of pack fill", "percent of pack length in use", "packs", unit=" %"
        ),
    }
    return {
        "checksum": told["checksum"],
        "slots": contents.slot_rows(told["slots"]),
        "pictures": {name: Markup(svg) for name, svg in drawn.items()},
        "length_words": contents.spread(told["sample_tokens"], "tokens"),
        "fill_words": contents.spread(told["pack_tokens"], "tokens in a pack"),
        "legend": legend,
        "buckets": contents.buckets(told),
        "packs": pack_rows(plan, lengths.tokens, kinds, words, where or (lambda i: ""), text_of),
        "drawn": len(chosen_packs(told["stats"]["packs"])),
        "over_long": told["stats"]["over_long_packs"],
    }


def _charts(told: Mapping[str, Any]) -> Iterable[tuple[str, str, str, list[str]]]:
    """Title, y-axis, picture and lines of every chart of a training."""
    lines = told["curves"]
    balance, forecast = (told["steps"].get(name) or {} for name in ("balance", "forecast"))
    for key, (title, y_label) in _CHARTS.items():
        held = {
            name: lines[name] for name in lines if name == key or (key == "loss" and name.startswith("eval_"))
        }
        if key == "step_s" and key in lines and forecast:
            held = {"measured": lines[key], "forecast": forecast["steps"]}
        if any(held.values()):
            yield title, y_label, plots.curve(held, label=f"{title} over steps", y_label=y_label), list(held)
    if balance and balance["world_size"] > 1:
        held = {"before balance": balance["before"], "after": balance["after"]}
        y_label = "slowest rank / mean"
        drawn = plots.curve(held, label="Balance over steps", y_label=y_label)
        yield "Balance of the ranks", y_label, drawn, list(held)


def _texts(record: Callable[[int], str] | None) -> Callable[[int], str]:
    """The text of a sample's record for the page, until `_RECORDS` of them were asked for."""
    left = _RECORDS

    def text_of(sample: int) -> str:
        nonlocal left
        if record is None or left <= 0:
            return ""
        left -= 1
        try:
            text = record(sample)
        except (PacktrainError, OSError) as error:
            return str(error)
        return contents.short(text, _RECORD)

    return text_of


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
