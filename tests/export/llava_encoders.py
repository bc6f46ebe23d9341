"""What LLaVA-OneVision-1.5 does with a pack before training, written anew from its published behaviour.

loader     the record of a key, its images decoded, `prompts` and `captions` as they are
captions   image tokens + caption + end of text; the prompt is not read
vqa        the processor's chat template over two plain texts, `<image>` replaced, a last line end cut
mixed      lists of prompts and captions by turns; as many `<image>` as images, else an error
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

__all__ = ["encoded"]

_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def encoded(sample: dict[str, Any], processor: Any, gate: str) -> list[list[int]]:
    """Token ids of each member of a pack.

    Args:
        sample: what the exported `sample_loader` returns; images as their bytes, or decoded by energon.
        gate: `captions`, `vqa` or `mixed`: which switch its training is started with.
    """
    step = {"captions": _caption, "vqa": _question, "mixed": _mixed}[gate]
    members = zip(sample["images"], sample["prompts"], sample["captions"], strict=True)
    return [step(processor, image, prompt, caption) for image, prompt, caption in members]


def _ids(processor: Any, text: str, images: list[Any]) -> list[int]:
    held = [Image.open(io.BytesIO(one)) if isinstance(one, bytes) else one for one in images]
    decoded = [one.convert("RGB") for one in held]
    made = processor(text=[text], images=decoded or None, return_tensors="pt")
    ids: list[int] = made["input_ids"][0].tolist()
    return ids


def _caption(processor: Any, image: bytes, prompt: str, caption: str) -> list[int]:
    return _ids(processor, _IMAGE + caption + processor.tokenizer.eos_token, [image])


def _question(processor: Any, image: bytes, prompt: str, caption: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": caption}]
    text = processor.apply_chat_template(turns, tokenize=False).replace("<image>", _IMAGE)
    text = text.removesuffix("\n")
    ids = _ids(processor, text, [image])
    answer = processor.tokenizer(caption, add_special_tokens=False)["input_ids"]
    assert ids[-len(answer) - 1 : -1] == answer  # its labels are laid over these places
    return ids


def _mixed(processor: Any, image: Any, prompts: list[str], captions: list[str]) -> list[int]:
    if len(prompts) != len(captions):
        raise ValueError("cur_prompt & cur_caption have different lengths")
    images = [image] if image else []
    if "".join(prompts).count("<image>") != len(images):
        raise ValueError("the number of images does not match the number of <image> tokens")
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for prompt, caption in zip(prompts, captions, strict=True):
        asked = prompt.replace("<image>", _IMAGE)
        text += f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{caption}<|im_end|>\n"
    return _ids(processor, text, images)
