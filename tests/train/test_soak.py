"""A run that is killed at random moments, a rank or one of its workers, and goes on with other ranks.

Two kills here, PACKTRAIN_SOAK_KILLS of them in `make soak`. Every life begins with one or two ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm

HERE = Path(__file__).parent
KILLS = int(os.environ.get("PACKTRAIN_SOAK_KILLS", "2"))
STEPS = 6
psutil = pytest.importorskip("psutil")


def live(folder: Path, file: Path, ranks: int) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(HERE / "soak_script.py"), str(folder), str(file)]
    with (folder / "stderr").open("ab") as told:
        return subprocess.Popen(
            [warm.python(), *(torchrun if ranks > 1 else []), *script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=told,
        )


def kill_one(folder: Path, chance: random.Random) -> int:
    """SIGKILL of a rank of this life, or of one of its workers; 0 where none is there yet."""
    ranks = [psutil.Process(int(path.suffix[1:])) for path in folder.glob("pid.*") if _is_alive(path)]
    if not ranks:
        return 0
    rank = chance.choice(ranks)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        family = rank.children(recursive=True)
        victim = chance.choice(family) if family and chance.random() < 0.3 else rank
        os.kill(victim.pid, signal.SIGKILL)
        return 1
    return 0


def _is_alive(path: Path) -> bool:
    return bool(psutil.pid_exists(int(path.suffix[1:])))


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps)), "each step once"
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def samples(run: Path) -> dict[int, list[int]]:
    """The samples of every step, over the files of all ranks."""
    found: dict[int, list[int]] = {}
    for path in run.glob("sample_loss/rank-*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            found[row["step"]] = sorted([*found.get(row["step"], []), *row["ids"]])
    return found


def test_a_run_that_is_killed_at_random_moments(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    keys: dict[str, Any] = {
        "packing_mode": "streaming", "stream_window": 16, "stream_splits": 2, "stream_shuffle_buffer": 8,
        "stream_encode_workers": 1, "max_steps": STEPS, "effective_batch_size": 4, "save_strategy": "steps",
        "save_steps": 1, "save_total_limit": 3,
    }  # fmt: skip

    def begin(name: str, ranks: int) -> subprocess.Popen[bytes]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for path in folder.glob("pid.*"):
            path.unlink()
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(text_run(90, output_dir=folder / "run", **keys)))
        return live(folder, file, ranks)

    assert begin("whole", 1).wait(240) == 0, (tmp_path / "whole" / "stderr").read_text()[-2000:]
    whole = losses(tmp_path / "whole" / "run")
    seed = int.from_bytes(os.urandom(4), "big")
    chance, kills, pace, runs = random.Random(seed), 0, 6.0, 0
    while kills < KILLS:  # a run that came to its end is followed by another
        runs += 1
        name, lives, before = f"killed-{runs}", 0, kills
        folder = tmp_path / name
        while True:
            lives += 1
            process = begin(name, chance.choice([1, 2]))
            if kills < KILLS:
                while process.poll() is None and not any(folder.glob("pid.*")):
                    time.sleep(0.05)  # a launcher alone is nobody to kill
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(0.1, pace))
                if process.poll() is None:
                    kills += kill_one(folder, chance)
                    pace = min(30.0, pace * 1.3)  # seconds of a life; a run that gets nowhere lives longer
            if process.wait(240) == 0:
                break
            told = (folder / "stderr").read_text()[-3000:]
            assert lives <= kills - before + 2, f"seed {seed}: {told}"
        killed = losses(folder / "run")
        assert sorted(whole) == sorted(killed) == list(range(1, STEPS + 1)), f"seed {seed}"
        assert [killed[n] for n in whole] == pytest.approx(list(whole.values()), rel=1e-4), f"seed {seed}"
        assert samples(folder / "run") == samples(tmp_path / "whole" / "run"), f"seed {seed}"
        pace = 6.0
    print(f"{kills} kills in {runs} runs")  # noqa: T201
