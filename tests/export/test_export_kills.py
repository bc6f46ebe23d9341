"""Real kills: the process of an export, a worker of its pool, a worker of Ray; the bytes are the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import Set
from kill_exports import kill, start

from packtrain.errors import InputError
from packtrain.pipeline.export import export
from packtrain.sources.chat import ChatSource
from packtrain.testing import snapshot


class Deadly(ChatSource):
    """Kills the process that reads sample 13 for the first time."""

    mark: Path

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def deadly(held: Set) -> Deadly:
    source = Deadly(held.source.source)
    source.mark = held.folder / "killed"
    return source


def fresh(held: Set) -> dict[str, str]:
    export(held.plan_folder, held.folder / "fresh", source=held.source, maxcount=1, task="multi_turn")
    return snapshot(held.folder / "fresh", ("origin.json",))


@pytest.mark.parametrize("fmt", ["raw", "webdataset", "energon", "chunks", "datasets"])
def test_a_killed_export_goes_on(made: Callable[..., Set], fmt: str) -> None:
    held, after = made(count=40), 4
    out, want = held.folder / "out", held.folder / "fresh"
    options = {"source": held.source, "template": held.template, "task": "multi_turn", "maxcount": 1}
    export(held.plan_folder, want, format=fmt, **options)
    process = start(held, out, fmt, ("local", 1), 0.05)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= after:
            break
    kill(process, group=True)
    whole = {path.name for path in (out / ".packtrain").glob("part-*.json")}
    assert after <= len(whole) < len(held.plan), "it was at work"
    before = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.is_file()}
    export(held.plan_folder, out, format=fmt, **options)
    assert snapshot(out, ("origin.json",)) == snapshot(want, ("origin.json",))
    again = [path for path, stamp in before.items() if path.exists() and path.stat().st_mtime_ns != stamp]
    members = max(len(list(want.glob(f"*{number:08d}*"))) for number in range(len(held.plan)))
    assert len(again) <= max(2, members), "finished parts are not written again"


def test_a_killed_worker_is_said_and_the_export_goes_on(made: Callable[..., Set]) -> None:
    held = made(count=40)
    out = held.folder / "out"
    options = {"maxcount": 1, "task": "multi_turn", "workers": 2}
    with pytest.raises(InputError, match="a worker died"):
        export(held.plan_folder, out, source=deadly(held), **options)
    export(held.plan_folder, out, source=held.source, **options)
    assert snapshot(out, ("origin.json",)) == fresh(held)


@pytest.mark.filterwarnings("ignore")  # of Ray, at its start and end
def test_a_killed_worker_on_ray(made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra packtrain[ray]")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    held = made(count=40)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        export(
            held.plan_folder,
            held.folder / "out",
            source=deadly(held),
            executor="ray",
            maxcount=1,
            task="multi_turn",
        )
    finally:
        ray.shutdown()
    assert (held.folder / "killed").exists()
    assert snapshot(held.folder / "out", ("origin.json",)) == fresh(held)
