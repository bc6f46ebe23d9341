"""PyTorch Lightning over packs: what each process trained, to OUT.RANK.json.

lightning_run.py OUT            two processes, two epochs of every kind of loader
lightning_run.py OUT FOLDER     one process, two epochs: whole, and stopped twice, with checkpoints in FOLDER
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
from packtrain.data import PackedDataset, PackLoader, PackSampler, StreamingPackedDataset
from packtrain.planning.replan import EpochPlans
from packtrain.template import ensure_torchvision

ensure_torchvision()
warnings.filterwarnings("ignore")
pytorch_lightning = importlib.import_module("pytorch_lightning")  # it imports torchvision
torch.set_num_threads(1)
SAMPLES = [{"input_ids": torch.arange(1, 6 + i % 7), "labels": torch.arange(1, 6 + i % 7)} for i in range(40)]
LENGTHS = pt.Lengths([len(one["input_ids"]) for one in SAMPLES])
ALIGNED = pt.plan(LENGTHS, pack_length=16).align(2)
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
    replan = EpochPlans(ALIGNED.plan, LENGTHS)
    replanned = PackedDataset(ALIGNED, SAMPLES, lengths=LENGTHS, replan=replan)
    return {
        "replan": PackLoader(replanned, PackSampler(ALIGNED, RANK, replan=replan), collate_fn=collate),
        "PackLoader": PackLoader(data, PackSampler(ALIGNED, RANK), collate_fn=collate),
        "DataLoader": DataLoader(data, sampler=PackSampler(ALIGNED, RANK), batch_size=1, collate_fn=collate),
        "pt.loader": pt.loader(PackedDataset(ALIGNED, SAMPLES), model=None, rank=RANK),
    }


class Fetching(Module):
    """Fetches by itself: Lightning reads a batch ahead where a loader has no length."""

    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(*next(dataloader_iter)[:2])


def resumed(folder: Path) -> dict[str, Any]:
    """Loader -> what a whole run trained, and what runs did that each went on behind the one before."""
    found: dict[str, Any] = {}
    for kind, workers in [(kind, workers) for kind in ("plan", "stream") for workers in (0, 2)]:
        name = f"{kind}, {workers} workers"
        for run, stop in (("whole", -1), ("parts", 3), ("parts", 17), ("parts", -1)):
            SEEN.clear()
            data: Any = StreamingPackedDataset(SAMPLES, None, pack_length=16, window=10)
            if kind == "plan":
                data = PackedDataset(ALIGNED.plan.align(1), SAMPLES)
            path = folder / name / run
            saved = pytorch_lightning.callbacks.ModelCheckpoint(path, every_n_train_steps=1, save_last=True)
            trainer = pytorch_lightning.Trainer(
                accelerator="cpu", devices=1, max_epochs=2, max_steps=stop, logger=False, callbacks=[saved],
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            module = Fetching() if kind == "stream" else Module()
            trainer.fit(module, pt.loader(data, model=None, num_workers=workers), ckpt_path="last")
            found.setdefault(name, {}).setdefault(run, []).extend(SEEN)
    return found


def main() -> None:
    found: dict[str, Any] = resumed(Path(sys.argv[2])) if sys.argv[2:] else every_loader()
    Path(f"{sys.argv[1]}.{RANK}.json").write_text(json.dumps(found))


def every_loader() -> dict[str, Any]:
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
    return found


if __name__ == "__main__":
    main()
