"""Header reader and decoder agree with Pillow, on real files and on made ones."""

from __future__ import annotations

import io
import struct
import types
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from made_images import encoded, exif_block, picture, pillow_size, png_chunk, with_png_chunk
from PIL import Image, ImageFile, ImageOps

from packtrain.errors import SampleError
from packtrain.media.image import ImageHeader, open_image, read_header


def reason(data: bytes | str) -> str:
    """The one reason both functions give."""
    with pytest.raises(SampleError) as header:
        read_header(data)
    with pytest.raises(SampleError) as opened:
        open_image(data)
    assert header.value.reason == opened.value.reason
    return header.value.reason


def real_images(data: Path) -> list[Path]:
    folders = [data / name for name in ("images_real", "mllm_demo", "detection")]
    found = [p for f in folders for p in sorted(f.rglob("*")) if p.suffix in (".jpg", ".jpeg", ".png")]
    assert len(found) >= 130
    return found


def test_real_files_have_the_size_of_pillow(data: Path) -> None:
    for path in real_images(data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                size, name = image.size, image.format
                turn = image.getexif().get(274, 1) if image.format == "JPEG" else 1
        header = read_header(str(path))
        assert (header.width, header.height) == (size[::-1] if turn >= 5 else size), path
        assert header.format == name.replace("MPO", "JPEG")
        assert read_header(path, check_end=False).complete


def test_cut_real_files_are_found(data: Path) -> None:
    small = [p for p in real_images(data) if p.stat().st_size < 150_000][:25]
    for path in small:
        content = path.read_bytes()
        for cut in (len(content) // 2, len(content) - len(content) // 10):
            assert pillow_size(content[:cut]) is None
            assert reason(content[:cut]) == "truncated_media", (path, cut)
        assert not read_header(content[: len(content) // 2], check_end=False).complete


def test_made_files(made: bytes) -> None:
    header = read_header(made)
    assert (header.width, header.height) == pillow_size(made)
    assert header.complete
    assert open_image(made).size == (header.width, header.height)


def test_cuts_agree_with_pillow_at_every_byte(made: bytes) -> None:
    """Never refused where Pillow decodes; where Pillow fails on a cut, the header reader says so."""
    for cut in range(0, len(made), max(1, len(made) // 60)):
        size = pillow_size(made[:cut])
        if size is None:
            assert reason(made[:cut]) in ("truncated_media", "unreadable_media")
        else:
            header = read_header(made[:cut])
            assert (header.width, header.height) == size
    for cut in (3, 9):
        assert reason(made[:cut]) in ("truncated_media", "unsupported_media")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_every_orientation(orientation: int, format: str) -> None:
    source = picture(30, 17)
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(source, format, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image)
    header = read_header(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == expected.size
    assert expected.size == ((17, 30) if orientation >= 5 else (30, 17))
    opened = open_image(data)
    assert np.array_equal(np.asarray(opened), np.asarray(expected))
    assert ImageOps.exif_transpose(opened).size == expected.size  # turned once, not twice


@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("value", [0, 1, 6, 9])
def test_exif_blocks(endian: str, kind: int, value: int) -> None:
    block = b"Exif\0\0" + exif_block(value, endian, kind)
    for data in (
        encoded(picture(20, 10), "JPEG", exif=block),
        encoded(picture(20, 10), "WEBP", exif=block),
        with_png_chunk(encoded(picture(20, 10), "PNG"), b"eXIf", block[6:], after_pixels=False),
        with_png_chunk(encoded(picture(20, 10), "PNG"), b"eXIf", block[6:], after_pixels=True),
    ):
        header = read_header(data)
        assert (header.width, header.height) == pillow_size(data)
        assert (header.width == 10) is (value == 6 and kind != 1)


def test_broken_exif_counts_as_upright() -> None:
    for block in (b"Exif\0\0garbage!!", b"Exif\0\0II*\0", b"Exif\0\0II*\0\xff\xff\0\0", b"Exif\0\0"):
        data = encoded(picture(20, 10), "JPEG", exif=block)
        assert read_header(data)[:3] == (20, 10, 1)
        assert ImageOps.exif_transpose(open_image(data)).size == (20, 10)


def test_xmp_orientation_where_exif_has_none() -> None:
    packet = b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>'
    jpeg = encoded(picture(20, 10), "JPEG")
    segment = b"http://ns.adobe.com/xap/1.0/\0" + packet
    jpeg = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]
    png = encoded(picture(20, 10), "PNG")
    body = b"XML:com.adobe.xmp\0\0\0\0\0" + packet
    packed = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(packet)
    for data in (
        jpeg,
        encoded(picture(20, 10), "WEBP", xmp=packet),
        with_png_chunk(png, b"iTXt", body, after_pixels=False),
        with_png_chunk(png, b"iTXt", packed, after_pixels=True),
    ):
        assert pillow_size(data) == (10, 20)
        assert read_header(data)[:3] == (10, 20, 6)


def test_raw_exif_profile_of_a_png() -> None:
    block = b"Exif\0\0" + exif_block(6)
    profile = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    png = encoded(picture(20, 10), "PNG")
    body = b"Raw profile type exif\0\0" + zlib.compress(profile)
    data = with_png_chunk(png, b"zTXt", body, after_pixels=False)
    assert pillow_size(data) == (10, 20)
    assert read_header(data)[:2] == (10, 20)


def test_png_with_many_small_chunks_and_exif_behind_them() -> None:
    """The last IDAT is found from the end; metadata behind the pixels are still seen."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (300, 500, 3), dtype=np.uint8))
    whole = encoded(noise, "PNG")
    start = whole.index(b"IDAT") - 4
    stream = b"".join(
        whole[at + 8 : at + 8 + length] for at, kind, length in _chunks(whole) if kind == b"IDAT"
    )
    pieces = b"".join(png_chunk(b"IDAT", stream[i : i + 8192]) for i in range(0, len(stream), 8192))
    plain = whole[:start] + pieces + png_chunk(b"IEND", b"")
    turned = whole[:start] + pieces + png_chunk(b"eXIf", exif_block(6)) + png_chunk(b"IEND", b"")
    assert read_header(plain)[:2] == (500, 300) == pillow_size(plain)
    assert read_header(turned)[:2] == (300, 500) == pillow_size(turned)
    assert read_header(plain + b"trailing bytes")[:2] == (500, 300)


def _chunks(data: bytes) -> list[tuple[int, bytes, int]]:
    out, at = [], 8
    while at < len(data):
        length = struct.unpack_from(">L", data, at)[0]
        out.append((at, data[at + 4 : at + 8], length))
        at += 12 + length
    return out


def test_trailing_bytes_and_missing_markers_are_no_cut() -> None:
    jpeg = encoded(picture(40, 30), "JPEG")
    second = encoded(picture(12, 8), "JPEG")
    for data in (
        jpeg + b"\0" * 5000,
        jpeg + b"\r\n",
        jpeg + second[: len(second) // 2],  # a motion photo or a second picture that was cut
        jpeg + b"ftypmp42 and a video",
        jpeg[:2] + b"\xff\xff\xff" + jpeg[2:],  # padding between markers
        encoded(picture(40, 30), "PNG")[:-12],  # no IEND
        encoded(picture(40, 30).quantize(8), "GIF")[:-1],  # no trailer
        encoded(picture(40, 30), "WEBP") + b"tail",
        encoded(picture(40, 30), "BMP") + b"tail",
    ):
        assert pillow_size(data) == (40, 30)
        assert read_header(data)[:2] == (40, 30)
        assert open_image(data).size == (40, 30)


def test_magic_not_suffix(tmp_path: Path) -> None:
    wrong = tmp_path / "photo.jpg"
    wrong.write_bytes(encoded(picture(20, 10), "PNG"))
    assert read_header(wrong) == ImageHeader(20, 10, 1, "PNG", True)
    assert open_image(str(wrong)).size == (20, 10)


def test_unusable_files(tmp_path: Path) -> None:
    assert reason(b"") == "unreadable_media"
    assert reason(b"\0" * 500) == "unsupported_media"
    assert reason(b"<html>404 not found</html>") == "unsupported_media"
    assert reason(b"BMW makes cars, and this is a text") in (
        "unreadable_media",
        "unsupported_media",
    )
    assert reason(str(tmp_path / "none.jpg")) == "missing_media"
    assert reason(str(tmp_path)) == "unreadable_media"
    (tmp_path / "zero.png").write_bytes(b"")
    assert reason(str(tmp_path / "zero.png")) == "unreadable_media"


def test_zero_pixels() -> None:
    jpeg = bytearray(encoded(picture(20, 10), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = b"\0\0\0\0"
    gif = bytearray(encoded(picture(20, 10).quantize(4), "GIF"))
    gif[6:10] = b"\0\0\0\0"
    image = gif.index(b",\0\0\0\0")
    gif[image + 5 : image + 9] = b"\0\0\0\0"
    png = bytearray(encoded(picture(20, 10), "PNG"))
    png[16:24] = b"\0" * 8
    png[29:33] = struct.pack(">L", zlib.crc32(bytes(png[12:29])))
    for data in (jpeg, gif, png):
        assert pillow_size(bytes(data)) is None
        assert reason(bytes(data)) == "unreadable_media"


def test_extreme_aspect() -> None:
    for size in ((30000, 1), (1, 30000)):
        data = encoded(Image.new("L", size), "PNG")
        assert read_header(data)[:2] == size == open_image(data).size


def test_a_bomb_is_a_reason_and_a_warning_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("L", (60, 50)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # 3000 pixels: a warning
    assert read_header(data)[:2] == (60, 50) == open_image(data).size
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # an error
    assert reason(data) == "unreadable_media"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_header(data)[:2] == (60, 50)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_switch_that_hides_cuts_is_neither_heard_nor_changed(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is global: a thread that decodes by it while others read pictures here goes on as it was set."""
    whole = picture(40, 30)
    data = encoded(whole, format)
    seen: list[object] = []

    class Watched(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "LOAD_TRUNCATED_IMAGES":
                seen.append(value)
            super().__setattr__(name, value)

    def outcome(size: int) -> str:
        try:
            read_header(data[:size])
            open_image(data[:size])
        except SampleError as error:
            return error.reason
        return "whole"

    sizes = range(len(data) // 3, len(data) + 1, max(1, len(data) // 40))
    plain = [outcome(size) for size in sizes]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(ImageFile, "__class__", Watched)
    assert [outcome(size) for size in sizes] == plain
    assert plain[0] == "truncated_media" and outcome(len(data)) == "whole"
    assert seen == [] and ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_formats_by_pillow() -> None:
    for format in ("PPM", "ICO", "JPEG2000"):
        data = encoded(picture(32, 32), format)
        assert read_header(data)[:2] == (32, 32) == open_image(data).size
    assert read_header(encoded(picture(20, 10), "TIFF", big_tiff=True))[:2] == (20, 10)
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n") == "unsupported_media"


def test_modes_stay() -> None:
    for mode in ("RGB", "RGBA", "L", "P"):
        source = picture(20, 10).quantize(8) if mode == "P" else picture(20, 10, mode)
        assert open_image(encoded(source, "PNG")).mode == mode
