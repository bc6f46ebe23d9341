"""Readers of foreign bytes, each with whole files to start from; what they give is compared with others."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from PIL import Image, ImageOps

from packtrain.errors import PacktrainError, SampleError


class Reader(NamedTuple):
    """`seeds` are whole files; `read(data, folder)` raises nothing but errors of packtrain."""

    seeds: list[bytes]
    read: Callable[[bytes, Path], Any]


# ------------------------------------------------------------------------------------------ media
def picture(mode: str = "RGB", size: tuple[int, int] = (41, 30)) -> Image.Image:
    pixels = np.random.default_rng(7).integers(
        0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 4), dtype=np.uint8
    )
    coarse = pixels.repeat(4, 0).repeat(4, 1)[: size[1], : size[0]]
    return Image.fromarray(np.ascontiguousarray(coarse), "RGBA").convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def exif() -> Image.Exif:
    held = Image.Exif()
    held[274] = 6
    held[271] = "maker"
    return held


def images() -> list[bytes]:
    rgb, grey, palette = picture(), picture("L"), picture().quantize(16)
    return [
        saved(rgb, "JPEG", exif=exif()),
        saved(rgb, "JPEG", progressive=True),
        saved(rgb, "PNG", exif=exif()),
        saved(palette, "PNG"),
        saved(rgb, "WEBP", exif=exif()),
        saved(picture("RGBA"), "WEBP", lossless=True),
        saved(palette, "GIF", save_all=True, append_images=[picture().quantize(8)]),
        saved(rgb, "BMP"),
        saved(grey, "TIFF", compression="tiff_lzw"),
        saved(rgb, "PPM"),
        saved(rgb, "ICO"),
    ]


def read_image(data: bytes, _: Path) -> None:
    from packtrain.media.image import open_image, read_header

    try:
        header = read_header(data)
    except SampleError:
        header = None
    try:
        opened = open_image(data).size
    except SampleError:
        opened = None
    assert opened is None or (header is not None and opened == header[:2])
    with warnings.catch_warnings(), suppress(Exception):  # what Pillow raises is its own affair
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            size = ImageOps.exif_transpose(image).size
            assert header is None or header[:2] == size, (header, size)


def sounds() -> list[bytes]:
    import soundfile

    wave = np.sin(np.arange(9000) / 20) * 0.5
    made = []
    for kind, subtype in (
        ("WAV", "PCM_16"), ("WAV", "IMA_ADPCM"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("AU", "PCM_16"), ("CAF", "PCM_16"), ("W64", "PCM_16"),
    ):  # fmt: skip
        out = io.BytesIO()
        soundfile.write(out, wave, 16000, format=kind, subtype=subtype)
        made.append(out.getvalue())
    return made


def read_sound(data: bytes, _: Path) -> None:
    import soundfile

    from packtrain.media.audio import open_audio, read_header

    try:
        header = read_header(data)
    except SampleError:
        header = None
    try:
        samples, rate = open_audio(data)
    except SampleError:
        return
    assert header is not None and samples.shape == (header.frames, header.channels)
    with suppress(soundfile.SoundFileError):
        assert soundfile.info(io.BytesIO(data)).samplerate == rate


def films() -> list[bytes]:
    import av

    made = []
    for container, codec in (("mp4", "mpeg4"), ("avi", "mpeg4"), ("matroska", "mpeg4")):
        out = io.BytesIO()
        with av.open(out, "w", format=container) as file:
            stream = file.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
            for number in range(6):
                pixels = np.full((16, 32, 3), number * 20, np.uint8)
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            file.mux(stream.encode(None))
        made.append(out.getvalue())
    return made


def read_film(data: bytes, _: Path) -> None:
    from packtrain.media.video import read_frames, read_header

    try:
        header = read_header(data)
    except SampleError:
        header = None
    if header is not None and header.frames > 2000:
        return  # to decode so many takes seconds, and should
    try:
        frames = read_frames(data)
    except SampleError:
        return
    assert header is not None and frames.shape[:3] == (header.frames, header.height, header.width)


# ---------------------------------------------------------------------------------------- records
ROWS: list[dict[str, Any]] = [
    {
        "id": number,
        "messages": [
            {"role": "user", "content": f"how much is {number}, ägain\n"},
            {"role": "assistant", "content": "much " * (number % 5 + 1)},
        ],
        "weight": 0.5,
        "tags": ["a", None, "b"],
    }
    for number in range(12)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def source(name: str) -> Callable[[bytes, Path], None]:
    """Reads all records of a file called `name`, and the chats they hold."""

    def read(data: bytes, folder: Path) -> None:
        from packtrain.sources import open_source
        from packtrain.sources.chat import ChatSource

        path = folder / name
        path.write_bytes(data)
        for stale in folder.glob(".*"):
            stale.unlink()
        try:
            opened = open_source(path, cache_dir=folder / "cache")
            chats: Any = ChatSource(opened)
        except PacktrainError:
            return
        for number in range(min(len(chats), 64)):
            with suppress(PacktrainError):
                chats[number]

    return read


def zstd(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.compress(data))


def table() -> Any:
    import pyarrow as pa

    made = pa.Table.from_pylist(ROWS)
    return made.append_column("kind", pa.array(["u", "v", "w"] * (len(ROWS) // 3)).dictionary_encode())


def arrow(stream: bool = False, compression: str | None = None) -> bytes:
    import pyarrow as pa

    sink, rows = pa.BufferOutputStream(), table()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, rows.schema, options=options) as writer:
        writer.write_table(rows, max_chunksize=5)
    return bytes(sink.getvalue().to_pybytes())


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table(), sink, row_group_size=5)
    return bytes(sink.getvalue().to_pybytes())


def tar(kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as file:
        for number in range(4):
            for suffix, data in (
                ("json", json.dumps(ROWS[number]).encode()),
                ("jpg", saved(picture(), "JPEG")),
            ):
                member = tarfile.TarInfo(f"{number:06d}{'x' * 120 * (number % 2)}.{suffix}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return out.getvalue()


def coco() -> bytes:
    return json.dumps(
        {
            "info": {},
            "images": [{"id": 1, "file_name": "a.jpg", "width": 9, "height": 8}],
            "annotations": [{"id": 3, "image_id": 1, "caption": "a", "bbox": [1, 2, 3, 4], "category_id": 2}],
            "categories": [{"id": 2, "name": "cat"}],
        }
    ).encode()


def read_lengths(name: str) -> Callable[[bytes, Path], None]:
    def read(data: bytes, folder: Path) -> None:
        from packtrain.pipeline.length_files import read_lengths as read_them

        (folder / name).write_bytes(data)
        with suppress(PacktrainError):
            read_them(folder / name)

    return read


def npz() -> bytes:
    out = io.BytesIO()
    np.savez(out, tokens=np.arange(9))
    return out.getvalue()


def npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(9))
    return out.getvalue()


def imported() -> bool:
    """The names of TrainingArguments are imported before the clock of an input runs."""
    from packtrain.train.config.trainer_keys import trainer_fields

    return bool(trainer_fields())


def read_config(data: bytes, folder: Path) -> None:
    from packtrain.train import load_config

    (folder / "run.yaml").write_bytes(data)
    with warnings.catch_warnings(), suppress(PacktrainError):
        warnings.simplefilter("ignore")
        load_config(folder / "run.yaml")


CONFIG = b"""\
model: {name_or_path: "tiny:qwen3"}
data: {kind: planned, task: chat, pack_length: 128}
custom: {train_jsonl: train.jsonl, columns: {prompt: question}}
training:
  output_dir: &out runs/demo
  learning_rate: 1.0e-4
  save_steps: 5
  logging_dir: *out
