"""Training on a plan: configuration, model, attention, proof, loss, Trainer.

Names load on first use, so that reading a configuration imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extend import on_first_use

if TYPE_CHECKING:
    from ..testing.tiny import tiny_model as tiny_model
    from .attention import check_attention as check_attention
    from .compare import evaluate_packed_vs_unpacked as evaluate_packed_vs_unpacked
    from .compiled import compile_layers as compile_layers
    from .config import RunConfig as RunConfig
    from .config import load_config as load_config
    from .loss import chunked_cross_entropy as chunked_cross_entropy
    from .loss import packed_loss as packed_loss
    from .model import load_model as load_model
    from .proof import prove_isolation as prove_isolation
    from .proof import run_controls as run_controls
    from .segments import isolate_states as isolate_states
    from .sft import train as train
    from .start_up import prove as prove
    from .start_up import prove_before_training as prove_before_training
    from .varlen import register_varlen_attention as register_varlen_attention
    from .varlen import use_varlen as use_varlen

#: Module -> what it has of the public names.
_NAMES = {
    "config": "RunConfig load_config",
    "attention": "check_attention",
    "loss": "chunked_cross_entropy packed_loss",
    "compiled": "compile_layers",
    "compare": "evaluate_packed_vs_unpacked",
    "segments": "isolate_states",
    "model": "load_model",
    "start_up": "prove prove_before_training",
    "proof": "prove_isolation run_controls",
    "varlen": "register_varlen_attention use_varlen",
    ".testing.tiny": "tiny_model",
    "sft": "train",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)
__getattr__ = on_first_use(__name__, _HOMES)
