"""The public names of datasets, samplers and loaders over packs (torch); they live in `packs`."""

from typing import Any

from .. import moved
from ..collate import FILLER
from ..packs.encode_cache import EncodeCache
from ..packs.equal_steps import EqualSteps
from ..packs.exported import ChunkedPacks, ShardedPacks, open_packs, pack_of_row
from ..packs.growing import LazyShardedDataset
from ..packs.loader import PackLoader, PackSampler, loader_position
from ..packs.pack import Pack
from ..packs.packed import PackedDataset
from ..packs.source import PackSource, PlannedSource, pack_source
from ..packs.streaming import StreamingPackedDataset
from ..packs.token_budget import TokenBudgetDataset
from ..packs.weighted import WeightedSources

__all__ = [
    "FILLER",
    "ChunkedPacks",
    "EncodeCache",
    "EqualSteps",
    "LazyShardedDataset",
    "Pack",
    "PackLoader",
    "PackSampler",
    "PackSource",
    "PackedDataset",
    "PlannedSource",
    "ShardedPacks",
    "StreamingPackedDataset",
    "TokenBudgetDataset",
    "WeightedSources",
    "loader_position",
    "open_packs",
    "pack_of_row",
    "pack_source",
]


def __getattr__(name: str) -> Any:
    """Names that other systems have for these."""
    return moved.attribute(__name__, name)
