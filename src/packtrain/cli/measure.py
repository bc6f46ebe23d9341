"""`packtrain measure`: the length of every sample, from metadata, into a lengths folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..measuring.audit import audit as run_audit
from ..planning.lengths import STATUS_OK, Lengths
from ..remote.outputs import writable
from ..remote.places import told_url
from ..store._folders import refuse_other_kind
from ._app import PATH, argument, emit, flag, option, progress, verb
from ._options import inputs_of, of_cluster, reading_options, shard_of
from ._show import lengths_figures, print_lengths


def _audited(text: str, usable: int) -> int:
    """How many of the usable samples are encoded and compared."""
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().removesuffix("%")) if share else int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= (100 if share else value):
        raise InputError(f"--audit {text!r} is no count or percentage", hint="for example 32, 1% or 0")
    return math.ceil(usable * value / 100) if share else int(value)


@verb("measure")
@argument("source", metavar="SOURCE")
@option(
    "--processor",
    "-p",
    default="",
    show_default=False,
    help="Folder or hub name of the processor or tokenizer; encoded rows need none.",
)
@option("--out", "-o", required=True, type=PATH, help="Lengths folder to write, or its URL.")
@reading_options
@flag(
    "--trust-hints",
    help="Take width, height, duration from the data where they give them, after an audit of 64 samples.",
)
@option(
    "--model-limit",
    type=int,
    help="Longest sample the model takes; longer ones go to the ledger as `beyond_model`.",
)
@option("--workers", type=int, help="Processes; default one per core for more than 2,048 samples.")
@option(
    "--executor",
    default="local",
    help="Where ranges are measured: `local` (processes of this machine) or `ray`.",
)
@option(
    "--address",
    help="Ray cluster: `auto`, `host:port`; default the one `RAY_ADDRESS` names, else Ray on this machine.",
)
@option(
    "--shard",
    metavar="I/N",
    help="`I/N`: measure shard I (from 0) of N only, for array jobs; `packtrain merge` joins them.",
)
@flag("--append", help="The source has grown: measure only what is new or changed.")
@option(
    "--audit",
    default="32",
    help="Samples to encode for real and compare with what was measured: a number, a share such "
    "as `1%`, or 0.",
)
@flag("--verify-content", help="Hash media again instead of trusting size and time.")
@option(
    "--max-drop-fraction",
    type=float,
    help="Exit 2 when a larger share of the samples cannot be used; default 0.1 where media are "
    "missing, or not those of the placeholders, or records malformed. The lengths are kept.",
)
@flag("--overwrite", help="Replace other lengths in `--out`.")
def command(out: Path, as_json: bool, audit: str, **options: Any) -> None:
    """Measure every sample of SOURCE (.jsonl or .json) without decoding media.

    \b
    Example:
      packtrain measure train.jsonl --processor Qwen/Qwen2.5-VL-3B-Instruct --out lengths
      packtrain measure qa.jsonl -p ./tokenizer -o qa --column prompt=question --column response=answer
      packtrain measure train.jsonl -p ./qwen -o lengths --shard $SLURM_ARRAY_TASK_ID/64
    """
    from ..pipeline.measure import measure, refuse_other_source
    from ..pipeline.plan import check_limit, check_measured
    from ..pipeline.shards import measure_shard, shard_lengths

    given = {name: options.pop(name) for name in ("executor", "workers", "overwrite")}
    check_limit(limit := options.pop("max_drop_fraction"))
    shard = shard_of(options.pop("shard"))
    append, verify_content = options.pop("append"), options.pop("verify_content")
    if shard is not None and append:
        raise InputError("--shard measures a whole source, --append a part", hint="leave one of them out")
    given["executor_options"] = of_cluster(given["executor"], options.pop("address"))
    _audited(audit, 0)
    local, out = told_url(out) is None, writable(out)
    refuse_other_kind(out, "lengths.json")  # before a processor is loaded
    inputs = inputs_of(options["source"], options)
    source = inputs.open_source()
    if local and shard is None and not (append or given["overwrite"]):
        refuse_other_source(out, source)
    template = inputs.open_template(source)
    with progress("measuring", quiet=as_json) as report:
        given.update(origin={"inputs": inputs.to_dict()}, progress=report)
        if shard is None:
            whole = {"append": append, "verify_content": verify_content}
            lengths, start = measure(source, template, out, **whole, **given), None
        else:
            made = measure_shard(source, template, out, shard, **given)
            merged = not made.folder.is_dir()
            lengths, start = (Lengths.load(out), None) if merged else (shard_lengths(made), made.start)
            out = out if merged else made.folder
    audited = 0
    if count := _audited(audit, int((lengths.status == STATUS_OK).sum())):
        with progress("checking", quiet=as_json) as report:
            chosen: dict[str, Any] = {
                "count": count,
                "start": start,
                "check": getattr(template, "check_decoded", None),
            }
            checked = run_audit(source, lengths, template.encode, progress=report, **chosen)
        audited = len(checked.ids)
    if not as_json:
        print_lengths(out, lengths, audited=audited)
    check_measured(lengths, out, limit)
    if as_json:
        emit({**lengths_figures(out, lengths), "audited": audited})
