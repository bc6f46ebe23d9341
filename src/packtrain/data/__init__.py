"""Datasets and samplers over a plan, and over directories of chunks (torch)."""

from .chunked import ChunkedPacks
from .encode_cache import EncodeCache
from .equal_steps import EqualSteps
from .lazy import LazyShardedDataset
from .loader import PackLoader, loader_position
from .packed import FILLER, PackedDataset
from .sampler import PackSampler
from .shards import ShardedPacks, open_packs
from .streaming import StreamingPackedDataset
from .token_budget import TokenBudgetDataset
from .weighted import WeightedSources

__all__ = [
    "FILLER",
    "ChunkedPacks",
    "EncodeCache",
    "EqualSteps",
    "LazyShardedDataset",
    "PackLoader",
    "PackSampler",
    "PackedDataset",
    "ShardedPacks",
    "StreamingPackedDataset",
    "TokenBudgetDataset",
    "WeightedSources",
    "loader_position",
    "open_packs",
]
