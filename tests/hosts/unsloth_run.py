"""Run in unsloth's environment: `python unsloth_run.py SPEC.json`; what `examples/unsloth_sft.py` trained.

spec: example, words and options of its `main`, resume (a checkpoint), report; leak: attention that forgets
the boundaries; cases: name -> options of trainers that are refused, whose messages are written.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import unsloth  # noqa: E402, F401  (it patches what follows)

import torch  # noqa: E402  # isort: skip

torch.set_num_threads(1)


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def message(example: Any, words: list[str], options: dict[str, Any]) -> str:
    from packtrain.errors import PacktrainError

    try:
        example(*words, **options)
    except PacktrainError as error:
        return f"{error.message} (hint: {error.hint})"
    return "packed"


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    from host_seen import watch

    if spec.get("leak"):
        leak()
    seen: Any = watch()
    example: Any = runpy.run_path(spec["example"])["main"]
    if "cases" in spec:
        given = {name: {**spec["options"], **more} for name, more in spec["cases"].items()}
        seen = {name: message(example, spec["words"], options) for name, options in given.items()}
    else:
        trainer = example(*spec["words"], **spec["options"])
        trainer.train(resume_from_checkpoint=spec.get("resume"))
        seen["model"] = type(trainer.model).__name__
    Path(f"{spec['report']}.0").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
