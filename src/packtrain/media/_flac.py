"""FLAC headers: total samples from STREAMINFO; the last frame is looked for to know that it is all there.

The frame header at the end of the file carries its own position, so the check needs the tail only: a
header whose CRC-8 fits, whose position plus size is the total, and whose CRC-16 covers the bytes up to the
end (tags behind it are passed over).
"""

from __future__ import annotations

import re
import struct
from functools import cache

from ._head import Head, ParsedAudio
from ._mp3 import tags_begin

__all__ = ["MAGIC", "parse"]

MAGIC = b"fLaC"
_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_FRAME = (1 << 21) + (1 << 14)  # bytes of the largest frame: 65,535 samples of 8 channels, stored as they are
_SUMMED = 4  # headers of the last frame that chance may give: each sums the bytes up to the end

_BLOCKS = {1: 192, **{n: 576 << (n - 2) for n in range(2, 6)}, **{n: 256 << (n - 8) for n in range(8, 16)}}


def parse(head: Head, start: int = 0) -> ParsedAudio | None:
    """Header facts of a FLAC file whose marker stands at `start`; None where its length is not known.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    info = head.at(start + 4, 38)
    if len(info) < 38:
        raise head.fail("truncated_media", "is cut short inside its FLAC header")
    if info[0] & 0x7F or info[1:4] != b"\0\0\x22":
        raise head.fail("unreadable_media", "is a broken FLAC: no STREAMINFO")
    smallest, _ = struct.unpack_from(">HH", info, 4)
    largest = int.from_bytes(info[11:14], "big")
    packed = int.from_bytes(info[14:22], "big")
    rate, channels = packed >> 44, (packed >> 41 & 7) + 1
    total = packed & (1 << 36) - 1
    if not rate:
        raise head.fail("unreadable_media", "is a broken FLAC: sample rate 0")
    position, last = start + 4, False
    while not last:
        field = head.at(position, 4)
        if len(field) < 4:
            raise head.fail("truncated_media", "is cut short inside its FLAC header")
        last = bool(field[0] & 0x80)
        position += 4 + int.from_bytes(field[1:], "big")
    if not total:
        return None
    return ParsedAudio(total, rate, channels, _whole(head, position, total, smallest, largest))


def _whole(head: Head, first: int, total: int, block: int, largest: int) -> bool:
    """Whether the frame that ends the stream is there to its last byte."""
    end = tags_begin(head, first)
    span = min(end - first, min(max(largest, 1 << 14), _FRAME) if largest else 1 << 17)
    if span < 11:
        return False
    tail = head.at(end - span, span)
    summed = 0
    for at in reversed([found.start() for found in _SYNC.finditer(tail, 0, max(0, len(tail) - 9))]):
        head.spend(4)
        if _frame(tail, at, block) == total:
            summed += len(tail) - at
            if summed > _SUMMED * len(tail):
                raise head.fail("unreadable_media", "is a broken FLAC: its end is full of frame headers")
            if _crc16(tail[at:]) == 0:
                return True
    return False


def _frame(data: bytes, at: int, block: int) -> int | None:
    """Sample number behind the frame whose header is at `at`; None where there is no header."""
    variable = data[at + 1] & 1
    code, rate = data[at + 2] >> 4, data[at + 2] & 15
    if not code or rate == 15 or data[at + 3] & 1:
        return None
    place = at + 4
    lead = data[place]
    more = 0 if lead < 0x80 else 7 - (lead ^ 0xFF).bit_length() if lead != 0xFF else -1
    if more < 0 or (lead >= 0x80 and more < 1) or place + more + 6 > len(data):
        return None
    number = lead if not more else lead & (0x3F >> more)
    for byte in data[place + 1 : place + 1 + more]:
        if byte & 0xC0 != 0x80:
            return None
        number = number << 6 | byte & 0x3F
    place += 1 + more
    if code in (6, 7):
        width = code - 5
        size = int.from_bytes(data[place : place + width], "big") + 1
        place += width
    else:
        size = _BLOCKS[code]
    place += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if _crc8(data[at : place + 1]):
        return None
    return (number if variable else number * block) + size


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ 0x07) & 0xFF if crc & 0x80 else crc << 1
    return crc


@cache
def _table16() -> list[int]:
    """CRC-16 (polynomial 0x8005) of every pair of bytes."""
    single = []
    for byte in range(256):
        crc = byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x8005) & 0xFFFF if crc & 0x8000 else crc << 1
        single.append(crc)
    table = []
    for pair in range(1 << 16):
        crc = single[pair >> 8]
        table.append((crc << 8 & 0xFFFF) ^ single[(crc >> 8) ^ (pair & 0xFF)])
    return table


def _crc16(data: bytes) -> int:
    """0 for a frame that ends with its own CRC-16. Leading zero bytes leave the sum as it is."""
    if len(data) & 1:
        data = b"\0" + data
    table, crc = _table16(), 0
    for pair in struct.unpack(f">{len(data) // 2}H", data):
        crc = table[crc ^ pair]
    return crc
