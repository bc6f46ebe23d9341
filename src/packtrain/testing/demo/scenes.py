"""Drawn scenes: a few coloured shapes on plain ground, with captions, boxes and counts that are true.

Boxes are integers 0..999 of the picture's width and height, as grounding data of the Qwen-VL
kind have them: `[left, top, right, bottom]`, the far edge excluded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .talks import Draws, Talk

if TYPE_CHECKING:
    from PIL.Image import Image


COLOURS = {
    "red": (214, 40, 40),
    "blue": (33, 90, 200),
    "green": (40, 150, 70),
    "yellow": (240, 196, 30),
    "purple": (124, 58, 168),
    "orange": (240, 124, 28),
    "black": (30, 30, 30),
}
_FORMS = ("circle", "square", "triangle", "diamond", "bar")
_GROUNDS = ((250, 250, 250), (232, 238, 244), (244, 236, 224), (226, 240, 228))
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape; `box` is (left, top, right, bottom) in pixels, far edge excluded."""

    colour: str
    form: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        return f"{self.colour} {self.form}"


@dataclass(frozen=True, slots=True)
class Scene:
    """Shapes that do not touch, in reading order (left to right, then top to bottom)."""

    width: int
    height: int
    ground: tuple[int, int, int]
    shapes: tuple[Shape, ...]

    def count(self, colour: str) -> int:
        return sum(shape.colour == colour for shape in self.shapes)

    def place(self, shape: Shape) -> str:
        """Where a shape lies, in words of a three by three grid."""
        x = (shape.box[0] + shape.box[2]) * 3 // (2 * self.width)
        y = (shape.box[1] + shape.box[3]) * 3 // (2 * self.height)
        if (x, y) == (1, 1):
            return "in the centre"
        return f"at the {('top', 'middle', 'bottom')[y]} {('left', 'centre', 'right')[x]}"


def scene(d: Draws) -> Scene:
    """Two to five shapes in different cells of a grid, on a canvas of a drawn size."""
    columns, rows = d.integer(2, 4), d.integer(2, 3)
    cell_w, cell_h = d.integer(44, 96), d.integer(44, 96)
    cells = [(c, r) for c in range(columns) for r in range(rows)]
    shapes = []
    for column, row in sorted(d.some(cells, d.integer(2, min(5, len(cells))))):
        form = d.choice(_FORMS)
        size = d.integer(min(cell_w, cell_h) // 2, min(cell_w, cell_h) - 8)
        high = max(10, size // 3) if form == "bar" else size
        left = column * cell_w + d.integer(2, cell_w - size - 2)
        top = row * cell_h + d.integer(2, cell_h - high - 2)
        shapes.append(Shape(d.choice(tuple(COLOURS)), form, (left, top, left + size, top + high)))
    return Scene(columns * cell_w, rows * cell_h, d.choice(_GROUNDS), tuple(shapes))


def draw_scene(view: Scene) -> Image:
    """The scene as an RGB picture."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (view.width, view.height), view.ground)
    pen = ImageDraw.Draw(picture)
    for shape in view.shapes:
        left, top, right, bottom = shape.box
        right, bottom = right - 1, bottom - 1
        middle, half = (left + right) / 2, (top + bottom) / 2
        fill = COLOURS[shape.colour]
        if shape.form == "circle":
            pen.ellipse((left, top, right, bottom), fill=fill)
        elif shape.form == "triangle":
            pen.polygon([(middle, top), (right, bottom), (left, bottom)], fill=fill)
        elif shape.form == "diamond":
            pen.polygon([(middle, top), (right, half), (middle, bottom), (left, half)], fill=fill)
        else:
            pen.rectangle((left, top, right, bottom), fill=fill)
    return picture


def boxes_json(view: Scene, shapes: Sequence[Shape]) -> str:
    """Shapes as JSON, boxes in integers 0..999 of width and height."""
    sizes = (view.width, view.height) * 2
    found = []
    for shape in shapes:
        box = [edge * 999 // size for edge, size in zip(shape.box, sizes, strict=True)]
        found.append({"bbox_2d": box, "label": shape.name})
    return json.dumps(found)


def caption(view: Scene) -> str:
    """A true sentence or two about a scene."""
    first, *rest = view.shapes
    text = f"There are {NUMBERS[len(view.shapes)]} shapes. "
    text += f"{_a(first.name).capitalize()} is {view.place(first)}"
    for shape in rest:
        text += f", {_a(shape.name)} is {view.place(shape)}"
    return text + "."


def scene_talk(d: Draws) -> Talk:
    """A caption, or boxes of all shapes, or of the shapes of one colour."""
    view = scene(d)
    picture = draw_scene(view)
    roll = d.integer(0, 2)
    if roll == 0:
        talk = Talk("caption")
        talk.ask(picture, d.choice(("Describe the image.", "What do you see?", "Write a caption.")))
        talk.answer(caption(view))
        return talk
    talk = Talk("boxes")
    if roll == 1:
        talk.ask(picture, "Locate every shape. Answer as JSON with bbox_2d and label.")
        talk.answer(boxes_json(view, view.shapes))
    else:
        colour = d.choice(view.shapes).colour
        talk.ask(f"Find all {colour} shapes in the picture ", picture, " and give their boxes as JSON.")
        talk.answer(boxes_json(view, [s for s in view.shapes if s.colour == colour]))
    return talk


def scene_chat(d: Draws) -> Talk:
    """Three or four turns about one scene."""
    view = scene(d)
    talk = Talk("scene_chat")
    if d.chance(0.3):
        talk.system("You look at pictures and answer in short sentences.")
    talk.ask(draw_scene(view), "How many shapes are there?")
    talk.answer(f"There are {NUMBERS[len(view.shapes)]}.")
    colour = d.choice(tuple(COLOURS))
    talk.ask(f"How many of them are {colour}?")
    count = view.count(colour)
    talk.answer(f"{NUMBERS[count].capitalize()} of them {'is' if count == 1 else 'are'} {colour}.")
    last = view.shapes[-1]
    rightmost = all(shape.box[2] < last.box[2] for shape in view.shapes[:-1])
    talk.ask("Which shape is furthest to the right?" if rightmost else "Name one of the shapes.")
    talk.answer(f"The {last.name}.")
    if d.chance(0.5):
        talk.ask("Where is it?")
        talk.answer(f"It is {view.place(last)}. {boxes_json(view, [last])}")
    return talk


def compare_talk(d: Draws) -> Talk:
    """Two to four scenes side by side."""
    views = [scene(d) for _ in range(d.choice((2, 2, 2, 3, 4)))]
    talk = Talk("compare")
    parts: list[str | Image] = []
    for number, view in enumerate(views, 1):
        parts += [f"Picture {number}: " if number == 1 else f"\nPicture {number}: ", draw_scene(view)]
    talk.ask(*parts, "\nWhich picture has the most shapes, and what differs?")
    counts = [len(view.shapes) for view in views]
    most = [str(number) for number, count in enumerate(counts, 1) if count == max(counts)]
    if len(most) == 1:
        text = f"Picture {most[0]} has the most shapes, {NUMBERS[max(counts)]}."
    else:
        text = f"Pictures {' and '.join(most)} are level with {NUMBERS[max(counts)]} shapes each."
    for number, view in enumerate(views, 1):
        text += f" Picture {number} shows {', '.join(_a(shape.name) for shape in view.shapes)}."
    talk.answer(text)
    return talk


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
