"""Frames, rate and size of videos from headers equal those of a full decode."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
from made_images import encoded, picture

from clips import video
from packtrain.errors import SampleError
from packtrain.media import location
from packtrain.media.video import VideoHeader, read_frames, read_header

av = pytest.importorskip("av")

MADE = [
    ("mp4", "mpeg4", 0),
    ("mp4", "libx264", 90),
    ("mp4", "mpeg4", -90),
    ("mov", "libx264", 180),
    ("avi", "mpeg4", 0),
    ("matroska", "libx264", 0),
    ("matroska", "mpeg4", 90),
    ("webm", "libvpx", 0),
]


def reason(ref: object) -> str:
    reasons = set()
    for call in (read_header, read_frames):
        with pytest.raises(SampleError) as error:
            call(ref)  # type: ignore[operator]
        reasons.add(error.value.reason)
    assert len(reasons) == 1
    return reasons.pop()


def test_real_videos(data: Path) -> None:
    folder = data / "mllm_demo/mllm_demo_data"
    names = ["1.mp4", "2.avi", "3.mp4", "4.mp4"]
    for name in names:
        header = read_header(folder / name)
        with av.open(str(folder / name)) as container:
            frames = [(frame.width, frame.height) for frame in container.decode(video=0)]
            rate = container.streams.video[0].average_rate
        assert header.frames == len(frames) and header.fps == float(rate)
        assert {(header.width, header.height)} == set(frames)
        assert header.duration == pytest.approx(len(frames) / float(rate))
        shown = read_frames(folder / name, [0, header.frames - 1, 0])
        assert shown.shape == (3, header.height, header.width, 3) and (shown[0] == shown[2]).all()


@pytest.mark.parametrize("made", MADE, ids=lambda made: "-".join(map(str, made)))
def test_made_videos(made: tuple[str, str, int]) -> None:
    data = video(*made)
    header = read_header(data)
    turned = made[2] in (90, -90)
    assert (header.frames, header.fps, header.duration) == (30, 10.0, 3.0)
    assert (header.width, header.height) == ((48, 64) if turned else (64, 48))
    assert header.rotation == -made[2] % 360
    frame = read_frames(data, [3])[0].astype(int)
    assert frame.shape == (header.height, header.width, 3)
    dark = {0: frame[:, :20], 90: frame[-20:], -90: frame[:20], 180: frame[:, -20:]}[made[2]]
    assert dark.mean() < 60 < frame.mean()  # turned counter-clockwise by 90, the left side is below


@pytest.mark.parametrize("made", MADE, ids=lambda made: "-".join(map(str, made)))
def test_a_cut_video_is_refused(made: tuple[str, str, int]) -> None:
    data = video(*made)
    for share in (0.98, 0.7, 0.3, 0.05):
        assert reason(data[: int(len(data) * share)]) == "truncated_media"


def test_an_index_that_leaves_out_frames_is_counted_as_it_decodes() -> None:
    """Frames in front of an edit list are in the file but never shown."""
    whole = video("mp4", "libx264", frames=40)
    out = io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(out, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.size:
                packet.pts -= 5 * 1024
                packet.dts -= 5 * 1024
                packet.stream = copy
                target.mux(packet)
    data = out.getvalue()
    with av.open(io.BytesIO(data)) as container:
        shown = sum(1 for _ in container.decode(video=0))
    assert read_header(data).frames == shown == len(read_frames(data))


def test_reasons(tmp_path: Path) -> None:
    assert reason(tmp_path / "none.mp4") == "missing_media"
    assert reason(b"") == "unreadable_media"
    assert reason(b"plain text " * 40) == "unsupported_media"
    assert reason(encoded(picture(20, 20), "JPEG")) == "unsupported_media"
    assert reason(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n") == "unsupported_media"
    for container in ("mp4", "matroska", "avi"):
        assert reason(video(container, "mpeg4", frames=0)) in ("unreadable_media", "truncated_media")
    with pytest.raises(IndexError):
        read_frames(video("mp4", "mpeg4"), [30])


def test_sound_alone_is_no_video() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        stream.layout = "mono"
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    assert reason(out.getvalue()) == "unreadable_media"


def test_lists_of_frames(tmp_path: Path) -> None:
    frames = [encoded(picture(30, 20), "PNG"), encoded(picture(30, 20, "L"), "PNG")]
    path = tmp_path / "f.png"
    path.write_bytes(frames[0])
    refs = [*frames, path]
    assert read_header(refs) == VideoHeader(3, None, 30, 20, None, 0, "frames")
    assert read_frames(refs).shape == (3, 20, 30, 3)
    assert read_frames(refs, [1]).shape == (1, 20, 30, 3)
    assert reason([]) == "unreadable_media"
    assert reason([*frames, encoded(picture(31, 20), "PNG")]) == "unsupported_media"
    assert reason([frames[0], tmp_path / "none.png"]) == "missing_media"
    assert reason([frames[0][:60]]) == "truncated_media"


def test_a_title_in_another_encoding() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as file:
        file.metadata["title"] = "marker title"
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(5):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    data = out.getvalue()
    assert b"marker title" in data
    assert read_header(data.replace(b"marker title", "标题标题标题".encode("gbk"))).frames == 5


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that demuxers read, call by call."""
    found: list[int] = []
    read = location._HeadFile.readinto

    def counted(file: location._HeadFile, buffer: object) -> int:
        found.append(read(file, buffer))
        return found[-1]

    monkeypatch.setattr(location._HeadFile, "readinto", counted)
    return found


def test_an_index_that_has_the_film_read_again_and_again_is_refused(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matroska with the beginning of its Cues written very often: PyAV reads 13,000 times its size."""
    monkeypatch.setattr(location, "_FREE_READ", 1 << 20)
    film = video("matroska", "mpeg4", frames=6)
    at = film.rindex(b"\x1c\x53\xbb\x6b")
    data = film[:at] + film[at : at + 38] * 2_000 + film[at:]
    assert reason(data) == "unreadable_media"
    with pytest.raises(SampleError, match=r"read more than (64|256) times over"):
        read_header(data)
    assert sum(taken) <= 3 * (257 * len(data) + (1 << 20))


def test_a_sound_behind_the_pictures_is_left_unread(taken: list[int]) -> None:
    """Otherwise the demuxer would jump between the two for every packet."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"max_interleave_delta": "1"}) as file:
        stream, sound = file.add_stream("mpeg4", rate=10), file.add_stream("aac", rate=8000)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        frames = [np.full((16, 32, 3), n % 250, np.uint8) for n in range(900)]
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
        noise = np.random.default_rng(0).normal(0, 0.1, (700, 1, 1024)).astype(np.float32)
        for number, values in enumerate(noise):
            heard = av.AudioFrame.from_ndarray(values, format="fltp", layout="mono")
            heard.sample_rate, heard.pts = 8000, number * 1024
            file.mux(sound.encode(heard))
        file.mux(sound.encode(None))
    data = out.getvalue()
    assert read_header(data).frames == len(read_frames(data)) == 900
    most = 3 if hasattr(av.stream.Stream, "discard") else 256
    assert sum(taken) <= most * len(data) and len(data) > 300_000


def test_damaged_files_raise_nothing_else() -> None:
    rng = random.Random(5)
    for made in MADE:
        data = video(*made)
        for _ in range(40):
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 2, 8, 30))):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                shown = read_frames(bytes(damaged))
            except SampleError:
                continue
            header = read_header(bytes(damaged))
            assert shown.shape == (header.frames, header.height, header.width, 3)
