"""`packtrain export`: a plan's packs as files that other loaders read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..remote.places import typed
from ._app import PATH, argument, emit, flag, option, progress, verb
from ._options import of_cluster, shard_of
from ._show import table


@verb("export")
@argument("plan", type=PATH, metavar="PLAN")
@argument("out", type=PATH, metavar="OUT")
@option(
    "--format",
    "-f",
    default="webdataset",
    help="`raw`, `webdataset`, `energon`, `chunks`, `mds`, `litdata`, `lance`, `datasets`, `megatron`.",
)
@option(
    "--task",
    default="auto",
    help="Form of the plain fields: `captions`, `vqa`, `multi_turn`; `auto`: the narrowest that holds all.",
)
@option(
    "--maxcount",
    default=1000,
    help="Packs of a part, the unit of work and of resuming, and of a shard at most.",
)
@option("--maxsize", default=3_000_000_000, help="Bytes after which the next pack opens a new shard.")
@option("--prompts", help="Name of the field of prompts: `prompt` or `prompts`.")
@option("--layout", help="`energon`: `packtrain` or `llava`; `megatron`: `parquet` or `npy`.")
@option("--media", help="`chunks`: `uint8` (default), `tensor`, `source`. Not given: as OUT was begun.")
@option(
    "--context-parallel",
    type=int,
    help="`megatron`: ranks that share a row; samples are padded to twice as many (plan with --multiple-of).",
)
@option("--workers", type=int, default=1, help="Processes; parts are their unit.")
@option("--executor", default="local", help="Where parts are written: local ray.")
@option("--address", help="Ray cluster [default: the one Ray finds, else processes on this machine].")
@option(
    "--shard", metavar="I/N", help="`I/N`: write only this share; `packtrain merge OUT` completes the export."
)
@flag("--verify-content", help="Hash media headers instead of trusting size and time.")
@flag("--overwrite", help="Replace another export in OUT.")
def command(
    plan: Path, out: Path, shard: str | None, address: str | None, as_json: bool, **given: Any
) -> None:
    """Write the packs of PLAN to OUT, a folder or its URL: whole samples with their media, or encoded packs
    (chunks, megatron).

    \b
    Example:
      packtrain export runs/demo/plan shards --format webdataset
      packtrain export plan energon -f energon --layout llava --workers 8
      packtrain export plan mds -f mds && packtrain verify mds
      packtrain export plan packed -f megatron --context-parallel 2
      packtrain export plan chunks -f chunks --media tensor --shard $SLURM_ARRAY_TASK_ID/64
      packtrain export plan s3://bucket/shards --workers 8
    """
    from ..pipeline.export import export

    options = {name: given.pop(name) for name in ("prompts", "layout", "media", "context_parallel")}
    with progress("exporting", quiet=as_json) as report:
        figures = export(
            plan,
            out,
            options=options,
            shard=shard_of(shard),
            executor_options=of_cluster(given["executor"], address),
            progress=report,
            **given,
        )
    emit(figures) if as_json else show_export(figures)


def show_export(figures: dict[str, Any]) -> None:
    """The figures of an export as a table."""
    rows = {
        name: f"{value:,}" if isinstance(value, int) else value
        for name, value in figures.items()
        if name not in ("out", "shard")
    }
    if (shard := figures.get("shard")) is not None:
        rows["share"] = f"{shard[0]} of 0 to {shard[1] - 1}"
        rows["when all are written"] = f"packtrain merge {typed(figures['out'])}"
    table(f"Export in {figures['out']}", rows)
