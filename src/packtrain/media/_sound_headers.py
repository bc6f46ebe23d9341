"""Headers of sounds (WAVE, MPEG audio, FLAC, Ogg): sample frames, and whether the end is there."""

from __future__ import annotations

import re
import struct
from functools import cache

from .location import Head, ParsedAudio

# --------------------------------------------------------------------------------------------
# WAVE headers (RIFF, RIFX, RF64, BW64): sample frames from the sizes of the `fmt ` and `data` chunks
# --------------------------------------------------------------------------------------------
# A `data` chunk that says 0 or 0xFFFFFFFF was written by a program that could not go back to fill it in (a
# stream): its frames are what the file holds. Any other size that runs over the end of the file is a cut.
WAV_MAGICS = (b"RIFF", b"RIFX", b"RF64", b"BW64")

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_PLAIN = frozenset((_PCM, _FLOAT, _ALAW, _MULAW))
_STREAMED = (0, 0xFFFFFFFF)
_IN_WAVE = "inside its WAVE header"


def is_wav(data: bytes) -> bool:
    return data[:4] in WAV_MAGICS and data[8:12] == b"WAVE"


def parse_wav(head: Head) -> ParsedAudio | None:
    """Header facts of a WAVE file; None for a codec whose frames its header does not give.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    endian = ">" if head.bytes[:4] == b"RIFX" else "<"
    large: int | None = None
    plan: tuple[int, int, int, int] | None = None  # codec, channels, rate, bytes per frame
    position = 12
    while True:
        field = head.need(position, 8, _IN_WAVE if plan is None else "before its samples")
        kind, length = field[:4], struct.unpack(endian + "L", field[4:])[0]
        if kind == b"ds64":
            large = int.from_bytes(head.need(position + 8, 24, _IN_WAVE)[8:16], "little")
        elif kind == b"fmt ":
            most = max(1, min(length, 40))
            plan = _format(head, head.need(position + 8, 16, _IN_WAVE, most), endian)
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
    length = _told(head, position, length, large)
    return ParsedAudio(length // block, rate, channels, length <= held)


def _told(head: Head, position: int, length: int, large: int | None) -> int:
    """Bytes of samples in the `data` chunk at `position`, which says `length`."""
    if length == 0xFFFFFFFF and large is not None:
        return large
    held = head.size - position - 8
    if length not in _STREAMED:
        return length
    return held if length or (held > 0 and _last(head, position)) else 0


def _last(head: Head, position: int) -> bool:
    """Whether an empty `data` chunk is one that was never filled in: no further chunk follows it."""
    following = head.at(position + 8, 4)
    return not (following.isalnum() or following in (b"LIST", b"id3 ", b"fact"))


def _format(head: Head, body: bytes, endian: str) -> tuple[int, int, int, int]:
    codec, channels, rate, _, block, bits = struct.unpack_from(endian + "HHLLHH", body)
    if codec == _EXTENSIBLE and len(body) >= 26:
        codec = struct.unpack_from(endian + "H", body, 24)[0]
    wanted = channels * ((bits + 7) // 8) if codec in _PLAIN else block
    broken = not channels or not rate or block != wanted or (codec in _PLAIN and not wanted)
    told = f"is a broken WAVE: {channels} channels of {bits} bits at {rate} Hz in {block} bytes a frame"
    head.refuse(broken, told)
    return codec, channels, rate, block


# --------------------------------------------------------------------------------------------
# MPEG audio (MP1, MP2, MP3): sample frames from the Xing/Info or VBRI tag, else by walking the frames
# --------------------------------------------------------------------------------------------
# A LAME tag says how many samples of the first and last frame are padding; decoders leave them out, so they
# are not counted. The walk reads frame headers only (4 bytes every few hundred), tells a real header from
# chance by the one that follows it, and passes over ID3v2 in front and tags behind. A stream that goes on in
# another version, layer or rate has no one length: it is refused.
# -------------------------------------------------------------------------------------------- Tags behind the
# sound of a file: ID3v1, APE, appended ID3v2 and Lyrics3, in any order
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
_JUNK = 1 << 16  # how far the next frame is looked for
LEADING = 1 << 20  # and the first one
_MP3_SYNC = 0xFFFE0C00  # sync, version, layer and rate stay the same from frame to frame


class _Frame:
    """One frame header."""

    __slots__ = ("channels", "key", "layer", "rate", "samples", "side", "size", "version")

    def __init__(self, word: int, version: int, layer: int, kbps: int, rate: int) -> None:
        self.key = word & _MP3_SYNC
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


def is_mp3(data: bytes) -> bool:
    """Whether a file may be MPEG audio by its first bytes: a tag or a frame header."""
    return data.startswith(b"ID3") or (len(data) >= 4 and _header(data, 0) is not None)


def parse_mp3(head: Head, start: int = 0) -> ParsedAudio | None:
    """Header facts; None where no frames are found (it is another format).

    Args:
        head: the medium.
        start: where the sound begins, behind an ID3v2 tag.

    Raises:
        SampleError: truncated_media; unsupported_media: the format changes; unreadable_media: too much junk.
    """
    end = tags_begin(head, start)
    head.refuse(start >= head.size, "is cut short: nothing follows its ID3 tag", "truncated_media")
    looked = range(start, min(end, start + LEADING), _JUNK)
    position = next((place for at in looked if (place := _first(head, at, end)) >= 0), -1)
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


# --------------------------------------------------------------------------------------------
# FLAC headers: total samples from STREAMINFO; the last frame is looked for to know that it is all there
# --------------------------------------------------------------------------------------------
# The frame header at the end of the file carries its own position, so the check needs the tail only: a
# header whose CRC-8 fits, whose position plus size is the total, and whose CRC-16 covers the bytes up to the
# end (tags behind it are passed over).
FLAC_MAGIC = b"fLaC"
_IN_FLAC = "inside its FLAC header"
_FLAC_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_FRAME = (1 << 21) + (1 << 14)  # bytes of the largest frame: 65,535 samples of 8 channels, stored as they are
_SUMMED = 4  # headers of the last frame that chance may give: each sums the bytes up to the end

_BLOCKS = {1: 192, **{n: 576 << (n - 2) for n in range(2, 6)}, **{n: 256 << (n - 8) for n in range(8, 16)}}


def parse_flac(head: Head, start: int = 0) -> ParsedAudio | None:
    """Header facts of a FLAC file whose marker stands at `start`; None where its length is not known.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    info = head.need(start + 4, 38, _IN_FLAC)
    smallest, _ = struct.unpack_from(">HH", info, 4)
    largest = int.from_bytes(info[11:14], "big")
    packed = int.from_bytes(info[14:22], "big")
    rate, channels = packed >> 44, (packed >> 41 & 7) + 1
    total = packed & (1 << 36) - 1
    broken = info[0] & 0x7F or info[1:4] != b"\0\0\x22" or not rate
    head.refuse(broken, "is a broken FLAC: no STREAMINFO with a sample rate")
    position, last = start + 4, False
    while not last:
        field = head.need(position, 4, _IN_FLAC)
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
    for at in reversed([found.start() for found in _FLAC_SYNC.finditer(tail, 0, max(0, len(tail) - 9))]):
        head.spend(4)
        if _frame(tail, at, block) == total:
            summed += len(tail) - at
            head.refuse(summed > _SUMMED * len(tail), "is a broken FLAC: its end is full of frame headers")
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


