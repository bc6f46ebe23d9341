"""Every kind of bad input ends as a reason for one sample or as one clear error, never as another one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtrain.errors import InputError, SampleError
from packtrain.media import hints
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

sf = pytest.importorskip("soundfile")
av = pytest.importorskip("av")

Write = Callable[..., Path]


def picture(width: int, height: int, format: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, format)
    return out.getvalue()


def sound() -> bytes:
    out = io.BytesIO()
    sf.write(out, np.zeros(4000, np.float32), 8000, format="FLAC")
    return out.getvalue()


def still() -> bytes:
    """A video file that has a stream and no frames."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        file.start_encoding()
    return out.getvalue()


def asked(kind: str, name: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": [{"type": kind, kind: name}]},
            {"role": "assistant", "content": "b"},
        ]
    }


MEDIA: list[tuple[str, str, bytes | None, str]] = [
    ("image", "cut.png", picture(80, 60)[:-40], "truncated_media"),
    ("image", "cut.jpg", picture(80, 60, "JPEG")[:300], "truncated_media"),
    ("image", "zero.jpg", b"", "unreadable_media"),
    (
        "image",
        "zero.bmp",
        b"BM" + picture(4, 4, "BMP")[2:18] + bytes(8) + picture(4, 4, "BMP")[26:],
        "unreadable_media",
    ),
    ("image", "none.jpg", None, "missing_media"),
    ("image", "words.jpg", b"not a picture at all", "unsupported_media"),
    ("audio", "zero.wav", b"", "unreadable_media"),
    (
        "audio",
        "corrupt.wav",
        b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0" + bytes(16) + b"data\0\0\0\0",
        "unreadable_media",
    ),
    ("audio", "cut.flac", sound()[:-30], "truncated_media"),
    ("audio", "none.wav", None, "missing_media"),
    ("video", "still.mkv", still(), "unreadable_media"),
    ("video", "zero.mp4", b"", "unreadable_media"),
    ("video", "words.mp4", b"not a video at all", "unsupported_media"),
]


@pytest.mark.parametrize(("kind", "name", "content", "expected"), MEDIA, ids=[row[1] for row in MEDIA])
def test_media(write: Write, kind: str, name: str, content: bytes | None, expected: str) -> None:
    if content is not None:
        write(name, content)
    chat = ChatSource(open_source(write("a.jsonl", [asked(kind, name)])))
    (part,) = chat[0]["messages"][0]["content"]
    with pytest.raises(SampleError) as error:
        hints.header_of(part)
    assert error.value.reason == expected and name in str(error.value)


def test_a_picture_of_one_pixel_by_many(write: Write) -> None:
    write("thin.png", picture(1, 30_000))
    chat = ChatSource(open_source(write("a.jsonl", [asked("image", "thin.png")])))
    assert hints.header_of(chat[0]["messages"][0]["content"][0])[:2] == (1, 30_000)


def test_records(write: Write) -> None:
    """One bad record each; the good one after it is read."""
    good = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}

    def turn(role: str, content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "a?"}, {"role": role, "content": content}]}

    lines: list[tuple[bytes, str | None]] = [
        (json.dumps(turn("assistant", None)).encode(), "malformed_record"),
        (json.dumps(turn("wizard", "b")).encode(), "malformed_record"),
        (b'{"messages": "caf\xe9"}', "malformed_record"),
        (json.dumps(turn("assistant", "\ud800")).encode(), "malformed_record"),
        (b'{"messages": [', "malformed_record"),
        (b"[" * 100_000, "malformed_record"),
        (b"null", "malformed_record"),
        (json.dumps(asked("image", "../../up.jpg")).encode(), "outside_media_root"),
        (json.dumps(turn("assistant", "é" * 5_000_000), ensure_ascii=False).encode(), None),
        (json.dumps(good).encode(), None),
    ]
    chat = ChatSource(open_source(write("a.jsonl", b"\n".join(line for line, _ in lines))))
    assert len(chat) == len(lines)
    for index, (_, expected) in enumerate(lines):
        if expected is None:
            assert chat[index]["messages"][1]["content"][0]["text"]
            continue
        with pytest.raises(SampleError) as error:
            chat[index]
        assert error.value.reason == expected and f"a.jsonl:{index + 1}" in str(error.value)
    assert len(chat[8]["messages"][1]["content"][0]["text"]) == 5_000_000


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "missing.parquet", "missing.tar", "missing.yaml", "missing/", "no*.jsonl"]
)
def test_sources_that_are_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as error:
        open_source(str(tmp_path / name))
    assert error.value.exit_code == 2 and "\n" not in error.value.message


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", ".parquet", ".arrow", ".tar", ".yaml", ".jsonl.gz", ".jsonl.zst"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 2000, b"\xff\xfe\x00words", b"{}", b"[]"],
    ids=["empty", "zeros", "utf16", "object", "array"],
)
def test_files_that_are_not_what_they_say(write: Write, suffix: str, content: bytes) -> None:
    """An error of the input, or a source whose records have reasons."""
    try:
        source = open_source(write(f"a{suffix}", content))
    except InputError as error:
        assert error.exit_code == 2 and "\n" not in error.message
        return
    for index in range(len(source)):
        with pytest.raises(SampleError):
            ChatSource(source)[index]
