"""Ranks that stop together without knowing each other's data, and resume; in threads and as real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warm
from packtrain.data import EqualSteps, StreamingPackedDataset
from packtrain.errors import ForeignArtefactError, InputError, SampleError

# torchdata 0.11 on torch 2.13
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def ids(packs: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in pack] for pack in packs]


def together(ranks: int, run: Callable[[int, Any], Any]) -> list[Any]:
    """`run(rank, exchange)` of several ranks in threads that exchange through a barrier."""
    import threading

    barrier, board = threading.Barrier(ranks), [None] * ranks
    out: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            board[rank] = value
            barrier.wait(10)
            told = list(board)
            barrier.wait(10)
            return told

        out[rank] = run(rank, exchange)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return out


class Counted:
    """Packs 0, 1, …, with a state."""

    def __init__(self, count: int) -> None:
        self.count, self.next = count, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.count:
            self.next += 1
            yield [{"input_ids": [1], "sample_id": self.next - 1}]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def lockstep(counts: list[int], exhausted: str, ahead: int) -> list[list[Any]]:
    def run(rank: int, exchange: Any) -> list[Any]:
        return list(EqualSteps(Counted(counts[rank]), exhausted=exhausted, ahead=ahead, exchange=exchange))

    return together(len(counts), run)


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("counts", [[5, 1], [0, 4], [3, 3], [8, 16], [0, 0], [17, 2, 9]])
def test_equal_steps(counts: list[int], ahead: int) -> None:
    for exhausted, steps in (("fill", max(counts)), ("first", min(counts))):
        out = lockstep(counts, exhausted, ahead)
        assert [len(rank) for rank in out] == [steps] * len(counts)
        for packs, count in zip(out, counts, strict=True):
            real = [pack[0]["sample_id"] for pack in packs if "sample_id" in pack[0]]
            assert real == list(range(min(count, steps)))
            assert all(pack[0].get("filler") for pack in packs[len(real) :])


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("counts", [[5, 1], [0, 4], [8, 16], [17, 2, 9]])
@pytest.mark.parametrize("exhausted", ["fill", "first"])
def test_equal_steps_resume_at_every_step(exhausted: str, counts: list[int], ahead: int) -> None:
    """What was pulled ahead and not handed out comes again; what was handed out does not."""
    whole = lockstep(counts, exhausted, ahead)
    for stop in range(len(whole[0]) + 1):

        def run(rank: int, exchange: Any, stop: int = stop) -> list[Any]:
            first = EqualSteps(Counted(counts[rank]), exhausted=exhausted, ahead=ahead, exchange=exchange)
            passed = iter(first)
            begun = [next(passed) for _ in range(stop)]
            state = json.loads(json.dumps(first.state_dict()))
            again = EqualSteps(Counted(counts[rank]), exhausted=exhausted, ahead=ahead, exchange=exchange)
            again.load_state_dict(state)
            return begun + list(again)

        assert together(len(counts), run) == whole


def test_equal_steps_refuse_what_has_no_state() -> None:
    steps = EqualSteps([[{"input_ids": [1]}]])
    for call in (steps.state_dict, lambda: steps.load_state_dict({})):
        with pytest.raises(InputError, match="a list keeps no state"):
            call()
    for foreign in ({}, {"next": 3}, {"version": 1, "packs": {}, "steps": 9, "ended": False}):
        with pytest.raises(ForeignArtefactError):
            EqualSteps(Counted(3)).load_state_dict(foreign)


@pytest.mark.parametrize("stop", [0, 3, 8, 11])
def test_equal_steps_around_a_loader_resume(stop: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    samples = [{"input_ids": [1] * (1 + k * 7 % 30)} for k in range(300)]

    def steps() -> Any:
        data = StreamingPackedDataset(samples, pack_length=50, window=20, shuffle_buffer=1)
        return EqualSteps(torchdata.StatefulDataLoader(data, batch_size=None, num_workers=2))

    expected = ids(steps())
    first = steps()
    packs = iter(first)
    begun = ids(next(packs) for _ in range(stop))
    again = steps()
    again.load_state_dict(first.state_dict())
    del packs
    assert begun + ids(again) == expected
    assert sorted(k for pack in expected for k in pack) == list(range(300))


def test_a_rank_that_fails_is_told_to_the_others() -> None:
    def exchange(value: Any) -> list[Any]:
        return [value, (0, True, "its disk is gone")]

    with pytest.raises(InputError, match="rank 1 cannot go on: its disk is gone"):
        list(EqualSteps([[{}]], exchange=exchange))

    def broken() -> Iterator[Any]:
        yield [{}]
        raise SampleError("failed", "here")

    told: list[Any] = []
    with pytest.raises(SampleError, match="here"):
        list(EqualSteps(broken(), exchange=lambda value: told.append(value) or [value]))
    assert told[-1][2] == "here"


def test_three_files_on_four_ranks_of_two_workers(tmp_path: Path) -> None:
    """Readers beyond the files get their share too: places are dealt, not files. Real ranks, real workers."""
    told = ranks_of("files_script.py", 4, tmp_path)
    whole = [rank["whole"] for rank in told]
    assert len({len(steps) for steps in whole}) == 1  # all ranks stop together
    assert sorted(n for steps in whole for pack in steps if pack for n in pack) == list(range(20))
    assert all(rank["begun"] + rank["resumed"] == rank["whole"] for rank in told)


def ranks_of(script: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of a script under torchrun wrote."""
    import subprocess

    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name(script)), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_real_ranks_stop_together(tmp_path: Path) -> None:
    """Two gloo ranks with skewed data, with an empty rank, and with one that fails: nobody waits for ever."""
    zero, one = ranks_of("stream_script.py", 2, tmp_path)
    assert zero["skewed"] == [[0], [1], [2], [3], [4]]
    assert one["skewed"] == [[0, 1, 2, 3, 4], None, None, None, None]
    assert zero["first"] == [[0]] and one["first"] == [[0, 1, 2, 3, 4]]
    assert zero["empty"] == [[0], [1]] and one["empty"] == [None, None]
    assert zero["resumed"] == zero["skewed"][3:] and one["resumed"] == [None, None]
    assert zero["failed"] == "sample 1: gone" and one["failed"] == "rank 0 cannot go on: sample 1: gone"
