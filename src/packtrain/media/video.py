"""Frames, rate and size of videos from their headers, and chosen frames, agreeing with each other.

A video is a file (MP4, MOV, AVI, Matroska, WebM; the extra `video` brings PyAV) or a list of pictures: frames
that were sampled before. `read_header` decodes nothing: frames are counted from the index of the container
(less those an edit list leaves out); Matroska has no such index, so its packets are counted, which reads
the file once. Width and height are as seen: turned as the container asks.

`read_frames` decodes and turns, and refuses a video that decodes to another number or size of frames.
Reasons of the `SampleError` both raise: missing_media, truncated_media, unreadable_media (no frames, broken),
unsupported_media (no container that is read here, frames of different sizes).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, described, optional
from . import image
from .location import Head, Ref, as_file, name_of, open_head, open_whole

# --------------------------------------------------------------------------------------------
# What of an MP4 or MOV file is needed beside the demuxer: how the picture is turned, and whether it is cut
# --------------------------------------------------------------------------------------------
# The boxes are walked by their sizes; sample data are never read.
_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_LIMIT = 1 << 26  # a moov box larger than this is not looked into
#: How often over a demuxer may read a film; one that cannot leave out a sound behind the pictures jumps
#: for each packet, and reads films of tiny packets nearly 200 times.
_TIMES = 64
_UNREAD = 48  # AVDISCARD_ALL
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 90, (-1, 0, 0, -1): 180, (0, -1, 1, 0): 270}


def _is_mp4(data: bytes) -> bool:
    return data[4:8] in _FIRST


def _mp4_is_cut(head: Head) -> bool:
    """Whether a box at the top runs over the end of the file, or there is no `moov` box."""
    found = False
    for kind, _, stop in _boxes(head):
        if stop > head.size:
            return True
        found = found or kind == b"moov"
    return not found


def _mp4_rotation(head: Head, track: int) -> int:
    """Degrees clockwise (0, 90, 180, 270) that the picture of a track is to be turned by.

    A matrix that is no turn by a right angle (mirrored, sheared) counts as 0.
    """
    for kind, start, stop in _boxes(head):
        if kind == b"moov" and stop - start <= _LIMIT:
            return _of_track(head.at(start, stop - start), track)
    return 0


def _boxes(head: Head) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start of content, end) of the boxes at the top."""
    position = 0
    while position + 8 <= head.size:
        kind, start, stop = _box(head.at(position, 16), position, head.size)
        yield kind, start, stop
        if stop <= position:
            return
        position = stop


def _box(field: bytes, position: int, end: int) -> tuple[bytes, int, int]:
    size, kind = struct.unpack_from(">L4s", field)
    start = position + 8
    if size == 1 and len(field) >= 16:
        size, start = struct.unpack_from(">Q", field, 8)[0], position + 16
    elif size == 0:
        size = end - position
    return kind, start, position + size if size >= 8 else position


