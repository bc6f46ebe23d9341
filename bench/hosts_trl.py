"""transformers' Trainer and TRL's SFTTrainer: the example scripts, packed by us and by TRL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .host_child import REPOSITORY, at_first_step

__all__ = ["VARIANTS", "child", "start_example"]

CAP = 2048
EXAMPLES = REPOSITORY / "examples"
#: name -> (script of examples/, packed by us, settings)
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "Trainer, unpacked": ("hf_trainer_text", False, {"per_device_train_batch_size": 8}),
    "Trainer, packtrain": ("hf_trainer_text", True, {"per_device_train_batch_size": 1}),
    "TRL, its packing (bfd)": (
        "trl_sft",
        False,
        {"per_device_train_batch_size": 1, "packing": True, "packing_strategy": "bfd"},
    ),
    "TRL, packtrain": ("trl_sft", True, {"per_device_train_batch_size": 1}),
}


def child(name: str, folder: Path, out: Path) -> None:
    start_example(*VARIANTS[name], folder, out)


def start_example(file: str, packed: bool, settings: dict[str, Any], folder: Path, out: Path) -> None:
    """Run a script of examples/, packed by us where `packed` says so, to its first optimizer step."""
    text = (EXAMPLES / f"{file}.py").read_text(encoding="utf-8")
    text = re.sub(r"^.*#\s*packtrain(?:\s+#.*)?$\n", "", text, flags=re.M)
    names: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), names)
    sft = file != "hf_trainer_text"
    more = {"gradient_accumulation_steps": 1, "use_cpu": True, **settings}
    if sft:
        more |= {"bf16": False, "gradient_checkpointing": False, "max_length": CAP}
    at_first_step(lambda trainer: len(trainer.packs if packed else trainer.train_dataset))
    trainer = names["main"](str(folder / "model"), str(folder / "rows.jsonl"), str(out), **more)
    if packed and sft:
        from packtrain.hosts.trl import pack as pack_trl

        pack_trl(trainer)
    elif packed:
        from packtrain.hosts.transformers import pack

        pack(trainer, CAP)
    trainer.train()
