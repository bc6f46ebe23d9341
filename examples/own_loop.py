"""A whole training loop of your own on packs, for any number of ranks.

python examples/own_loop.py MODEL train.jsonl OUT [--eval val.jsonl] [--fsdp]
torchrun --nproc-per-node 2 examples/own_loop.py MODEL train.jsonl OUT

Accumulation that holds at the end of an epoch, the exact loss over micro steps and ranks, resume to the pack,
workers, evaluation, and the proof that samples do not read each other.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import packtrain as pt
from packtrain.collate import IGNORE
from packtrain.data import PackedDataset
from packtrain.template import HFTemplate, load_processor
from packtrain.train import prove

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")


def packs_of(path, template, out, pack_length, grad_accum):
    """Measured and planned once, by rank 0; the same number of packs on every rank, in whole steps."""
    source = pt.open_chats(path)
    if RANK == 0:
        lengths = pt.measure(source, template, out / "lengths")
        pt.plan(lengths, pack_length=pack_length).save(out / "plan", overwrite=True)
    if WORLD > 1:
        dist.barrier()
    plan, lengths = pt.PackPlan.load(out / "plan"), pt.Lengths.load(out / "lengths")
    aligned = plan.align(WORLD, grad_accum=grad_accum)  # an epoch ends with a whole optimizer step
    return PackedDataset(aligned, source, template.encode, lengths=lengths)


def load_model(path):
    pictures = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    kind = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype="auto").to(DEVICE)
    model.config.use_cache = False
    return model


def shared(model, fsdp):
    """The model as the ranks train it."""
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if type(module).__name__.endswith("DecoderLayer"):
                fully_shard(module)
        return fully_shard(model)
    return torch.nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model


def loss_sum(model, batch):
    """Sum of the losses of the supervised tokens of a row; the model sees no labels, so it computes none."""
    batch = dict(batch.to(DEVICE))
    labels = batch.pop("labels")
    logits = model(**batch).logits.float()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def supervised(batches):
    """Supervised tokens of the batches, over all ranks. The first token of a sample is never one."""
    count = torch.tensor(sum(int((b["labels"][:, 1:] != IGNORE).sum()) for b in batches), device=DEVICE)
    if WORLD > 1:
        dist.all_reduce(count)
    return max(1, int(count))


@torch.no_grad()
def evaluate(model, loader):
    """Token-mean loss over all ranks. Ranks have equally many packs; repeated ones weigh next to nothing."""
    model.eval()
    total, tokens = torch.zeros((), device=DEVICE), 0
    for batch in loader:
        tokens += supervised([batch])
        total += loss_sum(model, batch)
    if WORLD > 1:
        dist.all_reduce(total)
    model.train()
    return float(total) / max(1, tokens)


def save(folder, model, optimizer, loader, step, fsdp):
    """Model, optimizer and the place in the data; the marker `step` last."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=fsdp)
    weights, moments = get_state_dict(model, optimizer, options=whole)
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": weights, "optimizer": moments, "packs": loader.state_dict(), "step": step}
        torch.save(state, folder / "next.pt")
        os.replace(folder / "next.pt", folder / "state.pt")


def resume(folder, model, optimizer, loader):
    """The step at which to go on; 0 without a checkpoint."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    if not (folder / "state.pt").exists():
        return 0
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    loader.load_state_dict(state["packs"])
    return state["step"]


def main(
    model_path,
    data_path,
    out,
    eval_path=None,
    *,
    fsdp=False,
    epochs=2,
    grad_accum=2,
    pack_length=2048,
    lr=1e-4,
    workers=0,
    stop_at=None,
):
    out = Path(out)
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)
    template = HFTemplate(load_processor(str(model_path)))
    data = packs_of(data_path, template, out / "train", pack_length, grad_accum)
    model = shared(load_model(model_path).train(), fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = pt.loader(data, model=model, num_workers=workers, seed=0, grad_accum=grad_accum)
    evaluation = None
    if eval_path:
        evaluation = packs_of(eval_path, template, out / "eval", pack_length, 1)
        evaluation = pt.loader(evaluation, model=model, shuffle=False)
    prove(model, loader)  # every rank, before the first step
    step, losses = resume(out / "checkpoint", model, optimizer, loader), []
    steps_per_epoch = data.packs.steps // grad_accum
    for epoch in range(step // steps_per_epoch, epochs):
        loader.set_epoch(epoch)
        held = []
        for batch in loader:
            held.append(batch)
            if len(held) < grad_accum:
                continue
            tokens, total = supervised(held), torch.zeros((), device=DEVICE)
            for place, micro in enumerate(held):
                last = place == len(held) - 1
                if fsdp:
                    model.set_requires_gradient_sync(last)
                elif WORLD > 1:
                    model.require_backward_grad_sync = last
                found = loss_sum(model, micro)
                (
                    found * WORLD / tokens
                ).backward()  # gradients are averaged over ranks: times WORLD undoes it
                total += found.detach()
            held = []
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if WORLD > 1:
                dist.all_reduce(total)
            losses.append(float(total) / tokens)
            if RANK == 0:
                print(json.dumps({"step": step, "epoch": epoch, "loss": losses[-1], "tokens": tokens}))
            if step == stop_at:
                save(out / "checkpoint", model, optimizer, loader, step, fsdp)
                return losses
        assert not held  # whole steps: no pack is left over
        save(out / "checkpoint", model, optimizer, loader, step, fsdp)
        if evaluation is not None:
            loss = evaluate(model, evaluation)
            if RANK == 0:
                print(json.dumps({"step": step, "eval_loss": loss}))
    return losses


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("model")
    words.add_argument("data")
    words.add_argument("out")
    words.add_argument("--eval")
    words.add_argument("--fsdp", action="store_true")
    words.add_argument("--workers", type=int, default=2)
    given = words.parse_args()
    main(given.model, given.data, given.out, given.eval, fsdp=given.fsdp, workers=given.workers)
    if WORLD > 1:
        dist.destroy_process_group()
