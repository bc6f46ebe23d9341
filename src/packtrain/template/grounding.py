"""Names and boxes of `objects`, written into a sample's texts as the model family writes them.

Coordinates are thousandths of the image, or pixels of the image as the processor gets it; both are worked
out from the image's header, so that measuring and encoding write the same digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import SampleError
from ..families import Family
from ..sources._objects import BOX, REF

__all__ = ["grounded"]

_MARK = re.compile(f"{re.escape(REF)}|{re.escape(BOX)}")

Size = tuple[int, int]


def grounded(
    sample: Mapping[str, Any], family: Family, sizes: Callable[[Mapping[str, Any]], tuple[Size, Size]]
) -> Mapping[str, Any]:
    """The sample with its objects in its texts.

    Args:
        sample: a normalised chat sample with `objects`.
        family: says how names and boxes are written.
        sizes: image part -> its (height, width), and those of what the processor makes of it.

    Raises:
        SampleError: `unread_key`, where the family has no such notation; the reasons of reading an image.
    """
    objects = sample["objects"]
    if family.grounding is None:
        raise SampleError(
            "unread_key",
            f"the key 'objects' is not read: {family.name} has no published notation of boxes",
            hint="write the boxes into the text, or leave them out: ignore_keys: [objects]",
        )
    name, box, scale = family.grounding
    images = [part for turn in sample["messages"] for part in turn["content"] if part["type"] == "image"]
    names = iter(objects["ref"])
    boxes = iter(zip(objects["bbox"], objects["image_id"], strict=True))

    def written(mark: re.Match[str]) -> str:
        if mark.group() == REF:
            return name.format(next(names))
        edges, which = next(boxes)
        (high, wide), (rows, columns) = (
            sizes(images[which]) if objects["bbox_type"] == "real" else ((1, 1),) * 2
        )
        if scale == "pixels" and objects["bbox_type"] == "norm1":
            rows, columns = sizes(images[which])[1]
        target = (1000, 1000) if scale == "thousandths" else (columns, rows)
        return _box(
            box, [round(x / of * to) for x, of, to in zip(edges, (wide, high) * 2, target * 2, strict=False)]
        )

    messages = [
        {
            **turn,
            "content": [
                {**part, "text": _MARK.sub(written, part["text"])} if part["type"] == "text" else part
                for part in turn["content"]
            ],
        }
        for turn in sample["messages"]
    ]
    return {**{key: value for key, value in sample.items() if key != "objects"}, "messages": messages}


def _box(notation: str, edges: Sequence[int]) -> str:
    """`{points}`: `(x1,y1),(x2,y2)`; `{list}`: `[x1, y1, x2, y2]`."""
    points = ",".join(f"({x},{y})" for x, y in zip(edges[::2], edges[1::2], strict=True))
    return notation.format(points=points, list=list(edges))
