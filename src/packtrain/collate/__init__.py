"""From packs to one row: declared fields, joined media, explicit boundaries."""

from .boundaries import BOUNDARY_KWARGS, attention_of, state_layers
from .fields import IGNORE, SAMPLE_FIELDS, TOKEN_FIELDS
from .padding_free import PackBatch, PaddingFreeCollator, filler_pack

__all__ = [
    "BOUNDARY_KWARGS",
    "IGNORE",
    "SAMPLE_FIELDS",
    "TOKEN_FIELDS",
    "PackBatch",
    "PaddingFreeCollator",
    "attention_of",
    "filler_pack",
    "state_layers",
]
