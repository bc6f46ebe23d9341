"""Start-up of many ranks in one process: threads as ranks, folders as disks, one maker for each disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import InputError, LawError, WaitTimeoutError
from packtrain.pipeline.ranks import StartUp
from packtrain.world import Node, World, node


class Job:
    """`nodes` machines of `local` ranks; every rank runs `share` in a thread of its own."""

    def __init__(self, tmp_path: Path, nodes: int, local: int, shared: bool = True) -> None:
        self.tmp, self.nodes, self.local, self.shared = tmp_path, nodes, local, shared
        self.made: list[int] = []
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.all_started = threading.Barrier(nodes * local)

    def folder(self, index: int) -> Path:
        return self.tmp / ("shared" if self.shared else f"disk{index}") / "run"

    def start(self, rank: int, **options: Any) -> StartUp:
        index, local = divmod(rank, self.local)
        return StartUp(
            self.folder(index),
            place=World(rank, self.nodes * self.local),
            where=Node(local, self.local, index, "launch"),
            relay=self.tmp / f"relay{index}",
            timeout_s=options.pop("timeout_s", 30),
            probe_s=options.pop("probe_s", 0.5),
            **options,
        )

    def run(self, make: Callable[[int, Any], dict[str, Any]], **options: Any) -> None:
        def one(rank: int) -> None:
            def called(tell: Any) -> dict[str, Any]:
                self.made.append(rank)
                return make(rank, tell)

            try:
                with self.start(rank, **options) as start:
                    self.results[rank] = start.share(called)
                    self.all_started.wait(30)  # as the process group does
            except BaseException as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.nodes * self.local)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_rank_0_makes_and_all_ranks_of_all_machines_get_it(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=3, local=2)

    def make(rank: int, tell: Any) -> dict[str, Any]:
        for done in range(4):
            tell("measuring", done, 4)
            time.sleep(0.05)
        return {"plan": "p", "by": rank}

    job.run(make, local_disk=False)
    assert job.errors == {} and job.made == [0]
    assert job.results == {rank: {"plan": "p", "by": 0} for rank in range(6)}
    assert not any((tmp_path / f"relay{index}").exists() for index in range(3))  # nothing is left behind
    assert list((tmp_path / "shared" / "run" / "startup" / "hello").iterdir()) == []


def test_one_poller_for_each_machine_reads_the_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packtrain.pipeline import ranks as module

    readers: set[tuple[str, str]] = set()
    real = module.fresh_json

    def noted(path: Path) -> Any:
        readers.add((threading.current_thread().name, path.parent.name))
        return real(path)

    monkeypatch.setattr(module, "fresh_json", noted)
    job = Job(tmp_path, nodes=2, local=4)
    job.run(lambda rank, tell: (time.sleep(0.3), {"a": 1})[1], local_disk=False)
    assert len(job.results) == 8
    assert len({thread for thread, folder in readers if folder == "startup"}) == 1  # rank 4 alone
    assert len({thread for thread, folder in readers if folder.startswith("relay")}) == 6


def test_a_disk_of_its_own_is_found_and_written_by_its_first_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=3, local=2, shared=False)
    job.run(lambda rank, tell: {"by": rank}, local_disk=True)
    assert job.errors == {} and sorted(job.made) == [0, 2, 4]
    assert job.results == {rank: {"by": rank // 2 * 2} for rank in range(6)}


def test_a_shared_folder_is_told_from_a_local_one_by_its_answer(tmp_path: Path) -> None:
    """Several machines' ranks on one disk (as in a test): the answer comes, so nobody else writes."""
    job = Job(tmp_path, nodes=2, local=2)
    job.run(lambda rank, tell: (time.sleep(1.0), {"by": rank})[1], local_disk=True)
    assert job.made == [0] and all(result == {"by": 0} for result in job.results.values())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("custom.train_jsonl is empty", hint="name a file"), InputError),
        (LawError("3 lengths drift"), LawError),
    ],
)
def test_the_reason_of_rank_0_reaches_every_rank_within_seconds(
    tmp_path: Path, error: Any, kind: type[Exception]
) -> None:
    job = Job(tmp_path, nodes=2, local=2)
    began = time.monotonic()

    def make(rank: int, tell: Any) -> dict[str, Any]:
        time.sleep(0.2)
        raise error

    job.run(make, local_disk=False)
    assert time.monotonic() - began < 10 and sorted(job.errors) == [0, 1, 2, 3]
    assert job.errors[0] is error
    for rank in (1, 2, 3):
        found = job.errors[rank]
        assert isinstance(found, kind) and error.message in str(found) and "rank 0 failed" in str(found)
        assert found.exit_code == error.exit_code and found.hint == error.hint  # type: ignore[attr-defined]


def test_a_short_wait_names_its_key_on_every_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2, local=2)
    job.all_started.abort()
    job.run(lambda rank, tell: (time.sleep(1.5), {})[1], local_disk=False, timeout_s=0.2)
    for rank in (1, 2, 3):
        assert "packing_wait_timeout_s" in str(job.errors[rank])
    assert isinstance(job.errors[2], WaitTimeoutError) and "beat.json" in str(job.errors[2])


def test_a_second_run_in_the_folder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    first = Job(tmp_path, 1, 1)
    with first.start(0) as start:
        start.share(lambda tell: {})
        start.calm()
        with pytest.raises(InputError, match="is being written by another run: process"), first.start(0) as b:
            b.share(lambda tell: {})
        start.check()
    with first.start(0) as start:
        assert start.share(lambda tell: {"again": 1}) == {"again": 1} and start.makes


def test_the_failure_in_training_is_kept_for_those_who_look(tmp_path: Path) -> None:
    job = Job(tmp_path, 1, 1)
    with pytest.raises(ZeroDivisionError), job.start(0) as start:
        start.share(lambda tell: {})
        raise ZeroDivisionError("division by zero")
    from packtrain.waiting.claim import look

    held = look(job.folder(0) / "startup")
    assert held is not None and held.beat["state"] == "failed" and "division" in held.beat["error"]["message"]


def test_where_a_process_stands_comes_from_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert node(World(3, 8)) == Node(index=3)  # unknown: every rank polls for itself
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "n0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert node(World(5, 8)) == Node(1, 4, 1, "n0:29500")
    monkeypatch.setenv("GROUP_RANK", "7")
    assert node(World(5, 8)).index == 7
    assert node(World(0, 1)) == Node()
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(InputError, match="local rank 4 of 4"):
        node(World(5, 8))
