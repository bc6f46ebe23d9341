"""Model families: the one place that knows how a family lays out media, positions and boundaries."""

from ._family import (
    BACKENDS,
    FLASH_KWARGS,
    MASK_KEYS,
    STATEFUL_MODEL_TYPES,
    VARLEN_KWARGS,
    Family,
    families,
    family_of,
)

__all__ = [
    "BACKENDS",
    "FLASH_KWARGS",
    "MASK_KEYS",
    "STATEFUL_MODEL_TYPES",
    "VARLEN_KWARGS",
    "Family",
    "families",
    "family_of",
]
