"""Weights of a checkpoint back into a model, also where the file names them differently.

transformers writes many models under the names of their published checkpoints (`visual.…`, `model.layers.…`)
and not under those of the module (`model.visual.…`, `model.language_model.layers.…`). Its Trainer resumes by
`load_state_dict(strict=False)`: for such a model nothing is loaded but a warning, and training goes on from
the weights it began with. Here the names are compared first; where they differ, the checkpoint is read by
`from_pretrained`, which knows them, and every weight must be there. Cost: one copy of the weights in host
memory while they are read. `load_best_model_at_end` has the same fault, and the same mend.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import FormatError
from ..template import ensure_torchvision
from .model import no_progress_bars

__all__ = ["RestoresWeights", "restore_weights"]

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class RestoresWeights:
    """Put before a transformers Trainer: resume and `load_best_model_at_end` load every weight."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        host: Any = self
        target = host.model if model is None else model
        if host.is_fsdp_enabled or not restore_weights(target, Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """DeepSpeed and FSDP keep the module's names in files of their own."""
        host: Any = self
        best = Path(host.state.best_model_checkpoint)
        if host.is_fsdp_enabled or host.is_deepspeed_enabled or not restore_weights(host.model, best):
            super()._load_best_model()  # type: ignore[misc]


def restore_weights(model: Any, folder: Path) -> bool:
    """Load the weights of a checkpoint folder whose names are not those of the model.

    Args:
        model: the unwrapped model of the run; its dtypes stay.
        folder: written by `save_pretrained`.

    Returns:
        False where there is nothing to do: the names agree, or it holds no whole model (adapters, FSDP).

    Raises:
        FormatError: weights of the model are missing in the checkpoint, or have other shapes.
    """
    ensure_torchvision()
    from transformers import PreTrainedModel

    names = _names(folder)
    if not isinstance(model, PreTrainedModel) or names is None or not (folder / "config.json").is_file():
        return False
    own = set(model.state_dict())
    if names <= own:
        return False
    kinds = {value.dtype for value in model.parameters()}
    widest = torch.float64 if torch.float64 in kinds else torch.float32
    try:
        with no_progress_bars():
            loaded, told = type(model).from_pretrained(
                str(folder),
                config=copy.deepcopy(model.config),
                dtype=kinds.pop() if len(kinds) == 1 else widest,
                attn_implementation="eager",
                output_loading_info=True,
            )
        lacking = sorted(told["missing_keys"])
        if lacking:
            raise FormatError(
                f"checkpoint {folder} lacks {len(lacking)} weights of the model, the first is {lacking[0]}",
                hint="resume with the model that wrote it",
            )
        model.load_state_dict(loaded.state_dict())
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise FormatError(
            f"the weights of checkpoint {folder} do not fit the model: {first}",
            hint="resume with the model that wrote it",
        ) from error
    return True


def _names(folder: Path) -> set[str] | None:
    """Names of the weights in the folder, or None when it holds no whole model."""
    if (folder / _FILE).is_file():
        from safetensors import safe_open

        with safe_open(str(folder / _FILE), framework="pt") as opened:
            return set(opened.keys())
    if (folder / _INDEX).is_file():
        return set(files.read_json(folder / _INDEX)["weight_map"])
    return None
