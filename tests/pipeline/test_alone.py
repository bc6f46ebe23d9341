"""Two processes, one output folder: the second is told who is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import packtrain
from packtrain import files
from packtrain.errors import InputError
from packtrain.pipeline.plan import plan_lengths
from packtrain.waiting.claim import PLACE, Owner, alone, look


def another(pid: int) -> dict[str, object]:
    """An owner as that process would write it."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {**Owner.here().to_dict(), "pid": pid, "started": int(state[19])}


def put_claim(folder: Path, owner: dict[str, object]) -> None:
    (folder / PLACE).mkdir(parents=True)
    files.publish_json(folder / PLACE / "claim.000001", owner)
    files.publish_json(folder / PLACE / "beat.json", {**owner, "state": "working", "beat": 1})


def test_the_claim_is_there_during_the_work_and_gone_after_it(tmp_path: Path) -> None:
    with alone(tmp_path / "out"):
        held = look(tmp_path / "out" / PLACE)
        assert held is not None and held.owner is not None and held.owner.pid == os.getpid()
    assert not (tmp_path / "out" / PLACE).exists()
    with pytest.raises(RuntimeError), alone(tmp_path / "out"):
        raise RuntimeError("stopped")
    assert not (tmp_path / "out" / PLACE).exists()


def test_a_living_rival_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rival:
        put_claim(tmp_path, another(rival.pid))
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with (
            pytest.raises(InputError, match=f"another run: process {rival.pid} on") as caught,
            alone(tmp_path),
        ):
            raise AssertionError("two processes in one folder")
        assert "choose another output folder" in str(caught.value.hint)
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        rival.kill()
        rival.wait()
        with alone(tmp_path):  # the dead hold nothing
            pass
    assert list(tmp_path.iterdir()) == []


def test_two_measurements_of_one_folder_never_mix(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}]}
        )
        for i in range(64)
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rival:
        put_claim(tmp_path / "out", another(rival.pid))
        command = [sys.executable, "-m", "packtrain", "measure", str(tmp_path / "d.jsonl")]
        command += ["--processor", "demo:qwen2_5_vl", "--out", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rival.kill()
    assert done.returncode == 2, done.stderr
    assert f"process {rival.pid}" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "lengths.json").exists()


def test_a_second_plan_in_one_folder_names_the_first(tmp_path: Path) -> None:
    lengths = packtrain.Lengths([5, 9, 2])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rival:
        put_claim(tmp_path / "plan", another(rival.pid))
        with pytest.raises(InputError, match=f"another run: process {rival.pid} on"):
            plan_lengths(lengths, tmp_path / "plan", pack_length=16)
        rival.kill()
        rival.wait()
    plan_lengths(lengths, tmp_path / "plan", pack_length=16)
    assert not (tmp_path / "plan" / PLACE).exists()
