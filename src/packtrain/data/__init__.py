"""Datasets and samplers over a plan (torch)."""

from .packed import FILLER, PackedDataset
from .sampler import PackSampler

__all__ = ["FILLER", "PackSampler", "PackedDataset"]
