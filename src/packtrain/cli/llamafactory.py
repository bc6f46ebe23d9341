"""`packtrain llamafactory`: the YAML file of `llamafactory-cli train`, trained on packs."""

from __future__ import annotations

import contextlib
import sys

from ._app import NamedPath, argument, emit, end_of_training, verb


@verb("llamafactory")
@argument("config", type=NamedPath(exists=True, dir_okay=False))
@argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def command(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train CONFIG of LLaMA-Factory (stage sft) on packs; run it in LLaMA-Factory's environment.

    Options of packing may stand under `packtrain:` in the file, such as `pack_length`.

    \b
    Example:
      packtrain llamafactory examples/train_lora/qwen2_5vl_lora_sft.yaml
      torchrun --nproc_per_node 8 -m packtrain llamafactory train.yaml learning_rate=1e-5
    """
    from ..hosts.llamafactory import launch

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        launch(config, overrides)
    if as_json:
        emit({"config": config, "overrides": list(overrides)})
    end_of_training()
