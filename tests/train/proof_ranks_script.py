"""Two ranks prove isolation together; run with torchrun by test_start_up.py.

    proof_ranks_script.py {ddp,fsdp,fully_shard} {clean,leak,nothing}

`leak`: the attention of rank 1 alone is patched. `nothing`: rank 1 has no packs. Prints one line per rank.
On GPUs where each rank has one (bench/gpu/proof.py --ranks), else on the CPU over gloo.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from leaks import plain_causal
from train_samples import text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.errors import IsolationError
from packtrain.testing.tiny import tiny_model
from packtrain.train.start_up import prove_before_training


def packs() -> list[list[dict[str, Any]]]:
    return [[text_sample(n, i) for i, n in enumerate((7, 5, 12))]]


def wrapped(model: Any, how: str, device: torch.device) -> Any:
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = FullyShardedDataParallel(
                layer, device_id=device, use_orig_params=True
            )
        return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main(how: str, what: str) -> None:
    torch.set_num_threads(1)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    model = tiny_model("tiny:qwen3", seed=1).to(device)
    if what == "leak" and rank == 1:
        for layer in model.model.layers:
            layer.self_attn.forward = types.MethodType(plain_causal, layer.self_attn)
    live = wrapped(model, how, device)
    mine = [] if what == "nothing" and rank == 1 else packs()
    try:
        report = prove_before_training(live, mine)
        assert report is not None
        told = f"{report.ok and report.fused} {[row.check for row in report.rows]}"
    except IsolationError as error:
        told = str(error)
    if what != "leak":  # the wrapper still trains
        batch = PaddingFreeCollator(model)(packs())
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        live(**moved).loss.backward()
        grads = [p.grad for p in live.parameters()]
        assert any(g is not None and float(g.abs().sum()) > 0 for g in grads)
    sys.stdout.write(f"rank {rank}: {told}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
