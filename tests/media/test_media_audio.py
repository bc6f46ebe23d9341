"""Frames from headers equal decoded frames, for real clips and for every format that can be made here."""

from __future__ import annotations

import io
import json
import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import SampleError
from packtrain.media.audio import AudioHeader, open_audio, read_header

sf = pytest.importorskip("soundfile")
av = pytest.importorskip("av")

KINDS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("WAV", "IMA_ADPCM"),
    ("WAVEX", "PCM_16"),
    ("RF64", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
    ("AIFF", "PCM_16"),
    ("AU", "PCM_16"),
    ("CAF", "PCM_16"),
    ("W64", "PCM_16"),
]


@cache
def clip(kind: tuple[str, str], frames: int, rate: int = 16000, channels: int = 1, **options: Any) -> bytes:
    noise = np.random.default_rng(frames).standard_normal((frames, channels)).astype("float32") * 0.1
    out = io.BytesIO()
    sf.write(out, noise, rate, format=kind[0], subtype=kind[1], **options)
    return out.getvalue()


def by_ffmpeg(codec: str, container: str, frames: int = 20_000, rate: int = 44100, **options: str) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.layout = "mono"
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate)
        tone = (np.sin(np.arange(frames) / 20) * 9000).astype("int16")
        for start in range(0, frames, 1024):
            block = av.AudioFrame.from_ndarray(tone[None, start : start + 1024], format="s16", layout="mono")
            block.sample_rate, block.pts = rate, start
            for frame in resampler.resample(block):
                file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def decoded(data: bytes) -> tuple[int, int, int]:
    samples, rate = sf.read(io.BytesIO(data), always_2d=True)
    return len(samples), rate, samples.shape[1]


def reason(data: bytes | str | Path) -> str:
    reasons = set()
    for call in (read_header, open_audio):
        with pytest.raises(SampleError) as error:
            call(data)  # type: ignore[operator]
        reasons.add(error.value.reason)
    assert len(reasons) == 1
    return reasons.pop()


def test_real_clips(data: Path) -> None:
    folder = data / "audio"
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text("utf-8").splitlines()]
    rows = [row for row in rows if (folder / row["file"]).exists()]
    assert len(rows) >= 150
    for row in rows:
        header = read_header(folder / row["file"])
        assert header[:3] == (row["frames"], row["samplerate"], row["channels"]), row["file"]
        assert header.duration == pytest.approx(row["duration"], abs=1e-3)
    clips = sorted(
        p for p in (data / "mllm_demo/mllm_demo_data").iterdir() if p.suffix in (".mp3", ".wav", ".flac")
    )
    for path in [*clips, *(folder / row["file"] for row in rows[:10])]:
        samples, rate = open_audio(path)
        assert (len(samples), rate, samples.shape[1]) == read_header(path)[:3]
    assert {read_header(path).format for path in clips} == {"MP3", "WAV", "FLAC"}


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_made_clips(kind: tuple[str, str]) -> None:
    for frames in (1, 100, 576, 1152, 4097, 50_001):
        data = clip(kind, frames)
        assert read_header(data)[:3] == decoded(data)
    for rate in (8000, 24000, 48000):
        data = clip(kind, 8193, rate, 2)
        assert read_header(data)[:3] == decoded(data)
        assert open_audio(data)[0].shape == (read_header(data).frames, 2)


@pytest.mark.parametrize(
    "made",
    [
        ("libmp3lame", "mp3", {}),
        ("libmp3lame", "mp3", {"write_xing": "0"}),
        ("libmp3lame", "mp3", {"id3v2_version": "3", "write_id3v1": "1"}),
        ("mp2", "mp2", {}),
        ("libopus", "ogg", {}),
        ("flac", "flac", {}),
        ("pcm_s16le", "wav", {}),
    ],
    ids=lambda made: "-".join(map(str, made[:2])) + "".join(made[2]),
)
def test_clips_of_another_encoder(made: tuple[str, str, dict[str, str]]) -> None:
    codec, container, options = made
    data = by_ffmpeg(codec, container, rate=48000 if codec == "libopus" else 44100, **options)
    assert read_header(data)[:3] == decoded(data)


@pytest.mark.parametrize("mode", ["CONSTANT", "AVERAGE", "VARIABLE"])
def test_mp3_rates(mode: str) -> None:
    data = clip(("MP3", "MPEG_LAYER_III"), 60_000, bitrate_mode=mode, compression_level=0.4)
    assert read_header(data)[:3] == decoded(data) == (60_000, 16000, 1)


