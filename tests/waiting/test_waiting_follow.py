"""Followers: fresh answers only, the writer's failure within seconds, silence judged by their own clock."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest
from simulated import Simulation, claim_from, dead_here, elsewhere, leave_behind

from packtrain.errors import InputError, LawError, WaitTimeoutError
from packtrain.pipeline.ranks import follow
from packtrain.waiting import poll
from packtrain.waiting.claim import Claim
from packtrain.waiting.poll import fresh_json, pauses


def wait(folder: Path, clock: Simulation, timeout_s: float = 7200.0, **options: Any) -> Any:
    return follow(folder, timeout_s=timeout_s, who="rank 1", clock=clock, **options)


def test_the_result_arrives_with_the_progress_seen_on_the_way(tmp_path: Path) -> None:
    clock, seen = Simulation(), []
    writer = claim_from(elsewhere(), tmp_path)
    clock.every(1, 100, writer.pulse)
    clock.at(3.5, lambda: writer.say("measuring", 40, 90))
    clock.at(10, lambda: writer.ready({"plan": "p"}))
    found = wait(tmp_path, clock, seen=lambda beat: seen.append((beat["stage"], beat["done"])))
    assert found == {"plan": "p"} and clock.late <= 13
    assert ("starting", 0) in seen and ("measuring", 40) in seen
    assert list((tmp_path / "hello").iterdir()) == []


def test_a_writer_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    clock = Simulation()

    def start() -> None:
        writer = claim_from(elsewhere(), tmp_path)
        clock.at(clock.late + 4, lambda: writer.ready({}))

    clock.at(300, start)
    assert wait(tmp_path, clock) == {} and 304 <= clock.late <= 307


@pytest.mark.parametrize("state", ["ready", "failed", "working", "released"])
def test_what_an_earlier_launch_left_answers_nobody(tmp_path: Path, state: str) -> None:
    leave_behind(tmp_path, dead_here(), state=state, result={"plan": "old"}, error={"message": "old"})
    clock = Simulation()
    clock.at(5, lambda: claim_from(elsewhere(), tmp_path).ready({"plan": "new"}))
    assert wait(tmp_path, clock) == {"plan": "new"}


def test_an_earlier_launch_that_tidies_up_does_not_silence_the_next(tmp_path: Path) -> None:
    clock = Simulation()
    old = claim_from(elsewhere("old"), tmp_path)
    clock.at(3, old.release)  # removes every hello
    clock.at(9, lambda: claim_from(elsewhere("new"), tmp_path).ready({"plan": "new"}))
    assert wait(tmp_path, clock) == {"plan": "new"}


def test_a_failure_reaches_the_waiters_within_seconds_with_its_reason(tmp_path: Path) -> None:
    for error, kind, code in (
        (InputError("no samples", hint="name a file"), InputError, 2),
        (LawError("drift of 3 tokens"), LawError, 1),
        (ZeroDivisionError("division by zero"), InputError, 2),
        (KeyboardInterrupt(), InputError, 2),
    ):
        clock = Simulation()
        folder = tmp_path / kind.__name__ / type(error).__name__
        writer = claim_from(elsewhere(), folder)
        clock.every(1, 20, writer.pulse)
        clock.at(20, lambda writer=writer, error=error: writer.fail(error))
        with pytest.raises(kind, match=r"rank 0 failed: ") as caught:
            wait(folder, clock)
        assert clock.late <= 22 and caught.value.exit_code == code
        said = getattr(error, "message", None) or str(error) or "it was stopped"
        assert said in caught.value.message and caught.value.hint == getattr(error, "hint", None)


def test_pb49_a_wrong_clock_on_the_writers_host_changes_nothing(tmp_path: Path) -> None:
    """Host clock +45 min, file server -2 min: the writer measures 60 s and beats every 5 s."""
    for shift in (2700.0, -120.0):
        clock, folder = Simulation(), tmp_path / str(shift)
        writer = claim_from(elsewhere(), folder)

        def beat(writer: Claim = writer, folder: Path = folder, shift: float = shift) -> None:
            writer.pulse()
            time = (folder / "beat.json").stat().st_mtime + shift
            os.utime(folder / "beat.json", (time, time))

        clock.every(5, 60, beat)
        clock.at(60, lambda writer=writer: writer.ready({}))
        assert wait(folder, clock, stale_s=20) == {} and 60 <= clock.late <= 63


def test_pb49_a_writer_killed_on_another_host_is_given_up_after_the_stale_limit(tmp_path: Path) -> None:
    clock = Simulation()
    writer = claim_from(elsewhere("node7"), tmp_path)
    clock.every(5, 30, writer.pulse)
    clock.at(12, lambda: writer.say("measuring training samples", 120, 5000))
    with pytest.raises(InputError) as caught:
        wait(tmp_path, clock, stale_s=20)
    assert 50 <= clock.late <= 54  # one look until the last beat is seen, one after the limit
    assert (
        "node7" in caught.value.message and "measuring training samples 120 of 5,000" in caught.value.message
    )


def test_a_writer_that_died_on_this_machine_is_given_up_at_once(tmp_path: Path) -> None:
    clock = Simulation()
    writer = claim_from(dead_here(), tmp_path)
    clock.at(2, writer.pulse)
    with pytest.raises(InputError, match="stopped without a word while starting: its process is gone"):
        wait(tmp_path, clock, stale_s=3600)
    assert clock.late <= 6


def test_the_wait_ends_with_an_error_that_names_key_file_and_progress(tmp_path: Path) -> None:
    clock = Simulation()
    with pytest.raises(WaitTimeoutError) as caught:
        wait(tmp_path, clock, timeout_s=0.01)
    assert clock.late == pytest.approx(0.01, abs=0.002)
    text = str(caught.value)
    assert "rank 1 waited 0.01 s" in text and str(tmp_path / "beat.json") in text
    assert "packing_wait_timeout_s" in text and "no sign of life" in text
    writer = claim_from(elsewhere(), tmp_path)
    writer.say("measuring training samples", 7, 90)
    clock = Simulation()
    clock.every(1, 10, writer.pulse)
    with pytest.raises(WaitTimeoutError, match=r"last seen of rank 0: measuring training samples 7 of 90"):
        wait(tmp_path, clock, timeout_s=5)
    assert clock.late == pytest.approx(5, abs=0.002)


def test_zero_waits_for_ever(tmp_path: Path) -> None:
    clock = Simulation()
    writer = claim_from(elsewhere(), tmp_path)
    clock.every(30, 9_000, writer.pulse)
    clock.at(9_000, lambda: writer.ready({}))  # longer than the default limit
    assert wait(tmp_path, clock, timeout_s=0) == {}


def test_an_unanswered_probe_ends_without_a_result(tmp_path: Path) -> None:
    clock = Simulation()
    leave_behind(tmp_path, elsewhere(), state="working")
    assert wait(tmp_path, clock, give_up_s=30) is None and clock.late == pytest.approx(30, abs=0.002)
    writer = claim_from(elsewhere(), tmp_path / "b")
    clock = Simulation()
    clock.every(1, 100, writer.pulse)
    clock.at(100, lambda: writer.ready({"a": 1}))
    assert wait(tmp_path / "b", clock, give_up_s=30) == {"a": 1}


class Cached:
    """A network client: an absent name stays absent until its folder is listed, which may be stale too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Simulation, stale_list_s: float = 0.0) -> None:
        self.clock, self.stale = clock, stale_list_s
        self.listed: dict[str, tuple[float, list[str]]] = {}
        self.known: set[str] = set()
        self.listdir, self.open = os.listdir, builtins.open
        monkeypatch.setattr(os, "listdir", self.names)
        monkeypatch.setattr(poll, "open", self.opened, raising=False)

    def names(self, folder: Any) -> list[str]:
        key, now = os.fspath(folder), self.clock.now()
        if key not in self.listed or now - self.listed[key][0] >= self.stale:
            self.listed[key] = (now, self.listdir(folder))
        names = self.listed[key][1]
        self.known |= {os.path.join(key, name) for name in names}
        return list(names)

    def opened(self, path: Any, mode: str = "r") -> io.IOBase:
        if os.fspath(path) not in self.known:
            raise FileNotFoundError(2, "cached", str(path))
        return self.open(path, mode)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("stale_list_s", "limit"), [(0.0, 2.1), (3.0, 5.1)])
def test_pb11_names_that_a_client_has_cached_as_absent_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale_list_s: float, limit: float
) -> None:
    clock = Simulation()
    Cached(monkeypatch, clock, stale_list_s)
    path = tmp_path / "beat.json"
    assert fresh_json(path) is None
    clock.at(1, lambda: path.write_text('{"a": 1}'))
    began, pause = clock.late, pauses("x")
    while fresh_json(path) is None:
        clock.sleep(next(pause))
        assert clock.late - began < 1 + limit
    assert fresh_json(path) == {"a": 1}


def test_pauses_grow_and_differ_between_waiters() -> None:
    one, two = pauses("one"), pauses("two")
    first, second = [next(one) for _ in range(40)], [next(two) for _ in range(40)]
    assert first != second and first == [p for p, _ in zip(pauses("one"), range(40), strict=False)]
    assert 0.03 < first[0] <= 0.05 and all(1.5 <= pause <= 2.0 for pause in first[-10:])


def test_a_torn_or_foreign_beat_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "beat.json").write_text("[1, 2")
    clock = Simulation()
    clock.at(4, lambda: claim_from(elsewhere(), tmp_path).ready({}))
    assert wait(tmp_path, clock) == {}
