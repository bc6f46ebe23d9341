"""Real runs that are killed and go on: same weights bit for bit, same order; other numbers of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import resume_script
import torch

from packtrain.errors import ForeignArtefactError
from packtrain.planning.build import plan

HERE = Path(__file__).parent


def torchrun(ranks: int, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    return subprocess.run(
        [*command, str(HERE / "resume_script.py"), *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def read_of(folder: Path, ranks: int) -> dict[int, list[list[list[int]]]]:
    """step -> what each rank trained on, one list for each micro step, by the last process that took it."""
    found: dict[int, list[list[list[int]]]] = {}
    for rank in range(ranks):
        mine: dict[int, list[list[int]]] = {}
        by: dict[int, int] = {}
        for line in (folder / f"read.{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if by.setdefault(row["step"], row["run"]) != row["run"]:
                by[row["step"]], mine[row["step"]] = row["run"], []
            mine.setdefault(row["step"], []).append(row["ids"])
        for step, ids in mine.items():
            found.setdefault(step, []).append(ids)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, three epochs, not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    done = torchrun(2, folder, 0)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_kill_9_inside_a_step_and_resume_gives_the_same_weights(whole: Path, tmp_path: Path) -> None:
    packs = len(plan(resume_script.LENGTHS, 24))
    steps = -(-packs // 4)
    kill = steps + steps // 2 + 1  # in the second epoch
    killed = torchrun(2, tmp_path, kill)
    assert killed.returncode != 0 and not (tmp_path / "weights.pt").exists()
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert saved and saved[-1] < kill
    state = json.loads((tmp_path / f"checkpoint-{saved[-1]}" / "packs.json").read_text())
    assert (state["epoch"], state["micro_step"]) == (1, 2 * (saved[-1] - steps))
    again = torchrun(2, tmp_path, 0, tmp_path / f"checkpoint-{saved[-1]}")
    assert again.returncode == 0, again.stderr[-2000:]
    one, two = torch.load(whole / "weights.pt"), torch.load(tmp_path / "weights.pt")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert read_of(whole, 2) == read_of(tmp_path, 2)


def test_one_rank_goes_on_where_two_were(whole: Path, tmp_path: Path) -> None:
    """Elastic: accumulation is derived anew, every step holds the samples it would have held."""
    checkpoint = sorted(whole.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[2]
    stop = int(checkpoint.name.split("-")[1])
    result = resume_script.run(tmp_path, 0, str(checkpoint))
    expected, mine = read_of(whole, 2), read_of(tmp_path, 1)
    assert sorted(mine) == [step for step in sorted(expected) if step > stop]
    assert len(plan(resume_script.LENGTHS, 24)) % 2 == 0  # so no pack is repeated for two ranks
    for step, ranks in mine.items():
        ours = sorted(ids for micro in ranks for ids in micro)
        assert ours == sorted(ids for micro in expected[step] for ids in micro)
    weights = torch.load(whole / "weights.pt")
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=2e-5, rtol=1e-4)


def test_ranks_that_cannot_share_a_step_are_refused_before_training(whole: Path, tmp_path: Path) -> None:
    checkpoint = next(iter(whole.glob("checkpoint-*")))
    with pytest.raises(ForeignArtefactError, match="a step of the saved run has 4 packs") as caught:
        resume_script.run(tmp_path, 0, str(checkpoint), effective_batch_size=3)
    assert "1 ranks with grad_accum 4, 2 ranks with grad_accum 2, 4 ranks with grad_accum 1" in str(
        caught.value.hint
    )
    assert not list(tmp_path.glob("read.*"))
