"""Templates: samples to token ids, labels, positions and media tensors (Hugging Face; needs torch)."""

from ._torchvision_shim import ensure_torchvision
from .dummy import dummy_samples
from .layout import mrope_positions, text_positions
from .load import load_processor
from .processor import HFTemplate

__all__ = [
    "HFTemplate",
    "dummy_samples",
    "ensure_torchvision",
    "load_processor",
    "mrope_positions",
    "text_positions",
]
