"""`packtrain which`: the samples of a training step, or the steps of a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import InputError, counted
from ._app import PATH, argument, emit, flag, option, verb, without_effect
from ._show import of_host


@verb("which")
@argument("artefact", type=PATH, metavar="RUN|PLAN")
@option("--step", type=int, help="The optimizer step: over the run, or inside `--epoch`.")
@option(
    "--sample",
    type=int,
    help="A sample id: print the steps that hold it (of all epochs of a run, else of `--epoch`).",
)
@option("--rank", type=int, help="Only what this rank takes.")
@option("--epoch", type=int, help="The epoch, from 0.")
@option("--world-size", type=int, help="Ranks, for a plan [default: 1].")
@option("--grad-accum", type=int, help="Micro steps a step, for a plan by packs [default: 1].")
@option("--seed", type=int, help="Seed of the epoch orders, for a plan [default: plan order].")
@option("--balance", help="Balance of the sampler, for a plan: step, window or global.")
@option("--replan", type=click.Choice(["epoch"]), help="For a plan: every epoch has a plan of its own.")
@flag(
    "--losses",
    help="With `--step` of a run: loss and supervised tokens of every sample, the largest loss first.",
)
def command(
    artefact: Path,
    step: int | None,
    sample: int | None,
    rank: int | None,
    epoch: int | None,
    losses: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say which samples a step of RUN (or of training on PLAN) sees, and where they stand in the source.

    \b
    Example:
      packtrain which runs/demo --step 100
      packtrain which runs/demo --step 100 --losses
      packtrain which runs/demo --sample 17
      packtrain which plan --step 3 --epoch 1 --world-size 2 --seed 42
    """
    from ..pipeline.which import is_unplanned, order_of, rows_of

    if (step is None) == (sample is None):
        raise InputError("name either --step or --sample", hint="for example --step 0")
    artefact = of_host(artefact)
    unplanned = is_unplanned(artefact)
    if losses and (step is None or not (unplanned or (artefact / "run.json").is_file())):
        raise InputError(
            "--losses needs --step of a run", hint="for example which runs/demo --step 100 --losses"
        )
    if unplanned:
        without_effect("of a run without a plan, or one that has not ended", "epoch", *options)
        _print_unplanned(artefact, step, sample, rank, as_json)
        return
    order = order_of(artefact, **options)
    if sample is not None:
        without_effect("with --sample", "rank")
        epochs = [epoch] if epoch is not None else list(range(order.epochs))
        _print_sample(sample, epoch, order.sample(sample, epochs), rows_of(order.folder, [sample]), as_json)
        return
    found = order.step(int(step or 0), epoch=epoch, rank=rank)
    rows = rows_of(order.folder, found["ids"])
    if losses:
        _print_losses(artefact, found, rows, rank, as_json)
        return
    if as_json:
        emit({**found, "rows": rows})
        return
    click.echo(
        f"epoch {found['epoch']}, step {found['step']} of {found['steps_per_epoch']} "
        f"(step {found['run_step']} of the run): {counted(len(found['ids']), 'samples')} in "
        f"{counted(len(found['packs']), 'packs')}"
    )
    where = dict(zip(found["ids"], rows or [], strict=False))
    for pack in found["packs"]:
        name = "filler" if pack["pack"] < 0 else f"pack {pack['pack']}"
        click.echo(f"micro step {pack['micro_step']}, rank {pack['rank']}: {name}")
        for i in pack["ids"]:
            click.echo(f"  {i}\t{where.get(i, '')}".rstrip())


def _print_losses(
    run: Path, found: dict[str, Any], rows: list[str] | None, rank: int | None, as_json: bool
) -> None:
    from ..pipeline.which import losses_of

    told = [row for row in losses_of(run, found["run_step"]) if rank is None or row["rank"] == rank]
    where = dict(zip(found["ids"], rows or [], strict=False))
    if as_json:
        emit({**found, "losses": [{**row, "row": where.get(row["id"])} for row in told]})
        return
    click.echo(
        f"step {found['run_step']} of the run: {counted(len(told), 'samples')}, loss and supervised tokens"
    )
    for row in told:
        click.echo(f"  {row['id']}\t{_loss(row)}\t{row['tokens']}\t{where.get(row['id'], '')}".rstrip())


def _loss(row: dict[str, Any]) -> str:
    return "-" if row["loss"] is None else f"{row['loss']:.4f}"


def _print_unplanned(
    run: Path, step: int | None, sample: int | None, rank: int | None, as_json: bool
) -> None:
    """Of a run without a plan, or one that has not ended: what it wrote down of every step."""
    from ..pipeline.which import losses_of, rows_of, steps_of

    if sample is None:
        ids = sorted(row["id"] for row in losses_of(run, int(step or 0)))
        rows = rows_of(run / "plan", ids)  # of a planned run that has not ended
        _print_losses(run, {"run_step": int(step or 0), "ids": ids}, rows, rank, as_json)
        return
    without_effect("with --sample", "rank")
    _print_sample(sample, None, steps_of(run, sample), rows_of(run / "plan", [sample]), as_json)


def _print_sample(
    sample: int, epoch: int | None, places: list[dict[str, Any]], rows: list[str] | None, as_json: bool
) -> None:
    if as_json:
        emit({"sample": sample, "steps": places, "row": rows[0] if rows else None})
        return
    click.echo(f"sample {sample}" + (f" ({rows[0]})" if rows else ""))
    if not places:
        click.echo("  no step of this run" + ("" if epoch is None else f" in epoch {epoch}") + " holds it")
    for place in places:
        step, rank = f"step {place['run_step']} of the run", f"rank {place['rank']}"
        if "pack" in place:
            step = f"epoch {place['epoch']}, step {place['step']} ({step}): micro step {place['micro_step']}"
            click.echo(f"  {step}, {rank}, pack {place['pack']}")
        else:  # as the run wrote it down
            told = f"loss {_loss(place)}, {counted(place['tokens'], 'supervised tokens')}"
            click.echo(f"  {step}: {rank}, {told}")
