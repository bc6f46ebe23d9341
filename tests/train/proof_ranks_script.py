"""Two ranks prove isolation together; run with torchrun by test_start_up.py.

    proof_ranks_script.py {ddp,fsdp,fully_shard} {clean,leak,nothing}

`leak`: the attention of rank 1 alone is patched. `nothing`: rank 1 has no packs. Prints one line per rank.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from leaks import plain_causal
from test_start_up import packs

from packtrain.collate import PaddingFreeCollator
from packtrain.errors import IsolationError
from packtrain.testing.tiny import tiny_model
from packtrain.train.start_up import prove_before_training


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = FullyShardedDataParallel(
                layer, device_id=torch.device("cpu"), use_orig_params=True
            )
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main(how: str, what: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = tiny_model("tiny:qwen3", seed=1)
    if what == "leak" and rank == 1:
        for layer in model.model.layers:
            layer.self_attn.forward = types.MethodType(plain_causal, layer.self_attn)
    live = wrapped(model, how)
    mine = [] if what == "nothing" and rank == 1 else packs()
    try:
        report = prove_before_training(live, mine)
        assert report is not None
        told = f"{report.ok} {[row.check for row in report.rows]}"
    except IsolationError as error:
        told = str(error)
    if what != "leak":  # the wrapper still trains
        batch = PaddingFreeCollator(model)(packs())
        live(**{k: v for k, v in batch.items()}).loss.backward()
        grads = [p.grad for p in live.parameters()]
        assert any(g is not None and float(g.abs().sum()) > 0 for g in grads)
    sys.stdout.write(f"rank {rank}: {told}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
