"""Headers of pictures (BMP, GIF, JPEG, PNG, TIFF, WebP): size, how they are turned, is the end there?"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

from .location import Head, Parsed

# --------------------------------------------------------------------------------------------
# The EXIF orientation, read from the few bytes that hold it
# --------------------------------------------------------------------------------------------
# Answers as Pillow's `ImageOps.exif_transpose` acts: the first usable Orientation tag (274) of the first
# directory, else the Orientation of an XMP packet. A block that is no TIFF structure counts as upright.
SIDEWAYS = frozenset((5, 6, 7, 8))  # orientations that swap width and height

_EXIF_ORIENTATION = 274
_PREFIX = re.compile(b"^(Exif\x00\x00){1,2}")
_TIFF = {b"II*\0": "<", b"MM\0*": ">", b"MM*\0": ">", b"II\0*": "<", b"MM\0+": ">"}
_UNIT = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_FORMAT = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 11: "f", 12: "d", 13: "L", 16: "Q"}
_EXIF_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """1..8 from an EXIF block and an XMP packet, either of which may be absent."""
    value = exif_orientation(exif) if exif else None
    if value is None and xmp:
        value = xmp_orientation(xmp)
    return value if value is not None and 1 <= value <= 8 else 1


def xmp_orientation(packet: bytes) -> int | None:
    found = _EXIF_XMP.search(packet)
    return int(found[1]) if found else None


def exif_orientation(block: bytes) -> int | None:
    """The Orientation of an EXIF block: None when the tag is absent, 1 when it means nothing."""
    data = _PREFIX.sub(b"", block)
    if not data:
        return None
    endian = _TIFF.get(data[:4])
    if endian is None or len(data) < 8:
        return 1
    start = struct.unpack_from(endian + "L", data, 4)[0]
    if start + 2 > len(data):
        return None
    count = struct.unpack_from(endian + "H", data, start)[0]
    entry = struct.Struct(endian + "HHL")
    far = 0  # bytes of values that stand outside their entry, as far as they were read
    for position in range(start + 2, min(start + 2 + 12 * count, len(data) - 11), 12):
        tag, kind, number = entry.unpack_from(data, position)
        unit = _UNIT.get(kind)
        if unit is None or number == 0:
            continue
        size = unit * number
        where = position + 8
        if size > 4:
            far += size
            if far > len(data):
                continue
            where = struct.unpack_from(endian + "L", data, position + 8)[0]
            if where + size > len(data):
                return None  # readers stop here: what follows in the directory is not seen
        if tag == _EXIF_ORIENTATION:
            return _number(endian, kind, data[where : where + size])
    return None


def _number(endian: str, kind: int, value: bytes) -> int:
    """The first number of a tag as an orientation; 1 where it is none."""
    if kind in _FORMAT:
        found: float = struct.unpack_from(endian + _FORMAT[kind], value)[0]
    elif kind in (5, 10):
        top, bottom = struct.unpack_from(endian + ("LL" if kind == 5 else "ll"), value)
        if bottom == 0 or top % bottom:
            return 1
        found = top // bottom
    else:
        return 1
    return int(found) if found in (1, 2, 3, 4, 5, 6, 7, 8) else 1


# --------------------------------------------------------------------------------------------
# BMP headers (OS/2 core header and the Windows headers up to version 5) and their pixel bytes
# --------------------------------------------------------------------------------------------
BMP_MAGIC = b"BM"

_HEADERS = (40, 52, 56, 64, 108, 124)
_BMP_DEPTHS = (1, 4, 8, 16, 24, 32)
_RAW, _RLE8, _RLE4, _BITFIELDS = range(4)


def parse_bmp(head: Head) -> Parsed:
    """Header facts of a BMP.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data = head.bytes
    head.need(0, 26, "inside its BMP header")
    length = struct.unpack_from("<L", data, 14)[0]
    if length == 12:
        width, height, _, bits = struct.unpack_from("<4H", data, 18)
        compression = _RAW
    elif length in _HEADERS:
        head.need(0, 14 + length, "inside its BMP header")
        width, height, _, bits, compression = struct.unpack_from("<LLHHL", data, 18)
        if data[25] == 0xFF:  # rows from top to bottom: the height is negative
            height = 2**32 - height
    else:
        raise head.fail("unreadable_media", f"is no BMP this reader knows (header of {length} bytes)")
    other = bits not in _BMP_DEPTHS or compression not in (_RAW, _RLE8, _RLE4, _BITFIELDS)
    told = f"is a BMP of {bits} bits per pixel, compression {compression}"
    head.refuse(other, told, "unsupported_media")
    if compression in (_RLE8, _RLE4):
        complete = head.at(head.size - 2, 2) == b"\0\1"  # the end-of-bitmap code
    else:
        start = struct.unpack_from("<L", data, 10)[0]
        complete = start + ((width * bits + 31) >> 3 & ~3) * height <= head.size
    return Parsed(width, height, 1, complete)


