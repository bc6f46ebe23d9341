"""Detection annotations (COCO, LVIS, Objects365 JSON) as chats: an image, and its boxes as JSON text.

One sample per image, in the order of the file's `images`:

    user       the image, then PROMPT
    assistant  [{"bbox_2d": [x1, y1, x2, y2], "label": "dog"}, …]      `[]` for an image without boxes

Coordinates are whole numbers 0 … 999: `x * 999 / width` rounded half up, clipped to the image first; x1 <= x2
and y1 <= y2. Boxes are sorted by (y1, x1, y2, x2, label), so the answer does not depend on the order of
annotations; `order="file"` keeps that order. Crowd regions (`iscrowd`) are left out unless `crowd`; boxes
that have no area inside the image are left out. How many, and why, is logged and in `fields()["left_out"]`.

The image's ref is its `file_name`, else the end of its `coco_url` (`val2017/000000000139.jpg`), relative to
the media root; its width and height stay beside the ref as hints. Coordinates assume pixels as the
annotations do: images without EXIF rotation. An image or annotation that cannot be used (no size, unknown
category, a box that is no box) is one `malformed_record`; the annotation file is parsed once, whole, and
then read from a JSONL in the cache folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..checks import is_finite, one_of
from ..errors import SampleError, SourceError
from ..files import StrPath
from ._derived import Derived, derive, digest_one

log = logging.getLogger(__name__)

PROMPT = (
    'Detect every object in the image. Answer with a JSON list of {"bbox_2d": [x1, y1, x2, y2], '
    '"label": name}: '
    "the left, top, right and bottom of each box as whole numbers from 0 to 999, relative to the width and "
    "height of the image."
)
SCALE = 999
VERSION = 1

Box = tuple[int, int, int, int]


class Detections(Derived):
    """Chats of a detection set. `where` names the image."""

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "kind": "coco", "left_out": self._left_out()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = super().__getitem__(index)
        if "fault" in record:
            raise SampleError("malformed_record", f"{self.where(index)}: {record['fault']}")
        return record

    def where(self, index: int) -> str:
        """`instances_val.json[17]`: the image's place in the file, from 0."""
        return f"{self._name}[{range(len(self))[index]}]"

    def _left_out(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for index in range(len(self)):
            total.update(super().__getitem__(index).get("left_out", {}))
        return dict(sorted(total.items()))


def open_source(
    path: StrPath,
    *,
    prompt: str = PROMPT,
    order: str = "position",
    crowd: bool = False,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Detections:
    """Open an annotation file.

    Args:
        path: JSON with `images`, `annotations` and `categories`.
        prompt: what the user asks.
        order: "position" (top to bottom, then left to right) or "file".
        crowd: keep crowd regions.
        cache_dir: cache folder, where the chats are kept.
        verify_content: hash the file again instead of trusting its size and time.

    Raises:
        SourceError: missing, not JSON, not such a file, two images of one id.
    """
    one_of("order", order, ("position", "file"))
    text = os.fspath(path)
    if not os.path.isfile(text):
        raise SourceError(f"{text} is no annotation file")
    origin = digest_one(text, cache_dir=cache_dir, verify=verify_content)
    options = {"prompt": prompt, "order": order, "crowd": crowd}
    rows = _records(origin.path, prompt, order, crowd)
    lines = (json.dumps(row).encode("ascii") + b"\n" for row in rows)
    made = derive(origin, {"coco": VERSION, **options}, lambda: lines, cache_dir)
    return Detections(made, origin, (open_source, {**options, "cache_dir": cache_dir}))


def normalise(box: tuple[float, float, float, float], width: int, height: int) -> Box:
    """Corners in pixels as whole numbers 0 … 999, rounded half up.

    >>> normalise((0, 0, 640, 240), 640, 480)
    (0, 0, 999, 500)
    """
    sides = (width, height, width, height)
    left, top, right, bottom = (math.floor(a * SCALE / of + 0.5) for a, of in zip(box, sides, strict=True))
    return left, top, right, bottom


# --------------------------------------------------------------------------------------------
def _records(path: str, prompt: str, order: str, crowd: bool) -> Iterator[dict[str, Any]]:
    images, by_image, names = _parse(path)
    totals: Counter[str] = Counter()
    for image in images:
        left_out: Counter[str] = Counter()
        try:
            record = _chat(image, by_image.get(image["id"], []), names, prompt, order, crowd, left_out)
        except ValueError as error:
            record = {"image_id": image["id"], "fault": str(error)}
        if left_out:
            record["left_out"] = dict(sorted(left_out.items()))
            totals.update(left_out)
        yield record
    for why, count in sorted(totals.items()):
        log.warning("%s: %d boxes left out: %s", path, count, why)


def _parse(path: str) -> tuple[list[dict[str, Any]], dict[Any, list[Any]], dict[Any, str]]:
    """(images, annotations by image id, category names by id)."""
    try:
        with open(path, "rb") as handle:
            held = json.load(handle)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from None
    parts: list[list[Any]] = []
    for key in ("images", "annotations", "categories"):
        part = held.get(key) if isinstance(held, Mapping) else None
        if not isinstance(part, list):
            raise SourceError(
                f"{path} is one JSON object, and no annotation file: it has no list of {key}",
                hint="give the list of records itself, or one object per line as .jsonl",
            )
        parts.append(part)
    images, annotations, categories = parts
    named = [c for c in categories if isinstance(c, Mapping) and isinstance(c.get("name"), str)]
    names = {c["id"]: c["name"] for c in named if _is_id(c.get("id"))}
    seen: set[Any] = set()
    for number, image in enumerate(images):
        if not isinstance(image, Mapping) or not _is_id(image.get("id")):
            raise SourceError(f"{path}: image {number} has no id (a number or a text)")
        if image["id"] in seen:
            raise SourceError(f"{path} has two images of the id {image['id']!r}")
        seen.add(image["id"])
    by_image: dict[Any, list[Any]] = {}
    strays = 0
    for note in annotations:
        owner = note.get("image_id") if isinstance(note, Mapping) else None
        if _is_id(owner) and owner in seen:
            by_image.setdefault(owner, []).append(note)
        else:
            strays += 1
    if strays:
        log.warning("%s: %d annotations of images that are not in the file", path, strays)
    return images, by_image, names


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _chat(
    image: Mapping[str, Any],
    notes: list[Any],
    names: Mapping[Any, str],
    prompt: str,
    order: str,
    crowd: bool,
    left_out: Counter[str],
) -> dict[str, Any]:
    """The chat of one image. ValueError says what makes it unusable."""
    name = image.get("file_name")
    if not name:
        name = "/".join(str(image.get("coco_url") or "").split("/")[-2:])
    if not isinstance(name, str) or not name:
        raise ValueError(f"image {image['id']!r} has neither file_name nor coco_url")
    sizes = [image.get(key) for key in ("width", "height")]
    if not all(_real(size) and size >= 1 for size in sizes):  # type: ignore[operator]
        raise ValueError(f"image {image['id']!r} has no width and height ({sizes[0]!r} x {sizes[1]!r})")
    width, height = (int(s) for s in sizes)  # type: ignore[arg-type]
    found: list[tuple[Box, str]] = []
    for note in notes:
        category = note.get("category_id")
        label = names.get(category) if _is_id(category) else None
        if label is None:
            raise ValueError(f"annotation {note.get('id')!r} has the unknown category {category!r}")
        if note.get("iscrowd") and not crowd:
            left_out["crowd"] += 1
            continue
        corners = _corners(note, width, height)
        if corners is None:
            left_out["no area inside the image"] += 1
            continue
        found.append((normalise(corners, width, height), label))
    if order == "position":
        found.sort(key=lambda item: (item[0][1], item[0][0], item[0][3], item[0][2], item[1]))
    answer = json.dumps([{"bbox_2d": list(box), "label": label} for box, label in found], ensure_ascii=False)
    part = {"type": "image", "image": name, "width": width, "height": height}
    return {
        "image_id": image["id"],
        "messages": [
            {"role": "user", "content": [part, {"type": "text", "text": prompt}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ],
    }


def _corners(note: Mapping[str, Any], width: int, height: int) -> tuple[float, float, float, float] | None:
    """The box clipped to the image; None where nothing of it is inside."""
    box = note.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(_real(value) for value in box):
        raise ValueError(f"annotation {note.get('id')!r} has the bbox {box!r}, not [x, y, width, height]")
    x, y, w, h = (float(value) for value in box)
    left, right = min(max(x, 0.0), width), min(max(x + w, 0.0), width)
    top, bottom = min(max(y, 0.0), height), min(max(y + h, 0.0), height)
    if right <= left or bottom <= top:
        return None
    return left, top, right, bottom


def _real(value: Any) -> bool:
    return not isinstance(value, bool) and is_finite(value)
