"""Knobs of a medium change the length, and `measure` and `encode` agree on how."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import SampleError
from packtrain.media.knobs import STARTS, chosen_frames, knobs_of, sized, stretch
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate

BOT = {"role": "assistant", "content": "yes"}


def sample(part: dict[str, Any], **options: Any) -> dict[str, Any]:
    content = [part, {"type": "text", "text": "so?"}]
    return ChatSource([{"messages": [{"role": "user", "content": content}, BOT]}], **options)[0]


def length(template: HFTemplate, part: dict[str, Any]) -> int:
    """Tokens by measuring and by encoding; the real processor's own ids are compared on the way."""
    made = sample(part)
    measured = int(template.measure(made))
    assert measured == len(template.encode(made)["input_ids"])
    return measured


def picture(width: int, height: int, shade: int = 0) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 9, 9)).save(buffer, "PNG")
    return buffer.getvalue()


def sound(seconds: float, rate: int = 16_000) -> dict[str, Any]:
    return {"array": np.zeros(round(seconds * rate), np.float32), "sampling_rate": rate}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_size_of_a_picture(name: str, template: Callable[[str], HFTemplate]) -> None:
    made, data = template(name), picture(640, 480)
    plain = length(made, {"type": "image", "image": data})
    small = length(made, {"type": "image", "image": data, "max_pixels": 128 * 128})
    large = length(made, {"type": "image", "image": data, "min_pixels": 1024 * 1024})
    given = length(made, {"type": "image", "image": data, "resized_height": 224, "resized_width": 448})
    assert small < given < plain < large
    side = made.media.image.factor  # type: ignore[union-attr]
    tokens = round(224 / side) * round(448 / side)
    assert given - int(made.measure(sample({"type": "text", "text": ""}))) - tokens in (2, 1)


def test_a_stretch_of_sound(template: Callable[[str], HFTemplate]) -> None:
    made = template("qwen2_audio")
    whole = {"type": "audio", "audio": sound(5)}
    second = length(made, {"type": "audio", "audio": sound(1)})
    for knobs in (
        {"offset": 2, "duration": 1},
        {"start": 2.0, "end": 3.0},
        {"begin_time": 2, "end_time": 3},
        {"offset": 4},
    ):
        assert length(made, {**whole, **knobs}) == second
    assert length(made, whole) > second
    assert length(made, {**whole, "duration": 5.0}) == length(made, whole)  # a description, not a knob
    with pytest.raises(SampleError, match="none of it lies"):
        made.measure(sample({**whole, "offset": 9, "duration": 1}))
    with pytest.raises(SampleError, match="ends at"):
        sample({**whole, "start": 3, "end": 2})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_of_a_list_need_their_rate(name: str, template: Callable[[str], HFTemplate]) -> None:
    made = template(name)
    frames = [picture(448, 448, shade) for shade in range(8)]
    part = {"type": "video", "video": frames}
    with pytest.raises(SampleError, match="no rate"):
        made.measure(sample(part))
    whole = length(made, {**part, "sample_fps": 2})
    assert whole == length(made, {**part, "fps": 2})
    assert made.measure(sample(part, frame_rate=2)) == whole
    if name == "qwen3_vl":
        text = made.spliced(
            made.rendered(sample({**part, "sample_fps": 2})),
            made.expansions({0: made.rendered(sample({**part, "sample_fps": 2})).media})[0],
        ).text
        assert [f"<{second:.1f} seconds>" in text for second in (0.25, 1.25, 2.25, 3.25)] == [True] * 4
    assert length(made, {**part, "sample_fps": 2, "start": 1.0, "end": 3.0}) < whole
    assert length(made, {**part, "sample_fps": 2, "nframes": 4}) < whole
    assert length(made, {**part, "sample_fps": 2, "max_frames": 4, "min_frames": 2}) < whole
    assert length(made, {**part, "sample_fps": 2, "max_pixels": 224 * 224}) < whole
    assert length(made, {**part, "sample_fps": 2, "total_pixels": 8 * 224 * 224}) < whole
    assert length(made, {"type": "video", "video": frames[:1], "fps": 2}) < whole  # one frame


