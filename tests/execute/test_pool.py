"""The pool of worker processes: order, its bound, errors at their turn, deaths, early ends, nothing left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import local_work as work
import pytest

from packtrain.errors import InputError, SampleError
from packtrain.execute.pool import Pool


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import `local_work` by name."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def pool() -> Iterator[Pool]:
    with closing(Pool(work.doubled, None, 2, ahead=3, name="task {}".format)) as made:
        yield made
    assert multiprocessing.active_children() == []


def test_order_and_what_is_on_the_way(pool: Pool) -> None:
    """The first tasks are the slow ones; no more are taken than may wait; workers start with tasks."""
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for taken in range(1, 41):
            yield -taken if taken < 3 else taken

    for number, value in enumerate(pool.map(tasks()), 1):
        assert value == (-2 * number if number < 3 else 2 * number)
        assert taken <= number - 1 + 6
    assert number == taken == 40 and list(pool.map([])) == []
    with closing(Pool(work.doubled, None, 4)) as other:
        assert list(other.map([7])) == [14] and len(multiprocessing.active_children()) == 3  # one of them new


def test_several_maps_share_the_workers_each_in_order(pool: Pool) -> None:
    pairs = zip(pool.map(range(-3, 30)), pool.map(range(100, 133)), strict=True)
    assert list(pairs) == [(2 * i, 2 * i + 206) for i in range(-3, 30)]
    assert len(multiprocessing.active_children()) == 2


def test_an_error_comes_at_its_turn_and_ends_nothing_else(pool: Pool) -> None:
    values = pool.map([-1, 2, "fail", 4])
    assert [next(values), next(values)] == [-2, 4]
    with pytest.raises(SampleError, match="nothing here") as caught:
        next(values)
    assert caught.value.__notes__[0].startswith("in a worker process, task fail:")
    assert list(pool.map([5, 6])) == [10, 12]


def test_what_cannot_travel_is_told_at_its_turn(pool: Pool) -> None:
    values = pool.map([1, lambda: 0, 3])
    assert next(values) == 2
    with pytest.raises(InputError, match=r"task <function .* cannot be sent to a worker process.*pickle"):
        next(values)
    other = Pool(work.unpicklable_answer, None, 1, name="task {}".format)
    with closing(other), pytest.raises(InputError, match=r"task 9 failed in a worker: .* cannot be pickled"):
        list(other.map([9]))
    with pytest.raises(InputError, match=r"WithLock cannot be sent to a worker process.*set n=0"):
        Pool(work.doubled, work.WithLock(), 1, alone="n=0")


def test_a_killed_worker_is_named_with_its_task(pool: Pool) -> None:
    """What came before it is handed out; what comes later says the same."""
    values = pool.map([-1, -2, "die", *range(20)])
    assert [next(values), next(values)] == [-2, -4]
    with pytest.raises(InputError, match=r"a worker died on task die \(killed by SIGKILL\)") as caught:
        next(values)
    assert caught.value.hint == "most likely out of memory: use fewer workers"


def test_a_worker_that_is_killed_between_two_tasks() -> None:
    with closing(Pool(work.process_id, None, 1)) as pool:
        (process,) = pool.map([0])
        os.kill(process, signal.SIGKILL)
        with pytest.raises(InputError, match=r"a worker died on 1 \(killed by SIGKILL\)"):
            list(pool.map([1, 2, 3]))
        pool.close()
        (other,) = pool.map([4])  # closed, it begins anew
        assert other != process


def test_an_early_stop_gives_the_workers_back(pool: Pool) -> None:
    values = pool.map([-1] * 6)
    assert next(values) == -2
    del values
    assert list(pool.map([8])) == [16]


def test_tasks_and_values_larger_than_a_pipe_holds(pool: Pool) -> None:
    """A second one is sent while the answer to the first is on its way."""
    assert [len(one) for one in pool.map([b"x" * (1 << 20)] * 12)] == [2 << 20] * 12


def test_workers_end_when_nobody_closes() -> None:
    pool: Any = Pool(work.forever, None, 2, name="task {}".format)
    pool._submit(1)
    assert len(multiprocessing.active_children()) == 1
    del pool
    assert multiprocessing.active_children() == []


def test_an_interpreter_ends_while_tasks_are_under_way() -> None:
    code = (
        "import local_work\nfrom packtrain.execute.pool import Pool\n"
        "held = Pool(local_work.process_id, None, 1).map([1] * 9)\n"
        "print(next(held), flush=True)\n"
        "busy = Pool(local_work.forever, None, 2)\nfor task in range(9): busy._submit(task)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "" and not Path(f"/proc/{done.stdout.strip()}").exists()


def test_a_closed_pool_serves_again(pool: Pool) -> None:
    for _ in range(2):
        assert list(pool.map([b"a", b"b"])) == [b"aa", b"bb"]
        pool.close()
        assert multiprocessing.active_children() == []
