"""What LLaVA-OneVision-1.5's encoders of packs read, and what they would read wrongly.

For each member of a pack they take `images[i]`, `prompts[i]` and `captions[i]`, and nothing else:

    captions     the image, then the caption; the prompt is not read
    vqa          one user and one assistant text; `<image>` in the prompt becomes the image's tokens
    multi_turn   lists of them, asked and answered by turns; one image or none

So `<image>` stays in the prompts where the image stands, and a sample that these three cannot hold is
refused: it would be trained otherwise than it was planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import counted
from ..media.knobs import KNOB_KEYS

__all__ = ["PLACEHOLDER", "placed", "refusal"]

PLACEHOLDER = "<image>"
_PLACEHOLDERS = (PLACEHOLDER, "<video>", "<|image_pad|>", "<|video_pad|>")


def refusal(sample: Mapping[str, Any], task: str) -> str | None:
    """Why a sample cannot be read there as it was planned; None where it can.

    Args:
        sample: normalised, media in any form.
        task: of the export.
    """
    messages = sample["messages"]
    further = sorted(set(sample) - {"messages"})
    if further:
        return f"it has {further[0]}"
    for message in messages:
        found = _of_message(message)
        if found is not None:
            return found
    roles = [message["role"] for message in messages]
    caption = roles == ["assistant"] and task == "captions"
    if not caption and (len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2)):
        if roles[-1] == "user":
            return "it ends with a question that nobody answers"
        return f"it has the turns {', '.join(roles)}"
    kinds = [[part["type"] for part in message["content"]] for message in messages]
    if any(kind == "image" for held in kinds[1::2] for kind in held):
        return "an answer holds an image"
    images = sum(kind == "image" for held in kinds for kind in held)
    if images > 1:
        return f"it has {counted(images, 'images')}"
    if caption and (kinds[0][:1] != ["image"] or not images):
        return "its caption does not begin with the image"
    if task == "captions" and not caption and _said(messages[0]):
        return "it asks something, and a caption's prompt is not read"
    return None


def _of_message(message: Mapping[str, Any]) -> str | None:
    further = sorted(set(message) - {"role", "content"})
    if further:
        return f"a message has {further[0]}"
    for part in message["content"]:
        if part["type"] not in ("text", "image"):
            return f"it has {part['type']}"
        text = part.get("text", "") if part["type"] == "text" else ""
        word = next((word for word in _PLACEHOLDERS if word in text), None)
        if word is not None:
            return f"a text says {word}, which stands for a medium there"
        if not KNOB_KEYS.isdisjoint(part):
            return "an image has a size of its own"
    return None


def placed(content: Sequence[Mapping[str, Any]]) -> str:
    """The text of a message with `<image>` where an image stands."""
    return "".join(part["text"] if part["type"] == "text" else PLACEHOLDER for part in content)


def _said(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "text" and part["text"] for part in message["content"])
