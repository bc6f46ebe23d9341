"""The demo's processor: a small byte-level BPE trained on the demo's own text, with the real
Qwen2.5-VL image processor and processor classes around it.

The folder is written as plain files in the layout of Hugging Face, so making it needs neither
torch nor transformers. Small pixel limits keep a picture at 4..64 tokens: the tiny model of the
demo then trains on two CPU cores.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import files
from ...errors import optional

_VOCABULARY = 2048
MAX_IMAGE_TOKENS = 64
PATCH, MERGE = 14, 2
_MARKS = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
SPECIALS = tuple(_MARKS.split())
# Words (with one leading space), up to three digits (a box coordinate is one token), signs, white space.
_SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int = _VOCABULARY) -> Any:
    """A `tokenizers.Tokenizer`: NFC, byte-level BPE of at most `vocabulary` tokens, specials first.

    Training is deterministic: merges are ordered by count, then by token ids.
    """
    optional("tokenizers", "tokenizers", "train")
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_processor(folder: Path, tokenizer: Any) -> list[str]:
    """Write the processor folder; `processor_config.json`, by which it is recognised, comes last.

    Returns the names of its files.
    """
    made = {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": _json(_tokenizer_config()),
        "chat_template.jinja": shipped("chat_template.jinja"),
        "processor_config.json": _json(_processor_config()),
    }
    for name, text in made.items():
        files.publish_text(folder / name, text)
    return list(made)


def shipped(name: str) -> str:
    """The text of a file of this folder."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _tokenizer_config() -> dict[str, Any]:
    return {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": [],
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5_VLProcessor",
        "tokenizer_class": "TokenizersBackend",
    }


def _processor_config() -> dict[str, Any]:
    cell = (PATCH * MERGE) ** 2
    pixels: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }
    limits = {"shortest_edge": 4 * cell, "longest_edge": MAX_IMAGE_TOKENS * cell}
    return {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor": {**pixels, "image_processor_type": "Qwen2VLImageProcessor", "size": limits},
        "video_processor": {
            **pixels,
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": limits,
            "cap_pixels_per_frame": False,
            "do_sample_frames": True,
            "fps": 2.0,
            "min_frames": 4,
            "max_frames": 16,
            "return_metadata": False,
        },
    }
