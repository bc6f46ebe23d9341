"""Datasets and samplers over a plan, and over directories of chunks (torch)."""

from .encode_cache import EncodeCache
from .lazy import LazyShardedDataset
from .loader import PackLoader
from .packed import FILLER, PackedDataset
from .sampler import PackSampler

__all__ = ["FILLER", "EncodeCache", "LazyShardedDataset", "PackLoader", "PackSampler", "PackedDataset"]
