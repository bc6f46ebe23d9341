"""Claims: one holder at a time, taken over only from the dead, without locks or clocks of other hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from simulated import Simulation, claim_from, dead_here, elsewhere, leave_behind

from packtrain import files
from packtrain.errors import InputError, WaitTimeoutError
from packtrain.waiting import claim as module
from packtrain.waiting.claim import Claim, Owner, disk_of, is_local_disk, look


def take(folder: Path, clock: Simulation | None = None, **options: object) -> Claim:
    return Claim.take(folder, clock=clock or Simulation(), threaded=False, **options)


def test_a_free_folder_is_claimed_at_once_and_freed_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with take(folder, what="x") as claim:
        claim.say("measuring", 3, 10)
        held = look(folder)
        assert held is not None and held.owner == claim.owner and not held.is_free and held.number == 1
    held = look(folder)
    assert held is not None and held.is_free and held.beat["state"] == "released"
    assert (held.beat["stage"], held.beat["done"], held.beat["total"]) == ("measuring", 3, 10)
    with take(folder) as again:
        assert again.number == 2


def test_a_living_holder_of_this_machine_is_waited_for_however_silent_it_is(tmp_path: Path) -> None:
    """A process that is stopped or computes in C gives no beat, and still may write at any time."""
    holder = take(tmp_path)
    clock = Simulation()
    with pytest.raises(WaitTimeoutError, match=r"process \d+ on .*packing_wait_timeout_s"):
        take(tmp_path, clock, timeout_s=500.0, stale_s=20)
    assert clock.late == pytest.approx(500, abs=0.002)
    clock.at(700, holder.release)
    assert take(tmp_path, clock, stale_s=20).number == 2 and 700 <= clock.late <= 703


def test_a_dead_process_of_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    leave_behind(tmp_path, dead_here(), state="working")
    clock = Simulation()
    assert take(tmp_path, clock).number == 2 and clock.late == 0


def test_a_killed_process_counts_as_dead_also_before_its_parent_noticed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from packtrain.waiting.claim import Claim\n"
        "Claim.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"is being written by another run: process {child.pid}"):
        take(tmp_path, refuse=True, what="runs/x")
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    clock = Simulation()
    assert take(tmp_path, clock, refuse=True).number == 2 and clock.late == 0
    child.wait()
    child.stdout.close()


def test_another_host_is_dead_when_its_counter_stands_still_for_our_own_time(tmp_path: Path) -> None:
    clock = Simulation()
    other = claim_from(elsewhere(), tmp_path)
    clock.every(5, 60, other.pulse)
    assert take(tmp_path, clock, stale_s=20).number == 2
    assert 80 <= clock.late <= 84  # one look until its last beat is seen, one after the limit


def test_pb49_times_of_files_and_hosts_decide_nothing(tmp_path: Path) -> None:
    """A claim dated a day ahead or long ago is judged by its counter alone."""
    for shift in (86_400.0, -86_400.0):
        folder = tmp_path / str(shift)
        clock = Simulation()
        other = claim_from(elsewhere(), folder)
        for path in (folder / "claim.000001", folder / "beat.json"):
            os.utime(path, (path.stat().st_atime + shift, path.stat().st_mtime + shift))
        clock.every(5, 30, other.pulse)
        assert take(folder, clock, stale_s=20).number == 2 and 50 <= clock.late <= 54


def test_two_runs_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    clock = Simulation()
    other = claim_from(elsewhere("node7"), tmp_path)
    clock.every(2, 600, other.pulse)
    with pytest.raises(InputError, match=r"runs/x is being written by another run: process 4242 on node7"):
        take(tmp_path, clock, refuse=True, what="runs/x")
    assert clock.late < 6


def test_a_holder_that_was_taken_over_stops(tmp_path: Path) -> None:
    slow = claim_from(elsewhere(), tmp_path)
    new = take(tmp_path, stale_s=5)
    slow.pulse()
    with pytest.raises(InputError, match="another process took over"):
        slow.say("measuring")
    slow.release()
    held = look(tmp_path)
    assert held is not None and held.owner == new.owner and held.beat["state"] == "working"


def test_of_many_contenders_one_wins(tmp_path: Path) -> None:
    leave_behind(tmp_path, dead_here(), state="working")
    gate, won = threading.Barrier(8), []

    def contend() -> None:
        gate.wait()
        claim = Claim.take_unless(lambda: False, tmp_path, threaded=False, timeout_s=0.3)
        won.append(claim)

    def quiet() -> None:
        with contextlib.suppress(WaitTimeoutError):
            contend()

    threads = [threading.Thread(target=quiet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and won[0].number == 2


def test_old_claims_are_tidied_but_a_number_is_never_free_again(tmp_path: Path) -> None:
    for number in range(1, 15):
        with take(tmp_path) as claim:
            assert claim.number == number
    names = sorted(path.name for path in tmp_path.glob("claim.*"))
    assert names[-1] == "claim.000014" and len(names) == 8
    assert not module._put(tmp_path, 14, Owner.here())
    assert not module._put(tmp_path, 3, Owner.here())  # lower than one that is there
    assert not (tmp_path / "claim.000003").exists()


def test_what_is_there_already_needs_no_claim(tmp_path: Path) -> None:
    holder = take(tmp_path)
    clock, there = Simulation(), [False]
    clock.at(40, lambda: there.__setitem__(0, True))
    assert Claim.take_unless(lambda: there[0], tmp_path, clock=clock, threaded=False) is None
    assert 40 <= clock.late <= 43 and not holder.is_lost


def test_pb55_no_operating_system_lock_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On file systems without locks flock fails (ENOLCK, ENOSYS) or blocks for ever."""

    def never(*args: object) -> None:
        raise OSError(37, "No locks available")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, never)
    monkeypatch.setattr(os, "lockf", never)
    with take(tmp_path) as claim:
        claim.ready({"a": 1})
    held = look(tmp_path)
    assert held is not None and held.beat["result"] == {"a": 1}


