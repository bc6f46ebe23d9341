"""MPEG audio (MP1, MP2, MP3): sample frames from the Xing/Info or VBRI tag, else by walking the frames.

A LAME tag says how many samples of the first and last frame are padding; decoders leave them out, so they
are not counted. The walk reads frame headers only (4 bytes every few hundred), tells a real header from
chance by the one that follows it, and passes over ID3v2 in front and tags behind. A stream that goes on in
another version, layer or rate has no one length: it is refused.
"""

from __future__ import annotations

import struct

from ._head import Head, ParsedAudio

__all__ = ["accepts", "parse", "tags_begin"]


# --------------------------------------------------------------------------------------------
# Tags behind the sound of a file: ID3v1, APE, appended ID3v2 and Lyrics3, in any order
# --------------------------------------------------------------------------------------------
_MOST = 8  # tags one behind the other; writers leave two


def tags_begin(head: Head, start: int) -> int:
    """Where the sound ends: in front of the tags at the end of the medium; never before byte `start`."""
    end = head.size
    for _ in range(_MOST):
        size = _tag_size(head.at(max(start, end - 128), min(128, max(0, end - start))))
        if not size or size > end - start:
            break
        end -= size
    return max(start, end)


def _tag_size(tail: bytes) -> int:
    """Size of the tag that ends where `tail` (the last 128 bytes) ends; 0: none."""
    foot = tail[-32:]
    if len(tail) == 128 and tail.startswith(b"TAG"):
        return 128
    if len(foot) == 32 and foot.startswith(b"APETAGEX"):
        size, flags = struct.unpack_from("<L", foot, 12)[0], struct.unpack_from("<L", foot, 20)[0]
        return int(size) + (32 if flags & 1 << 31 else 0)
    if foot[-10:-7] == b"3DI" and not any(byte & 0x80 for byte in foot[-4:]):
        size = 0
        for byte in foot[-4:]:
            size = size << 7 | byte
        return size + 20
    if foot[-9:] == b"LYRICS200" and foot[-15:-9].isdigit():
        return int(foot[-15:-9]) + 15
    return 0


# --------------------------------------------------------------------------------------------
# mp3
# --------------------------------------------------------------------------------------------
_RATES = (44100, 48000, 32000)
_KBPS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_WINDOW = 1 << 16
_JUNK = 1 << 16  # how far a first frame is looked for
_SYNC = 0xFFFE0C00  # sync, version, layer and rate stay the same from frame to frame
_DELAY = 529  # samples that the decoder itself delays by


