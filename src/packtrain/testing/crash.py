"""The crash law: a verb is stopped after each of its durable steps and run again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from .. import files


class Stopped(BaseException):
    """The process is stopped here (raised by a test's observer; no code may catch it)."""


def crash_points(
    verb: Callable[[Path], object],
    root: Path,
    *,
    prepare: Callable[[Path], object] | None = None,
    check: Callable[[Path], object] | None = None,
    ignore: Sequence[str] = (),
    every: int = 1,
) -> int:
    """Stop `verb(folder)` after each durable step, run it again, and compare every byte of the folder.

    Args:
        verb: writes its result into the folder it is given (`root`/out, the same path every time).
        root: an empty scratch folder.
        prepare: sets the folder up before each run, for example with another artefact.
        check: called with the folder after each stop, to assert "absent or whole".
        ignore: file names that may differ (`origin.json` holds times).
        every: stop only after each `every`-th step, and after the last.

    Returns:
        The number of durable steps that the verb has.
    """
    folder = Path(root) / "out"
    steps: list[tuple[str, Path]] = []

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if prepare is not None:
            prepare(folder)

    fresh()
    with mock.patch.object(files, "observer", lambda kind, path: steps.append((kind, path))):
        verb(folder)
    whole = snapshot(folder, ignore)
    for stop in sorted({*range(1, len(steps) + 1, every), len(steps)}):
        fresh()
        with contextlib.suppress(Stopped), stopped_after(stop):
            verb(folder)
        if check is not None:
            check(folder)
        verb(folder)
        again = snapshot(folder, ignore)
        if again != whole:
            differ = sorted(set(again.items()) ^ set(whole.items()))
            raise AssertionError(f"stopped after step {stop} {steps[stop - 1]}: {differ[:4]} differ")
    return len(steps)


@contextlib.contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """What runs in the block is stopped (`Stopped`) after so many durable steps."""
    seen = 0

    def observe(kind: str, path: Path) -> None:
        nonlocal seen
        seen += 1
        if seen >= steps:
            raise Stopped(f"{kind} {path}")

    with mock.patch.object(files, "observer", observe):
        yield


def snapshot(folder: Path, ignore: Sequence[str] = ()) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by relative path."""
    out: dict[str, str] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if name not in ignore:
                out[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out
