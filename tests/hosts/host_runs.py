"""Runs of hosts that are transformers Trainers, in processes of their own environments; and their law.

A script of a host takes a JSON file (`spec`) and writes what `host_seen.watch` noted to `spec["report"]`, one
file a rank.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from matrix_recorder import LEAK

__all__ = ["ids_of", "leak_of", "losses_of", "refused", "same_losses", "start"]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports packtrain from the source tree."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept.update(
        PYTHONPATH=f"{REPOSITORY / 'src'}{os.pathsep}{HERE}",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        # logits of a real vocabulary come and go: without these each of them is new pages
        MALLOC_MMAP_MAX_="0",
        MALLOC_TRIM_THRESHOLD_="8589934592",
        **more,
    )
    return kept


def start(python: Path, script: str, folder: Path, name: str, *, ranks: int = 1, **spec: Any) -> list[Any]:
    """What each rank of a run saw."""
    done = _run(python, script, folder, name, ranks, spec)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-4000:]}"
    seen = [json.loads((folder / f"{name}.seen.{rank}").read_text()) for rank in range(ranks)]
    seen[0]["stderr"] = done.stderr
    return seen


def refused(python: Path, script: str, folder: Path, name: str, *, ranks: int = 1, **spec: Any) -> str:
    """The error output of a run that ends with an error."""
    done = _run(python, script, folder, name, ranks, spec)
    assert done.returncode != 0, done.stdout[-1500:]
    return done.stderr


def leak_of(told: str) -> tuple[str, str, str]:
    """The cell of the support table for a run that the isolation proof has ended: feature, reason, line."""
    lines = [line for line in told.splitlines() if "IsolationError" in line and LEAK[1] in line]
    assert lines, told[-2000:]
    line = lines[-1].partition("IsolationError: ")[2]
    return (*LEAK, re.split(r", first in | \(|: ", line)[0])


def _run(
    python: Path, script: str, folder: Path, name: str, ranks: int, spec: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    path = folder / f"{name}.spec"
    path.write_text(json.dumps({"report": str(folder / f"{name}.seen"), **spec}), encoding="utf-8")
    words = [str(python)]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*words, str(HERE / script), str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=folder,
    )


def ids_of(seen: list[Any]) -> list[list[int]]:
    """Samples of every optimizer step, over all ranks."""
    return [
        [number for rank in step for number in rank] for step in zip(*(r["ids"] for r in seen), strict=True)
    ]


def losses_of(seen: list[Any]) -> list[float]:
    """Loss of every optimizer step: gradients are means over ranks, so losses carry their number."""
    steps = zip(*(rank["losses"] for rank in seen), strict=True)
    return [sum(map(sum, step)) / len(seen) for step in steps]


def same_losses(seen: list[Any]) -> None:
    """Each step's loss is the mean over the tokens of the host's own losses of its samples alone."""
    for number, loss in enumerate(losses_of(seen)):
        alone = [one for rank in seen for one in rank["alone"][number]]
        tokens = sum(count for _, count in alone)
        assert tokens > 0
        wanted = sum(value * count for value, count in alone if count) / tokens
        assert loss == pytest.approx(wanted, rel=1e-4), f"step {number}"
