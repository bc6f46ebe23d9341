"""Opening artefacts and printing them as tables; shared by several verbs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import files
from ..errors import FormatError, counted
from ..pipeline.length_files import read_lengths
from ..pipeline.plan import told_truncated, truncated_figures, truncated_rows
from ..pipeline.publish import read_keys, told
from ..pipeline.which import read_run, unplanned_kind
from ..planning.distribution import median_of, quantiles
from ..planning.lengths import STATUS_OK, Lengths
from ..planning.packplan import PackPlan
from ..remote.copies import opened
from ..remote.places import spelled, typed
from ..report.contents import over_long_words, rows_words
from ..store.chunk_folder import PRODUCER, View, chunk_name, completed, number_of, read_stream, readers
from ..store.lengths import verify
from ..store.shards import at, is_export
from ..waiting.claim import look

_BARS = "▁▂▃▄▅▆▇█"

_ROWS = 100  # samples named in figures; details.jsonl names all


def artefact_kind(folder: Path) -> str:
    """`lengths`, `plan`, `run`, `stream` or `export`, by the marker that lies in `folder`.

    Raises:
        FormatError: it holds none.
    """
    for marker in ("run", "plan", "lengths", "stream"):
        if (folder / f"{marker}.json").is_file():
            return marker
    if is_export(folder):
        return "export"
    if not folder.exists():
        told, hint = "does not exist", "name a lengths, plan or run folder"
    elif (folder / "partial").is_dir():
        told, hint = "is an unfinished measurement", "run the same measure command again"
    elif any(folder.glob("shard_*_of_*/partial")):
        told, hint = "holds shards that are not merged", f"run packtrain merge {typed(folder)}"
    else:
        told, hint = _unmarked(folder)
    raise FormatError(f"{folder} {told}", hint=hint)


def _unmarked(folder: Path) -> tuple[str, str]:
    """What a folder is that holds no artefact, and which it has below it."""
    found = ("*/run.json", "*/plan.json", "*/plan/plan.json")  # the last one: of a run that has not ended
    held = sorted({path.parent for name in found for path in folder.glob(name)})
    held = [path for path in held if path.parent not in held]
    held += sorted(path.parent for path in folder.glob("*/packs"))  # what pack(trainer) left
    told = "holds no lengths, plan or run, and no stream"
    hint = files.recipe_hint(folder) or "name the folder given as --out"
    if (folder / "run_config.json").is_file():
        told = "is a run that has not ended"
        hint = "the same command goes on with it; packtrain which --step N answers already"
        held = [path for path in held if not path.name.startswith("val_")]
    return told, f"it has {', '.join(map(str, held))}" if held else hint


def of_host(folder: Path) -> Path:
    """What `pack(trainer)` left in a run: its record, else its newest training plan; else `folder`, or the
    copies of what is behind a URL."""
    folder = at(folder)
    if (folder / "packs" / "run.json").is_file() and not (folder / "run.json").exists():
        return folder / "packs"
    if folder.is_dir() and not any((folder / f"{name}.json").exists() for name in ("run", "plan", "lengths")):
        for place in (folder / "packs" / "train", folder / "train", folder):
            made = sorted(place.glob("plan-*/plan.json"), key=lambda path: path.stat().st_mtime)
            if made:
                return made[-1].parent
    return folder


def folder_of_run(run: Path, name: str) -> Path:
    """Where a run's `lengths` or `plan` lie: in its own folder, or in the cache that `run.json` names."""
    if (run / name).is_dir():
        return run / name
    named = read_run(run)[1].get(f"{name}_folder")
    if not isinstance(named, str):
        why, hint = f"{run} holds no {name}, and its run.json names none", None
        if (kind := unplanned_kind(run)) is not None:
            why, hint = f"{run} is a run of kind {kind}: it has no {name}", _verifiable(run, kind)
        raise FormatError(why, hint=hint)
    return Path(named)


