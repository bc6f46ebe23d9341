"""The environment of VeOmni 0.1.12 on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

from venvs import build

__all__ = ["veomni_python"]

#: What its training imports; its own extras would bring CUDA builds.
LIGHT = """
blobfile==3.2.0 packaging==25.0 tiktoken psutil setuptools einops matplotlib wandb pillow PyYAML rich
safetensors sentencepiece pydantic numba av==14.2.0 ftfy requests
"""
REQUIREMENTS = [
    "torchvision==0.28.0",
    "transformers==5.9.0",
    "accelerate==1.13.0",
    "datasets==2.21.0",
    "torchdata==0.11.0",
    "peft==0.18.1",
    *LIGHT.split(),
]


def veomni_python() -> Path:
    """The Python of that environment."""
    return build("veomni", REQUIREMENTS, no_deps=["veomni==0.1.12"])