class _Frame:
    """One frame header."""

    __slots__ = ("channels", "key", "layer", "rate", "samples", "side", "size", "version")

    def __init__(self, word: int, version: int, layer: int, kbps: int, rate: int) -> None:
        self.key = word & _SYNC
        self.version, self.layer, self.rate = version, layer, rate
        self.channels = 1 if word >> 6 & 3 == 3 else 2
        padding = word >> 9 & 1
        if layer == 1:
            self.samples = 384
            self.size = (12000 * kbps // rate + padding) * 4
        else:
            self.samples = 576 if layer == 3 and version != 1 else 1152
            self.size = 125 * self.samples * kbps // rate + padding
        one = self.channels == 1
        self.side = (17 if one else 32) if version == 1 else (9 if one else 17)


def accepts(data: bytes) -> bool:
    """Whether a file may be MPEG audio by its first bytes: a tag or a frame header."""
    return data.startswith(b"ID3") or (len(data) >= 4 and _header(data, 0) is not None)


def parse(head: Head, start: int = 0) -> ParsedAudio | None:
    """Header facts; None where no frames are found (it is another format).

    Args:
        head: the medium.
        start: where the sound begins, behind an ID3v2 tag.

    Raises:
        SampleError: truncated_media; unsupported_media: the format changes; unreadable_media: too much junk.
    """
    end = tags_begin(head, start)
    if start >= head.size:
        raise head.fail("truncated_media", "is cut short: nothing follows its ID3 tag")
    position = _first(head, start, end)
    if position < 0:
        return None
    data = head.at(position, 1 << 12)
    frame = _header(data, 0)
    if frame is None:
        return None
    tag = _tag(data, frame)
    if tag is None:
        count, whole = _walk(head, position, end, frame)
        return ParsedAudio(count * frame.samples, frame.rate, frame.channels, whole)
    frames, size, skip = tag
    if not frames:
        frames, whole = _walk(head, position + frame.size, end, frame)
    elif size:
        whole = position + size <= head.size
    else:
        whole = _walk(head, position + frame.size, end, frame)[0] >= frames
    return ParsedAudio(max(0, frames * frame.samples - skip), frame.rate, frame.channels, whole)


def _header(data: bytes, at: int) -> _Frame | None:
    """The frame header at `at`, or None."""
    if data[at] != 0xFF or data[at + 1] < 0xE0:
        return None
    word = int.from_bytes(data[at : at + 4], "big")
    version = (3, 0, 2, 1)[word >> 19 & 3]  # 3: MPEG 2.5
    layer = 4 - (word >> 17 & 3)
    code, pitch = word >> 12 & 15, word >> 10 & 3
    if not version or layer == 4 or code in (0, 15) or pitch == 3:
        return None
    rate = _RATES[pitch] >> (0, 0, 1, 2)[version]
    kbps = _KBPS[1, layer] if version == 1 else _KBPS[2, 1 if layer == 1 else 2]
    return _Frame(word, version, layer, kbps[code - 1], rate)


def _first(head: Head, start: int, end: int) -> int:
    """Where the first frame is: a header that another one of its kind follows; -1 where there is none."""
    data = head.at(start, _JUNK)
    at = data.find(b"\xff")
    while 0 <= at <= len(data) - 4:
        frame = _header(data, at)
        if frame is not None:
            following = start + at + frame.size
            if following + 4 > end:
                return start + at if at == 0 else -1
            second = _header(head.at(following, 4), 0)
            if second is not None and second.key == frame.key:
                return start + at
        at = data.find(b"\xff", at + 1)
    return -1


def _walk(head: Head, position: int, end: int, first: _Frame) -> tuple[int, bool]:
    """(number of whole frames from `position` on, the last one is whole)."""
    count = 0
    base, data = position, head.at(position, _WINDOW)
    while position + 4 <= end:
        at = position - base
        if at + 4 > len(data):
            base, data, at = position, head.at(position, _WINDOW), 0
            if len(data) < 4:
                break
        frame = _header(data, at)
        if frame is None or frame.key != first.key:
            position = _first(head, position, end)
            if position < 0:
                break
            other = _header(head.at(position, 4), 0)
            if other is None or (other.key != first.key and position + other.size + 4 > end):
                break  # a lone frame at the end may be chance
            if other.key != first.key:
                raise head.fail(
                    "unsupported_media",
                    f"goes on at byte {position} in another MPEG audio format than it began in",
                )
            continue
        if position + frame.size > end:
            return count, False
        count += 1
        position += frame.size
    return count, True


def _tag(data: bytes, frame: _Frame) -> tuple[int, int, int] | None:
    """(frames, bytes, samples to leave out) of a Xing, Info or VBRI tag in the first frame."""
    if frame.layer != 3:
        return None
    at = 4 + frame.side
    if data[36:40] == b"VBRI" and len(data) >= 54:
        size, frames = struct.unpack_from(">LL", data, 46)
        return frames, size, 0
    if data[at : at + 4] not in (b"Xing", b"Info") or len(data) < at + 8:
        return None
    flags = int.from_bytes(data[at + 4 : at + 8], "big")
    place = at + 8
    frames = size = 0
    if flags & 1:
        frames, place = int.from_bytes(data[place : place + 4], "big"), place + 4
    if flags & 2:
        size, place = int.from_bytes(data[place : place + 4], "big"), place + 4
    place += (100 if flags & 4 else 0) + (4 if flags & 8 else 0)
    skip = 0
    if data[place : place + 4] in (b"LAME", b"Lavf", b"Lavc") and len(data) >= place + 24:
        delay = int.from_bytes(data[place + 21 : place + 24], "big")
        skip = (delay >> 12) + (delay & 0xFFF)
    return frames, size, skip
