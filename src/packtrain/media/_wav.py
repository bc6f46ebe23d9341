"""WAVE headers (RIFF, RIFX, RF64, BW64): sample frames from the sizes of the `fmt ` and `data` chunks.

A `data` chunk that says 0 or 0xFFFFFFFF was written by a program that could not go back to fill it in (a
stream): its frames are what the file holds. Any other size that runs over the end of the file is a cut.
"""

from __future__ import annotations

import struct

from ._head import Head, ParsedAudio

__all__ = ["MAGICS", "accepts", "parse"]

MAGICS = (b"RIFF", b"RIFX", b"RF64", b"BW64")

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_PLAIN = frozenset((_PCM, _FLOAT, _ALAW, _MULAW))
_STREAMED = (0, 0xFFFFFFFF)


def accepts(data: bytes) -> bool:
    return data[:4] in MAGICS and data[8:12] == b"WAVE"


def parse(head: Head) -> ParsedAudio | None:
    """Header facts of a WAVE file; None for a codec whose frames its header does not give.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    endian = ">" if head.bytes[:4] == b"RIFX" else "<"
    large: int | None = None
    plan: tuple[int, int, int, int] | None = None  # codec, channels, rate, bytes per frame
    position = 12
    while True:
        field = head.at(position, 8)
        if len(field) < 8:
            what = "inside its WAVE header" if plan is None else "before its samples"
            raise head.fail("truncated_media", f"is cut short {what}")
        kind, length = field[:4], struct.unpack(endian + "L", field[4:])[0]
        if kind == b"ds64":
            body = head.at(position + 8, 24)
            if len(body) < 24:
                raise head.fail("truncated_media", "is cut short inside its WAVE header")
            large = struct.unpack("<Q", body[8:16])[0]
        elif kind == b"fmt ":
            plan = _format(head, head.at(position + 8, min(length, 40)), endian)
        elif kind == b"data":
            break
        position += 8 + length + (length & 1)
    if plan is None:
        raise head.fail("unreadable_media", "is a broken WAVE: no format before its samples")
    codec, channels, rate, block = plan
    held = head.size - position - 8
    if codec not in _PLAIN:
        if length > held and length not in _STREAMED:
            raise head.fail("truncated_media", "is cut short: its WAV data end before its samples do")
        return None
    if length == 0xFFFFFFFF and large is not None:
        length = large
    elif length in _STREAMED:
        length = held if length or (head.size - position - 8 > 0 and _last(head, position)) else 0
    return ParsedAudio(length // block, rate, channels, length <= held)


def _last(head: Head, position: int) -> bool:
    """Whether an empty `data` chunk is one that was never filled in: no further chunk follows it."""
    following = head.at(position + 8, 4)
    return not (following.isalnum() or following in (b"LIST", b"id3 ", b"fact"))


def _format(head: Head, body: bytes, endian: str) -> tuple[int, int, int, int]:
    if len(body) < 16:
        raise head.fail("truncated_media", "is cut short inside its WAVE header")
    codec, channels, rate, _, block, bits = struct.unpack_from(endian + "HHLLHH", body)
    if codec == _EXTENSIBLE and len(body) >= 26:
        codec = struct.unpack_from(endian + "H", body, 24)[0]
    if not channels or not rate:
        raise head.fail("unreadable_media", f"is a WAVE of {channels} channels at {rate} Hz")
    if codec in _PLAIN:
        wanted = channels * ((bits + 7) // 8)
        if not wanted or block != wanted:
            raise head.fail("unreadable_media", f"is a broken WAVE: {block} bytes a frame of {bits} bits")
    return codec, channels, rate, block
