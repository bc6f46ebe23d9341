"""The environment of ms-swift 4.6 (its own transformers and TRL), and what its scripts begin with."""

from __future__ import annotations

import os
from pathlib import Path

from venvs import build

__all__ = ["PREAMBLE", "swift_python"]

#: What ms-swift imports besides; its own list would bring another torch.
LIGHT = """
addict aiohttp attrdict binpacking charset-normalizer dacite einops fastapi importlib-metadata
json-repair matplotlib modelscope nltk openai oss2 pandas pillow PyYAML requests rouge scipy
sentencepiece simplejson sortedcontainers tensorboard tiktoken tqdm uvicorn zstandard
click numba psutil pydantic rich
"""
REQUIREMENTS = [
    "transformers==5.19.0",
    "trl==0.29.1",
    "datasets==4.8.4",
    "peft==0.20.0",
    "accelerate==1.15.0",
    *LIGHT.split(),
]
NO_DEPS = ["ms-swift==4.6.0", "torchvision==0.28.0", "qwen-vl-utils", "av"]

#: torchvision's Python part beside any torch; one thread.
PREAMBLE = """
from packtrain.template import ensure_torchvision
ensure_torchvision()
import torch
torch.set_num_threads(1)
"""


def swift_python() -> Path:
    """The Python of that environment; PACKTRAIN_SWIFT names one that is there already."""
    given = os.environ.get("PACKTRAIN_SWIFT")
    return Path(given) if given else build("swift", REQUIREMENTS, no_deps=NO_DEPS)
