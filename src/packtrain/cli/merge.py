"""`packtrain merge`: the shares of an array job become one lengths folder or one export."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ._app import PATH, argument, emit, flag, verb
from ._show import lengths_figures, print_lengths
from .export import show_export


@verb("merge")
@argument("out", metavar="OUT", type=PATH)
@flag("--overwrite", help="Replace other lengths in `OUT`.")
def command(out: Path, overwrite: bool, as_json: bool) -> None:
    """Join the shards that `packtrain measure --shard` left in OUT, and remove them; or complete an export
    that was written with `packtrain export --shard`.

    \b
    Example:
      packtrain measure train.jsonl -p ./qwen -o lengths --shard 0/2
      packtrain measure train.jsonl -p ./qwen -o lengths --shard 1/2
      packtrain merge lengths
      packtrain merge shards
    """
    from ..pipeline.shards import merge
    from ..remote.outputs import writable
    from ..store.shards import at, is_export

    out = writable(out)
    place = at(out)
    if not place.is_dir():
        raise InputError(
            f"{out} {'is a file' if out.exists() else 'does not exist'}",
            hint="name the folder that packtrain measure --shard or packtrain export --shard wrote to",
        )
    if is_export(place):
        from ..pipeline.export import finish_export

        figures = finish_export(out)
        emit(figures) if as_json else show_export(figures)
        return
    lengths = merge(out, overwrite=overwrite)
    emit(lengths_figures(out, lengths)) if as_json else print_lengths(out, lengths)