@pytest.mark.parametrize("kind", [*KINDS, ("WAV", "GSM610"), ("WAV", "MS_ADPCM")], ids="-".join)
def test_a_cut_file_is_refused(kind: tuple[str, str]) -> None:
    """Also where a decoder would give what is left of it."""
    data = clip(kind, 30_000)
    assert read_header(data)[:3] == decoded(data)
    for share in (0.999, 0.9, 0.5, 0.1):
        with pytest.raises(SampleError) as caught:
            read_header(data[: int(len(data) * share)])
        assert caught.value.reason in ("truncated_media", "unreadable_media"), share


def test_flac_cut_inside_its_last_frame() -> None:
    data = clip(("FLAC", "PCM_16"), 20_000)
    assert reason(data[:-1]) == "truncated_media"
    assert read_header(data + b"TAG" + bytes(125)).frames == 20_000
    broken = bytearray(data)
    broken[-20] ^= 1
    assert reason(bytes(broken)) == "truncated_media"


def test_wave_oddities() -> None:
    data = clip(("WAV", "PCM_16"), 1000)
    at = data.index(b"data")
    for size in (0, 0xFFFFFFFF):
        streamed = data[: at + 4] + struct.pack("<L", size) + data[at + 8 :]
        assert read_header(streamed).frames == 1000
    extra = data[:12] + b"LIST\x05\0\0\0abcde\0" + data[12:]
    assert read_header(extra)[:3] == decoded(extra) == (1000, 16000, 1)
    assert reason(data[:at] + b"data\0\0\0\0") == "unreadable_media"  # no samples
    assert reason(data[:20]) == "truncated_media"
    assert reason(data[:at]) == "truncated_media"


def test_the_content_decides(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp3"
    path.write_bytes(clip(("WAV", "PCM_16"), 100))
    assert read_header(path) == AudioHeader(100, 16000, 1, "WAV")


def test_reasons(tmp_path: Path) -> None:
    assert reason(tmp_path / "none.wav") == "missing_media"
    assert reason(b"") == "unreadable_media"
    assert reason(b"RIFF") == "truncated_media"
    assert reason(b"this is text, not sound " * 20) == "unsupported_media"
    assert reason(by_ffmpeg("aac", "mp4")) == "unsupported_media"
    assert reason(b"ID3\4\0\0\0\0\0\0") == "truncated_media"
    assert reason(b"fLaC" + bytes(60)) == "unreadable_media"
    assert reason(clip(("OGG", "VORBIS"), 1000)[:40]) == "truncated_media"


def test_junk_before_and_among_mpeg_frames_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpg123 finds frames in junk, in time with the square of its size."""
    whole = clip(("MP3", "MPEG_LAYER_III"), 20_000)
    frames = whole[whole.index(whole[:2], 4) :]  # without the frame that holds the count
    junk = b"\xff\xff\xff\xff\xff\x00\x00\x00" * 20_000
    read, asked = sf.read, []

    def counted(file: Any, most: int, **options: Any) -> Any:
        asked.append(most)
        return read(file, most, **options)

    monkeypatch.setattr(sf, "read", counted)
    monkeypatch.setattr(sf.SoundFile, "blocks", None)
    alone = read_header(frames)
    for before in (b"", b"ID3\4\0\0\0\0\0\0"):
        found = read_header(before + frames[:4] + junk + frames)
        assert (found.frames, found.sample_rate, found.format) == (alone.frames, 16000, "MP3")
        with pytest.raises(SampleError) as error:
            read_header(before + frames[:4] + junk * 10 + frames)
        assert error.value.reason == "unreadable_media"
        try:
            assert len(open_audio(before + frames[:4] + junk + frames)[0]) == alone.frames
        except SampleError as refused:
            assert refused.reason == "unreadable_media"
    assert asked and set(asked) == {alone.frames + 1}


def test_damaged_files_raise_nothing_else() -> None:
    """A corrupt header is a reason or another count, never another exception."""
    rng = random.Random(7)
    for kind in KINDS:
        data = clip(kind, 4097)
        for _ in range(40):
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 2, 8))):
                damaged[rng.randrange(min(len(damaged), 300))] = rng.randrange(256)
            try:
                open_audio(bytes(damaged))
            except SampleError:
                continue
            assert decoded(bytes(damaged)) == read_header(bytes(damaged))[:3]
