"""Readers of foreign bytes end: a medium beyond its budget of steps and bytes is refused by name."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from packtrain.errors import SampleError
from packtrain.media import audio, location
from packtrain.media._sound_headers import _crc8, _crc16
from packtrain.media.audio import read_header as read_audio
from packtrain.media.image import open_image
from packtrain.media.image import read_header as read_image

MP3_A = b"\xff\xfb\x90\x44" + bytes(413)  # MPEG 1, layer 3, 44.1 kHz: 417 bytes
MP3_B = b"\xff\xf3\x40\x44" + bytes(100)  # MPEG 2, layer 3, 22.05 kHz: 104 bytes


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "STEPS", 4096)


def refused(data: bytes, reader: object = read_audio) -> SampleError:
    with pytest.raises(SampleError) as told:
        reader(data)  # type: ignore[operator]
    assert "\n" not in str(told.value)
    return told.value


def test_an_mp3_that_changes_its_format_is_refused() -> None:
    error = refused(MP3_A * 2 + MP3_B * 2)
    assert error.reason == "unsupported_media" and "byte 834" in str(error)
    assert read_audio(MP3_A * 3).frames == 3 * 1152


def test_a_lone_frame_of_another_kind_at_the_end_ends_the_walk() -> None:
    assert read_audio(MP3_A * 3 + MP3_B).frames == 3 * 1152


def test_mp3_junk_between_frames_is_passed_over_within_the_budget() -> None:
    assert read_audio(MP3_A * 2 + b"junk" + MP3_A * 2).frames == 4 * 1152
    error = refused((MP3_A * 2 + b"\0" * 4) * 6000)
    assert error.reason == "unreadable_media"


def test_an_ogg_of_pages_in_pages_is_no_work_for_a_decoder() -> None:
    """It sums up a page wherever `OggS` stands: 20 MB of that took 21 seconds."""
    soundfile = pytest.importorskip("soundfile")
    made = io.BytesIO()
    soundfile.write(made, np.zeros(8000, dtype=np.float32), 8000, format="OGG", subtype="VORBIS")
    sound = made.getvalue()
    for middle in (b"OggS" * 1_000_000, (b"OggS" + b"\xff" * 28) * 10_000):
        for data in (sound + middle, sound[:300] + middle + sound):
            with pytest.raises(SampleError, match=r"times over|parts") as told:
                audio.open_audio(data)
            assert told.value.reason == "unreadable_media"
    assert len(audio.open_audio(sound)[0]) == 8000
    assert len(audio.open_audio(sound + sound)[0]) == read_audio(sound + sound).frames


def flac(body: bytes, total: int, largest: int) -> bytes:
    packed = 16000 << 44 | 0 << 41 | 15 << 36 | total
    info = struct.pack(">HH", 4096, 4096) + bytes(3) + largest.to_bytes(3, "big") + packed.to_bytes(8, "big")
    return b"fLaC\x80\0\0\x22" + info + bytes(16) + body


def frame_header(number: int) -> bytes:
    head = bytes((0xFF, 0xF8, 0xC9, 0x08, number))
    return head + bytes((_crc8(head),))


def test_flac_frame_headers_without_end_are_refused() -> None:
    many = flac(frame_header(0) * 3000, 4096, (1 << 24) - 1)
    assert "full of frame headers" in str(refused(many))
    others = flac(frame_header(1) * 9000, 4096, (1 << 24) - 1)
    assert "parts" in str(refused(others))


TAGS = {
    "ID3v1": b"TAG" + bytes(125),
    "APE": b"APETAGEX" + struct.pack("<LLLL", 2000, 40, 0, 1 << 31) + bytes(8 + 8),
    "ID3v2": b"ID3\4\0\x10\0\0\1\0" + bytes(128) + b"3DI\4\0\x10\0\0\1\0",
    "Lyrics3": b"LYRICSBEGIN" + b"x" * 20 + b"000031LYRICS200",
}
TAGS["APE"] = (
    b"APETAGEX"
    + struct.pack("<LLLL", 2000, 72, 0, 1 << 31 | 1 << 29)
    + bytes(8)
    + bytes(40)
    + (b"APETAGEX" + struct.pack("<LLLL", 2000, 72, 0, 1 << 31) + bytes(8))
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(TAGS)), max_size=3))
@example(["APE", "ID3v1"])
def test_a_flac_with_tags_behind_it_is_whole(order: list[str]) -> None:
    soundfile = pytest.importorskip("soundfile")
    made = io.BytesIO()
    soundfile.write(made, np.sin(np.arange(9000) / 20), 16000, format="FLAC")
    tags = b"".join(TAGS[name] for name in order)
    assert read_audio(made.getvalue() + tags).frames == 9000
    assert refused(made.getvalue()[:-7] + tags).reason == "truncated_media"


def test_crc16_of_a_frame_is_zero() -> None:
    body = b"some bytes of a frame"
    crc = 0
    for byte in body:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x8005) & 0xFFFF if crc & 0x8000 else crc << 1
    assert _crc16(body + crc.to_bytes(2, "big")) == 0


def test_empty_gif_extensions_and_stray_bytes_are_refused() -> None:
    made = io.BytesIO()
    Image.new("P", (20, 10)).save(made, "GIF")
    start, rest = made.getvalue()[:6] + made.getvalue()[6:13], made.getvalue()[13:]
    palette = 3 << ((start[10] & 7) + 1) if start[10] & 0x80 else 0
    start, rest = start + rest[:palette], rest[palette:]
    for filler in (b"!\xfe\0", b"\0"):
        few = read_image(start + filler * 50 + rest)
        assert (few.width, few.height) == (20, 10)
        assert "parts" in str(refused(start + filler * 9000 + rest, read_image))


def test_what_stands_before_the_pixels_of_a_ppm_is_bounded() -> None:
    for filler in (b" ", b"#\n"):
        few = read_image(b"P6\n" + filler * 50 + b"2 1 255\n" + bytes(6))
        assert (few.width, few.height) == (2, 1)
        assert "parts" in str(refused(b"P6\n" + filler * 300_000 + b"2 1 255\n" + bytes(6), read_image))
    for kind in (b"P1", b"P2", b"P3"):
        digits = b"#\n" * 50 + b"1 " * 12
        assert read_image(kind + b"\n2 2" + b" 1" * (kind != b"P1") + b"\n" + digits).width == 2
        many = kind + b"\n2 2" + b" 1" * (kind != b"P1") + b"\n" + b"#\n" * 5000 + digits
        assert "parts" in str(refused(many, read_image))


def jpeg() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (20, 10)).save(made, "JPEG")
    return made.getvalue()


def test_jpeg_segments_and_fill_bytes_are_bounded() -> None:
    data = jpeg()
    block = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0"
    exif = b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block
    more = b"\xff\xe1" + (6 + 60000 + 2).to_bytes(2, "big") + b"Exif\0\0" + bytes(60000)
    turned = read_image(data[:2] + exif + more * 3 + data[2:])
    assert (turned.width, turned.height) in ((10, 20), (20, 10))
    for filler in (b"\xff\xe1\0\2", b"\xff\xd0", b"\xff"):
        assert "parts" in str(refused(data[:2] + filler * 9000 + data[2:], read_image))
    assert "parts" in str(refused(data[:-2] + b"\xff\x01" * 9000, read_image))


def test_a_parser_may_not_read_a_medium_over_and_over() -> None:
    with location.Head(bytes(100), 100, "made.bin") as head:
        head._room = 250
        head.at(0, 100), head.at(0, 100)
        with pytest.raises(SampleError, match=r"made\.bin is read more than"):
            head.at(0, 100)
        assert head.read(0, 100) == bytes(100)  # for decoders


def test_a_sound_of_a_size_that_nobody_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    monkeypatch.setattr(audio, "MOST_VALUES", 8000)
    for kind in ("WAV", "FLAC", "OGG", "AIFF"):
        made = io.BytesIO()
        soundfile.write(made, np.sin(np.arange(9000) / 20), 16000, format=kind)
        assert "a sound has at most 8,000 values" in str(refused(made.getvalue()))


def test_what_is_decoded_over_and_over_is_bounded() -> None:
    """A scan of 14 bytes passes over every pixel of a JPEG, a strip of 8 is decoded on its own."""
    held = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(held, "JPEG", progressive=True)
    data = held.getvalue()
    last = data.rindex(b"\xff\xda")
    few, many = (data[:-2] + data[last : last + 14] * scans + b"\xff\xd9" for scans in (90, 20_000))
    assert open_image(few).size == (2000, 2000)
    assert (
        "has 20,0" in str(refused(many, open_image))
        and refused(many, open_image).reason == "unreadable_media"
    )
    rows = 300_000
    fields = {256: 8, 257: rows, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 8}
    body = 8 + 2 + 12 * len(fields) + 4
    places = {273: (rows, body), 279: (rows, body + 4 * rows)}
    entries = [struct.pack("<HHII", tag, 4, *places.get(tag, (1, value))) for tag, value in fields.items()]
    table = b"II*\0" + struct.pack("<IH", 8, len(fields)) + b"".join(entries) + bytes(4)
    error = refused(table + struct.pack("<I", 8) * 2 * rows, open_image)
    assert "has 300,000 strips, more than 262,144" in str(error)
