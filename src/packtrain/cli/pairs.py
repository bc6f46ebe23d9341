"""`packtrain pairs`: several records of one image, split into pairs or merged into one dialogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from ._app import PATH, argument, emit, flag, option, verb, without_effect
from ._options import pairs, placeholders
from ._show import table


@verb("pairs")
@argument("source", metavar="SOURCE")
@argument("out", type=PATH, metavar="OUT")
@option("--way", default="split", help="`split`: a folder of pairs; `merge`: a JSONL file.")
@option(
    "--processor",
    "-p",
    default="",
    show_default=False,
    help="merge: folder or hub name; it counts the merged length.",
)
@option("--max-length", type=int, help="merge: longest merged sample, in tokens.")
@flag(
    "--skip",
    help="Leave records out that cannot be used, and say which in a ledger, instead of stopping "
    "at the first.",
)
@option("--shape", default="auto", help="As for measure.")
@option("--column", "columns", multiple=True, metavar="NAME=FIELD", help="As for measure; repeatable.")
@option("--placeholder", "placeholders", multiple=True, help="As for measure; repeatable.")
@option("--media-root", help="As for measure.")
@flag("--allow-outside", help="As for measure.")
@flag("--allow-remote", help="As for measure.")
@option("--ignore-key", "ignore_keys", multiple=True, metavar="KEY", help="Leave KEY out; repeatable.")
def command(
    source: str, out: Path, way: str, max_length: int | None, skip: bool, as_json: bool, **options: Any
) -> None:
    """Write SOURCE as a folder of {image, json} pairs without clashing names (split), or as a JSONL file with
    one sample an image, no longer than --max-length (merge).

    \b
    Example:
      packtrain pairs vqa.jsonl pairs/
      packtrain pairs vqa.jsonl sound_pairs/ --skip
      packtrain pairs vqa.jsonl other_pairs/ --ignore-key bbox
      packtrain pairs vqa.jsonl merged.jsonl --way merge -p ./qwen --max-length 8192
    """
    from ..pipeline.inputs import Inputs
    from ..pipeline.pairs import merge_images, split_pairs
    from ..pipeline.publish import told

    if way not in ("split", "merge"):
        raise InputError(f"--way {way!r}", hint="split or merge")
    options |= {
        "columns": pairs("--column", options["columns"]),
        "placeholders": placeholders(options["placeholders"]),
        "ignore_keys": list(options["ignore_keys"]),
    }
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise InputError(f"{out} is the source itself", hint="choose another output")
    inputs = Inputs(source=source, **options)
    opened = inputs.open_source()
    if way == "split":
        without_effect("on a split", "max_length", "processor")
        done = split_pairs(opened, out, skip=skip)
    else:
        if max_length is None or not options["processor"]:
            raise InputError("a merge needs its limit", hint="add --processor P --max-length N")
        done = merge_images(opened, out, inputs.open_template(opened).measure, max_length, skip=skip)
    counts = done.pop("keys", {})
    if as_json:
        emit({"out": str(out), **done, "keys": counts})
    else:
        rows = {name: f"{value:,}" for name, value in done.items()}
        table(f"{way.capitalize()} in {out}", {**rows, "keys": told(counts) or None})
