"""Real kills of exports: a process that works is killed again and again at random moments.

    python tests/export/kill_exports.py FOLDER KILLS       # all formats, 1 and 2 workers, Ray; exit 0: equal

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
FORMATS = ("raw", "webdataset", "energon", "chunks")


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
    """So many kills at work in all, dealt to formats and executors; a row each.

    An export that came to its end is compared, and the next one begins from nothing.

    Raises:
        AssertionError: the bytes differ from those of an export that nobody killed.
    """
    chance = random.Random(seed)
    held = Set(folder / "set", records(NAMES, 60), 64, NAMES)
    ways = [(fmt, how) for fmt in FORMATS for how in (("local", 1), ("local", 2), ("ray", 2))]
    told = []
    for number, (fmt, how) in enumerate(ways):
        fresh = folder / f"fresh-{fmt}"
        if not fresh.exists():
            export(
                held.plan_folder,
                fresh,
                format=fmt,
                source=held.source,
                template=Words(),
                task="multi_turn",
                maxcount=1,
            )
        due, met, ends = kills // len(ways) + (number < kills % len(ways)), 0, 0
        while True:
            out = folder / f"{fmt}-{how[0]}-{how[1]}-{ends}"
            process = start(held, out, fmt, how, 0.02 if met < due else 0.0)
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(chance.random() * 0.4)
            if met < due and process.poll() is None:
                met += 1
                kill(process, group=met % 2 == 0)
                continue
            process.communicate(timeout=300)
            assert process.returncode == 0, (fmt, how)
            assert snapshot(out, ("origin.json",)) == snapshot(fresh, ("origin.json",)), (fmt, how)
            ends += 1
            if met == due:
                break
        told.append(
            {"format": fmt, "executor": how[0], "workers": how[1], "killed at work": met, "ends": ends}
        )
    return told


if __name__ == "__main__":
    if sys.argv[1] == "export":
        one(*sys.argv[2:])
    else:
        for row in run(Path(sys.argv[1]), int(sys.argv[2])):
            sys.stdout.write(json.dumps(row) + "\n")
