"""Worker processes of the server: what they get, that they are forked safely, and that they end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain.workers as workers
from packtrain.errors import InputError
from packtrain.workers import parcel, start_early, worker_context

SOURCE = Path(workers.__file__).parents[1]


class HFTemplate:
    """Heavy by its name; counts who reads it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.name,)


def _read(name: str) -> HFTemplate:
    found = HFTemplate(name)
    if name == "threads":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    found.read_by = os.getpid()  # type: ignore[attr-defined]
    return found


def _answer(pipe: Any, *given: Any) -> None:
    threads = len(os.listdir("/proc/self/task"))
    pipe.send(
        {
            "pid": os.getpid(),
            "server": os.getppid(),
            "threads": threads,
            "random": float(np.random.random()),  # noqa: NPY002
            "variable": os.environ.get("PACKTRAIN_OF_A_TEST"),
            "asked": os.environ.get(workers._ASKED),
            "main": hasattr(sys.modules["__main__"], "__file__"),
            "read_by": [getattr(one, "read_by", None) for one in given],
            "same": len({id(one) for one in given}),
        }
    )


def _ask(*given: Any) -> dict[str, Any]:
    context: Any = worker_context()
    ours, theirs = context.Pipe()
    one = context.Process(target=_answer, args=(theirs, *given), daemon=True)
    one.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    one.join(60)
    assert one.exitcode == 0
    return found


def test_workers_share_a_server_that_read_what_is_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    template = HFTemplate("a")
    start_early(template)
    first, second = _ask(template, template), _ask(template)
    assert first["server"] == second["server"] != os.getpid()
    # This class is of a test module, which no server imports by itself: it was read there all the same.
    assert first["read_by"] == [first["server"]] * 2 and second["read_by"] == [first["server"]]
    assert first["same"] == 1  # one object, as it was
    assert first["random"] != second["random"]
    assert first["asked"] is None and not first["main"]
    monkeypatch.setenv("PACKTRAIN_OF_A_TEST", "now")
    third = _ask()
    assert third["variable"] == "now" and third["server"] == first["server"]
    monkeypatch.delenv("PACKTRAIN_OF_A_TEST")
    assert _ask()["variable"] is None
    changed = _ask(HFTemplate("b"))
    assert changed["read_by"] == [changed["server"]] != first["read_by"][:1]
    assert b"HFTemplate" not in parcel(template).body


def test_a_server_with_another_thread_forks_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_told", set())
    monkeypatch.setattr(workers, "_server", None)
    template = HFTemplate("threads")
    start_early(template)
    with caplog.at_level(logging.WARNING, "packtrain.workers"):
        told = _ask(template)
    assert told["server"] == os.getpid()  # spawned by this process, and whole
    assert told["read_by"] == [told["pid"]]
    assert [r.getMessage() for r in caplog.records] == [
        "workers are spawned one by one, not forked by a server: other threads run in it (python)"
    ]
    workers._server.let_go()


def test_a_dead_server_is_replaced() -> None:
    first = _ask()
    assert first["server"] != os.getpid()
    os.kill(first["server"], signal.SIGKILL)
    time.sleep(0.2)
    assert _ask()["server"] not in (first["server"], os.getpid())


SCRIPT = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from packtrain.workers import worker_context
{where}
loader = DataLoader({data}, batch_size=None, num_workers=2, multiprocessing_context=worker_context())
print("ran", flush=True)
{act}
"""
LOCAL = """
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, place): return place
"""


def _script(tmp_path: Path, where: str, data: str, act: str) -> subprocess.Popen[str]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(where=where, data=data, act=act))
    paths = os.pathsep.join([str(SOURCE), str(tmp_path)])
    variables = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, str(file)], stdout=-1, stderr=-1, text=True, env=variables, cwd=tmp_path
    )


def test_a_script_without_a_main_guard_works_or_gets_one_line(tmp_path: Path) -> None:
    started = _script(tmp_path, "", "list(range(4))", "print(sorted(loader))")
    out, err = started.communicate(timeout=120)
    assert out.split("\n")[:2] == ["ran", "[0, 1, 2, 3]"], err
    refused = _script(tmp_path, LOCAL, "Numbers()", "print(sorted(loader))")
    out, err = refused.communicate(timeout=120)
    assert out == "ran\n"  # the script ran once
    assert "InputError: workers need Numbers from" in err and "would run that script again" in err


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "class Slow:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, place):\n"
        "        open(f'worker-{os.getpid()}-{os.getppid()}', 'w').close()\n"
        "        time.sleep(600)\n"
    )
    started = _script(tmp_path, "from slow import Slow", "Slow()", "next(iter(loader))")
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("worker-*"))) < 2:
        assert time.monotonic() < until and started.poll() is None
        time.sleep(0.05)
    pids = {int(part) for one in tmp_path.glob("worker-*") for part in one.name.split("-")[1:]}
    assert started.pid not in pids and len(pids) == 3  # two workers and the server
    started.kill()
    started.communicate()
    while any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_what_a_session_without_a_file_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(InputError, match="Cell is defined in this session"):
        workers.check_script(["Cell"])


def test_the_users_own_fork_server_is_left_alone() -> None:
    _ask()
    from multiprocessing import forkserver

    assert multiprocessing.get_context("forkserver") is not worker_context()
    assert forkserver._forkserver._forkserver_pid is None or (
        forkserver._forkserver._forkserver_pid != workers._server._forkserver_pid
    )
