"""The start of LLaMA-Factory: with its own packing, with ours, not packed."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

from .host_child import at_first_step

__all__ = ["VARIANTS", "child"]

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


def child(name: str, folder: Path, out: Path) -> None:
    # the index has torchaudio for CUDA builds of torch only
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    ours, settings = VARIANTS[name]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    rows = {
        "file_name": "rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    where = {"model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "output_dir": str(out)}
    config = folder / "train.yaml"
    config.write_text(json.dumps({**SETTINGS, **where, **settings}), encoding="utf-8")
    at_first_step(lambda trainer: len(trainer.packs if ours else trainer.train_dataset))
    if ours:
        from packtrain.hosts.llamafactory import launch

        launch(str(config))
    else:
        from llamafactory.train.tuner import run_exp

        sys.argv = ["llamafactory", str(config)]
        run_exp()
