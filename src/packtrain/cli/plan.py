"""`packtrain plan`: lengths to a plan folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import files
from ..remote.outputs import writable
from ._app import PATH, argument, completed, emit, flag, option, verb
from ._options import limits_of
from ._show import open_lengths, print_plan


@verb("plan")
@argument("lengths", type=PATH, metavar="LENGTHS")
@option(
    "--pack-length",
    "-n",
    type=int,
    required=True,
    help="Cap of a pack of several samples, in tokens; a longer sample follows `--long-samples`.",
)
@option("--out", "-o", type=PATH, required=True, help="Plan folder to write, or its URL.")
@option("--packer", default="auto", help="How packs are filled.", shell_complete=completed("packers"))
@option(
    "--packer-options",
    metavar="YAML",
    help="Knobs of the packer as YAML, for example `'{max_items: 8}'` of `diverse`.",
)
@option(
    "--long-samples",
    default="single",
    help="A sample that does not fit: `single` (a pack of its own), `drop` (ledger), `error`.",
)
@option(
    "--long-rule",
    default=">",
    help="Long means length `>` or `>=` the pack length; a YAML has `>=` (planning.md, Long samples).",
)
@option(
    "--limit",
    "limits",
    multiple=True,
    metavar="COST=N",
    help="`COST=N`, a further hard cap per pack, such as `images=64`; repeatable.",
)
@option("--max-samples", type=int, help="Cap on the samples in a pack.")
@option(
    "--multiple-of",
    type=int,
    default=1,
    help="Every sample is later padded to a multiple of this; counted into the cap.",
)
@option("--window", type=int, help="Samples planned together; default all.")
@option(
    "--seed",
    type=int,
    help="Shuffle samples of equal cost among their places; with `--samples-per-step` also which "
    "samples a step holds.",
)
@option("--samples-per-step", type=int, help="Exactly this many samples in each optimizer step.")
@option(
    "--packs-multiple", type=int, help="Packs of such a step are a multiple of this: ranks × accumulation."
)
@option(
    "--last-step",
    help="Samples that do not fill the last step: `keep` (a smaller step) or `drop` (ledger, "
    "`partial_step`) [default: keep].",
)
@option(
    "--skip-samples",
    type=PATH,
    help="File of sample ids to leave out, one a line or a JSON list (ledger, `skipped`).",
)
@option(
    "--max-drop-fraction",
    type=float,
    help="Fail when a larger share of the samples goes to the ledger, naming them.",
)
@flag("--overwrite", help="Replace another plan in `--out`.")
def command(lengths: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Pack the samples of LENGTHS (a lengths folder, or a .npy, .npz, .json,
    .jsonl, .csv or .parquet file of token counts).

    \b
    Example:
      packtrain plan lengths --pack-length 8192 --out plan
      packtrain plan lengths.parquet -n 8192 -o plan
      packtrain plan lengths -n 8192 -o plan --samples-per-step 1024 --packs-multiple 64
      packtrain plan s3://bucket/lengths -n 8192 -o s3://bucket/plan
    """
    from ..pipeline.plan import plan_lengths
    from ..planning.ledger import read_skip_file

    out = writable(out)
    options = {name: value for name, value in options.items() if value is not None}
    options["limits"] = limits_of(options["limits"])
    if "packer_options" in options:
        options["packer_options"] = files.parse_yaml(options["packer_options"], "--packer-options")
    if "skip_samples" in options:
        options["skip"] = read_skip_file(options.pop("skip_samples"))
    plan = plan_lengths(open_lengths(lengths), out, lengths_folder=lengths, **options)
    if plan.spec.samples_per_step is not None and plan.spec.seed is None:
        click.echo(
            "note: steps hold neighbours of the file; --seed 0 draws their samples at random, as a run does",
            err=True,
        )
    figures = {"plan": str(out), "checksum": plan.checksum, **plan.stats()}
    emit(figures) if as_json else print_plan(out, plan)
