"""The start of torchtitan on one CPU rank: with its own packing, with ours (measured and planned in it).

What it asks of a card is answered as in its tests (`tests/hosts/torchtitan_run.py`).
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

from .host_child import REPOSITORY, one_rank, planned, stepped

__all__ = ["VARIANTS", "child"]

CAP = 2048
VARIANTS = {"torchtitan, its packing (ChatDataLoader)": False, "torchtitan, packtrain": True}


def child(name: str, folder: Path, out: Path) -> None:
    one_rank()
    import torchtitan_run
    from torchtitan.hf_datasets.text_datasets import ChatDataLoader
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.trainer import Trainer

    FlexAttention.compiled_flex_attn = staticmethod(torchtitan_run.dense)
    config = torchtitan_run.config_of(leak=False)
    assets = Path(f"{out}.assets")
    assets.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "model" / file, assets)
    template = (folder / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # tags of transformers
    (assets / "chat_template.jinja").write_text(plain, encoding="utf-8")
    config.dump_folder, config.hf_assets_path = str(out), str(assets)
    config.training.steps = config.training.local_batch_size = config.training.global_batch_size = 1
    config.training.seq_len, config.training.disable_cuda_graphs = CAP, True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    if VARIANTS[name]:
        planned(folder, out, CAP)
        told = {"MODEL": folder / "model", "ROWS": folder / "rows.jsonl", "PLAN": out / "plan"}
        os.environ.update({key: str(value) for key, value in told.items()})
        config = runpy.run_path(str(REPOSITORY / "examples" / "torchtitan_config.py"))["packed"](config)
    else:
        config.dataloader = ChatDataLoader.Config(
            dataset_path="json",
            load_dataset_kwargs={"data_files": str(folder / "rows.jsonl"), "split": "train"},
            sample_processor=lambda row: row["messages"],
        )
    step = Trainer.train_step

    def train_step(self: Any, data: Any) -> None:
        step(self, data)
        stepped(len(self.dataloader.packs) if VARIANTS[name] else None)

    Trainer.train_step = train_step
    config.build().train()
