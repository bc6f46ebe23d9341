"""The environment of axolotl 0.19.0, the newest for Python 3.11, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

from venvs import build

__all__ = ["axolotl_python"]

#: What its training imports; its own list would bring CUDA builds.
LIGHT = """
packaging==26.0 hf_xet typing-extensions einops sentencepiece addict fire PyYAML requests colorama
evaluate scipy python-dotenv zstandard fastcore langdetect immutabledict schedulefree pillow psutil
posthog mistral-common art tensorboard click typer rich numba wandb
"""
REQUIREMENTS = [
    "torchvision==0.28.0",
    "transformers==5.16.1",
    "accelerate==1.13.0",
    "datasets==4.8.4",
    "peft==0.20.0",
    "trl==1.9.0",
    "pydantic==2.12.5",
    "trackio==0.19.0",
    *LIGHT.split(),
]
NO_DEPS = [
    "axolotl==0.19.0",
    "axolotl-contribs-lgpl==0.0.7",
    "axolotl-contribs-mit==0.0.6",
    "bitsandbytes==0.50.2",
    "triton==3.4.0",
]


def axolotl_python() -> Path:
    """The Python of that environment."""
    return build("axolotl", REQUIREMENTS, no_deps=NO_DEPS)