def validation_folders(run: Path) -> list[tuple[str, Path | None, Path | None]]:
    """Name, lengths and plan of every validation set of a run; None: somewhere in a cache.

    Raises:
        FormatError: a folder is gone, or `run.json` was edited.
    """
    from ..train.config import validation_prefix

    config, figures = read_run(run)
    with files.reading(run / "run.json", "the record of a run", None):
        data, told = config.get("data") or {}, figures.get("validation_folders") or {}
        val = data.get("val") or []
        names = list(dict.fromkeys([*([""] if isinstance(val, str) else val), *told]))  # a trainer names none
        cached = (data.get("cache") or {}).get("root_dir") is not None
        named = {(name, part): Path(told[name][part]) for name in told for part in ("lengths", "plan")}

    def place(name: str, part: str) -> Path | None:
        own = run / f"{validation_prefix(name)}{part}"
        if own.is_dir():
            return own
        if (name, part) not in named and cached:
            return None
        found = named.get((name, part), own)
        if not found.is_dir():
            raise FormatError(f"{found}, of the run's validation set, does not exist", hint="run it again")
        return found

    return [(name, place(name, "lengths"), place(name, "plan")) for name in names]


def _verifiable(run: Path, kind: str) -> str:
    """What stands in the place of lengths and plan of a run that has none."""
    data = read_run(run)[0].get("data") or {}
    if kind == "growing":
        place = data.get("path") or "OUT"
        return f"the chunks that packtrain produce wrote can be verified: packtrain verify {typed(place)}"
    return (
        "only runs of kind planned and exported can be verified and compared; packtrain show has its figures"
    )


def open_lengths(path: Path) -> Lengths:
    """A lengths folder, hashed, as a plan is made of it; or the token counts in a file of one of
    `pipeline.length_files.SUFFIXES`."""
    path = opened(path)
    if path.is_dir():
        if artefact_kind(path) == "run":
            path = folder_of_run(path, "lengths")
        return verify(path)
    return read_lengths(path)


