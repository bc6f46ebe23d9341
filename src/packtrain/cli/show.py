"""`packtrain show`: what is in an artefact, as a table, JSON or an HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from .. import files
from ..errors import FormatError, InputError
from ..pipeline.length_files import lengths_of
from ..pipeline.plan_table import write_plan_table
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ._app import emit
from ._distribution import show_distribution
from ._show import artefact_kind, folder_of_run, lengths_figures, print_lengths, print_plan, table
from ._stream import follow_stream, kind_to_follow, ledger_of, stream_figures, stream_rows
from .export import show_export

__all__ = ["command"]


@click.command("show")
@click.argument("artefact", type=click.Path(path_type=Path), metavar="ARTEFACT")
@click.option(
    "--html", type=click.Path(path_type=Path), help="Write a self-contained page about a plan or run."
)
@click.option(
    "--export",
    "table_file",
    type=click.Path(path_type=Path),
    help="Write a plan as a table (.npz, .jsonl, .csv, .parquet): pack, position, sample, offset, length.",
)
@click.option("--pack", type=int, help="Print the sample ids of one pack of a plan.")
@click.option("--ledger", is_flag=True, help="Print every sample that is not in the plan, with its reason.")
@click.option("--distribution", is_flag=True, help="Lengths against a pack: classes, powers of two, phases.")
@click.option("--pack-length", "-n", type=int, help="Of --distribution, for a lengths folder.")
@click.option("--follow", is_flag=True, help="Print a growing directory whenever it changes, until its end.")
@click.option("--interval", default=2.0, show_default=True, help="Seconds between two looks of --follow.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(
    artefact: Path,
    html: Path | None,
    table_file: Path | None,
    pack: int | None,
    ledger: bool,
    distribution: bool,
    pack_length: int | None,
    follow: bool,
    interval: float,
    as_json: bool,
) -> None:
    """Show a lengths, plan or run folder, an export, or a directory of chunks that grows.

    \b
    Example:
      packtrain show runs/demo/plan --html plan.html
      packtrain show runs/demo/plan --pack 0
      packtrain show runs/demo/plan --export plan.parquet
      packtrain show lengths --distribution -n 8192
      packtrain show packed/ --follow
    """
    kind = kind_to_follow(artefact) if follow else artefact_kind(artefact)
    if pack_length is not None and not distribution:
        raise InputError("--pack-length has no effect", hint="add --distribution")
    if table_file is not None and kind not in ("plan", "run"):
        raise InputError("--export writes a plan", hint="name a plan or run folder")
    if distribution and kind in ("lengths", "plan", "run"):
        of_run = folder_of_run(artefact, "plan") if kind == "run" else artefact
        show_distribution(of_run, "plan" if kind == "run" else kind, pack_length, as_json)
        return
    if distribution:
        raise InputError("--distribution needs lengths or a plan", hint="name the plan of this folder")
    if kind == "export":
        if html or pack is not None or ledger:
            raise InputError("--html, --pack and --ledger need a plan", hint="name the plan of the export")
        from ..pipeline.export import export_figures

        figures = export_figures(artefact)
        emit(figures) if as_json else show_export(figures)
        return
    if kind == "stream":
        if html or pack is not None:
            raise InputError("--html and --pack need a plan", hint="a stream of chunks has none")
        _show_stream(artefact, ledger, follow, interval, as_json)
        return
    if follow:
        raise InputError(f"--follow has no effect on a {kind} folder", hint="it is whole: leave it out")
    if kind == "lengths":
        if html or pack is not None or ledger:
            raise InputError("--html, --pack and --ledger need a plan", hint="plan these lengths first")
        lengths = Lengths.load(artefact)
        if as_json:
            emit(lengths_figures(artefact, lengths))
            return
        print_lengths(artefact, lengths)
        return
    folder = folder_of_run(artefact, "plan") if kind == "run" else artefact
    plan = PackPlan.load(folder)
    if pack is not None:
        _print_pack(plan, pack, as_json)
        return
    if ledger:
        _print_ledger(folder, plan, as_json)
        return
    if html is not None:
        _write_html(folder, plan, html)
    if table_file is not None:
        rows = write_plan_table(plan, lengths_of(folder), table_file)
        if not as_json:
            click.echo(f"table: {table_file}, {rows:,} rows")
    if as_json:
        emit({"plan": str(folder), "checksum": plan.checksum, **plan.stats()})
    else:
        print_plan(folder, plan)
        if kind == "run":
            table(f"Run in {artefact}", files.read_json(artefact / "run.json").get("result", {}))
        if html is not None:
            click.echo(f"page: {html}")


def _show_stream(folder: Path, ledger: bool, follow: bool, interval: float, as_json: bool) -> None:
    if ledger:
        rows = ledger_of(folder)
        if as_json:
            emit({"ledger": rows})
            return
        for row in rows:
            click.echo(f"{row['id']}\t{row['reason']}\t{row['shard']}:{row['row']}\t{row['detail']}")
        return
    for figures in follow_stream(folder, interval) if follow else [stream_figures(folder)]:
        if as_json:
            emit(figures)
        else:
            table(f"Chunks in {folder}", stream_rows(figures))


def _print_pack(plan: PackPlan, pack: int, as_json: bool) -> None:
    if not 0 <= pack < len(plan):
        raise InputError(f"pack {pack} of {len(plan)} packs", hint=f"0 to {len(plan) - 1}")
    ids = plan[pack].tolist()
    if as_json:
        emit({"pack": pack, "ids": ids, "tokens": int(plan.pack_tokens[pack])})
    else:
        click.echo(f"pack {pack}: {int(plan.pack_tokens[pack])} tokens, {len(ids)} samples")
        click.echo(" ".join(map(str, ids)))


def _print_ledger(folder: Path, plan: PackPlan, as_json: bool) -> None:
    from ..pipeline.plan import ledger_rows

    rows = ledger_rows(plan, _place_of_lengths(folder))
    if as_json:
        emit({"ledger": rows})
        return
    for row in rows:
        click.echo(f"{row['id']}\t{row['reason']}\t{row['where']}\t{row['detail']}")


def _write_html(folder: Path, plan: PackPlan, html: Path) -> None:
    from ..pipeline.plan import ledger_rows
    from ..report.html import write_report

    write_report(
        html,
        title=f"Plan {folder}",
        stats=plan.stats(),
        plan=plan,
        lengths=lengths_of(folder),
        ledger_rows=ledger_rows(plan, _place_of_lengths(folder)),
    )


def _place_of_lengths(folder: Path) -> Path | None:
    from ..pipeline.inputs import lengths_of_plan

    try:
        return lengths_of_plan(folder)
    except FormatError:
        return None
