"""A trainer in a process of its own, from the start of that process to its first optimizer step.

    held, wall, cpu = start("axolotl", "axolotl, packtrain", folder, out)

`bench/hosts_HOST.py` says its VARIANTS and has `child(name, folder, out)`, which runs in the host's Python
and ends in `stepped`. That Python is the one of the tests' environment (PACKTRAIN_HOSTS), PACKTRAIN_<HOST>
names another; a host without either is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["HOSTS", "REPOSITORY", "at_first_step", "python_of", "run", "start", "stepped", "variants"]

REPOSITORY = Path(__file__).resolve().parents[1]
HOSTS = ("trl", "unsloth", "swift", "llamafactory", "axolotl", "veomni", "torchtitan", "automodel")


def python_of(host: str) -> str | None:
    """The Python that runs a host; None: there is none here."""
    if host == "trl":
        return sys.executable
    given = os.environ.get(f"PACKTRAIN_{host.upper()}")
    place = Path(os.environ.get("PACKTRAIN_HOSTS") or Path.home() / ".cache" / "packtrain-hosts")
    made = sorted(path.parent / "bin" / "python" for path in place.glob(f"{host}-*/.ready"))
    return given or (str(made[-1]) if made else None)


def variants() -> dict[str, str]:
    """Variant -> its host, of the hosts that are here."""
    here = [host for host in HOSTS if python_of(host)]
    return {name: host for host in here for name in importlib.import_module(f"bench.hosts_{host}").VARIANTS}


def start(host: str, name: str, folder: Path, out: Path) -> tuple[int | None, float, float]:
    """Rows that the trainer holds; wall and processor seconds of its process to the first optimizer step."""
    began = time.time()
    told = run(host, name, folder, out)
    return told["held"], float(told["stepped"]) - began, float(told["cpu"])


def run(host: str, name: str, *words: Any) -> Any:
    """What a child told in its last line."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    paths = (REPOSITORY / "src", REPOSITORY / "tests" / "hosts", REPOSITORY / "examples")
    more = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    words = (python_of(host), "-m", "bench.host_child", host, name, *words)
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
        # `datasets` prepares rows anew each time, and versions of it do not read each other's
        tempfile.TemporaryDirectory() as prepared,
    ):
        child = subprocess.Popen(
            [*map(str, words)],
            stdout=out,
            stderr=errors,
            cwd=REPOSITORY,
            env={**kept, **more, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": prepared},
            start_new_session=True,
        )
        code = child.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left behind
        if code:
            errors.seek(0)
            raise SystemExit(f"{name}: {errors.read()[-3000:]}")
        out.seek(0)
        return json.loads(next(line for line in reversed(out.readlines()) if line.startswith('{"')))


def stepped(held: int | None) -> None:
    """The first optimizer step is made: tell, and end the process.

    Args:
        held: rows or packs that the trainer holds; None: it does not say.
    """
    told = {"held": held, "stepped": time.time(), "cpu": time.process_time()}
    print("\n" + json.dumps(told), flush=True)
    os._exit(0)


def at_first_step(held: Callable[[Any], int]) -> None:
    """`stepped` behind the first step of transformers' Trainer, whoever builds it."""
    from transformers import Trainer, TrainerCallback

    train = Trainer.train

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        count = held(self)

        class First(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                stepped(count)

        self.add_callback(First())
        return train(self, *args, **kwargs)

    Trainer.train = watched


def planned(folder: Path, out: Path, cap: int) -> None:
    """Measure and plan the rows in this process, for hosts that take a plan: `out`/plan."""
    import packtrain as pt
    from packtrain.template import HFTemplate, load_processor

    template = HFTemplate(load_processor(str(folder / "model")))
    lengths = pt.measure(pt.open_chats(folder / "rows.jsonl"), template, out / "lengths")
    pt.plan(lengths, pack_length=cap).save(out / "plan")


def one_rank() -> None:
    """What a launcher says to the only rank."""
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**given, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})


if __name__ == "__main__":
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    import torch

    torch.set_num_threads(1)
    host, name, *words = sys.argv[1:]
    importlib.import_module(f"bench.hosts_{host}").child(name, *map(Path, words))
