"""PyTorch Lightning: a LightningModule and a LightningDataModule on packs, for any number of ranks.

python examples/lightning_module.py MODEL train.jsonl OUT --devices 8
"""

import argparse
import json
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM

import packtrain as pt
from packtrain.collate import IGNORE
from packtrain.data import PackedDataset
from packtrain.template import HFTemplate, load_processor
from packtrain.train import prove


def loss_sum(model, batch):
    """Sum of the losses of the supervised tokens of a row."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


class Packs(pl.LightningDataModule):
    """Measured and planned once; a step is `samples` samples, in as few packs as they fill."""

    def __init__(self, data_path, model_path, out, pack_length, samples):
        super().__init__()
        self.template = HFTemplate(load_processor(str(model_path)))
        self.source, self.out = pt.open_chats(data_path), out
        self.pack_length, self.samples = pack_length, samples

    def prepare_data(self):  # rank 0 alone, while the others wait
        lengths = pt.measure(self.source, self.template, self.out / "lengths")
        steps = {"samples_per_step": self.samples, "packs_multiple": self.trainer.world_size}
        plan = pt.plan(lengths, pack_length=self.pack_length, **steps)
        plan.save(self.out / "plan", overwrite=True)

    def setup(self, stage):
        plan, lengths = pt.PackPlan.load(self.out / "plan"), pt.Lengths.load(self.out / "lengths")
        packs = plan.align(self.trainer.world_size)
        self.data = PackedDataset(packs, self.source, self.template.encode, lengths=lengths)
        self.trainer.accumulate_grad_batches = packs.block // self.trainer.world_size

    def train_dataloader(self):
        place, model = self.trainer, self.trainer.lightning_module.model
        accum = place.accumulate_grad_batches
        return pt.loader(self.data, model=model, seed=0, rank=place.global_rank, grad_accum=accum)


class Model(pl.LightningModule):
    """A step's loss is the mean over the supervised tokens of its rows on all ranks."""

    def __init__(self, model_path, lr):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").train()
        self.lr, self.losses, self.step_sums = lr, [], torch.zeros(2)

    def on_train_start(self):
        prove(self.model, self.trainer.train_dataloader)  # every rank, before the first step

    def training_step(self, batch, number):
        found = loss_sum(self.model, batch)
        tokens = (batch["labels"][:, 1:] != IGNORE).sum()
        self.step_sums = self.step_sums.to(found.device) + torch.stack([found.detach(), tokens])
        # Lightning divides by the rows of a step, and gradients are averaged over ranks: this undoes both
        return found * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def on_before_optimizer_step(self, optimizer):
        """Divide the gradients of the step by its tokens, before they are clipped."""
        total, tokens = self.trainer.strategy.reduce(self.step_sums, reduce_op="sum")
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad /= tokens
        self.step_sums = torch.zeros(2)
        self.losses.append(float(total / tokens))
        if self.trainer.is_global_zero:
            print(json.dumps({"epoch": self.current_epoch, "loss": self.losses[-1], "tokens": int(tokens)}))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main(model_path, data_path, out, *, pack_length=2048, samples=32, lr=1e-4, save_every=100, **options):
    """`options` are those of Lightning's Trainer."""
    out = Path(out)
    torch.manual_seed(0)
    # Lightning's checkpoint holds the place of the loader, and `fit` goes on with the next pack
    saved = ModelCheckpoint(out / "checkpoints", every_n_train_steps=save_every, save_last=True)
    settings = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "callbacks": [saved]}
    trainer = pl.Trainer(**{**settings, **options})
    module = Model(model_path, lr)
    trainer.fit(module, Packs(data_path, model_path, out, pack_length, samples), ckpt_path="last")
    return module.losses


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        words.add_argument(name)
    words.add_argument("--devices", default="auto")
    given = words.parse_args()
    main(given.model, given.data, given.out, devices=given.devices)
