"""Weights: what a model folder holds against its config, and a checkpoint back into a model.

    check_weights(folder, config)

The network is built without memory (on torch's meta device), and the files' headers are read: nothing is
loaded. What has no header (`*.bin`) is left to loading.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import files
from ..errors import ConfigError, FormatError, counted, first_line, one_line
from ..template import ensure_torchvision
from .model import class_for, no_progress_bars
from .segments import isolate_states

_HINT = "check model.name_or_path: copy or convert the model again"

#: Learned positions, by the names they have.
_POSITIONS = re.compile(r"(^|[._])(wpe|embed_positions|position_embeddings?)$")

_TOWER = re.compile("vision|visual|audio|image")


def outline(config: Any) -> Any:
    """The network of a config without memory; None where it cannot be built like that.

    Raises:
        ConfigError: the config is of no network.
        IsolationError: it has layers with a state that cannot be run per segment.
    """
    kind = class_for(config)
    try:
        with torch.device("meta"), torch.random.fork_rng([]):
            made = kind.from_config(config)
    except (NotImplementedError, ImportError):
        return None  # something in it wants numbers or a kernel: loading it says what is wrong, if anything
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"the config of {config.model_type} is of no model: {one_line(error, 160)}", hint=_HINT
        ) from error
    return isolate_states(made)


def position_table(model: Any) -> int | None:
    """Longest sample that the model's learned positions reach; None: it has none."""
    found = [
        module.num_embeddings - int(getattr(module, "offset", 0) or 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name) and not _TOWER.search(name)
    ]
    return min(found, default=None)


def check_weights(folder: Path, config: Any) -> tuple[Any, list[str]]:
    """The files of a model folder against its config.

    Returns:
        The network's `outline`, and warnings.

    Raises:
        ConfigError: a file is missing, cut or foreign, a weight has another shape, or a package that reads
            quantised weights is missing.
    """
    _check_packages(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        shapes |= _shapes(path)
    made = outline(config)
    if made is None or getattr(config, "quantization_config", None) is not None:
        return made, []
    wanted = made.state_dict()
    for name, held in wanted.items():
        there = shapes.get(name)
        if there is not None and there != tuple(held.shape):
            raise ConfigError(
                f"{folder} holds {name} of shape {list(there)}, its config says {list(held.shape)}",
                hint="the config is of another model, or was changed",
            )
    alike = set(map(_of_layer, shapes)) - {None}
    lacking = [name for name in wanted if name not in shapes and _of_layer(name) in alike]
    if not lacking:
        return made, []
    return made, [
        f"{folder} lacks {len(lacking)} weights of layers that its config has, {lacking[0]} the first: "
        "they begin random"
    ]


def _of_layer(name: str) -> str | None:
    """The name without the number of its layer; None: it is of no layer."""
    plain = re.sub(r"\.\d+\.", ".", name, count=1)
    return None if plain == name else plain


def _files(folder: Path) -> list[Path]:
    """Weight files with a header; every one that an index names must be there."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            named = sorted(set(files.parse_json(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} cannot be read: {one_line(error, 80)}", hint=_HINT) from error
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{folder} lacks {missing[0]}, one of {counted(len(named), 'files')} of its weights",
                hint=_HINT,
            )
    return sorted(folder.glob("*.safetensors"))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a safetensors file, by name; the file is whole."""
    try:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # its errors have no common kind beside this
        raise ConfigError(
            f"{path} cannot be read: {one_line(error, 100)}",
            hint="the file is cut or no safetensors; " + _HINT,
        ) from error


def _check_packages(config: Any) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    try:
        from transformers.quantizers import AutoHfQuantizer

        AutoHfQuantizer.from_config(quantised, pre_quantized=True).validate_environment()
    except ImportError as error:
        raise ConfigError(
            f"the weights of {config.model_type} are quantised: {one_line(error, 160)}", hint="install it"
        ) from error
    except Exception:  # anything else may be about how it is loaded: loading says it
        return


# --------------------------------------------------------------------------------------------
# Weights of a checkpoint back into a model, also where the file names them differently
# --------------------------------------------------------------------------------------------
# transformers writes many models under the names of their published checkpoints (`visual.…`,
# `model.layers.…`) and not under those of the module (`model.visual.…`, `model.language_model.layers.…`). Its
# Trainer resumes by `load_state_dict(strict=False)`: for such a model nothing is loaded but a warning, and
# training goes on from the weights it began with. Here the names are compared first; where they differ, the
# checkpoint is read by `from_pretrained`, which knows them, and every weight must be there. Cost: one copy of
# the weights in host memory while they are read. `load_best_model_at_end` has the same fault, and the same
# mend.
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
        raise FormatError(
            f"the weights of checkpoint {folder} do not fit the model: {first_line(error)}",
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
