"""PyTorch Lightning takes loaders of packs as they are, its own distributed sampler on or off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from venvs import REPOSITORY, build

pytestmark = pytest.mark.hosts
#: Beside the development environment, which has what they need.
PACKAGES = ["pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"]


def test_two_ranks_train_every_sample_once_an_epoch(tmp_path: Path) -> None:
    python = build("lightning", [], no_deps=PACKAGES, torch=None)
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(site)])
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("lightning_run.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "seen")],
        capture_output=True, text=True, timeout=600, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"seen.{rank}.json").read_text()) for rank in (0, 1)]
    assert len(ranks[0]) == 6
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
