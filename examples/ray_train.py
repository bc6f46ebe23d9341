"""Ray Train: a TorchTrainer whose workers train on packs, and go on behind the last checkpoint.

python examples/ray_train.py MODEL train.jsonl OUT --workers 8
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
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


def train_worker(config):
    """What every worker runs."""
    place, out = ray.train.get_context(), Path(config["out"])
    rank, world = place.get_world_rank(), place.get_world_size()
    torch.manual_seed(0)
    template = HFTemplate(load_processor(config["model"]))
    plan, lengths = pt.PackPlan.load(out / "plan"), pt.Lengths.load(out / "lengths")
    data = PackedDataset(plan.align(world), pt.open_chats(config["data"]), template.encode, lengths=lengths)
    grad_accum = data.packs.block // world
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype="auto").train()
    loader = pt.loader(data, model=model, seed=0, rank=rank, grad_accum=grad_accum)
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    step, device = 0, next(model.parameters()).device
    if (held := ray.train.get_checkpoint()) is not None:
        with held.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["packs"])
        step = state["step"]
    prove(model, loader)  # every worker, before the first step
    batches = iter(loader)
    while micro := [batch.to(device) for batch in itertools.islice(batches, grad_accum)]:
        total = torch.zeros((), device=device)
        tokens = torch.tensor(sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in micro), device=device)
        dist.all_reduce(tokens)
        for number, batch in enumerate(micro):
            model.require_backward_grad_sync = number == len(micro) - 1
            found = loss_sum(model, batch)
            (found * world / tokens).backward()  # gradients are averaged over workers: times world undoes it
            total += found.detach()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(total)
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state = {**weights, "packs": loader.state_dict(), "step": step}
                torch.save(state, Path(folder) / "state.pt")
            saved = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"step": step, "loss": float(total / tokens)}, checkpoint=saved)


def main(model, data, out, *, workers=2, use_gpu=None, samples=32, pack_length=2048, lr=1e-4, **more):
    """Measure and plan here, then train; a step is `samples` samples, in as few packs as they fill."""
    out = Path(out).absolute()
    template = HFTemplate(load_processor(str(model)))
    lengths = pt.measure(pt.open_chats(data), template, out / "lengths")
    steps = {"samples_per_step": samples, "packs_multiple": workers}
    pt.plan(lengths, pack_length=pack_length, **steps).save(out / "plan", overwrite=True)
    trainer = ray.train.torch.TorchTrainer(
        more.pop("worker", train_worker),
        train_loop_config={"model": str(model), "data": str(data), "out": str(out), "lr": lr, **more},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=torch.cuda.is_available() if use_gpu is None else use_gpu
        ),
        run_config=RunConfig(
            name="run", storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=1)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        words.add_argument(name)
    words.add_argument("--workers", type=int, default=2)
    given = words.parse_args()
    main(given.model, given.data, given.out, workers=given.workers)
