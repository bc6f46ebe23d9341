"""Real kills of exports: the process is killed again and again at random moments until one gets to its end.

    python tests/export/kill_exports.py FOLDER KILLS       # each format, 1 and 2 workers, Ray; exit 0: equal

Also the process itself: `kill_exports.py export ROWS PLAN OUT FORMAT EXECUTOR WORKERS PAUSE`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from export_sets import Set, Slow, Words, open_source, records

from packtrain.pipeline.export import export
from packtrain.testing import snapshot

NAMES = [f"{i}.jpg" for i in range(6)]


def one(rows: str, plan: str, out: str, fmt: str, executor: str, workers: str, pause: str) -> None:
    source = Slow(open_source(rows))
    source.pause = float(pause)
    export(
        plan,
        out,
        format=fmt,
        source=source,
        template=Words(),
        task="multi_turn",
        maxcount=1,
        executor=executor,
        workers=int(workers),
        progress=lambda done, total: print(done, flush=True),  # noqa: T201
    )


def start(held: Set, out: Path, fmt: str, how: tuple[str, int], pause: float) -> subprocess.Popen[str]:
    """The export of a set in a process group of its own."""
    words = ["export", held.path, held.plan_folder, out, fmt, *how, pause]
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str], *, group: bool) -> None:
    """End a process that cannot defend itself; with its workers, or leaving them to notice."""
    os.killpg(process.pid, signal.SIGKILL) if group else process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def run(folder: Path, kills: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns a row a format and executor; AssertionError where the bytes differ."""
    chance = random.Random(seed)
    held = Set(folder / "set", records(NAMES, 60), 64, NAMES)
    told = []
    for fmt in ("raw", "webdataset", "energon", "chunks"):
        fresh = folder / f"fresh-{fmt}"
        export(
            held.plan_folder,
            fresh,
            format=fmt,
            source=held.source,
            template=Words(),
            task="multi_turn",
            maxcount=1,
        )
        for how in (("local", 1), ("local", 2), ("ray", 2)):
            out, met = folder / f"{fmt}-{how[0]}-{how[1]}", 0
            for turn in range(kills):
                process = start(held, out, fmt, how, 0.02)
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(chance.random() * 0.4)
                if process.poll() is None:
                    met += 1
                    kill(process, group=turn % 2 == 0)
            process = start(held, out, fmt, how, 0.0)
            process.communicate(timeout=300)
            assert process.returncode == 0, (fmt, how)
            assert snapshot(out, ("origin.json",)) == snapshot(fresh, ("origin.json",)), (fmt, how)
            told.append({"format": fmt, "executor": how[0], "workers": how[1], "killed at work": met})
    return told


if __name__ == "__main__":
    if sys.argv[1] == "export":
        one(*sys.argv[2:])
    else:
        for row in run(Path(sys.argv[1]), int(sys.argv[2])):
            sys.stdout.write(json.dumps(row) + "\n")