"""
MIXTURE = b"seed: 3\nsources:\n- {path: a.jsonl, weight: 1.5}\n- {path: b.jsonl, columns: {prompt: q}}\n"

#: What files of JSON and YAML hold, by their reader.
VALUES: dict[str, Callable[[], list[Any]]] = {
    "coco": lambda: [json.loads(coco())],
    "config": lambda: [yaml.safe_load(CONFIG)],
    "json": lambda: [ROWS[:2], ROWS[0]],
    "lengths.json": lambda: [[3, 5, 7], {"tokens": [3, 5, 7]}],
    "mixture": lambda: [yaml.safe_load(MIXTURE)],
}

#: Made when they are asked for.
READERS: dict[str, Callable[[], Reader]] = {
    "image": lambda: Reader(images(), read_image),
    "sound": lambda: Reader(sounds(), read_sound),
    "video": lambda: Reader(films(), read_film),
    "jsonl": lambda: Reader([LINES, b"\xef\xbb\xbf\r\n" + LINES], source("a.jsonl")),
    "json": lambda: Reader([json.dumps(ROWS).encode(), json.dumps(ROWS[0]).encode()], source("a.json")),
    "gzip": lambda: Reader([gzip.compress(LINES)], source("a.jsonl.gz")),
    "bzip2": lambda: Reader([bz2.compress(LINES)], source("a.jsonl.bz2")),
    "xz": lambda: Reader([lzma.compress(LINES)], source("a.jsonl.xz")),
    "zstd": lambda: Reader([zstd(LINES), zstd(LINES) * 2], source("a.jsonl.zst")),
    "arrow": lambda: Reader([arrow(), arrow(stream=True), arrow(compression="zstd")], source("a.arrow")),
    "parquet": lambda: Reader([parquet()], source("a.parquet")),
    "tar": lambda: Reader([tar(tarfile.PAX_FORMAT), tar(tarfile.GNU_FORMAT)], source("a.tar")),
    "coco": lambda: Reader([coco()], source("a.json")),
    "mixture": lambda: Reader([MIXTURE], source("a.yaml")),
    "lengths.npz": lambda: Reader([npz()], read_lengths("l.npz")),
    "lengths.npy": lambda: Reader([npy()], read_lengths("l.npy")),
    "lengths.csv": lambda: Reader([b"tokens,images\n5,1\n7,0\n"], read_lengths("l.csv")),
    "lengths.json": lambda: Reader([b"[3, 5, 7]"], read_lengths("l.json")),
    "lengths.jsonl": lambda: Reader([b'{"tokens": 3}\n{"tokens": 5}\n'], read_lengths("l.jsonl")),
    "lengths.parquet": lambda: Reader([parquet()], read_lengths("l.parquet")),
    "config": lambda: imported() and Reader([CONFIG], read_config),
}
