"""The `demo:` spellings of a run's YAML, as paths: `demo:formulas`, `demo:formulas-val`, `demo:qwen2_5_vl`.

Resolving makes the set when it is not there. `packtrain run examples/demo.yaml` therefore needs no
step before it, and the same YAML is shipped inside the package (`demo_config`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...checks import one_of
from ...world import cache_dir
from .make import VERSION, DemoSet, make_demo
from .processor import shipped

_PREFIX = "demo:"
_PARTS: dict[str, Callable[[DemoSet], Path]] = {
    "formulas": lambda made: made.train_jsonl,
    "formulas-val": lambda made: made.val_jsonl,
    "qwen2_5_vl": lambda made: made.processor_dir,
}


def is_demo(value: object) -> bool:
    """True for a `demo:...` spelling."""
    return isinstance(value, str) and value.startswith(_PREFIX)


def resolve_demo(
    spelling: str, folder: str | Path | None = None, *, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The path behind a `demo:...` spelling; any other string comes back as a path unchanged.

    Args:
        folder: where the set lies or is made; default: in the cache folder, by version.

    Raises:
        UnknownNameError: no such demo part; names the nearest.
    """
    if not is_demo(spelling):
        return Path(spelling)
    name = spelling.removeprefix(_PREFIX)
    one_of("demo", name, _PARTS)
    place = cache_dir() / "demo" / f"v{VERSION}" if folder is None else Path(folder)
    return _PARTS[name](make_demo(place, progress=progress))


def demo_config() -> str:
    """The text of the demo's YAML, the same file as `examples/demo.yaml`."""
    return shipped("demo.yaml")