def test_without_hard_links_a_claim_is_still_exclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object, **kwargs: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    assert files.publish_new(tmp_path / "a", "one") and not files.publish_new(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["a"]
    assert take(tmp_path / "c").number == 1


def test_a_torn_claim_is_nobody_alive_and_nobody_dead(tmp_path: Path) -> None:
    (tmp_path / "claim.000001").write_text('{"nonce": ')
    clock = Simulation()
    assert take(tmp_path, clock, stale_s=20).number == 2 and 20 <= clock.late <= 23


def test_a_heartbeat_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    with Claim.take(tmp_path) as claim:
        real, failed = files.publish_json, threading.Event()

        def full(path: Path, value: object) -> None:
            failed.set()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "publish_json", full)
        assert failed.wait(10)
        monkeypatch.setattr(files, "publish_json", real)
        before = look(tmp_path)
        for _ in range(1000):
            now = look(tmp_path)
            assert now is not None and before is not None
            if now.pulse != before.pulse:
                break
            threading.Event().wait(0.01)
        assert now.pulse != before.pulse and not claim.is_lost
    assert "no heartbeat" in caplog.text


def test_the_failure_of_the_block_is_what_the_claim_says(tmp_path: Path) -> None:
    with pytest.raises(InputError), take(tmp_path):
        raise InputError("the disk is full", hint="make room")
    held = look(tmp_path)
    assert held is not None and held.is_free
    assert held.beat["error"] == {"message": "the disk is full", "hint": "make room", "exit_code": 2}


def test_disks_are_named() -> None:
    assert disk_of("/proc") == "proc" and not is_local_disk("/proc")
    assert disk_of("/dev/shm") == "tmpfs" and is_local_disk("/dev/shm/not/there/yet")
