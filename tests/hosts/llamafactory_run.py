"""Run in LLaMA-Factory's environment: `python llamafactory_run.py SPEC.json`; writes what it saw.

spec: config (train.yaml), overrides, report, leak (attention that forgets the boundaries), cases (name ->
overrides of runs that are refused: their messages are what is written).
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

from packtrain.template import ensure_torchvision

ensure_torchvision()
# The index has torchaudio for CUDA builds of torch only; LLaMA-Factory imports it and reads sounds with it.
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

import torch  # noqa: E402

torch.set_num_threads(1)
SPEC = json.loads(Path(sys.argv[1]).read_text())


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def messages() -> dict[str, str]:
    from packtrain.errors import PacktrainError
    from packtrain.hosts.llamafactory import launch

    told = {}
    for name, overrides in SPEC["cases"].items():
        try:
            launch(SPEC["config"], overrides)
            told[name] = "trained"
        except PacktrainError as error:
            told[name] = f"{error.message} (hint: {error.hint})"
    return told


def main() -> None:
    from host_seen import watch

    from packtrain.hosts.llamafactory import launch

    seen = watch()
    if SPEC.get("leak"):
        leak()
    if "cases" in SPEC:
        seen = messages()
    else:
        launch(SPEC["config"], SPEC.get("overrides", []))
    rank = int(os.environ.get("RANK", "0"))
    path = Path(SPEC["report"])
    path.with_name(f"{path.name}.{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
