"""The start of LLaMA-Factory: with its own packing, with ours, not packed.

`PACKTRAIN_LLAMAFACTORY=/path/of/its/python python -m bench.hosts DATA` runs it; without: left out.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

__all__ = ["LLAMAFACTORY", "VARIANTS", "start"]

#: The Python of its environment.
LLAMAFACTORY = os.environ.get("PACKTRAIN_LLAMAFACTORY")
REPOSITORY = Path(__file__).resolve().parents[1]
#: name -> (packed by us, settings)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "LLaMA-Factory, its packing (neat_packing)": (False, {"packing": True, "neat_packing": True}),
    "LLaMA-Factory, packtrain": (True, {"packtrain": {"samples_per_step": None}}),
    "LLaMA-Factory, unpacked": (False, {"per_device_train_batch_size": 8}),
}
SETTINGS: dict[str, Any] = {
    "stage": "sft", "do_train": True, "finetuning_type": "full", "cutoff_len": 2048, "template": "default",
    "dataset": "rows", "learning_rate": 1e-3, "num_train_epochs": 1, "save_strategy": "no", "use_cpu": True,
    "report_to": "none", "overwrite_cache": True, "disable_gradient_checkpointing": True,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
}  # fmt: skip


def start(name: str, folder: Path, out: Path) -> tuple[int, float, float]:
    """Rows that the trainer holds; wall and processor seconds of its process to the first optimizer step."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    more = {"PYTHONPATH": str(REPOSITORY / "src"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    started = time.time()
    done = subprocess.run(
        [str(LLAMAFACTORY), "-m", "bench.hosts_llamafactory", name, str(folder), str(out)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**kept, **more, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return int(told["held"]), float(told["stepped"]) - started, float(told["cpu"])


def _child(name: str, folder: Path, out: str) -> None:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    # the index has torchaudio for CUDA builds of torch only
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    import torch
    from transformers import Trainer, TrainerCallback

    torch.set_num_threads(1)
    ours, settings = VARIANTS[name]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    rows = {
        "file_name": "rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    where = {"model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "output_dir": out}
    config = folder / "train.yaml"
    config.write_text(json.dumps({**SETTINGS, **where, **settings}), encoding="utf-8")
    told: dict[str, Any] = {}

    class First(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.update({"stepped": time.time(), "cpu": time.process_time()})
            control.should_training_stop = True

    train = Trainer.train

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        told["held"] = len(self.packs) if ours else len(self.train_dataset)
        self.add_callback(First())
        return train(self, *args, **kwargs)

    Trainer.train = watched
    if ours:
        from packtrain.hosts.llamafactory import launch

        launch(str(config))
    else:
        from llamafactory.train.tuner import run_exp

        sys.argv = ["llamafactory", str(config)]
        run_exp()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
