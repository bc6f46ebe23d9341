"""PNG headers: size, orientation (eXIf chunk, raw EXIF profile, XMP) and the IEND chunk.

Chunks are walked by their length fields; pixel data are never read. Metadata may follow the pixels, so
the chunk in front of IEND must be looked at: where IDAT chunks are small and many, the last one is found
from the end of the file instead of walking thousands of them.
"""

from __future__ import annotations

import struct
import zlib

from ._exif import orientation
from ._head import Parsed
from .location import Head

__all__ = ["MAGIC", "parse"]

MAGIC = b"\x89PNG\r\n\x1a\n"

_END = b"\0\0\0\0IEND\xaeB`\x82"
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PROFILE = b"Raw profile type exif"
_XMP = b"XML:com.adobe.xmp"
_TEXT_LIMIT = 1 << 20
_NEAR = 16384  # IDAT chunks up to this size are looked for from the end


class _Notes:
    """Metadata met so far; later chunks replace earlier ones."""

    __slots__ = ("animated", "exif", "profile", "xmp")

    def __init__(self) -> None:
        self.exif: bytes | None = None
        self.profile: bytes | None = None
        self.xmp: bytes | None = None
        self.animated = False

    def take(self, head: Head, kind: bytes, position: int, length: int) -> None:
        if kind == b"acTL":
            self.animated = True
        elif kind == b"eXIf":
            self.exif = head.at(position, length)
        elif kind in _TEXTS and length <= _TEXT_LIMIT:
            key, value = _text(kind, head.at(position, length))
            if key == _PROFILE:
                self.profile = _unhex(value)
            elif key == _XMP:
                self.xmp = value
            elif key == b"exif" and kind == b"tEXt":
                self.exif = value

    def orientation(self) -> int:
        exif = self.exif if self.exif is not None else self.profile
        return orientation(exif, self.xmp) if exif or self.xmp else 1


def parse(head: Head) -> Parsed:
    """Header facts of a PNG.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data = head.bytes
    if len(data) < 33:
        raise head.fail("truncated_media", "is cut short inside its PNG header")
    width, height = _ihdr(head, data)
    notes = _Notes()
    position = 8 + 12 + struct.unpack_from(">L", data, 8)[0]
    while True:
        length, kind = _chunk(head, position)
        if kind == b"IDAT":
            break
        if kind == b"IEND":
            raise head.fail("unreadable_media", "is a PNG without pixel data")
        notes.take(head, kind, position + 8, length)
        position += 12 + length
    complete = _tail(head, position, length, notes)
    return Parsed(width, height, notes.orientation(), complete)


def _ihdr(head: Head, data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR" or not 13 <= struct.unpack_from(">L", data, 8)[0] <= 4096:
        raise head.fail("unreadable_media", "is a broken PNG: no header chunk at its start")
    length = struct.unpack_from(">L", data, 8)[0]
    body = head.at(12, length + 8)
    if len(body) < length + 8:
        raise head.fail("truncated_media", "is cut short inside its PNG header")
    if zlib.crc32(body[:-4]) != struct.unpack(">L", body[-4:])[0]:
        raise head.fail("unreadable_media", "is a broken PNG: wrong checksum of its header chunk")
    if data[24] not in _DEPTHS.get(data[25], ()):
        raise head.fail("unsupported_media", f"is a PNG of colour type {data[25]} with {data[24]} bits")
    width, height = struct.unpack_from(">LL", data, 16)
    return width, height


def _chunk(head: Head, position: int) -> tuple[int, bytes]:
    """(length, kind) of the chunk at `position`."""
    field = head.at(position, 8)
    if len(field) < 8:
        raise head.fail("truncated_media", "is cut short inside its PNG header")
    kind = field[4:]
    if not kind.isalnum():
        raise head.fail("unreadable_media", f"is a broken PNG: no chunk at byte {position}")
    return int.from_bytes(field[:4], "big"), kind


def _tail(head: Head, position: int, length: int, notes: _Notes) -> bool:
    """Walk from the first IDAT (at `position`) to IEND; whether it is there."""
    end = head.size - len(_END)
    following = position + 12 + length
    if following == end or (length <= _NEAR and following < end - 8 * _NEAR):
        tail = head.at(max(position, end - _NEAR - 12), _NEAR + 12 + len(_END))
        if tail.endswith(_END):
            if following == end:
                return True
            last = tail.rfind(b"IDAT", 0, len(tail) - len(_END))
            if last >= 4:
                size = struct.unpack_from(">L", tail, last - 4)[0]
                if last + 4 + size + 4 == len(tail) - len(_END):
                    return True
    while following + 8 <= head.size:
        field = head.at(following, 8)
        kind = field[4:]
        length = int.from_bytes(field[:4], "big")
        if kind == b"IEND":
            return True
        if not kind.isalnum() or following + 12 + length > head.size:
            return False
        if kind == b"fcTL" and notes.animated:
            return True  # the next frame of an animation: the first one is whole
        notes.take(head, kind, following + 8, length)
        following += 12 + length
    return False


def _text(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
    """(keyword, value) of a text chunk, decompressed; a broken one has an empty value."""
    key, _, value = body.partition(b"\0")
    if key not in (_PROFILE, _XMP, b"exif"):
        return key, b""
    packed = False
    if kind == b"zTXt":
        packed, value = True, value[1:]
    elif kind == b"iTXt":
        packed = value[:1] == b"\1"
        value = value[2:].split(b"\0", 2)[-1]
    if packed:
        try:
            value = zlib.decompressobj().decompress(value, _TEXT_LIMIT)
        except zlib.error:
            value = b""
    return key, value


def _unhex(profile: bytes) -> bytes | None:
    """The bytes of a raw profile: a name, a length, then lines of hex digits."""
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return None
