"""Training on a plan: configuration, model, attention, proof, loss, Trainer.

Names load on first use, so that reading a configuration imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..testing.tiny import tiny_model
    from .attention import check_attention
    from .compare import evaluate_packed_vs_unpacked
    from .compiled import compile_layers
    from .config import RunConfig, load_config
    from .loss import chunked_cross_entropy, packed_loss
    from .model import load_model
    from .proof import prove_isolation, run_controls
    from .segments import isolate_states
    from .sft import train
    from .start_up import prove, prove_before_training
    from .varlen import register_varlen_attention, use_varlen

_HOMES = {
    "RunConfig": "config",
    "check_attention": "attention",
    "chunked_cross_entropy": "loss",
    "compile_layers": "compiled",
    "evaluate_packed_vs_unpacked": "compare",
    "isolate_states": "segments",
    "load_config": "config",
    "load_model": "model",
    "packed_loss": "loss",
    "prove": "start_up",
    "prove_before_training": "start_up",
    "prove_isolation": "proof",
    "register_varlen_attention": "varlen",
    "run_controls": "proof",
    "tiny_model": ".testing.tiny",
    "train": "sft",
    "use_varlen": "varlen",
}

__all__ = [
    "RunConfig",
    "check_attention",
    "chunked_cross_entropy",
    "compile_layers",
    "evaluate_packed_vs_unpacked",
    "isolate_states",
    "load_config",
    "load_model",
    "packed_loss",
    "prove",
    "prove_before_training",
    "prove_isolation",
    "register_varlen_attention",
    "run_controls",
    "tiny_model",
    "train",
    "use_varlen",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("." + _HOMES[name], __name__), name)
