"""PyTorch Lightning on packs: two ranks, 200 real samples, by the example as it stands.

Each step's loss is that of training without packs: the mean over the tokens of the samples of the step, one
forward pass each, on weights that were trained so. Its Trainer takes loaders of packs as they are, its own
distributed sampler on or off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from host_runs import leak_of, refused, start
from loops import EXAMPLES, SETTINGS, named, unpacked
from venvs import REPOSITORY, build

pytestmark = pytest.mark.hosts
#: Beside the development environment, which has what they need.
PACKAGES = ["pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"]


def site() -> Path:
    """Where Lightning is installed."""
    python = build("lightning", [], no_deps=PACKAGES, torch=None)
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


def given(network: Path, talks: Path, out: Path, **options: Any) -> dict[str, Any]:
    return {
        "site": str(site()),
        "example": str(EXAMPLES / "lightning_module.py"),
        "words": [str(network), str(talks), str(out)],
        "options": {**SETTINGS, **options},
    }


def steps_of(seen: list[Any]) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> its samples over all ranks."""
    steps: dict[tuple[int, int], list[int]] = {}
    for rank in seen:
        for epoch, step, ids in rank["seen"]:
            steps.setdefault((epoch, step), []).extend(ids)
    return steps


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
def test_it_trains_as_unpacked_and_goes_on(network: Path, talks: Path, tmp_path: Path) -> None:
    """Two epochs of five steps; stopped behind step 2, and at the end of an epoch, it goes on as if not."""
    assert named("lightning_module.py")

    def trained(name: str, out: str, **options: Any) -> list[Any]:
        spec = given(network, talks, tmp_path / out, **options)
        return start(Path(sys.executable), "lightning_loop.py", tmp_path, name, ranks=2, **spec)

    seen = trained("whole", "whole", max_epochs=2)
    steps = steps_of(seen)
    assert list(steps) == [(step // 5, step) for step in range(10)]
    assert [len(ids) for ids in steps.values()] == [40] * 10
    for epoch in (0, 1):
        ids = [number for at, held in steps.items() if at[0] == epoch for number in held]
        assert sorted(ids) == list(range(200))
    assert seen[0]["losses"] == pytest.approx(unpacked(network, talks, list(steps.values())), rel=1e-4)
    for start_at, stop_at in ((0, 2), (2, 5), (5, 10)):
        part = trained(f"to {stop_at}", "parts", max_epochs=2, max_steps=stop_at, save_every=1)
        assert steps_of(part) == {at: ids for at, ids in steps.items() if start_at <= at[1] < stop_at}
        assert part[0]["losses"] == pytest.approx(seen[0]["losses"][start_at:stop_at], rel=1e-5)


def test_attention_that_forgets_boundaries_is_refused(
    network: Path, talks: Path, tmp_path: Path, record_property: Any
) -> None:
    """Before a row is trained."""
    spec = given(network, talks, tmp_path / "out")
    told = refused(Path(sys.executable), "lightning_loop.py", tmp_path, "leak", ranks=2, leak=True, **spec)
    record_property("refused", leak_of(told))


def seen_by(out: Path, *words: str, ranks: int = 1) -> list[Any]:
    """What each rank of `lightning_run.py` trained."""
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(site())])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lightning_run.py")), str(out), *words],
        capture_output=True, text=True, timeout=600, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(out.with_name(f"{out.name}.{rank}.json").read_text()) for rank in range(ranks)]


def test_two_ranks_train_every_sample_once_an_epoch(tmp_path: Path) -> None:
    ranks = seen_by(tmp_path / "seen", ranks=2)
    assert len(ranks[0]) == 8
    for case, first in ranks[0].items():
        second = ranks[1][case]
        assert len(first) == len(second), case
        orders = []
        for epoch in (0, 1):
            steps = [[ids for at, ids in rank if at == epoch] for rank in (first, second)]
            trained = sorted(number for rank in steps for ids in rank for number in ids)
            assert trained == sorted(range(40)), case
            orders.append(steps)
        assert orders[0] != orders[1], case  # the epoch is followed
        packs = [{tuple(ids) for rank in steps for ids in rank} for steps in orders]
        assert (packs[0] != packs[1]) == case.startswith("replan"), case


@pytest.mark.matrix("streams")
def test_a_run_that_is_stopped_goes_on_with_the_next_pack(tmp_path: Path) -> None:
    """Plans, and streams whose module fetches by itself; stopped in both epochs, with and without workers."""
    (seen,) = seen_by(tmp_path / "seen", str(tmp_path))
    assert len(seen) == 4
    for case, run in seen.items():
        assert run["parts"] == run["whole"], case
        for epoch in (0, 1):
            trained = sorted(number for at, ids in run["whole"] if at == epoch for number in ids)
            assert trained == sorted(range(40)), case
