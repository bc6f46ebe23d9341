"""Compiled decoder layers: `training.compile`, with rows of any length and no padding for it.

Each repeated layer of the language model, and of a vision tower with offsets of its own, is compiled in
place, so all of them share a few graphs and names of weights stay. Boundaries are read once before the layers
run and handed down as offsets: on the varlen kernel a layer is then one graph; elsewhere, and in a tower,
attention stays outside of it. The first lengths are static, the second make lengths dynamic: after two or
three steps nothing is compiled again.

Trade-off: other encoders, embeddings and the loss stay as they are; the layers hold nearly all of the work.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from ..collate.model_traits import text_config
from ..errors import IsolationError
from . import varlen
from .loss import bare_model
from .segments import of_offsets, of_positions

logger = logging.getLogger(__name__)

#: Modes of torch.compile that record CUDA graphs, and what stands in for them. A recorded layer leaves its
#: gradients in memory that its next replay overwrites, while they are still summed over micro steps.
_RECORDING = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}

#: Graphs of one layer: training, evaluation and proof, each with static and dynamic lengths.
_GRAPHS = 32


def compile_layers(model: Any, **options: Any) -> int:
    """Compile every repeated layer of the language model and of a tower in place; returns how many.

    Args:
        model: a loaded transformers model, adapters included; before it is wrapped for ranks.
        options: of `torch.compile` (`backend`, `mode`).
    """
    if (mode := options.get("mode")) in _RECORDING:
        options["mode"] = _RECORDING[mode]
        logger.warning(
            "compile mode %r records CUDA graphs, which layers of packs cannot use: it is %r",
            *(mode, _RECORDING[mode]),
        )
    bare = bare_model(model)
    names = set(getattr(bare, "_no_split_modules", None) or ())
    text, count = type(text_config(bare.config)), 0
    for parent in bare.modules():
        lists = [child for child in parent.children() if isinstance(child, torch.nn.ModuleList)]
        layers = [layer for held in lists for layer in held if type(layer).__name__ in names]
        if layers and isinstance(getattr(parent, "config", None), text):
            parent.register_forward_pre_hook(_hand_down, with_kwargs=True)
        else:
            layers = [layer for layer in layers if any(map(varlen.has_offsets, layer.modules()))]
        for layer in layers:
            layer.compile(**options)
        count += len(layers)
    if count:
        varlen.compiles()
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _GRAPHS)
        logger.info("%d layers are compiled: the first steps take longer", count)
    else:
        logger.warning("training.compile has no effect: %s names no repeated layers", type(bare).__name__)
    return count


def _hand_down(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Offsets and the longest segment of the row, for the layers of a model that runs on varlen.

    Neither where they are not known or do not cover the row: the attention then reads them itself, outside of
    the graphs, and says what is wrong.
    """
    if module.config._attn_implementation != varlen.VARLEN:
        return None
    positions, offsets = given.get("position_ids"), given.get("pack_cu")
    if positions is None and offsets is None:
        return None
    if positions is not None and positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # the text row of four
    rows = [*args[:1], given.get("input_ids"), given.get("inputs_embeds")]
    shape = next((row.shape[:2] for row in rows if row is not None), ())
    try:
        segments = of_positions(positions) if offsets is None else of_offsets(offsets)
    except IsolationError:
        segments = None
    if segments is None or segments.tokens != math.prod(shape):
        return args, {**given, "pack_max": None}
    return args, {**given, "pack_cu": segments.cu, "pack_max": segments.longest}
