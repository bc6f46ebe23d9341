"""Hints are numbers that may be used in place of a header, and are compared with it first."""

from __future__ import annotations

import io

import numpy as np
import pytest
from made_images import MADE, encoded, picture

from packtrain.errors import SampleError
from packtrain.media import hints
from packtrain.media.image import read_header

sf = pytest.importorskip("soundfile")


def sound(frames: int = 16001, rate: int = 16000) -> bytes:
    out = io.BytesIO()
    sf.write(out, np.zeros(frames, np.float32), rate, format="WAV")
    return out.getvalue()


def test_images() -> None:
    part = {"type": "image", "image": MADE["jpeg-exif6"](), "width": 40, "height": 61}
    assert hints.differences(part) == []
    assert hints.header_of(part) == read_header(part["image"])
    assert hints.header_of(part, trust=True)[:2] == (40, 61)
    stored = {**part, "width": 61, "height": 40}  # as stored, before rotation
    assert hints.differences(stored) == [
        "width is 61 in the data and 40 in the medium",
        "height is 40 in the data and 61 in the medium",
    ]
    assert hints.header_of({**part, "width": None}, trust=True) == read_header(part["image"])
    assert hints.header_of({"type": "image", "image": "/none.jpg", "width": 5, "height": 6}, trust=True)[
        :2
    ] == (5, 6)


def test_sounds() -> None:
    part = {"type": "audio", "audio": sound(), "frames": 16001, "sample_rate": 16000}
    assert hints.differences(part) == [] and hints.hinted(part)[:3] == (16001, 16000, 1)
    seconds = {"type": "audio", "audio": sound(), "duration": 1.00006, "sample_rate": 16000}
    assert hints.differences(seconds) == [] and hints.hinted(seconds).frames == 16001
    assert hints.hinted({"type": "audio", "audio": b"", "frames": 16000, "duration": 2.0}).sample_rate == 8000
    assert hints.hinted({"type": "audio", "audio": b"", "duration": 2.0}) is None
    assert len(hints.differences({**part, "frames": 16000, "duration": 1.1})) == 2


def test_videos() -> None:
    given = {"type": "video", "video": b"", "width": 64, "height": 48, "duration": 3.0}
    assert hints.hinted(given) is None
    assert hints.hinted({**given, "fps": 10.0})[:5] == (30, 10.0, 64, 48, 3.0)
    assert hints.hinted({**given, "frames": 30}).fps == 10.0
    frames = [encoded(picture(8, 6), "PNG")] * 4
    listed = {"type": "video", "video": frames, "frames": 4, "fps": 2.0, "width": 8, "height": 6}
    assert hints.differences(listed) == [] and hints.header_of(listed).frames == 4
    assert hints.differences({**listed, "frames": 5}) == ["frames is 5 in the data and 4 in the medium"]


def test_numbers() -> None:
    assert hints.checked("width", 640.0) == 640 and isinstance(hints.checked("width", 640.0), int)
    assert hints.checked("duration", 2) == 2.0
    for name, value in [
        ("width", 0),
        ("width", -1),
        ("width", 1.5),
        ("width", "640"),
        ("width", True),
        ("fps", float("nan")),
        ("duration", float("inf")),
        ("frames", None),
    ]:
        with pytest.raises(SampleError) as error:
            hints.checked(name, value)
        assert error.value.reason == "malformed_record"