# --------------------------------------------------------------------------------------------
# GIF headers: the screen, grown to the first frame where that is larger; end of the first frame
# --------------------------------------------------------------------------------------------
# Only the first frame is used by anyone who trains on a GIF, so a file cut in a later frame is complete.
GIF_MAGICS = (b"GIF87a", b"GIF89a")

_IN_GIF = "inside its GIF header"


def parse_gif(head: Head) -> Parsed:
    """Header facts of a GIF.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    data = head.need(0, 13, _IN_GIF)
    width, height = struct.unpack_from("<HH", data, 6)
    position = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while True:  # each block is a step of the budget
        block = head.need(position, 1, _IN_GIF)
        if block == b"!":
            behind = _skip(head, position + 2)
            position = head.size if behind < 0 else behind  # nothing stands at its size
        elif block == b",":
            break
        elif block == b";":
            raise head.fail("unreadable_media", "is a GIF without a picture")
        else:
            position += 1  # readers pass over stray bytes between blocks
    frame = head.need(position, 10, _IN_GIF)
    left, top, wide, high = struct.unpack_from("<4H", frame, 1)
    pixels = position + 10 + (3 << (frame[9] & 7) + 1 if frame[9] & 0x80 else 0) + 1
    head.need(pixels - 1, 1, _IN_GIF)
    complete = head.at(head.size - 2, 2) == b"\0;" or _skip(head, pixels) >= 0
    return Parsed(max(width, left + wide), max(height, top + high), 1, complete)


def _skip(head: Head, position: int) -> int:
    """Where the chain of sub-blocks at `position` ends, or -1 when the file ends first."""
    data, base = head.bytes, 0
    while True:  # each sub-block is a step; writers fill them with 255 bytes
        head.spend()
        at = position - base
        if at >= len(data):
            if position >= head.size:
                return -1
            data, base, at = head.at(position, 1 << 16), position, 0
        if not data[at]:
            return position + 1
        position += 1 + data[at]


# --------------------------------------------------------------------------------------------
# JPEG headers: frame size, EXIF orientation and the end marker, without decoding
# --------------------------------------------------------------------------------------------
# Walks the marker segments up to the first scan as Pillow does (junk between segments is skipped, the
# last frame header wins). The end is normally the last two bytes (zero padding is passed over); a file
# with other data behind it (second pictures, motion photos) is searched for its own end marker.
JPEG_MAGIC = b"\xff\xd8\xff"

_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), 0xDE))
_BARE = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))  # markers without a segment
_NO_SEGMENT = frozenset((0, 0xFF, *_BARE))
_IN_JPEG = "inside its JPEG header"
_WINDOW = 2048
_JPEG_EXIF = b"Exif\0\0"
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def parse_jpeg(head: Head) -> Parsed:
    """Header facts of a JPEG.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data, base = head.bytes, 0  # the window looked at, and where it starts
    position = 2
    frame: tuple[int, int] | None = None
    notes: list[bytes] = []
    while True:
        head.spend()
        at = position - base
        if at + 4 > len(data):
            data, base, at = head.need(position, 4, _IN_JPEG, _WINDOW), position, 0
        marker = data[at + 1]
        if data[at] != 0xFF or marker in _NO_SEGMENT:
            position += _gap(data, at)
            continue
        if marker < 0xC0:
            raise head.fail("unreadable_media", f"is a broken JPEG: no marker at byte {position}")
        length = max(2, data[at + 2] << 8 | data[at + 3])
        stop = position + 2 + length
        if stop > head.size:
            raise head.fail("truncated_media", f"is cut short {_IN_JPEG}")
        if marker in _FRAMES:
            frame = _frame(head, head.at(position + 4, length - 2))
        elif marker == 0xE1:
            notes.append(head.at(position + 4, length - 2))
        elif marker == 0xDA:
            break
        position = stop
    if frame is None:
        raise head.fail("unreadable_media", "is a broken JPEG: a scan before its frame header")
    return Parsed(*frame, _jpeg_orientation(notes) if notes else 1, _ends(head, stop))


def _gap(data: bytes, at: int) -> int:
    """How many bytes to pass over where no segment begins: junk, fill bytes, a bare marker."""
    if data[at] != 0xFF:
        found = data.find(b"\xff", at)
        return (found if found >= 0 else len(data)) - at
    return 1 if data[at + 1] == 0xFF else 2


