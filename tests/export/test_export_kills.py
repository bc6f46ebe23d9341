"""Real kills: the process of an export, a worker of its pool, a worker of Ray; the bytes are the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import Set

from packtrain.errors import InputError
from packtrain.pipeline.export import export
from packtrain.sources.chat import ChatSource
from packtrain.testing import snapshot

SCRIPT = """
import sys, time
from export_sets import ChatSource, open_source
from packtrain.pipeline.export import export
source = ChatSource(open_source(sys.argv[1]))
export(sys.argv[2], sys.argv[3], source=source, maxcount=1, task="multi_turn",
       progress=lambda done, total: (print(done, flush=True), time.sleep(0.1)))
"""


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


@pytest.mark.parametrize("after", [1, 5])
def test_a_killed_export_goes_on(made: Callable[..., Set], after: int) -> None:
    held = made(count=40)
    out = held.folder / "out"
    arguments = [sys.executable, "-c", SCRIPT, str(held.path), str(held.plan_folder), str(out)]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= after:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert after <= len(before) < len(held.plan)
    export(held.plan_folder, out, source=held.source, maxcount=1, task="multi_turn")
    assert snapshot(out, ("origin.json",)) == fresh(held)
    kept = [name for name, stamp in before.items() if (out / name).stat().st_mtime_ns == stamp]
    assert len(kept) >= len(before) - 1, "finished parts are not written again"


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
