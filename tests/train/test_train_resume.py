"""Real runs that are killed and go on: same weights bit for bit, same order; other numbers of ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import resume_script
import torch

import warm
from packtrain.data import PackSampler
from packtrain.errors import ConfigError, ForeignArtefactError
from packtrain.planning.build import plan
from packtrain.train.config import load_config
from packtrain.train.positions import TrainBatches, check_resume

HERE = Path(__file__).parent


def torchrun(ranks: int, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
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
    shutil.copytree(whole / "sample_loss", tmp_path / "sample_loss")
    result = resume_script.run(tmp_path, 0, str(checkpoint))
    told = [
        {(row["step"], one) for row in map(json.loads, path.read_text().splitlines()) for one in row["ids"]}
        for path in sorted((tmp_path / "sample_loss").iterdir())
    ]
    assert len(told) == 2 and not told[0] & told[1], "each sample of a step once, in the file of one rank"
    assert max(step for step, _ in told[1]) == stop - 1
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
    checkpoint = whole / "checkpoint-3"
    with pytest.raises(ForeignArtefactError, match="a step of the saved run has 4 packs") as caught:
        resume_script.run(tmp_path, 0, str(checkpoint), effective_batch_size=3)
    assert "1 rank with grad_accum 4, 2 ranks with grad_accum 2, 4 ranks with grad_accum 1" in str(
        caught.value.hint
    )
    assert not list(tmp_path.glob("read.*"))


def test_more_steps_than_the_saved_run_had(tmp_path: Path) -> None:
    """`max_steps` ends in the first epoch and, resumed, in the third; saves and evaluations in between."""
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "effective_batch_size": 2}
    steps = -(-len(plan(resume_script.LENGTHS, 24)) // 2)
    whole = resume_script.run(tmp_path / "whole", max_steps=2 * steps + 3, save_strategy="no", **options)
    stop = steps - 2
    resume_script.run(tmp_path / "part", max_steps=stop, save_steps=stop, **options)
    checkpoint = tmp_path / "part" / f"checkpoint-{stop}"
    again = resume_script.run(tmp_path / "rest", 0, str(checkpoint), max_steps=2 * steps + 3, **options)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    expected, mine = read_of(tmp_path / "whole", 1), read_of(tmp_path / "rest", 1)
    assert mine == {step: ids for step, ids in expected.items() if step > stop}


def test_what_lies_before_the_position_is_not_computed() -> None:
    """Trainer skips batches of a new pass one by one: they are empty, for any step of any plan."""
    sampler = PackSampler(plan([8] * 50, pack_length=8).align(2), 1, seed=5)
    whole = list(sampler)
    asked: list[int] = []
    compute = sampler.order.of_rank
    sampler.order.of_rank = lambda rank, epoch, start, stop: (  # type: ignore[method-assign]
        asked.append(start) or compute(rank, epoch, start, stop)  # type: ignore[func-returns-value]
    )
    batches = TrainBatches(sampler)
    sampler.begin_at(20)
    stream = iter(batches)
    assert [next(stream) for _ in range(20)] == [[]] * 20 and not asked
    assert [position for batch in stream for position in batch] == whole[20:]
    assert [position for batch in batches for position in batch] == whole  # the next pass is a whole one
    batches.set_epoch(1)
    assert sampler.epoch == 1 and len(batches) == 25


def test_skipping_no_data_is_what_happens_and_asking_for_it_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `ignore_data_skip` Trainer would begin the epoch again."""
    with pytest.raises(ConfigError, match=r"training\.ignore_data_skip cannot be True"):
        load_config({"training": {"ignore_data_skip": True}})
    checkpoint = whole / "checkpoint-3"  # behind the last one nothing is trained
    from packtrain.train import sft

    made = sft.training_arguments

    def arguments(*given: Any, **options: Any) -> Any:
        found = made(*given, **options)
        found.ignore_data_skip = True
        return found

    monkeypatch.setattr(sft, "training_arguments", arguments)
    with pytest.raises(ConfigError, match="ignore_data_skip=True would begin the epoch again"):
        resume_script.run(tmp_path, 0, str(checkpoint))
    assert not list(tmp_path.glob("read.*"))


def test_a_checkpoint_without_a_position_is_told_and_random_states_of_other_ranks_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PB-23: a run with fewer ranks saves the same step in the same folder."""
    steps = -(-len(plan(resume_script.LENGTHS, 24)) // 4)
    stale = tmp_path / "checkpoint-3" / "rng_state_3.pth"
    stale.parent.mkdir()
    stale.write_bytes(b"of a run with four ranks")
    resume_script.run(tmp_path, num_train_epochs=1)
    assert steps > 3 and not stale.exists() and (stale.parent / "packs.json").is_file()
    (stale.parent / "packs.json").unlink()
    sampler = PackSampler(plan(resume_script.LENGTHS, 24).align(1), seed=42, grad_accum=4)
    check_resume(sampler, str(stale.parent), str(tmp_path))
    assert "checkpoint-3 has no packs.json" in caplog.text
