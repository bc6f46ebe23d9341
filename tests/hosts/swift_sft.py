"""`swift sft` on a tiny random Qwen2.5-VL, in processes of ms-swift's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from swift_env import swift_python

__all__ = ["SWITCHES", "environment", "losses", "refused", "sft"]

HERE = Path(__file__).resolve().parent
SWITCHES = {
    "model_type": "qwen2_5_vl",
    "template": "qwen2_5_vl",
    "tuner_type": "full",
    "attn_impl": "sdpa",
    "torch_dtype": "float32",
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "split_dataset_ratio": 0,
    "dataset_shuffle": "false",
    "add_version": "false",
    "report_to": "none",
    "use_hf": "true",
    "check_model": "false",
    "max_length": 2048,
    "gradient_checkpointing": "false",
    "freeze_vit": "false",
    "load_from_cache_file": "false",
    "dataloader_num_workers": 0,
    "use_cpu": "true",
}


def environment() -> dict[str, str]:
    """Of a process that imports packtrain from the source tree; small pictures."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept.update(
        PYTHONPATH=str(HERE.parents[1] / "src"),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        IMAGE_MAX_TOKEN_NUM="30",
    )
    return kept


def sft(folder: Path, name: str, switches: dict[str, Any], *, ranks: int = 1, **spec: Any) -> list[Any]:
    """What each rank of a `swift sft` run saw."""
    done = _run(folder, name, switches, ranks, spec)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-4000:]}"
    return [json.loads((folder / f"{name}.json.{rank}").read_text()) for rank in range(ranks)]


def refused(folder: Path, name: str, switches: dict[str, Any], *, ranks: int = 1, **spec: Any) -> str:
    """The error output of a run that ends with an error."""
    done = _run(folder, name, switches, ranks, spec)
    assert done.returncode != 0, done.stdout[-1500:]
    return done.stderr


def _run(
    folder: Path, name: str, switches: dict[str, Any], ranks: int, spec: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    words = [
        word
        for key, value in {**SWITCHES, "output_dir": folder / name, **switches}.items()
        for word in (f"--{key}", str(value))
    ]
    path = folder / f"{name}.spec"
    report = str(folder / f"{name}.json")
    path.write_text(json.dumps({"args": words, "report": report, **spec}), encoding="utf-8")
    start = [str(swift_python())]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*start, str(HERE / "swift_run.py"), str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )


def losses(seen: Any) -> list[float]:
    return [sum(parts) for _, parts in sorted(seen["losses"].items(), key=lambda item: int(item[0]))]
