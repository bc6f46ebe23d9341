"""PyTorch Lightning over packs on two processes: what each trained, to OUT.RANK.json.

lightning_run.py OUT
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, PackLoader, PackSampler
from packtrain.template import ensure_torchvision

ensure_torchvision()
warnings.filterwarnings("ignore")
pytorch_lightning = importlib.import_module("pytorch_lightning")  # it imports torchvision
torch.set_num_threads(1)
SAMPLES = [{"input_ids": torch.arange(1, 6 + i % 7), "labels": torch.arange(1, 6 + i % 7)} for i in range(40)]
ALIGNED = pt.plan([len(one["input_ids"]) for one in SAMPLES], pack_length=16).align(2)
RANK = int(os.environ.get("LOCAL_RANK", "0"))
SEEN: list[list[Any]] = []


class Module(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, number: int) -> Any:
        SEEN.append([self.current_epoch, list(map(int, batch.sample_ids))])
        return (self.weight * batch["input_ids"].float().mean()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders() -> dict[str, Any]:
    data, collate = PackedDataset(ALIGNED, SAMPLES), PaddingFreeCollator()
    return {
        "PackLoader": PackLoader(data, PackSampler(ALIGNED, RANK), collate_fn=collate),
        "DataLoader": DataLoader(data, sampler=PackSampler(ALIGNED, RANK), batch_size=1, collate_fn=collate),
        "pt.loader": pt.loader(PackedDataset(ALIGNED, SAMPLES), model=None, rank=RANK),
    }


def main() -> None:
    found: dict[str, Any] = {}
    for distributed in (True, False):
        for name, loader in loaders().items():
            SEEN.clear()
            trainer = pytorch_lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
                use_distributed_sampler=distributed, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(Module(), loader)
            found[f"{name}, use_distributed_sampler={distributed}"] = list(SEEN)
    Path(f"{sys.argv[1]}.{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
