"""`packtrain show`: what is in an artefact, as a table, JSON or an HTML page."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from .. import files
from ..errors import FormatError, InputError, counted
from ..pipeline.length_files import lengths_of
from ..pipeline.page import Report, sample_figures, source_of, where_of
from ..pipeline.plan_table import write_plan_table
from ..pipeline.which import read_run
from ..planning.costs import DeviceProfile
from ..planning.distribution import distribution, phases_of
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..store.plans import undamaged
from ._app import PATH, argument, emit, flag, option, spoken, verb, without_effect
from ._show import (
    artefact_kind,
    folder_of_run,
    follow_stream,
    kind_to_follow,
    ledger_of,
    lengths_figures,
    of_host,
    print_lengths,
    print_plan,
    print_run,
    stream_figures,
    stream_rows,
    table,
)
from .export import show_export


# --------------------------------------------------------------------------------------------
# The view of lengths against a pack length, and the phases of a `diverse` plan
# --------------------------------------------------------------------------------------------
def _show_distribution(folder: Path, kind: str, pack_length: int | None, as_json: bool) -> None:
    """Print the view of a lengths folder, or of the plan in a plan or run folder.

    Raises:
        InputError: a lengths folder has no pack length of its own, a plan no other.
    """
    if kind not in ("lengths", "plan", "run"):
        raise InputError("--distribution needs lengths or a plan", hint="name the plan of this folder")
    phases: dict[str, Any] = {}
    if kind == "lengths":
        if pack_length is None:
            raise InputError("lengths have no pack length", hint="add --pack-length N")
        lengths = Lengths.load(folder)
    else:
        folder = folder_of_run(folder, "plan") if kind == "run" else folder
        plan = PackPlan.load(folder)
        if pack_length not in (None, plan.spec.pack_length):
            raise InputError(f"the plan has packs of {plan.spec.pack_length}", hint="leave --pack-length out")
        pack_length = plan.spec.pack_length
        phases = phases_of(plan)
        lengths = lengths_of(folder)
    view = {**distribution(lengths.usable(), pack_length), "phases": phases}
    title = f"Lengths in {folder} against packs of {pack_length:,}"
    emit(view) if as_json else table(title, _rows_of(view))


def _rows_of(view: dict[str, Any]) -> dict[str, str]:
    """The view as text."""
    rows = {
        "samples": f"{view['samples']:,} of {view['distinct_lengths']:,} distinct lengths",
        "tokens": f"{view['tokens']:,}",
    }
    for row in view["classes"]:
        bar = "█" * max(1, round(row["share"] * 40))
        rows[f"  {row['class']}"] = f"{row['samples']:>12,} {row['share']:>7.1%} {bar}"
    rows["over half a pack"] = f"{view['over_half']['samples']:,} ({view['over_half']['share']:.1%})"
    powers = view["powers_of_two"]
    rows["powers of two"] = (
        f"{powers['samples']:,} ({powers['share']:.1%}) of {len(powers['lengths'])} lengths"
    )
    keys = ("packs", "samples", "tokens", "fill")
    phases = view["phases"].items()
    return rows | {f"phase {name}": ", ".join(f"{key} {told[key]}" for key in keys) for name, told in phases}


# --------------------------------------------------------------------------------------------
# `packtrain show`: what is in an artefact, as a table, JSON or an HTML page
# --------------------------------------------------------------------------------------------
def _need_plan(hint: str, **given: Any) -> None:
    """Refuse options that show a plan, where there is none."""
    named = [f"--{name}" for name, value in given.items() if value is not None and value is not False]
    if named:
        raise InputError(f"{' and '.join(named)} of what has no plan", hint=hint)


@verb("show")
@argument("artefact", type=PATH, metavar="ARTEFACT")
@option("--html", type=PATH, help="Write the page of a plan or run.")
@option(
    "--export",
    "table_file",
    type=PATH,
    help="Write a plan as a table, one row a sample: `pack`, `position` in the pack, `sample`, "
    "`offset` of its first token, `length`; `.npz`, `.jsonl`, `.csv` or `.parquet`.",
)
@option("--pack", type=int, help="The sample ids of one pack.")
@option(
    "--sample",
    type=int,
    help="One sample: where it stands, its length, its pack or why it has none, and its record.",
)
@option(
    "--profile",
    type=PATH,
    help="Of a run with `--html` or `--json`: a device profile (JSON), for a forecast in seconds "
    "of that device.",
)
@flag(
    "--ledger",
    help="Every sample that is not in the plan, or that no plan of the lengths can hold: id, reason, "
    "where it stands, what is wrong.",
)
@flag(
    "--distribution",
    help="Lengths against a pack: classes, powers of two, share over half, phases of `diverse`.",
)
@option("--pack-length", "-n", type=int, help="The pack length of `--distribution`, for a lengths folder.")
@flag("--follow", help="A directory of chunks: print it whenever it changes, until it has ended.")
@option("--interval", default=2.0, help="Seconds between two looks of `--follow`.")
def command(artefact: Path, **options: Any) -> None:
    """Show a lengths, plan or run folder, an export, or a directory of chunks that grows.

    \b
    Example:
      packtrain show runs/demo/plan --html plan.html
      packtrain show runs/demo/plan --pack 0
      packtrain show runs/demo --sample 17
      packtrain show runs/demo/plan --export plan.parquet
      packtrain show lengths --distribution -n 8192
      packtrain show packed/ --follow
    """
    asked = SimpleNamespace(**options)
    artefact = of_host(artefact)
    kind = kind_to_follow(artefact) if asked.follow else artefact_kind(artefact)
    if not asked.distribution:
        without_effect("without --distribution", "pack_length")
    if not asked.follow:
        without_effect("without --follow", "interval")
    elif kind != "stream":
        without_effect(f"on a {kind} folder, which is whole", "follow")
    if kind not in ("plan", "run"):
        _need_plan("name a plan or run folder", export=asked.table_file)
    if asked.distribution:
        _show_distribution(artefact, kind, asked.pack_length, asked.as_json)
    elif asked.sample is not None and kind in ("lengths", "plan", "run"):
        _print_sample(artefact, kind, asked.sample, asked.as_json)
    else:
        shown = {"export": _show_export, "stream": _show_stream, "lengths": _show_lengths, "run": _show_run}
        shown.get(kind, _show_plan)(artefact, asked)


def _show_export(out: Path, asked: Any) -> None:
    from ..pipeline.export import export_figures

    _need_plan("name the plan of the export", html=asked.html, pack=asked.pack, ledger=asked.ledger)
    figures = export_figures(out)
    emit(figures) if asked.as_json else show_export(figures)


def _show_lengths(folder: Path, asked: Any) -> None:
    _need_plan("plan these lengths first", html=asked.html, pack=asked.pack)
    lengths = Lengths.load(folder)
    if asked.ledger:
        from ..pipeline.plan import measured_rows

        locate = where_of(folder, source_of(folder))
        _print_ledger(measured_rows(folder, lengths, locate), asked.as_json)
        return
    emit(lengths_figures(folder, lengths)) if asked.as_json else print_lengths(folder, lengths)


def _show_run(folder: Path, asked: Any) -> None:
    report = read_run(folder)  # checked
    run = files.read_json(folder / "run.json")
    if (folder / "plan").is_dir() or "plan_folder" in run.get("result", {}):
        _show_plan(folder, asked, run)
        return
    # packs of streams and growing directories have no plan
    with files.reading(folder / "run.json", "the record of a run", None):
        kept = run["config"]["data"]["kind"]
    hint = f"packs of kind {kept} have none; left_out.jsonl names what was left out"
    _need_plan(hint, export=asked.table_file, pack=asked.pack, ledger=asked.ledger)
    page = Report.of_run(folder, *report)
    if asked.html is not None:
        page.write(asked.html, title=f"Run {folder}")
    if asked.as_json:
        emit({"report": page.figures(), "run": run})
        return
    _print_run(folder, run, None)
    if asked.html is not None:
        click.echo(f"page: {asked.html}")


def _show_plan(artefact: Path, asked: Any, run: dict[str, Any] | None = None) -> None:
    """Of a plan folder, or of the plan of a `run`."""
    folder = artefact if run is None else folder_of_run(artefact, "plan")
    reads = asked.pack is not None or asked.ledger or asked.table_file is not None
    plan = undamaged(folder) if reads else PackPlan.load(folder)
    if asked.pack is not None:
        _print_pack(plan, asked.pack, asked.as_json)
        return
    if asked.ledger:
        from ..pipeline.inputs import lengths_of_plan
        from ..pipeline.plan import ledger_rows

        measured = None
        with contextlib.suppress(FormatError):  # the lengths are gone
            measured = lengths_of_plan(folder)
        held = ledger_rows(plan, measured, where_of(folder, source_of(folder)))
        _print_ledger(held, asked.as_json, run is not None)
        return
    if run is None or not (asked.html or asked.as_json):
        without_effect("without --html or --json of a run", "profile")
    device = None if asked.profile is None else DeviceProfile.load(asked.profile)
    if asked.html is not None:
        title = f"{'Plan' if run is None else 'Run'} {artefact}"
        _report(artefact, run is not None, folder, plan).write(asked.html, title=title, profile=device)
    if asked.table_file is not None:
        rows = write_plan_table(plan, lengths_of(folder), asked.table_file)
        if not asked.as_json:
            click.echo(f"table: {asked.table_file}, {counted(rows, 'rows')}")
    if asked.as_json:
        figures = {"plan": str(folder), "checksum": plan.checksum, **plan.stats()}
        with contextlib.suppress(FormatError):  # the lengths are gone: the plan's own figures
            figures["report"] = Report.of(artefact, folder, plan).figures(device)
        emit(figures if run is None else {**figures, "run": run})
        return
    print_plan(folder, plan) if run is None else _print_run(artefact, run, plan)
    if asked.html is not None:
        click.echo(f"page: {asked.html}")


def _report(artefact: Path, of_run: bool, folder: Path, plan: PackPlan) -> Report:
    """Of the plan and what was trained on it; where its lengths are gone, of the training alone."""
    try:
        return Report.of(artefact, folder, plan)
    except FormatError:
        if not of_run:
            raise
        return Report.of_run(artefact, *read_run(artefact))


def _print_run(artefact: Path, run: dict[str, Any], plan: PackPlan | None) -> None:
    print_run(artefact, run.get("result", {}), plan, run.get("config") or {})


def _print_sample(artefact: Path, kind: str, sample: int, as_json: bool) -> None:
    folder = folder_of_run(artefact, "plan") if kind == "run" else artefact
    plan = None if kind == "lengths" else undamaged(folder)
    lengths = Lengths.load(folder) if plan is None else lengths_of(folder)
    _refuse_beyond("sample", sample, len(lengths))
    found = sample_figures(folder, plan, lengths, sample)
    if as_json:
        emit(found)
        return
    record = found.pop("record")
    found["detail"] = _as_measured(found.get("detail") or "", kind == "run") or None
    table(f"Sample {sample} of {artefact}", found)
    if record is not None:
        click.echo(json.dumps(record, ensure_ascii=False, indent=2))


def _show_stream(folder: Path, asked: Any) -> None:
    _need_plan("a stream of chunks has none", html=asked.html, pack=asked.pack)
    if asked.ledger:
        _print_ledger([_placed(row) for row in ledger_of(folder)], asked.as_json)
        return
    for figures in follow_stream(folder, asked.interval) if asked.follow else [stream_figures(folder)]:
        emit(figures) if asked.as_json else table(f"Chunks in {folder}", stream_rows(figures))


def _placed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a stream's ledger with its place as the source says it, where its detail begins with that.

    `row` counts from 0, as `dataset.where` does; what people read counts lines and records from 1.
    """
    where, found, detail = str(row["detail"]).partition(": ")
    folder, slash, name = str(row["shard"]).rpartition("/")
    if found and where.startswith(name):
        return {**row, "where": f"{folder}{slash}{where}", "detail": detail}
    return {**row, "where": f"{row['shard']}, record {row['row'] + 1}"}


def _refuse_beyond(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise InputError(f"{what} {number} of {counted(count, f'{what}s')}", hint=f"0 to {count - 1}")


def _print_pack(plan: PackPlan, pack: int, as_json: bool) -> None:
    _refuse_beyond("pack", pack, len(plan))
    ids = plan[pack].tolist()
    if as_json:
        emit({"pack": pack, "ids": ids, "tokens": int(plan.pack_tokens[pack])})
    else:
        click.echo(f"pack {pack}: {int(plan.pack_tokens[pack])} tokens, {counted(len(ids), 'samples')}")
        click.echo(" ".join(map(str, ids)))


def _as_measured(detail: str, of_run: bool) -> str:
    """What a sample was left out for, in the options of `measure`, or in the keys of the YAML of a run."""
    from .measure import command as measuring

    return spoken(detail, measuring, of_run)


def _print_ledger(rows: list[dict[str, Any]], as_json: bool, of_run: bool = False) -> None:
    if as_json:
        emit({"ledger": rows})
        return
    if not rows:
        click.echo("the ledger is empty: no sample was left out", err=True)
    for row in rows:
        click.echo(f"{row['id']}\t{row['reason']}\t{row['where']}\t{_as_measured(row['detail'], of_run)}")
