"""The start of VeOmni on one CPU rank: with its dynamic batches, with our packs, with rows as they come.

What it asks of its device is answered as in its tests (`tests/hosts/veomni_run.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .host_child import one_rank, stepped

__all__ = ["VARIANTS", "child"]

#: name -> (packed by us, settings of `train`)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "VeOmni, its packing (dyn_bsz)": (
        False,
        {"dyn_bsz": True, "micro_batch_size": 1, "global_batch_size": 1},
    ),
    "VeOmni, packtrain": (True, {"dyn_bsz": True, "micro_batch_size": 1, "global_batch_size": 1}),
    "VeOmni, eight rows": (False, {"dyn_bsz": False, "micro_batch_size": 8, "global_batch_size": 8}),
}
PLAIN = """moe cross_entropy_loss rms_norm swiglu_mlp rotary_pos_emb load_balancing_loss rms_norm_gated
causal_conv1d chunk_gated_delta_rule"""


def config(folder: Path, out: Path, more: dict[str, Any]) -> dict[str, Any]:
    kernels = {f"{name}_implementation": "eager" for name in PLAIN.split()}
    single = {"enable": True, "param_dtype": "float32", "reduce_dtype": "float32"}
    model = {f"{name}_path": str(folder / "model") for name in ("config", "model", "tokenizer")}
    return {
        "model": {**model, "ops_implementation": {"attn_implementation": "sdpa", **kernels}},
        "data": {
            "train_path": str(folder / "rows.jsonl"),
            "data_type": "conversation",
            "chat_template": "tokenizer",
            "datasets_type": "mapping",
            "max_seq_len": 2048,
            "train_size": 400000,
            "dataloader": {"num_workers": 0, "pin_memory": False, "prefetch_factor": None},
        },
        "train": {
            "init_device": "meta",
            "num_train_epochs": 1,
            "optimizer": {"lr": 1e-3},
            "gradient_checkpointing": {"enable": False},
            "accelerator": {"fsdp_config": {"fsdp_mode": "ddp", "mixed_precision": single}},
            "checkpoint": {"output_dir": str(out), "save_hf_weights": False},
            **more,
        },
    }


def child(name: str, folder: Path, out: Path) -> None:
    ours, more = VARIANTS[name]
    one_rank()
    import veomni_run

    path = folder / "veomni.json"
    path.write_text(json.dumps(config(folder, out, more)), encoding="utf-8")
    sys.argv = ["veomni", str(path.rename(path.with_suffix(".yaml")))]
    veomni_run.on_a_processor()
    from veomni.arguments import VeOmniArguments, parse_args
    from veomni.trainer.base import BaseTrainer
    from veomni.trainer.text_trainer import TextTrainer

    args, place = parse_args(VeOmniArguments), BaseTrainer._build_parallelized_model

    def on_cpu(self: Any) -> None:
        args.train.init_device = "cuda"
        place(self)

    args.train.init_device = "cpu"  # one rank shards nothing, and its settings know no CPU
    BaseTrainer._build_parallelized_model = on_cpu
    trainer = TextTrainer(args)
    if ours:
        from packtrain.hosts.veomni import pack

        pack(trainer)
    loader = trainer.base.train_dataloader
    held = len(loader.packs) if ours else len(trainer.base.train_dataset)
    BaseTrainer.on_step_end = lambda *args, **kwargs: stepped(held)
    trainer.train()