def _inner(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    while start + 8 <= stop:
        kind, begin, end = _box(data[start : start + 16], start, stop)
        if end < begin or end > stop:
            return
        yield kind, begin, end
        start = end


def _of_track(moov: bytes, track: int) -> int:
    for kind, start, stop in _inner(moov, 0, len(moov)):
        if kind != b"trak":
            continue
        for name, begin, end in _inner(moov, start, stop):
            if name != b"tkhd":
                continue
            wide = moov[begin] == 1
            place = begin + (20 if wide else 12)
            matrix = begin + (52 if wide else 40)
            if matrix + 36 > end or struct.unpack_from(">L", moov, place)[0] != track:
                continue
            a, b, _, c, d = struct.unpack_from(">5l", moov, matrix)
            return _TURNS.get(tuple(round(value / 65536) for value in (a, b, c, d)), 0)
    return 0


# --------------------------------------------------------------------------------------------
# Frames, rate and size of videos from their headers, and chosen frames, agreeing with each other
# --------------------------------------------------------------------------------------------
VideoRef: TypeAlias = Ref | Sequence[Ref]

# Only these containers (playlists and scripts name other files), and titles in any encoding.
_OPEN: dict[str, Any] = {
    "options": {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,avi,matroska,webm"},
    "metadata_errors": "replace",
}
_NAMES = {"mov,mp4,m4a,3gp,3g2,mj2": "MP4", "avi": "AVI", "matroska,webm": "MKV"}
_av = functools.partial(optional, "av", "PyAV (av)", "video")
_TURN_MARK = b"\x76\x75"  # ProjectionPoseRoll in Matroska


class VideoHeader(NamedTuple):
    """What the headers of a video say.

    Attributes:
        frames: as a decoder gives them.
        fps: average frames per second; None for a list of pictures.
        width: pixels, after rotation.
        height: pixels, after rotation.
        duration: seconds, frames / fps; None for a list of pictures.
        rotation: degrees clockwise the stored picture is turned by: 0, 90, 180, 270.
        format: "MP4", "AVI", "MKV" or "frames".
    """

    frames: int
    fps: float | None
    width: int
    height: int
    duration: float | None
    rotation: int
    format: str


def read_header(ref: VideoRef) -> VideoHeader:
    """Number, rate and size of the frames of a video, without decoding them.

    Args:
        ref: a path, URL, tar member, data URL or bytes, or a list of images (pre-sampled frames).

    Raises:
        SampleError: see the module.
        MissingExtraError: PyAV is not installed.
    """
    if _is_list(ref):
        return _of_pictures(ref)  # type: ignore[arg-type]
    with open_head(ref) as head:  # type: ignore[arg-type]
        return _read(head)


def read_frames(ref: VideoRef, indices: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """Chosen frames uint8[n, height, width, 3] (RGB), in the order asked for; all of them by default.

    Raises:
        SampleError: the reasons of `read_header`, for the same files.
        IndexError: an index outside of 0 .. frames - 1.
    """
    if _is_list(ref):
        listed: list[Ref] = list(ref)  # type: ignore[arg-type]
        wanted = _checked(indices, _of_pictures(listed).frames)
        return np.stack([np.asarray(image.open_image(listed[i]).convert("RGB")) for i in wanted])
    with open_whole(ref) as head:  # type: ignore[arg-type]
        header = _read(head)
        return _decode(head, header, _checked(indices, header.frames))


# --------------------------------------------------------------------------------------------
def _is_list(ref: VideoRef) -> bool:
    return isinstance(ref, Sequence) and not isinstance(ref, (str, bytes))


def _of_pictures(refs: Sequence[Ref]) -> VideoHeader:
    if not refs:
        raise SampleError("unreadable_media", "a video of pictures has no pictures")
    sizes = [image.read_header(ref)[:2] for ref in refs]
    other = next((number for number, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise SampleError(
            "unsupported_media",
            f"{name_of(refs[other])} is {sizes[other][0]}x{sizes[other][1]} pixels, "
            f"the first frame of the video {sizes[0][0]}x{sizes[0][1]}",
            hint="frames of one video must have one size",
        )
    return VideoHeader(len(refs), None, *sizes[0], None, 0, "frames")


def _read(head: Head) -> VideoHeader:
    head.refuse(not head.bytes, "is empty (0 bytes)")
    head.refuse(_cut(head), "is cut short: its container says it is longer than the file", "truncated_media")
    av = _av()
    try:
        with _opened(head) as container:
            stream = next(iter(container.streams.video), None)
            if stream is None or stream.codec_context is None:
                raise head.fail("unreadable_media", "has no video stream that can be decoded")
            kind = _NAMES.get(container.format.name, container.format.name)
            frames = _count(head, container, stream, kind)
            rate = stream.average_rate or stream.guessed_rate
            width, height = stream.codec_context.width, stream.codec_context.height
            turn = _rotation(head, stream, kind)
    except av.error.FFmpegError as error:
        raise _broken(head, error) from None
    if min(frames, width, height) < 1 or not rate:
        told = f"is a video of {frames} frames of {width}x{height} pixels"
        raise head.fail("unreadable_media", told + ("" if rate else " that does not say its frame rate"))
    if turn in (90, 270):
        width, height = height, width
    return VideoHeader(frames, float(rate), width, height, float(frames / rate), turn, kind)


def _opened(head: Head) -> Any:
    """The container, its sound left unread. Some indexes have a demuxer read the film for each entry."""
    av = _av()
    skips = hasattr(av.stream.Stream, "discard")  # since PyAV 18
    container = av.open(as_file(head, times=_TIMES if skips else 4 * _TIMES), **_OPEN)
    for stream in container.streams:
        if skips and stream.type != "video":
            stream.discard = _UNREAD
    return container


def _count(head: Head, container: Any, stream: Any, kind: str) -> int:
    """Frames a decoder gives: entries of the index, or packets where there is no index."""
    if kind in ("MP4", "AVI"):
        entries = stream.index_entries
        if len(entries) == stream.frames > 0:
            last = shown = 0
            for entry in entries:
                last = max(last, entry.pos + entry.size)
                shown += entry.size > 0 and not entry.is_discard
            cut = "is cut short: its frames end behind the end of the file"
            head.refuse(last > head.size, cut, "truncated_media")
            return shown
    return sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _rotation(head: Head, stream: Any, kind: str) -> int:
    """Degrees clockwise."""
    if kind == "MP4":
        return _mp4_rotation(head, stream.id)
    if kind == "MKV" and _TURN_MARK in head.bytes:
        with _opened(head) as container:
            frame = next(container.decode(video=0), None)
            return 0 if frame is None else _turn_of(frame)
    return 0


def _turn_of(frame: Any) -> int:
    """Degrees clockwise from the counter-clockwise angle a frame carries."""
    return int(round(-frame.rotation / 90) * 90 % 360)


def _cut(head: Head) -> bool:
    """Whether the container says it is longer than the file."""
    data = head.bytes
    if _is_mp4(data):
        return _mp4_is_cut(head)
    if data[:4] == b"RIFF":
        return int.from_bytes(data[4:8], "little") + 8 > head.size + 1
    return data[:4] == b"\x1a\x45\xdf\xa3" and _matroska_cut(head)


def _matroska_cut(head: Head) -> bool:
    """Whether the Segment of a Matroska file has a known size that runs over the end of the file."""
    data = head.bytes
    at = data.find(b"\x18\x53\x80\x67")
    if at < 0 or at + 12 > len(data):
        return at < 0
    lead = data[at + 4]
    width = 9 - lead.bit_length()
    if width > 8:
        return False
    unknown = (1 << 7 * width) - 1
    value = int.from_bytes(data[at + 4 : at + 4 + width], "big") & unknown
    return value != unknown and at + 4 + width + value > head.size


def _decode(head: Head, header: VideoHeader, wanted: list[int]) -> NDArray[np.uint8]:
    kept: dict[int, NDArray[np.uint8]] = {}
    needed, count = set(wanted), 0
    av = _av()
    try:
        with _opened(head) as container:
            for frame in container.decode(video=0):
                if count in needed:
                    kept[count] = np.rot90(frame.to_ndarray(format="rgb24"), -(_turn_of(frame) // 90))
                count += 1
    except av.error.FFmpegError as error:
        raise _broken(head, error) from None
    size = (header.height, header.width, 3)
    if count != header.frames or any(kept[i].shape != size for i in wanted):
        raise head.fail(
            "unreadable_media",
            f"says {header.frames} frames of {header.width}x{header.height} in its header "
            f"but decodes to {count}"
            + "".join(f" of {v.shape[1]}x{v.shape[0]}" for v in [*kept.values()][:1]),
        )
    return np.stack([kept[i] for i in wanted]) if wanted else np.zeros((0, *size), np.uint8)


def _checked(indices: Sequence[int] | None, frames: int) -> list[int]:
    wanted = list(range(frames)) if indices is None else [int(i) for i in indices]
    for i in wanted:
        if not 0 <= i < frames:
            raise IndexError(f"frame {i} of {frames}")
    return wanted


def _broken(head: Head, error: Exception) -> SampleError:
    data = head.bytes
    if not (_is_mp4(data) or data[8:12] == b"AVI " or data[:4] == b"\x1a\x45\xdf\xa3"):
        return head.fail(
            "unsupported_media",
            f"is no video format that is read here (it starts with {data[:8]!r})",
            hint="MP4, MOV, AVI, Matroska and WebM are read; convert it, or give a list of frames",
        )
    return head.fail("unreadable_media", f"cannot be read ({described(error, 160)})")
