"""`objects` of a record: boxes and names that stand at `<bbox>` and `<ref-object>` in its texts (ms-swift).

    {"ref": ["dog"], "bbox": [[x1, y1, x2, y2]], "bbox_type": "real" | "norm1", "image_id": [0]}

Boxes (or points, two numbers) are pixels of their image, or shares of its sides (`norm1`); `image_id` says
which listed image each belongs to, the first where it is left out. How they are written is the model family's
to say: the template fills them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..checks import is_finite
from ..errors import SampleError, counted
from ._content import fault
from ._values import absent

REF, BOX = "<ref-object>", "<bbox>"

_KEYS = ("ref", "bbox", "bbox_type", "image_id")


def objects_of(value: Any, texts: Iterable[str], images: int) -> dict[str, Any] | None:
    """The objects of a record, checked; None where its texts have no place for any, or it has no image.

    Args:
        value: what the record holds.
        texts: its texts, in order.
        images: how many images it has.

    Raises:
        SampleError: malformed_record; placeholder_mismatch, where texts have more or fewer places.
    """
    told = list(texts)
    places = {mark: sum(text.count(mark) for text in told) for mark in (REF, BOX)}
    if not images or not any(places.values()) or not isinstance(value, Mapping):
        return None
    held = {name: inner for name, inner in value.items() if not absent(inner)}
    odd = [name for name in held if name not in _KEYS]
    if odd:
        raise fault(f"objects holds {odd[0]!r}", hint=f"it takes {', '.join(_KEYS)}")
    names, boxes, which = (held.get(name, []) for name in ("ref", "bbox", "image_id"))
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise fault("ref of objects is not a list of texts")
    if not isinstance(boxes, (list, tuple)) or not all(_is_box(box) for box in boxes):
        raise fault("bbox of objects is not a list of [x1, y1, x2, y2] or [x, y]")
    for mark, found in ((REF, names), (BOX, boxes)):
        if places[mark] != len(found):
            raise SampleError(
                "placeholder_mismatch",
                f"the text has {places[mark]} {mark} but objects holds {len(found)}",
                hint="ignore_keys: [objects] trains the text as it stands",
            )
    kind = held.get("bbox_type", "real")
    if kind not in ("real", "norm1"):
        raise fault(f"bbox_type of objects is {kind!r}", hint="real or norm1")
    which = [*which, *[0] * (len(boxes) - len(which))] if isinstance(which, (list, tuple)) else which
    known = isinstance(which, list) and len(which) == len(boxes)
    if not known or not all(type(number) is int and 0 <= number < images for number in which):
        raise fault(
            f"image_id of objects is {which!r} for "
            f"{counted(len(boxes), 'boxes')} and {counted(images, 'images')}"
        )
    return {"ref": list(names), "bbox": [list(b) for b in boxes], "bbox_type": kind, "image_id": which}


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, (list, tuple))
        and len(box) in (2, 4)
        and all(type(edge) in (int, float) and is_finite(edge) and edge >= 0 for edge in box)
    )