def table(title: str, rows: Mapping[str, Any]) -> None:
    """Two columns on standard output; a row whose value is None is left out."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=spelled(title), show_header=False, title_justify="left", title_style="bold")
    grid.add_column(style="cyan")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            grid.add_row(name, spelled(str(value)))
    Console(markup=False, emoji=False).print(grid)


def print_lengths(folder: Path, lengths: Lengths, *, audited: int | None = None) -> None:
    sums, spread = _usable(lengths)
    audit = None if audited is None else "not run"
    if audited:
        audit = f"{counted(audited, 'samples')} encoded for real: 0 mismatches"
    rows = {
        "samples": f"{len(lengths):,}",
        "usable": f"{sums['usable']:,}",
        **{f"  {reason}": f"{count:,}" for reason, count in lengths.unusable().items()},
        "tokens": f"{sums['tokens']:,}" if spread else None,
        "length": ", ".join(f"{name} {value:,.0f}" for name, value in spread.items()) or None,
        **{name: f"{value:,}" for name, value in sums["costs"].items()},
        "audit": audit,
        "keys": told(read_keys(folder)) or None,
        "truncation": told_truncated(folder, lengths) or None,
        "digest": lengths.digest[:16],
    }
    table(f"Lengths in {folder}", rows)


def _usable(lengths: Lengths) -> tuple[dict[str, Any], dict[str, float]]:
    """Of the usable samples: their count, tokens and costs; mean, median, 95th percentile and longest."""
    here = np.asarray(lengths.status) == STATUS_OK
    tokens = np.asarray(lengths.tokens)[here]
    costs = {name: int(np.asarray(held)[here].sum(dtype=np.int64)) for name, held in lengths.costs.items()}
    sums = {"usable": len(tokens), "tokens": int(tokens.sum(dtype=np.int64)), "costs": costs}
    if not len(tokens):
        return sums, {}
    p95, longest = quantiles(tokens, 95, 100)
    return sums, {"mean": float(tokens.mean()), "p50": median_of(tokens), "p95": p95, "max": longest}


def lengths_figures(folder: Path, lengths: Lengths) -> dict[str, Any]:
    """What machines are told of a lengths folder."""
    cut = truncated_rows(folder, lengths)
    sums, spread = _usable(lengths)
    return {
        "lengths": str(folder),
        "samples": len(lengths),
        **sums,
        "length": spread,
        "digest": lengths.digest,
        "unusable": lengths.unusable(),
        "keys": read_keys(folder),
        "truncation": {**truncated_figures(cut, lengths), "rows": cut[:_ROWS]},
    }


def print_plan(folder: Path, plan: PackPlan) -> None:
    table(f"Plan in {folder}", plan_rows(plan))


def plan_rows(plan: PackPlan) -> dict[str, str | None]:
    """The figures of a plan, as text.

    Raises:
        FormatError: its marker was edited.
    """
    with files.reading(plan.folder or "the plan", "a plan as it was written", "make the plan again"):
        return _plan_rows(plan, plan.stats())


def _plan_rows(plan: PackPlan, stats: Mapping[str, Any]) -> dict[str, str | None]:
    proven = "proven optimal" if stats["optimal"] else f"gap {stats['gap']:.4%}"
    sources = steps = slowest = None
    if stats.get("sources"):
        drawn = f"({stats['sources_per_pack_at_random']:.2f} if drawn at random)"
        sources = f"{stats['sources_per_pack']:.2f} of {stats['sources']:,} {drawn}"
    if "steps" in stats:
        fillers = f", {counted(stats['fillers'], 'fillers')}" if stats["fillers"] else ""
        samples = counted(min(stats["samples_per_step"], stats["samples"]), "samples")
        each = f"{counted(stats['packs_per_step'], 'packs')} each"
        steps = f"{stats['steps']:,} of {samples}, {each}{fillers}"
        ranks = counted(plan.spec.packs_multiple, "ranks")
        slowest = f"{stats['step_imbalance']:.3f} x the mean on {ranks} (predicted)"
    return {
        "over-long": over_long_words(stats, plan.spec.pack_length) or None,
        "samples": f"{stats['samples']:,} of {stats['read']:,} read",
        "packs": f"{stats['packs']:,} of {plan.spec.pack_length:,} tokens",
        "efficiency": f"{stats['efficiency']:.2%} of slots are real tokens",
        "samples per pack": f"{stats['samples_per_pack']:.2f}",
        "length and order": f"correlation {stats['length_order_correlation']:+.2f}",
        "lower bound": f"{counted(stats['bound'], 'packs')} ({stats['bound_name']}), {proven}",
        "packer": stats["packer"],
        "checksum": plan.checksum[:16],
        "ledger": f"{counted(stats['dropped'], 'samples')}",
        **{f"  {reason}": f"{count:,}" for reason, count in stats["dropped_by_reason"].items()},
        "sources per pack": sources,
        "steps": steps,
        "slowest rank": slowest,
    }


def print_run(
    folder: Path, figures: Mapping[str, Any], plan: PackPlan | None, config: Mapping[str, Any] | None = None
) -> None:
    """The closing table of a run with the losses of its log, and the path of its report as the last line.

    Args:
        figures: as they stand in `run.json`; what an older version did not write is left out.
        plan: None: its packs were not planned.
        config: of the run, where its samples and model are to be named and its warnings told again.

    Raises:
        FormatError: `run.json` was edited.
    """
    with files.reading(folder / "run.json", "the record of a run", None):
        rows = _run_rows(folder, figures, plan, config)
        report = None if not figures.get("report") else Path(figures["report"]).resolve()
    table(f"Run in {folder}", rows)
    if report is not None:
        click.echo(f"report: {report}")


def _run_rows(
    folder: Path, figures: Mapping[str, Any], plan: PackPlan | None, config: Mapping[str, Any] | None
) -> dict[str, Any]:
    from ..report.contents import consumed_words, plan_words

    source = {name: figures.get(name) for name in ("source", "dataset")}
    metrics = figures.get("metrics") or {}
    told_out = None
    if figures.get("left_out"):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in figures["left_out"].items())
        told_out = f"{reasons} ({figures.get('ledger_file', 'left_out.jsonl')})"
    return {
        **({} if config is None else _named(config)),
        **(source if plan is None else plan_rows(plan)),
        **dict(consumed_words(figures.get("consumed"), plan is not None)),
        **_shown_before(figures),
        **_training_rows(folder, figures, metrics),
        **{f"validation {name}": told for name, told in plan_words(figures.get("eval") or {})},
        **_validation_rows(metrics),
        "left out": told_out,
        "warnings": None if config is None else "\n".join(figures.get("warnings") or ()) or None,
    }


def _shown_before(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What was saved, audited and proven before the first step, and the loss that came of it."""
    saved = difference = None
    if "padding_saved" in figures:
        saved = (
            f"{figures['padding_saved']:.1%} of the slots of padded batches, "
            f"{figures['padding_saved_to_cap']:.1%} of one padded sample a row"
        )
        if "padded_to" in figures:  # an older version did not write it
            saved += f"; {rows_words(figures)}"
    if (loss := figures.get("loss")) is not None:
        means = f"({loss['packed']:.5f} - {loss['unpacked']:.5f})"
        difference = f"{loss['difference']:+.1e} {means} over {counted(loss['packs'], 'packs')}"
    audited, proof = figures.get("audited"), figures.get("proof")
    return {
        "padding saved": saved,
        "lengths audited": None
        if audited is None
        else f"{counted(audited, 'samples')} encoded for real: 0 mismatches",
        "keys": told(figures.get("keys") or {}) or None,
        "truncation": figures.get("truncation") or None,
        "isolation": None if proof is None else f"proven before training ({counted(proof, 'comparisons')})",
        "packed - unpacked loss": difference,
    }


