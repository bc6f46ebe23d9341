"""The environment of LLaMA-Factory 0.9.5: the newest of what its own list of requirements permits."""

from __future__ import annotations

from pathlib import Path

from venvs import build

__all__ = ["llamafactory_python"]

#: Without its web interface, and without torchaudio, whose wheel on the index is for CUDA.
LIGHT = """
einops fire matplotlib modelscope numpy omegaconf packaging pandas protobuf psutil pydantic PyYAML safetensors
scipy sentencepiece tiktoken sse-starlette fastapi uvicorn pillow click rich numba
"""
REQUIREMENTS = [
    "torchvision==0.28.0",
    "transformers==5.6.0",
    "accelerate==1.11.0",
    "datasets==4.0.0",
    "peft==0.18.1",
    "trl==0.24.0",
    "torchdata==0.11.0",
    "tyro==0.8.14",
    "av==16.0.0",
    *LIGHT.split(),
]


def llamafactory_python() -> Path:
    """The Python of that environment."""
    return build("llamafactory", REQUIREMENTS, no_deps=["llamafactory==0.9.5"])
