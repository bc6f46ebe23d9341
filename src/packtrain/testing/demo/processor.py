"""The demo's processor: a small byte-level BPE trained on the demo's own text, with the real
Qwen2.5-VL image processor and processor classes around it.

The folder is written as plain files in the layout of Hugging Face, so making it needs neither
torch nor transformers. Small pixel limits keep a picture at 4..64 tokens: the tiny model of the
demo then trains on two CPU cores.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import files
from ...errors import optional

_VOCABULARY = 2048
#: What the pixel limits of `processor_config.json` come to: patches of 14, merged by 2.
MAX_IMAGE_TOKENS = 64
#: Files of the folder beside its tokenizer, in the order in which they are written.
_FILES = ("tokenizer_config.json", "chat_template.jinja", "processor_config.json")
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
        **{name: shipped(f"processor_files/{name}") for name in _FILES},
    }
    for name, text in made.items():
        files.publish_text(folder / name, text)
    return list(made)


def shipped(name: str) -> str:
    """The text of a file of this folder."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