def _jpeg_orientation(notes: list[bytes]) -> int:
    """How the APP1 segments of a JPEG say that it is turned: by EXIF, however many they are, or by XMP."""
    exif: list[bytes] = []
    xmp: bytes | None = None
    for note in notes:
        if note.startswith(_JPEG_EXIF):
            exif.append(note[len(_JPEG_EXIF) :] if exif else note)
        elif note.startswith(_JPEG_XMP):
            xmp = note[len(_JPEG_XMP) :]
    return orientation(b"".join(exif) or None, xmp)


def _frame(head: Head, segment: bytes) -> tuple[int, int]:
    """(width, height) of a frame header."""
    head.refuse(len(segment) < 6, "is a broken JPEG: short frame header")
    bits, components = segment[0], segment[5]
    told = f"is a JPEG of {components} components of {bits} bits (not 1, 3 or 4 of 8)"
    head.refuse(bits != 8 or components not in (1, 3, 4), told, "unsupported_media")
    return segment[3] << 8 | segment[4], segment[1] << 8 | segment[2]


def _ends(head: Head, scan: int) -> bool:
    """Whether the picture whose first scan starts at byte `scan` has its end marker."""
    if head.at(max(scan, head.size - 64), 64).rstrip(b"\0").endswith(b"\xff\xd9"):
        return True
    data = head.at(scan, head.size - scan)
    position = 0
    while found := _MARKER.search(data, position):
        head.spend()
        position = found.end()
        code = data[position - 1]
        if code == 0xD9:
            return True
        if code >= 0xC0 and code not in _BARE:
            if position + 2 > len(data):
                return False
            position += data[position] << 8 | data[position + 1]
    return False


# --------------------------------------------------------------------------------------------
# PNG headers: size, orientation (eXIf chunk, raw EXIF profile, XMP) and the IEND chunk
# --------------------------------------------------------------------------------------------
# Chunks are walked by their length fields; pixel data are never read. Metadata may follow the pixels, so
# the chunk in front of IEND must be looked at: where IDAT chunks are small and many, the last one is found
# from the end of the file instead of walking thousands of them.
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

_IN_PNG = "inside its PNG header"
_END = b"\0\0\0\0IEND\xaeB`\x82"
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_PROFILE = b"Raw profile type exif"
_PNG_XMP = b"XML:com.adobe.xmp"
_TEXT_LIMIT = 1 << 20
_NEAR = 16384  # IDAT chunks up to this size are looked for from the end


@dataclass(slots=True)
class _Notes:
    """Metadata met so far; later chunks replace earlier ones."""

    exif: bytes | None = None
    profile: bytes | None = None
    xmp: bytes | None = None
    animated: bool = False

    def take(self, head: Head, kind: bytes, position: int, length: int) -> None:
        if kind == b"acTL":
            self.animated = True
        elif kind == b"eXIf":
            self.exif = head.at(position, length)
        elif kind in _TEXTS and length <= _TEXT_LIMIT:
            key, value = _text(kind, head.at(position, length))
            if key == _PROFILE:
                self.profile = _unhex(value)
            elif key == _PNG_XMP:
                self.xmp = value
            elif key == b"exif" and kind == b"tEXt":
                self.exif = value

    def orientation(self) -> int:
        exif = self.exif if self.exif is not None else self.profile
        return orientation(exif, self.xmp) if exif or self.xmp else 1


