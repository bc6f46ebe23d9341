"""From packs to one row: declared fields, joined media, explicit boundaries."""

from .boundaries import BOUNDARY_KWARGS, attention_of, state_layers
from .fields import IGNORE, SAMPLE_FIELDS, TOKEN_FIELDS
from .pack_batch import FILLER, PackBatch, filler_pack, is_filler
from .padding import context_parallel_index, segment_multiple
from .padding_free import PaddingFreeCollator

__all__ = [
    "BOUNDARY_KWARGS",
    "FILLER",
    "IGNORE",
    "SAMPLE_FIELDS",
    "TOKEN_FIELDS",
    "PackBatch",
    "PaddingFreeCollator",
    "attention_of",
    "context_parallel_index",
    "filler_pack",
    "is_filler",
    "segment_multiple",
    "state_layers",
]
