"""From packs to one row: declared fields, joined media, explicit boundaries."""

from .fields import IGNORE, SAMPLE_FIELDS, TOKEN_FIELDS
from .model_traits import BOUNDARY_KWARGS, attention_of, state_layers
from .pack_batch import FILLER, PackBatch, context_parallel_index, filler_pack, is_filler
from .padding_free import PaddingFreeCollator, segment_multiple

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