def test_rules_of_frames_stretches_and_sizes() -> None:
    part = {"nframes": 4}
    assert chosen_frames(part, 0, 100, 25.0, 2).tolist() == [0, 33, 66, 99]  # type: ignore[union-attr]
    assert chosen_frames({}, 0, 100, 25.0, 2) is None
    assert len(chosen_frames({"sample_fps": 2.0}, 0, 250, 25.0, 2)) == 20  # type: ignore[arg-type]
    assert len(chosen_frames({"sample_fps": 2.0, "max_frames": 8}, 0, 250, 25.0, 2)) == 8  # type: ignore[arg-type]
    assert stretch({"start": 1.0, "end": 2.0}, 100, 25.0) == (25, 50)
    assert stretch({}, 7, None) == (0, 7)
    for bad in ({"start": 5.0}, {"start": 1.0, "end": 1.0}):
        with pytest.raises(SampleError):
            stretch(bad, 100, 25.0)
    assert sized({}, 33, 77, 28) == (33, 77)
    high, wide = sized({"max_pixels": 10_000}, 480, 640, 28)
    assert high * wide <= 10_000 and high % 28 == wide % 28 == 0
    assert knobs_of("video", {"fps": 2}) == ({"sample_fps": 2.0}, {"fps"})
    assert knobs_of("video", {"fps": 25, "frames": 100}) == ({}, set())
    assert knobs_of("video", {"video_start": 1, "video_end": "2"}) == (
        {"start": 1.0, "end": 2.0},
        {"video_start", "video_end"},
    )
    for kind, bad in (("image", {"detail": "blurred"}), ("video", {"nframes": 4, "sample_fps": 1})):
        with pytest.raises(SampleError):
            knobs_of(kind, bad)


def test_detail_of_an_image() -> None:
    for detail, knobs in (("auto", {}), ("high", {}), ("low", {"max_pixels": 512 * 512})):
        assert knobs_of("image", {"detail": detail}) == (knobs, {"detail"})
    assert knobs_of("image", {"detail": "low", "max_pixels": 99})[0] == {"max_pixels": 99}


@pytest.mark.parametrize("kind", ["audio", "video"])
@pytest.mark.parametrize("start", STARTS)
def test_a_start_with_a_duration_is_a_stretch(kind: str, start: str) -> None:
    """Also where the duration is that of the whole clip: a stretch ends with its clip."""
    for seconds in (1, 3, 99):
        found, taken = knobs_of(kind, {start: 2, "duration": seconds})
        assert found == {"start": 2.0, "end": 2.0 + seconds} and taken == {start, "duration"}
        assert stretch(found, 50, 10.0) == (20, min(50, 20 + 10 * seconds))


def test_a_video_file(template: Callable[[str], HFTemplate], data: Path) -> None:
    clip = next(iter(sorted((data / "mllm_demo").rglob("*.mp4"))), None)
    if clip is None:
        pytest.skip("no video")
    made = template("qwen2_5_vl")
    part = {"type": "video", "video": str(clip), "max_pixels": 56 * 56}
    lengths = [length(made, {**part, **knobs}) for knobs in ({"nframes": 2}, {"nframes": 4}, {"fps": 1.0})]
    assert lengths[0] < lengths[1]
    assert length(made, {**part, "video_start": 0, "video_end": 0.5, "nframes": 2}) == lengths[0]


@pytest.mark.spec(
    "003",
    "frames of videos",
    key="`template.fps`, `template.max_frames`",
    api="`HFTemplate(fps=, max_frames=)`",
)
def test_sampling_of_the_template(data: Path, processor: Callable[[str], Any]) -> None:
    """`fps` and `max_frames` of the template hold for videos that do not say their own."""
    clip = {"type": "video", "video": str(data / "mllm_demo" / "mllm_demo_data" / "4.mp4")}
    plain = HFTemplate(processor("qwen2_5_vl"))
    few = HFTemplate(processor("qwen2_5_vl"), fps=1.0, max_frames=4)
    assert few.measure(sample(clip)).costs["video_frames"] == 4
    assert length(few, clip) < length(plain, clip)
    assert length(few, {**clip, "nframes": 6}) == length(plain, {**clip, "nframes": 6})
    assert few.config() == {**plain.config(), "sampling": {"fps": 1.0, "max_frames": 4}}


@pytest.mark.spec(
    "003", "`max_aspect_ratio`", key="`template.max_aspect_ratio`", api="`HFTemplate(max_aspect_ratio=)`"
)
def test_the_aspect_ratio_of_the_template(processor: Callable[[str], Any]) -> None:
    """A picture or video beyond it cannot be used, measured or encoded; part of the identity."""
    narrow = HFTemplate(processor("qwen2_5_vl"), max_aspect_ratio=3)
    plain = HFTemplate(processor("qwen2_5_vl"))
    fits, long = ({"type": "image", "image": picture(w, 50)} for w in (150, 151))
    assert length(narrow, fits) == length(plain, fits)
    assert length(plain, long) > 0
    for act in (narrow.measure, narrow.encode):
        with pytest.raises(
            SampleError, match="151x50 pixels has an aspect ratio above max_aspect_ratio 3"
        ) as told:
            act(sample(long))
        assert told.value.reason == "unsupported_media"
    assert narrow.config() == {**plain.config(), "max_aspect_ratio": 3.0}
    frames = {"type": "video", "video": [picture(200, 50, shade) for shade in range(4)], "fps": 2}
    with pytest.raises(SampleError, match="200x50 pixels has an aspect ratio above"):
        narrow.measure(sample(frames))
    assert pickle.loads(pickle.dumps(narrow)).config() == narrow.config()
