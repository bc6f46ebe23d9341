"""Start-up in real processes: killed writers, restarts, two jobs in one cache, a shifted clock."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from packtrain.store import parts
from packtrain.waiting.poll import fresh_json

SCRIPT = Path(__file__).parent / "start_script.py"


class Rank:
    """A rank's process. `result()` is what it printed."""

    def __init__(self, folder: Path, *args: Any, rank: int = 0, size: int = 1, prefix: Any = ()) -> None:
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "PYTHONHASHSEED": "0"}
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        command = [*prefix, sys.executable, str(SCRIPT), str(folder), *map(str, args)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def result(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=60)
        return json.loads(out) if out.strip() else {}  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def measured(folder: Path) -> int:
    return len(parts.finished(folder / "lengths"))


def told_stage(folder: Path) -> str:
    return str((fresh_json(folder / "startup" / "beat.json") or {}).get("stage"))


def test_kill_9_of_rank_0_ends_the_wait_and_a_restart_gives_the_same_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = [Rank(folder, 300, 0.02, rank=rank, size=2) for rank in range(2)]
    until(lambda: measured(folder) >= 3 and told_stage(folder) == "measuring")
    time.sleep(2.5)  # rank 1 looks every 2 s
    began = time.monotonic()
    ranks[0].kill()
    told = ranks[1].result()
    assert time.monotonic() - began < 15 and ranks[1].process.returncode == 2
    assert "rank 0" in told["error"] and "stopped without a word while measuring" in told["error"]
    assert ranks[0].result() == {}
    kept = measured(folder)
    assert kept >= 3
    again = [Rank(folder, 300, 0.01, rank=rank, size=2) for rank in (1, 0)]  # the waiter first
    results = [rank.result() for rank in again]
    whole = Rank(tmp_path / "undisturbed", 300, 0.0).result()
    assert [r["checksum"] for r in results] == [whole["checksum"]] * 2
    assert [r["made"] for r in results] == [False, True]


def test_two_jobs_share_one_root_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one = Rank(tmp_path / "one", 300, 0.01, root)
    until(lambda: list(root.glob("lengths/*/partial/*.npz")))
    two = Rank(tmp_path / "two", 300, 0.01, root)
    time.sleep(1.0)
    assert two.process.poll() is None and len(list(root.glob("lengths/*"))) == 1
    one.kill()
    found = two.result()
    assert one.result() == {}
    third = Rank(tmp_path / "three", 300, 0.01, root).result()
    whole = Rank(tmp_path / "undisturbed", 300, 0.0).result()
    assert found["checksum"] == third["checksum"] == whole["checksum"]
    assert len(list(root.glob("lengths/*"))) == len(list(root.glob("plans/*"))) == 1


def test_two_runs_in_one_output_folder_are_refused_by_name(tmp_path: Path) -> None:
    first = Rank(tmp_path / "run", 300, 0.01)
    until(lambda: measured(tmp_path / "run") >= 1)
    second = Rank(tmp_path / "run", 300, 0.0)
    told = second.result()
    assert second.process.returncode == 2 and "is being written by another run: process" in told["error"]
    assert first.result()["made"] is True


def test_pb19_too_short_a_wait_names_file_and_progress_and_a_longer_one_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Rank(folder, 300, 0.02, rank=0, size=2)
    until(lambda: measured(folder) >= 1)
    short = Rank(folder, 300, 0.02, "", 0.7, rank=1, size=2)
    long = Rank(folder, 300, 0.02, "", 60, rank=1, size=2)
    told = short.result()
    assert short.process.returncode == 2 and "packing_wait_timeout_s" in told["hint"]
    waited = re.search(r"rank 1 waited ([\d.]+) s for the artefacts of (\S+) \((\S+)", told["error"])
    assert waited, told
    assert 0.7 <= float(waited[1]) < 60 and waited[2] == str(folder)
    assert waited[3].startswith(str(folder / "startup"))
    assert "measuring" in told["error"] and " of 300" in told["error"]
    assert first.result()["checksum"] == long.result()["checksum"]


@pytest.mark.skipif(not Path("/usr/bin/unshare").exists(), reason="time namespaces need unshare")
def test_the_clock_of_one_rank_is_shifted(tmp_path: Path) -> None:
    """A monotonic clock ahead by a day on rank 1; file times are rank 0's."""
    shifted = ["/usr/bin/unshare", "--time", "--monotonic", "86400", "--fork"]
    if subprocess.run([*shifted, "true"], capture_output=True).returncode:
        pytest.skip("time namespaces are not allowed here")
    ranks = [
        Rank(tmp_path / "run", 150, 0.01, rank=0, size=2),
        Rank(tmp_path / "run", 150, 0.01, rank=1, size=2, prefix=shifted),
    ]
    results = [rank.result() for rank in ranks]
    assert results[0]["checksum"] == results[1]["checksum"]
