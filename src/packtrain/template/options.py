"""Checks of a template's options: each fault is one line with a hint, before any sample is read."""

from __future__ import annotations

import json
from typing import Any

from ..checks import one_of, whole
from ..errors import ConfigError, UnknownNameError
from ..families import BACKENDS, Family, family_of
from .account import DROPPABLE
from .layout import TRUNCATIONS

#: Option -> what it may be.
_CHOICES = {
    "long_audio": ("error", "cut", "drop"),  # what becomes of a clip that the processor would cut
    "truncation": TRUNCATIONS,
    "train_on": ("all", "last"),  # which answers
    "reasoning": ("keep", "mask", "drop_history"),
    "answer_end": ("mark", "line"),  # where what is trained of an answer ends
}

#: What a processor needs for each modality.
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}


def choose_family(family: Family | str | None, processor: Any) -> Family:
    """The family that was named, or the one the processor's class belongs to."""
    if isinstance(family, Family):
        return family
    if family is not None:
        found = family_of(name=family)
    else:
        try:
            found = family_of(processor=processor)
        except UnknownNameError:
            found = _unknown(processor)
    for kind in found.modalities:
        if not hasattr(processor, _PARTS[kind]):
            raise ConfigError(
                f"family {found.name} needs a processor with an {_PARTS[kind].replace('_', ' ')}, "
                f"got {type(processor).__name__}",
                hint="load the processor, not the tokenizer alone",
            )
    return found


def _unknown(processor: Any) -> Family:
    """A family for a processor that none describes: it can be measured and encoded, not packed.

    Its media are counted by asking the processor; which attention keeps its packed samples apart, and
    what shape its positions have, is not known, so every backend is refused.
    """
    kinds = [kind for kind, part in _PARTS.items() if getattr(processor, part, None) is not None]
    if not kinds or getattr(processor, "tokenizer", None) is None:
        return family_of(processor=processor)  # raises, naming what is known
    why = f"no family describes {type(processor).__name__}"
    return Family(
        name="oracle", model_types=(), modalities=tuple(kinds), refused=dict.fromkeys(BACKENDS, why)
    )


def positive(name: str, value: int | None) -> int | None:
    """`value` if it is a positive integer or None."""
    if value is None:
        return None
    return whole(name, value, 1, hint=f"give {name} in tokens", error=ConfigError)


def check_options(template: Any) -> None:
    """Refuse variables, truncation and tokenizers that cannot hold."""
    try:
        json.dumps(template.variables)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"template variables are not plain values: {error}",
            hint="use strings, numbers, lists and mappings",
        ) from None
    for name, known in _CHOICES.items():
        one_of(name, getattr(template, name), known)
    if template.truncation != "error" and template.max_length is None:
        raise ConfigError(
            f"truncation {template.truncation!r} has no max_length to cut to", hint="set template.max_length"
        )
    for kind in template.allow_dropped:
        one_of("allow_dropped", kind, DROPPABLE)
    if not getattr(template.tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(template.tokenizer).__name__} cannot say which characters a token covers",
            hint="use a tokenizer backed by tokenizer.json (use_fast=True)",
        )
