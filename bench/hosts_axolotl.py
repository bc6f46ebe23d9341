"""The start of axolotl: with its own packing, with ours, not packed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .host_child import at_first_step

__all__ = ["VARIANTS", "child"]

PLUGIN = {"plugins": ["packtrain.hosts.axolotl.PacktrainPlugin"], "packtrain": {"samples_per_step": None}}
#: name -> settings
VARIANTS: dict[str, dict[str, Any]] = {
    "axolotl, its packing (sample_packing)": {"sample_packing": True, "pad_to_sequence_len": True},
    "axolotl, packtrain": PLUGIN,
    "axolotl, unpacked": {"micro_batch_size": 8},
}
SETTINGS: dict[str, Any] = {
    "sample_packing": False, "sequence_len": 2048, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3, "num_epochs": 1, "optimizer": "adamw_torch", "lr_scheduler": "linear",
    "save_strategy": "no", "bf16": False, "fp16": False, "tf32": False, "attn_implementation": "sdpa",
    "val_set_size": 0,
}  # fmt: skip


def child(name: str, folder: Path, out: Path) -> None:
    rows = {"ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    where = {"base_model": str(folder / "model"), "output_dir": str(out)}
    where["dataset_prepared_path"] = f"{out}.prepared"
    datasets = [{"path": str(folder / "rows.jsonl"), **rows}]
    path = folder / "axolotl.yaml"
    path.write_text(json.dumps({**SETTINGS, **where, "datasets": datasets, **VARIANTS[name]}))
    sys.argv = ["axolotl"]
    ours = "plugins" in VARIANTS[name]
    at_first_step(lambda trainer: len(trainer.packs if ours else trainer.train_dataset))
    from axolotl.cli.train import do_cli

    do_cli(str(path))