def _training_rows(folder: Path, figures: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Steps, their time and the curve of the loss, by the log in the run's folder."""
    from ..pipeline.page import read_history
    from ..report.contents import loss_words, speed_words
    from ..report.numbers import curves

    rows: dict[str, Any] = {}
    if "steps" in metrics:
        ranks = f" on {counted(figures['world_size'], 'ranks')}" if "world_size" in figures else ""
        rows["optimizer steps"] = f"{int(metrics['steps']):,}{ranks}"
        if metrics.get("unsupervised_steps"):
            rows["optimizer steps"] += f", {int(metrics['unsupervised_steps']):,} without a trained token"
    lines = curves(read_history(folder))
    if words := speed_words(lines):
        rows["step time"] = words
    losses = lines.get("loss", [])
    if words := loss_words({"train_loss": losses}):
        rows["training loss"] = words.removeprefix("train loss ")
        if len(losses) == 1 and "train_loss" in metrics:
            rows["training loss"] += f"; {metrics['train_loss']:.3f} in the mean of all steps"
        rows["loss curve"] = _spark([value for _, value in losses])
    return rows


def _validation_rows(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The loss of every validation set: `eval_loss`, or `eval_<set>_loss`."""
    rows = {}
    for key, value in metrics.items():
        if key.startswith("eval_") and key.endswith("loss"):
            name = key.removesuffix("loss")
            of = f" ({name[5:-1]})" if name != "eval_" else ""
            tokens = metrics.get(f"{name}tokens")
            over = "" if tokens is None else f" over {counted(int(tokens), 'tokens')}"
            rows[f"validation loss{of}"] = f"{value:.4f}{over}"
    return rows


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Model, samples and learning of a run."""
    data, training = config.get("data") or {}, config.get("training") or {}
    return {
        "model": (config.get("model") or {}).get("name_or_path"),
        "samples of": data.get("path"),
        "validation": data.get("val"),
        "epochs": training.get("num_train_epochs") if int(training.get("max_steps") or -1) < 1 else None,
        "learning rate": training.get("learning_rate"),
        "seed": training.get("seed"),
    }


def _spark(values: list[float], width: int = 48) -> str:
    """A line of bars; several values share one bar when there are more than `width`."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in means)


# --------------------------------------------------------------------------------------------
# What a growing directory holds
# --------------------------------------------------------------------------------------------
def stream_figures(folder: Path, view: View | None = None) -> dict[str, Any]:
    """Counts of the stream, how far readers are, and what the producer is doing."""
    with files.reading(folder, "a growing directory as it was written", "verify it"):
        return _figures(folder, view or View(folder))


def stream_of(folder: Path, view: View) -> dict[str, Any]:
    """What the stream in a folder says of itself, as it is now."""
    view.refresh()
    if view.stream is None:
        raise FormatError(
            f"{folder} holds no stream of packs", hint="name the OUT of packtrain produce, once it has begun"
        )
    return view.stream


def _figures(folder: Path, view: View) -> dict[str, Any]:
    stream = stream_of(folder, view)
    newest = len(view.counts) - 1
    told: dict[str, Any] = {"pack_length": stream["config"].get("pack_length")}
    if view.end is not None:
        told = dict(view.end["stats"])
    elif newest >= 0:
        told = dict(files.read_json((folder / chunk_name(newest)).with_suffix(".json"))["meta"]["stats"])
    told["chunks"], told["packs"] = len(view.counts), sum(view.counts)
    slots = told["packs"] * (told["pack_length"] or 0) + told.get("beyond", 0)
    told["efficiency"] = round(told.get("tokens", 0) / slots, 6) if slots else 0.0
    told["samples_per_pack"] = round(told.get("packed", 0) / told["packs"], 4) if told["packs"] else 0.0
    told["lag_samples"] = told.get("read", 0) - told.get("packed", 0) - sum(told.get("dropped", {}).values())
    marks = readers(folder, stream["stream"])
    slots = min((0 if told is None else int(told["slots"]) for told in marks.values()), default=0)
    present = [name for name in view.names if name.startswith("chunk_") and name.endswith(".arrow")]
    return {
        "stream": stream["stream"],
        "out": str(folder),
        **told,
        "chunks_on_disk": len(present),
        "chunks_completed": len(set.intersection(*map(completed, marks))) if marks else 0,
        "readers": len(marks),
        "packs_acknowledged": min(slots, told["packs"]),
        "ended": view.is_complete,
        "producer": _doing(folder),
    }


def _doing(folder: Path) -> str:
    held = look(folder / PRODUCER)
    if held is None or held.owner is None:
        return "none"
    state = str(held.beat.get("state", "working"))
    if state == "failed":
        return f"failed: {(held.beat.get('error') or {}).get('message', '')}"
    if state == "released":
        return "stopped"
    return "gone without a word" if held.owner.is_dead else f"{held.owner}: {held.beat.get('stage', state)}"


def stream_rows(figures: dict[str, Any]) -> dict[str, str | None]:
    """Figures as text."""
    dropped = figures.get("dropped", {})
    shards = f"{figures.get('shards', 0):,}"
    for name, what in (("duplicates", "twice"), ("faulty", "unreadable")):
        if figures.get(name):
            shards += f", {figures[name]:,} {what}"
    cut = figures.get("truncated")
    rows = {
        "samples": f"{figures.get('packed', 0):,} packed of {figures.get('read', 0):,} read, "
        f"{figures['lag_samples']:,} waiting",
        "packs": f"{figures['packs']:,} of {figures['pack_length'] or 0:,} tokens, "
        f"{counted(figures['chunks'], 'chunks')}",
        "tokens": f"{figures.get('tokens', 0):,}",
        "efficiency": f"{figures['efficiency']:.2%} of slots are real tokens",
        "samples per pack": f"{figures['samples_per_pack']:.2f}",
        "raw shards": shards,
        "ledger": f"{sum(dropped.values()):,} samples",
        **{f"  {reason}": f"{count:,}" for reason, count in dropped.items()},
        "keys": told(figures.get("keys", {})) or None,
        "truncation": f"{counted(cut, 'samples')} lost answers, or a part of one: show --ledger"
        if cut
        else None,
    }
    if "producer" not in figures:
        return rows
    return {
        **rows,
        "readers": f"{figures['readers']:,}; "
        f"{counted(figures['packs_acknowledged'], 'packs')} acknowledged by all; chunks: "
        f"{figures['chunks_completed']:,} used up, {figures['chunks_on_disk']:,} on disk",
        "producer": str(figures["producer"]),
        "ended": "yes" if figures["ended"] else "no",
    }


def kind_to_follow(folder: Path) -> str:
    """The kind of a folder; one that holds nothing as yet may become a stream."""
    try:
        return artefact_kind(folder)
    except FormatError:
        if folder.is_dir() and not (folder / PRODUCER).is_dir() and any(folder.iterdir()):
            raise
        return "stream"


def follow_stream(folder: Path, interval: float) -> Iterator[dict[str, Any]]:
    """Figures each time they change, until the stream has ended; waits for it to begin."""
    view, last = View(folder), None
    while read_stream(folder) is None:
        time.sleep(interval)
    while True:
        figures = stream_figures(folder, view)
        if figures != last:
            yield figures
            last = figures
        if figures["ended"]:
            return
        time.sleep(interval)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    """Every sample that is in no pack, or lost answers to truncation, as far as manifests are there."""
    rows: list[dict[str, Any]] = []
    for path in [*sorted(folder.glob("chunk_*.json")), folder / "END"]:
        if not path.is_file() or (path.name != "END" and number_of(path.name) is None):
            continue
        with files.reading(path, "a manifest"):
            told = files.read_json(path)
            rows += told["ledger"] if path.name == "END" else told["meta"].get("ledger", [])
    return rows