# --------------------------------------------------------------------------------------------
# Ogg headers (Vorbis, Opus): sample frames from the granule position of the last page
# --------------------------------------------------------------------------------------------
# The first page names the codec, the tail holds the last page. Its granule counts samples from the start of
# the stream, at 48 kHz for Opus (whose pre-skip is not heard). A stream that was cut out of a longer one
# starts at a later granule: the first pages say so. Streams that follow each other in one file (chained) or
# share it (video beside sound) are left to the decoder.
OGG_MAGIC = b"OggS"

_TAIL = 1 << 16  # a page is at most 65 307 bytes
_BLOCK = 1 << 20
_NONE = -1  # granule of a page on which no packet ends
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)


def parse_ogg(head: Head) -> ParsedAudio | None:
    """Header facts of an Ogg file; None for what only a decoder can count.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    first = head.at(0, 27 + 255 + 64)
    short = len(first) < 28 or len(first) < 27 + first[26] + 30
    head.refuse(short, "is cut short inside its Ogg header", "truncated_media")
    serial, packet = first[14:18], first[27 + first[26] :]
    head.refuse(not first[5] & 2, "is a broken Ogg: it does not start with a first page")
    opus = packet.startswith(b"OpusHead")
    if not opus and not packet.startswith(b"\1vorbis"):
        return None
    if opus:
        channels, skip, given = packet[9], *struct.unpack_from("<HL", packet, 10)
        rate = next((known for known in _OPUS_RATES if given and given <= known), 48000)
    else:
        channels, rate = struct.unpack_from("<BL", packet, 11)
        skip = 0
    head.refuse(not channels or not rate, f"is an Ogg of {channels} channels at {rate} Hz")
    last = _last_page(head, serial)
    if last is None:
        return None
    granule, flags, stop, pages = last
    if pages < 3:  # the headers alone: no page with samples
        granule = skip
    if _starts_late(head, serial, granule):
        return None
    heard = max(0, granule - skip)
    frames = heard * rate // 48000 if opus else heard
    return ParsedAudio(frames, rate, channels, bool(flags & 4) or stop == head.size)


def _last_page(head: Head, serial: bytes) -> tuple[int, int, int, int] | None:
    """(granule, flags, end, number + 1) of the last whole page; None for chained or shared files."""
    start = max(0, head.size - 2 * _TAIL)
    tail = head.at(start, head.size - start)
    at = tail.rfind(OGG_MAGIC)
    best: tuple[int, int, int, int] | None = None
    cut = False
    while at >= 0:
        page = _page(tail, at)
        if page is None:
            cut = True
        elif page[0] != serial:
            return None
        else:
            granule, flags, stop, number = page[1:]
            if best is None:
                best = (granule, flags, start + stop, number + 1)
            if granule != _NONE:
                return (granule, 0 if cut else best[1], best[2] if not cut else -1, best[3])
        at = tail.rfind(OGG_MAGIC, 0, at)
    raise head.fail("truncated_media", "is cut short: it has no whole Ogg page at its end")


def _page(data: bytes, at: int) -> tuple[bytes, int, int, int, int] | None:
    """(serial, granule, flags, end, number) of the page at `at`; None where it is cut."""
    if at + 27 > len(data):
        return None
    flags, granule, serial, number = data[at + 5], *struct.unpack_from("<q4sL", data, at + 6)
    segments = data[at + 26]
    lacing = data[at + 27 : at + 27 + segments]
    stop = at + 27 + segments + sum(lacing)
    if len(lacing) < segments or stop > len(data):
        return None
    return serial, granule, flags, stop, number


def _starts_late(head: Head, serial: bytes, granule: int) -> bool:
    """Whether the first page that ends a packet of sound says more than it can hold: cut from a stream."""
    data = head.at(0, _TAIL)
    at, seen = 0, 0
    while (page := _page(data, at)) is not None:
        if page[1] > 0:
            # a packet holds at most 8192 samples (Vorbis) or 5760 (Opus)
            return bool(page[1] > 8192 * max(1, data[at + 26]) and page[1] != granule)
        at, seen = page[3], seen + 1
        if data[at : at + 4] != OGG_MAGIC or (page[0] != serial and seen):
            break
    return False


def check_pages(head: Head) -> None:
    """Refuse an Ogg that a decoder would check over and over: it sums up a page wherever `OggS` stands.

    Raises:
        SampleError: unreadable_media: such pages overlap, and are together beyond the budget of the medium.
    """
    for start in range(0, head.size, _BLOCK):
        block = head.at(start, _BLOCK + len(OGG_MAGIC) - 1)
        at = block.find(OGG_MAGIC)
        while at >= 0:
            data = head.at(start + at, 27 + 255)
            if len(data) > 27:
                lacing = data[27 : 27 + data[26]]
                head.at(start + at, 27 + len(lacing) + sum(lacing))
            at = block.find(OGG_MAGIC, at + 1)
