"""`packtrain produce`: raw shards that arrive over time become chunks of packs that training reads."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..remote.outputs import writable
from ._app import PATH, argument, completed, emit, flag, option, progress, verb, without_effect
from ._options import inputs_of, limits_of, reading_options
from ._show import stream_rows, table


@verb("produce")
@argument("inputs", type=PATH, metavar="IN")
@argument("output", type=PATH, metavar="OUT")
@option(
    "--processor",
    "-p",
    default="",
    show_default=False,
    help="Folder or hub name of the processor or tokenizer; `--kind encoded` needs none.",
)
@option("--pack-length", "-n", type=int, required=True, help="Cap of a pack in tokens.")
@flag("--watch", help="Go on until a file `END` lies in IN, then end the stream.")
@flag(
    "--once",
    "--end",
    "ends",
    help="Take what is there and end the stream [default: take it; a later call goes on].",
)
@option("--packs-per-chunk", default=100, help="Packs of a chunk.")
@option("--chunk-mb", default=1024, help="MiB at which a chunk is full before.")
@option(
    "--window",
    default="1000",
    help="Samples planned together; those of packs that are not full wait for the next window. "
    "`all`: everything in IN, with `--packer ffd` first fit decreasing over the global view.",
)
@option("--packer", default="auto", help="How a window is packed.", shell_complete=completed("packers"))
@option("--seed", type=int, help="Shuffle samples of equal length inside a window.")
@option("--limit", "limits", multiple=True, metavar="COST=CAP", help="Further cap of a pack; repeatable.")
@option("--max-samples", type=int, help="Samples of a pack.")
@option("--multiple-of", default=1, help="Later padding of every sample.")
@option("--long-samples", help="single, drop or error [default: as OUT was begun, else single].")
@option(
    "--media",
    help="How chunks hold pictures and sound: `uint8` (default), `tensor`, `source`. Not given: "
    "as OUT was begun.",
)
@option(
    "--ready",
    help="When a raw shard is complete: `rename`, `marker` (`NAME.done`, `_SUCCESS`), `stable`; "
    "default `stable` with `--watch`, else `rename`.",
)
@option("--stable", "stable_s", default=5.0, help="Seconds without change for `stable`.")
@option("--max-age", default=16, help="Windows a sample may wait so.")
@option(
    "--flush",
    "flush_s",
    default=10.0,
    help="Seconds without new shards until a smaller window is planned; packs and a chunk that are not full "
    "wait on.",
)
@option(
    "--max-ahead",
    type=int,
    help="Back-pressure: wait while so many chunks are not acknowledged; at least the number of ranks.",
)
@option(
    "--keep-completed",
    type=int,
    help="Remove acknowledged chunks but the newest so many; default: remove none.",
)
@option("--workers", default=1, help="Processes that encode; the chunks do not depend on it.")
@option("--poll", "poll_s", default=1.0, help="Seconds between two looks at IN.")
@reading_options
@option("--max-length", type=int, help="Cap of a sample with --truncation left or right.")
@option("--truncation", default="error", help="error, left or right.")
@option(
    "--stop-after-failures",
    default=100,
    help="Stop when the first so many records all fail for one reason, or all records do (0: go on).",
)
def command(inputs: Path, output: Path, watch: bool, ends: bool, as_json: bool, **options: Any) -> None:
    """Measure, encode and pack the raw shards in IN into numbered chunks in OUT, a folder or its URL, for
    training that reads along.

    \b
    Example:
      packtrain produce raw/ packed/ --processor Qwen/Qwen2-Audio-7B-Instruct --pack-length 8192 --watch
      packtrain produce raw/ packed_4k/ -p ./qwen -n 4096 --once --json
      packtrain produce rows/ packed_rows/ --kind encoded -n 8192 --limit supervised=6000
      packtrain produce raw/ packed_all/ -p ./qwen -n 8192 --window all --packer ffd --end
      packtrain produce raw/ s3://bucket/packed -p ./qwen -n 8192 --watch
    """
    from ..export import PackingProducer

    if watch and ends:
        raise InputError("--watch and --once (--end) say different things", hint="keep one of them")
    output = writable(output)
    window = options["window"]
    options["window"] = int(window) if window.isdecimal() else window
    opened = inputs_of(str(inputs), options)
    options["ready"] = options["ready"] or ("stable" if watch else "rename")
    if options["ready"] != "stable":
        without_effect(f"with --ready {options['ready']}", "stable_s")
    if not watch:
        without_effect("without --watch", "flush_s")
    options["limits"] = limits_of(options["limits"])
    with progress("packing", quiet=as_json) as report:
        producer = PackingProducer(
            inputs,
            output,
            functools.partial(_template, opened),
            open_shard=ShardOpener(opened),
            progress=report,
            **options,
        )
        stats = producer.run(watch=watch, end=ends)
    figures = {"out": str(output), **stats.figures()}
    emit(figures) if as_json else table(f"Chunks in {output}", stream_rows(figures))


@dataclasses.dataclass(frozen=True)
class ShardOpener:
    """path -> the samples in it, by the options of the command. Picklable."""

    inputs: Any

    def __call__(self, path: Path) -> Any:
        return dataclasses.replace(self.inputs, source=str(path)).open_source()

    def config(self) -> dict[str, Any]:
        """Options that decide the samples."""
        from ..export._intake import reading
        from ..pipeline.inputs import OF_CHAT

        named = (*OF_CHAT, "kind", "source_options", "task")
        return reading({name: getattr(self.inputs, name) for name in named})


def _template(inputs: Any) -> Any:
    from ..sources.encoded import EncodedTemplate

    if inputs.kind == "encoded":
        return EncodedTemplate()
    if not inputs.processor:
        raise InputError("--processor is not set", hint="name a folder or hub name, or use --kind encoded")
    return inputs.open_template()
