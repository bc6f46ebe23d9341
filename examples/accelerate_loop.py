"""Hugging Face accelerate: a plain loop on packs, for any number of ranks.

accelerate launch --num_processes 8 examples/accelerate_loop.py MODEL train.jsonl OUT
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import packtrain as pt
from packtrain.collate import IGNORE
from packtrain.data import PackedDataset
from packtrain.template import HFTemplate, load_processor
from packtrain.train import prove


def packs_of(path, template, out, accelerator, pack_length, samples):
    """Measured and planned once; a step is `samples` samples, in as few packs as they fill."""
    source = pt.open_chats(path)
    if accelerator.is_main_process:
        lengths = pt.measure(source, template, out / "lengths")
        steps = {"samples_per_step": samples, "packs_multiple": accelerator.num_processes}
        pt.plan(lengths, pack_length=pack_length, **steps).save(out / "plan", overwrite=True)
    accelerator.wait_for_everyone()
    plan, lengths = pt.PackPlan.load(out / "plan"), pt.Lengths.load(out / "lengths")
    return PackedDataset(plan.align(accelerator.num_processes), source, template.encode, lengths=lengths)


def loss_sum(model, batch):
    """Sum of the losses of the supervised tokens of a row."""
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = model(**batch).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def main(model_path, data_path, out, *, pack_length=2048, samples=32, epochs=1, lr=1e-4, save_at=None):
    out, accelerator = Path(out), Accelerator()
    torch.manual_seed(0)
    template = HFTemplate(load_processor(str(model_path)))
    data = packs_of(data_path, template, out, accelerator, pack_length, samples)
    grad_accum = data.packs.block // accelerator.num_processes
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").train()
    loader = pt.loader(data, model=model, seed=0, grad_accum=grad_accum)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # the loader stays as it is
    accelerator.register_for_checkpointing(loader)
    prove(model, loader)  # every rank, before the first step
    if (out / "checkpoint").exists():
        accelerator.load_state(out / "checkpoint")
    losses = []
    for epoch in range(loader.pack_sampler.epoch, epochs):
        loader.set_epoch(epoch)
        held = []
        for batch in loader:
            held.append(batch)
            if len(held) < grad_accum:
                continue
            count = torch.tensor(sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in held))
            tokens = accelerator.reduce(count.to(accelerator.device), "sum")
            total = torch.zeros((), device=accelerator.device)
            # gradients are averaged over ranks: times their number undoes it
            for micro in held[:-1]:
                with accelerator.no_sync(model):
                    found = loss_sum(model, micro)
                    accelerator.backward(found * accelerator.num_processes / tokens)
                total += found.detach()
            found = loss_sum(
                model, held[-1]
            )  # gradients are averaged over ranks: times their number undoes it
            accelerator.backward(found * accelerator.num_processes / tokens)
            total += found.detach()
            held = []
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(total, "sum") / tokens))
            accelerator.print(json.dumps({"epoch": epoch, "loss": losses[-1], "tokens": int(tokens)}))
            if len(losses) == save_at:
                accelerator.save_state(out / "checkpoint")
    return losses


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        words.add_argument(name)
    given = words.parse_args()
    main(given.model, given.data, given.out)
