"""Run by ranks in torchtitan's environment: `torchrun torchtitan_run.py SPEC.json`; what its Trainer trained.

spec: example, environment (what it reads), assets (a tokenizer), out, steps, packs (of a step), interval
(of checkpoints), report; alone: samples are measured by themselves too; leak: attention without positions.

Its own Trainer, model, masks, loss and checkpoints on a CPU: its compiled kernel of FlexAttention, which has
no backward there, is read as the dense attention of the mask that torchtitan made.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402

torch.set_num_threads(1)


class Device:
    """What it asks of a card, answered for a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *given, **named: None)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, *given: Any) -> str:
        return "CPU"

    def get_device_properties(self, *given: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34)

    def memory_stats(self, *given: Any) -> dict[str, int]:
        return collections.defaultdict(int)


if not hasattr(torch.distributed, "set_timeout"):  # of a newer torch than the newest release
    torch.distributed.set_timeout = lambda *given: None
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: Device()


def config_of(leak: bool) -> Any:
    """A Qwen3 of two layers, built by its own parts."""
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    config = qwen3_debugmodel()
    sizes = {"n_layers": 2, "dim": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "hidden_dim": 128}
    rope = CosSinRoPE.Config(dim=32, max_seq_len=2048, theta=1e6)
    layers = qwen3._build_qwen3_layers(fuse_qkv=True, attn_backend="flex", rope=rope, **sizes)
    base = config.model_spec.model
    model = dataclasses.replace(
        base,
        dim=64,
        layers=layers,
        norm=qwen3._qwen3_norm(64),
        tok_embeddings=dataclasses.replace(base.tok_embeddings, embedding_dim=64),
        lm_head=dataclasses.replace(base.lm_head, in_features=64),
    )
    if leak:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        for layer in model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = dataclasses.replace(config.model_spec, model=model)
    config.loss = CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    return config


def dense(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **kwargs: Any) -> Any:
    """The attention of torchtitan's mask."""
    size, like = q.shape[-2], torch.arange(q.shape[-2])
    zero = torch.zeros((), dtype=torch.long)
    keep = torch.stack(
        [
            torch.as_tensor(block_mask.mask_mod(torch.tensor(b), zero, like[:, None], like[None, :]))
            for b in range(q.shape[0])
        ]
    )
    assert keep.shape[-2:] == (size, size)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=keep[:, None], scale=scale, enable_gqa=enable_gqa
    )
    return out, None


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("LOCAL_RANK", "0")
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    os.environ.update(spec["environment"])
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.trainer import Trainer

    import packtrain.hosts.torchtitan as host

    FlexAttention.compiled_flex_attn = staticmethod(dense)
    seen: dict[str, Any] = {"ids": [], "losses": [], "alone": [], "steps": []}
    config = config_of(spec.get("leak", False))
    config.dump_folder, config.hf_assets_path = spec["out"], spec["assets"]
    config.training.steps, config.training.local_batch_size = spec["steps"], 1
    config.training.global_batch_size = spec["packs"]
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.parallelism.spmd_backend = "partial_dtensor"  # the others ask FSDP for more than torch 2.13 has
    config.checkpoint.enable, config.checkpoint.interval = True, spec["interval"]
    config.activation_checkpoint = None
    config = runpy.run_path(spec["example"])["packed"](config)
    as_batch, body, step = host._as_batch, Trainer._forward_backward_body, Trainer.train_step

    def noted(rows: list[Any]) -> Any:
        seen["ids"].append([int(number) for row in rows for number in row.sample_ids])
        return as_batch(rows)

    def train_step(self: Any, data: Any) -> Any:
        seen["steps"].append(len(seen["ids"]))
        return step(self, data)

    def forward(self: Any, inputs: Any, labels: Any, count: Any, extra: Any) -> Any:
        if spec.get("alone"):
            with torch.no_grad():
                seen["alone"].append(alone(self.model_parts[0], inputs, labels, extra["positions"], count))
        loss = body(self, inputs, labels, count, extra)
        seen["losses"].append(float(loss.detach()))
        return loss

    host._as_batch, Trainer._forward_backward_body, Trainer.train_step = noted, forward, train_step
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo sums, and has no scaled sum
            module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()
    Path(f"{spec['report']}.{os.environ['RANK']}").write_text(json.dumps(seen))


def alone(model: Any, ids: Any, labels: Any, places: Any, count: Any) -> float:
    """Losses of the samples of a row, each by itself, over the tokens of the step."""
    starts = [*(places[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
    total = 0.0
    for begin, end in itertools.pairwise(starts):
        own = places[:, begin:end]
        logits = model(
            ids[:, begin:end], positions=own, attention_masks=model.get_attention_masks(positions=own)
        )
        targets = labels[0, begin:end]
        total += float(torch.nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum"))
    return total / float(count)


if __name__ == "__main__":
    main()