def parse_png(head: Head) -> Parsed:
    """Header facts of a PNG.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data, notes = head.bytes, _Notes()
    head.need(0, 33, _IN_PNG)
    width, height = _ihdr(head, data)
    position = 8 + 12 + struct.unpack_from(">L", data, 8)[0]
    while True:
        length, kind = _chunk(head, position)
        if kind == b"IDAT":
            break
        head.refuse(kind == b"IEND", "is a PNG without pixel data")
        notes.take(head, kind, position + 8, length)
        position += 12 + length
    complete = _tail(head, position, length, notes)  # which may take notes of more
    return Parsed(width, height, notes.orientation(), complete)


def _ihdr(head: Head, data: bytes) -> tuple[int, int]:
    length, kind = struct.unpack_from(">L4s", data, 8)
    head.refuse(kind != b"IHDR" or not 13 <= length <= 4096, "is a broken PNG: no header chunk at its start")
    body = head.need(12, length + 8, _IN_PNG)
    crc = struct.unpack(">L", body[-4:])[0]
    head.refuse(zlib.crc32(body[:-4]) != crc, "is a broken PNG: wrong checksum of its header chunk")
    told = f"is a PNG of colour type {data[25]} with {data[24]} bits"
    head.refuse(data[24] not in _PNG_DEPTHS.get(data[25], ()), told, "unsupported_media")
    width, height = struct.unpack_from(">LL", data, 16)
    return width, height


def _chunk(head: Head, position: int) -> tuple[int, bytes]:
    """(length, kind) of the chunk at `position`."""
    field = head.need(position, 8, _IN_PNG)
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
    if key not in (_PROFILE, _PNG_XMP, b"exif"):
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


# --------------------------------------------------------------------------------------------
# TIFF headers: size, orientation and extent of the first directory. BigTIFF is left to Pillow
# --------------------------------------------------------------------------------------------
TIFF_MAGICS = (b"II*\0", b"MM\0*")

_WIDTH, _HEIGHT, _TIFF_ORIENTATION = 256, 257, 274
_EXTENTS = ((273, 279), (324, 325))  # (offsets, byte counts) of strips and of tiles
_INTEGERS = {1: "B", 3: "H", 4: "L"}
_SIZES = {1: 1, 3: 2, 4: 4}


def parse_tiff(head: Head) -> Parsed:
    """Header facts of a TIFF; the size is the stored one, as for every format.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    endian = "<" if head.bytes[:2] == b"II" else ">"
    start = struct.unpack(endian + "L", head.need(4, 4, "inside its TIFF header"))[0]
    count = struct.unpack(endian + "H", head.need(start, 2, "before its TIFF directory"))[0]
    table = head.need(start + 2, 12 * count, "inside its TIFF directory")
    tags: dict[int, tuple[int, ...]] = {}
    for position in range(0, len(table), 12):
        tag, kind, number = struct.unpack_from(endian + "HHL", table, position)
        code = _INTEGERS.get(kind)
        wanted = tag in (_WIDTH, _HEIGHT, _TIFF_ORIENTATION) or any(tag in pair for pair in _EXTENTS)
        if code is None or not number or not wanted or tag in tags:
            continue
        size = number * _SIZES[kind]
        where = struct.unpack_from(endian + "L", table, position + 8)[0]
        value = table[position + 8 : position + 8 + size] if size <= 4 else head.at(where, size)
        if len(value) < size:
            continue  # without a strip table the file counts as suspicious, and Pillow is asked
        tags[tag] = struct.unpack(f"{endian}{number}{code}", value)
    head.refuse(_WIDTH not in tags or _HEIGHT not in tags, "is a broken TIFF: no width or height")
    turned = tags.get(_TIFF_ORIENTATION, (1,))[0]
    complete = any(
        offsets in tags
        and counts in tags
        and all(o + c <= head.size for o, c in zip(tags[offsets], tags[counts], strict=False))
        for offsets, counts in _EXTENTS
    )
    return Parsed(tags[_WIDTH][0], tags[_HEIGHT][0], turned if 1 <= turned <= 8 else 1, complete)


# --------------------------------------------------------------------------------------------
# WebP headers: VP8 (lossy), VP8L (lossless) and VP8X (extended) sizes, EXIF/XMP chunks, RIFF length
# --------------------------------------------------------------------------------------------
_WEBP_EXIF, _WEBP_XMP = 0x08, 0x04  # flags of the extended header


def is_webp(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def parse_webp(head: Head) -> Parsed:
    """Header facts of a WebP.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data = head.bytes
    kind = data[12:16]
    head.need(0, 25 if kind == b"VP8L" else 30, "inside its WebP header")
    complete = 8 + int.from_bytes(data[4:8], "little") <= head.size
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        turned = _turned(head, data[20]) if data[20] & (_WEBP_EXIF | _WEBP_XMP) else 1
        return Parsed(width, height, turned, complete)
    if kind == b"VP8L":
        head.refuse(data[20] != 0x2F, "is a broken WebP: no lossless signature")
        bits = int.from_bytes(data[21:25], "little")
        return Parsed(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 1, complete)
    if kind == b"VP8 ":
        unframed = data[23:26] != b"\x9d\x01\x2a" or data[20] & 1
        head.refuse(unframed, "is a broken WebP: no key frame at its start")
        width, height = struct.unpack_from("<HH", data, 26)
        return Parsed(width & 0x3FFF, height & 0x3FFF, 1, complete)
    raise head.fail("unsupported_media", f"is a WebP with an unknown first chunk {kind!r}")


def _turned(head: Head, flags: int) -> int:
    """Orientation from the EXIF or XMP chunk that the flags announce; the first of a kind counts."""
    exif: bytes | None = None
    xmp: bytes | None = None
    position = 12
    stop = min(head.size, 8 + int.from_bytes(head.bytes[4:8], "little"))
    while position + 8 <= stop:
        field = head.at(position, 8)
        length = int.from_bytes(field[4:], "little")
        kind = field[:4]
        if kind == b"EXIF" and exif is None and flags & _WEBP_EXIF:
            exif = head.at(position + 8, length)
        elif kind == b"XMP " and xmp is None and flags & _WEBP_XMP:
            xmp = head.at(position + 8, length)
        position += 8 + length + (length & 1)
    return orientation(exif, xmp)
