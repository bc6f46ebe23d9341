"""Run in axolotl's environment: `python axolotl_run.py SPEC.json`; writes what it saw.

spec: config (a YAML file), overrides, report, leak (attention that forgets the boundaries), cases (name ->
overrides of runs that are refused: their messages are what is written).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402

torch.set_num_threads(1)


def decode_by_pillow() -> None:
    """The index has torchvision for CUDA builds of torch only: its decoder of pictures is missing here."""
    import transformers.image_processing_backends as backends
    from torchvision.transforms.functional import pil_to_tensor
    from transformers.image_utils import load_image

    backends.load_image_as_tensor = lambda path: pil_to_tensor(load_image(path))


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def message(config: str, overrides: dict[str, Any]) -> str:
    from axolotl.cli.train import do_cli

    from packtrain.errors import PacktrainError

    try:
        do_cli(config, **overrides)
    except PacktrainError as error:
        return f"{error.message} (hint: {error.hint})"
    return "trained"


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = ["axolotl"]
    from axolotl.cli.train import do_cli
    from host_seen import watch

    seen: Any = watch()
    decode_by_pillow()
    if spec.get("leak"):
        leak()
    if "cases" in spec:
        seen = {name: message(spec["config"], overrides) for name, overrides in spec["cases"].items()}
    else:
        do_cli(spec["config"], **spec.get("overrides", {}))
    rank = int(os.environ.get("RANK", "0"))
    path = Path(spec["report"])
    path.with_name(f"{path.name}.{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
