"""Virtual environments of hosts whose packages conflict with the development environment.

    python = build("energon5", ["megatron-energon==5.0.0"])
    run(python, "import megatron.energon")            # a script in that environment

A venv is made once and kept outside the repository: in `PACKTRAIN_HOSTS`, else `~/.cache/packtrain-hosts`.
Its folder carries a digest of what is in it, so another list of requirements is another venv. torch comes
first, at the version of `constraints.txt`, so that no requirement pulls another build behind it. A process
that finds a venv half made by another waits for its lock; what cannot be built skips with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["TORCH", "build", "run"]

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH = next(
    line.strip()
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("torch==")
)


def folder() -> Path:
    """Where the venvs are kept."""
    return Path(os.environ.get("PACKTRAIN_HOSTS") or Path.home() / ".cache" / "packtrain-hosts")


def build(
    name: str, requirements: Sequence[str], *, no_deps: Sequence[str] = (), torch: str | None = TORCH
) -> Path:
    """The Python of a venv that holds torch and `requirements`; made when it is not there.

    Args:
        name: of the host, for people.
        requirements: as for pip, versions pinned.
        no_deps: installed after them, without their dependencies.
        torch: installed first; None: not at all.

    Skips the test when the environment cannot be made.
    """
    steps = [[torch]] if torch else []
    steps += [list(requirements)] if requirements else []
    steps += [["--no-deps", *no_deps]] if no_deps else []
    key = hashlib.sha256(repr((sys.version_info[:2], steps)).encode()).hexdigest()[:12]
    place = folder() / f"{name}-{key}"
    python, ready = place / "bin" / "python", place / ".ready"
    if ready.is_file():
        return python
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.is_file():
            return python
        shutil.rmtree(place, ignore_errors=True)
        try:
            _command([sys.executable, "-m", "venv", str(place)])
            for step in steps:
                _command([str(python), "-m", "pip", "install", "--quiet", *step])
        except subprocess.CalledProcessError as error:
            shutil.rmtree(place, ignore_errors=True)
            told = (error.stderr or error.stdout or "").strip().splitlines()
            pytest.skip(f"the environment {name} cannot be made: {told[-1] if told else error}")
        ready.write_text("\n".join(" ".join(step) for step in steps) + "\n", encoding="utf-8")
    return python


def run(python: Path, script: str, *arguments: object, timeout_s: float = 600.0, ours: bool = False) -> str:
    """What a script prints in a venv; its error output is the failure's message.

    Args:
        ours: packtrain can be imported too (the source tree is put on the path).
    """
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept.update({"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    if ours:
        kept["PYTHONPATH"] = str(REPOSITORY / "src")
    done = subprocess.run(
        [str(python), "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=kept,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _command(words: list[str]) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(words, check=True, capture_output=True, text=True, env=kept, timeout=1500)
        return
    raise subprocess.CalledProcessError(
        1, words, stderr=f"{' '.join(words[:4])}… took longer than 25 minutes"
    )
