"""Models whose mask does not know the samples: transformers parts a row only where it is told the positions.

Some models call transformers' mask functions without `position_ids` (OPT, BLOOM, MPT, XGLM, BioGPT on 5.24),
or with a mask of ones. Which do is seen by watching a pass, not by name: a release that passes them on is no
longer refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..errors import IsolationError
from .culprit import place_of

_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")

#: Backends that part samples by the mask.
_MASKED = ("sdpa", "eager", "flex_attention")


@dataclass(frozen=True)
class BlindMask:
    """A mask that was made without the boundaries.

    Attributes:
        where: the function that asked for it, with its file.
        what: what it did.
        attends: the attention itself is told the positions, so that varlen can part the samples.
    """

    where: str
    what: str
    attends: bool

    @property
    def hint(self) -> str:
        """What to set."""
        unpacked = "train it unpacked (packing: false)"
        return (
            f"set model.attn: varlen, whose attention reads the positions, or {unpacked}"
            if self.attends
            else unpacked
        )

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def blind_mask(run: Callable[[], Any], backend: str | None) -> BlindMask | None:
    """Watch a pass for masks that were made without the boundaries; None: there are none, or none is used."""
    if backend not in _MASKED:
        return None
    found: list[tuple[str, str]] = []
    attends = False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal attends
        name, held = frame.f_code.co_name, frame.f_locals
        if event != "call":
            return
        if name in _MAKERS and frame.f_code.co_filename.endswith("masking_utils.py"):
            if held.get("position_ids") is None:
                found.append((_asker(frame), f"makes its mask without position_ids ({name})"))
            elif held.get("attention_mask") is not None:
                found.append((_asker(frame), f"gives {name} a mask of its own"))
        elif name.endswith("_attention_forward"):
            attends = attends or held.get("kwargs", {}).get("position_ids") is not None

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return BlindMask(*found[0], attends) if found else None


def blind_mask_of(outline: Any, backend: str) -> BlindMask | None:
    """The same of a network without memory (`weights.outline`), as far as its pass runs."""
    ids = torch.ones(1, 4, dtype=torch.int64, device="meta")
    places = torch.ones(1, 4, dtype=torch.int64, device="meta")

    def run() -> None:
        try:
            with torch.no_grad():
                outline.eval()(input_ids=ids, position_ids=places, use_cache=False)
        except Exception:  # what wants numbers stops: what was asked before it is seen
            return

    return blind_mask(run, backend)


def check_mask(outline: Any, backend: str, kind: str) -> None:
    """Refuse a model of type `kind` whose mask does not know the samples.

    Args:
        outline: as of `blind_mask_of`; None: there is none.

    Raises:
        IsolationError: names the function that asked for the mask.
    """
    blind = None if outline is None else blind_mask_of(outline, backend)
    if blind is not None:
        raise IsolationError(f"packed samples would read each other in {kind}: {blind}", hint=blind.hint)


def _asker(frame: FrameType) -> str:
    asked: FrameType | None = frame.f_back
    while asked is not None and "/utils/" in asked.f_code.co_filename and asked.f_back is not None:
        asked = asked.f_back
    return place_of(asked.f_code) if asked is not None else "the model"
