"""Datasets and samplers over a plan, and over directories of chunks (torch)."""

from .lazy import LazyShardedDataset
from .loader import PackLoader
from .packed import FILLER, PackedDataset
from .sampler import PackSampler

__all__ = ["FILLER", "LazyShardedDataset", "PackLoader", "PackSampler", "PackedDataset"]
