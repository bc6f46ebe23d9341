"""The samples are true: formulas draw, boxes lie on their shapes, sums add up, files read as drawn."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from packtrain.testing.demo.formulas import draw_formula, formula, formula_chat, formula_talk
from packtrain.testing.demo.make import (
    PACK_LENGTH,
    SCHEDULE,
    encode_picture,
    lesson,
    schedule,
    tokens_of,
    variant_of,
)
from packtrain.testing.demo.maths import problem, problem_talk
from packtrain.testing.demo.scenes import (
    COLOURS,
    Scene,
    boxes_json,
    compare_talk,
    draw_scene,
    scene,
    scene_chat,
)
from packtrain.testing.demo.talks import SHAPES, Draws, Talk, record_of

keys = st.integers(0, 10**6).map(str)


def test_draws_are_the_same_everywhere() -> None:
    d = Draws("golden")
    assert [d.integer(0, 99) for _ in range(8)] == [81, 48, 26, 8, 37, 97, 17, 14]
    assert Draws("golden").shuffled(range(6)) == [3, 5, 0, 1, 2, 4]


@given(keys, st.integers(-5, 5), st.integers(0, 20))
def test_draws_stay_in_range(key: str, low: int, span: int) -> None:
    d = Draws(key)
    assert all(low <= d.integer(low, low + span) <= low + span for _ in range(20))
    assert sorted(d.shuffled(range(span))) == list(range(span))


@settings(max_examples=60, deadline=None)
@given(keys)
def test_every_formula_draws(key: str) -> None:
    d = Draws(key)
    found = formula(d, depth=2)
    picture = draw_formula(d, found.drawn)
    assert found.latex.count("{") == found.latex.count("}")
    assert picture.mode == "RGB" and picture.width < 2000 and picture.height < 600
    assert len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)) > 1


def test_formulas_have_every_construction() -> None:
    text = " ".join(formula(Draws(str(k)), depth=2).latex for k in range(400))
    for word in ("frac", "sqrt", "sum", "int", "prod", "lim", "bmatrix", "binom", "partial", "alpha", "vec"):
        assert f"\\{word}" in text or f"{{{word}}}" in text, word
    assert not re.search(r"\\partial (\w)\}\{\\partial \1\}", text)


@settings(max_examples=40, deadline=None)
@given(keys)
def test_boxes_are_where_the_colour_is(key: str) -> None:
    """Oracle: the pixels that differ from the ground, inside and outside of the boxes."""
    view = scene(Draws(key))
    pixels = np.asarray(draw_scene(view)).astype(int)
    inked = (pixels != np.array(view.ground)).any(axis=2)
    for shape in view.shapes:
        left, top, right, bottom = shape.box
        rows, columns = np.nonzero(inked[top:bottom, left:right])
        assert (int(columns.min()), int(rows.min())) == (0, 0)
        assert (int(columns.max()), int(rows.max())) == (right - left - 1, bottom - top - 1)
        colours = pixels[top:bottom, left:right][inked[top:bottom, left:right]]
        assert (colours == COLOURS[shape.colour]).all()
        inked[top:bottom, left:right] = False
    assert not inked.any()


@settings(max_examples=40, deadline=None)
@given(keys)
def test_boxes_are_integers_below_1000(key: str) -> None:
    view = scene(Draws(key))
    for found, shape in zip(json.loads(boxes_json(view, view.shapes)), view.shapes, strict=True):
        assert found["label"] == shape.name
        assert all(isinstance(edge, int) and 0 <= edge <= 999 for edge in found["bbox_2d"])
        scale = (view.width, view.height, view.width, view.height)
        for edge, size, pixel in zip(found["bbox_2d"], scale, shape.box, strict=True):
            assert edge * size / 999 == pytest.approx(pixel, abs=size / 999)


@given(keys)
def test_sums_in_worked_answers_are_right(key: str) -> None:
    question, worked = problem(Draws(key))
    chains = [chain.strip(" .,").split("=") for chain in re.findall(r"[\d ()+*/=-]+=[\d ()+*/=-]+", worked)]
    assert question.endswith(("?", ".")) and worked.rsplit("\n", 1)[1].startswith("Answer: ")
    assert chains
    for chain in chains:  # digits and signs only, by the pattern above
        assert len({eval(side) for side in chain if side.strip()}) == 1, worked


def test_counts_in_chats_are_right() -> None:
    for k in range(40):
        talk = compare_talk(Draws(str(k)))
        text = talk.turns[-1].text
        assert len(talk.pictures) == len(re.findall(r"Picture \d shows", text)) >= 2
        chat = scene_chat(Draws(str(k)))
        said = [turn.text for turn in chat.turns if turn.role == "assistant"]
        assert len(said) in (3, 4) and said[0].startswith("There are ")


@pytest.mark.parametrize("variant", sorted(set(SCHEDULE)))
@pytest.mark.parametrize("sample", range(7))
def test_a_reader_sees_the_picture_that_was_drawn(variant: str, sample: int) -> None:
    picture = draw_scene(Scene(96, 60, (250, 250, 250), scene(Draws("x")).shapes[:1]))
    suffix, data = encode_picture(picture, variant, sample)
    with Image.open(io.BytesIO(data)) as stored:
        read = ImageOps.exif_transpose(stored)
        assert (stored.format == "JPEG") == variant.startswith("jpeg")
    assert read.size == picture.size
    wanted = picture.convert("L") if variant == "grey" else picture
    off = np.abs(np.asarray(read.convert("RGB"), int) - np.asarray(wanted.convert("RGB"), int)).mean()
    assert off < (3 if variant.startswith("jpeg") else 0.01)
    mislabelled = {"png_named_jpg": ".jpg", "jpeg_named_png": ".png"}
    assert suffix == mislabelled.get(variant, suffix)


def test_colours_that_matter_are_kept() -> None:
    assert "grey" in {variant_of(i, 0, False) for i in range(16)}
    assert "grey" not in {variant_of(i, k, True) for i in range(64) for k in range(4)}


def test_one_talk_in_every_shape() -> None:
    talk = Talk("scene")
    talk.ask("Look: ", Image.new("RGB", (9, 9)), " What is it?")
    talk.answer("Black.")
    path = ["images/a.png"]
    marked = "Look: <image> What is it?"
    assert record_of(talk, "messages", path) == {
        "messages": [{"role": "user", "content": marked}, {"role": "assistant", "content": "Black."}],
        "images": path,
    }
    assert record_of(talk, "sharegpt", path)["conversations"][0] == {"from": "human", "value": marked}
    assert record_of(talk, "parts", path)["messages"][0]["content"][1] == {"type": "image", "image": path[0]}
    openai = record_of(talk, "openai", path)["messages"]
    assert openai[0]["content"][1] == {"type": "image_url", "image_url": {"url": path[0]}}
    assert openai[1]["content"] == "Black."
    text = problem_talk(Draws("2"))
    text.turns = text.turns[:2]
    assert record_of(text, "alpaca", []).keys() == {"instruction", "input", "output"}
    assert set(SHAPES) == {"messages", "parts", "sharegpt", "openai", "alpaca"}


def test_talks_join_with_their_pictures() -> None:
    first, second = formula_talk(Draws("1")), formula_chat(Draws("2"))
    count = len(first.pictures) + len(second.pictures)
    first.extend(second)
    places = [part.picture for turn in first.turns for part in turn.parts if not isinstance(part, str)]
    assert places == list(range(count))


def test_schedule_has_faults_and_a_tail_at_any_size() -> None:
    for samples in (60, 61, 320, 1000):
        jobs = schedule("s", samples)
        assert len(jobs) == samples
        assert sum(bool(job.reason) for job in jobs) == 15
        tail = [job.tokens for job in jobs if job.kind == "lesson" and not job.reason]
        assert len(tail) >= 4 and PACK_LENGTH * 0.9 < max(tail) < PACK_LENGTH


@settings(max_examples=10, deadline=None)
@given(keys, st.integers(300, 2000))
def test_lessons_stay_below_or_pass_their_length(key: str, tokens: int) -> None:
    def count(text: str) -> int:
        return len(text.split())

    assert tokens_of(lesson(Draws(key), tokens, count), count, most=True) <= tokens
    assert tokens_of(lesson(Draws(key), tokens, count, over=True), count, most=False) > tokens
