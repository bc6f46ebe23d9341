"""Ogg headers (Vorbis, Opus): sample frames from the granule position of the last page.

The first page names the codec, the tail holds the last page. Its granule counts samples from the start of
the stream, at 48 kHz for Opus (whose pre-skip is not heard). A stream that was cut out of a longer one
starts at a later granule: the first pages say so. Streams that follow each other in one file (chained) or
share it (video beside sound) are left to the decoder.
"""

from __future__ import annotations

import struct

from ._head import Head, ParsedAudio

__all__ = ["MAGIC", "parse"]

MAGIC = b"OggS"

_TAIL = 1 << 16  # a page is at most 65 307 bytes
_NONE = -1  # granule of a page on which no packet ends
_OPUS_RATES = (8000, 12000, 16000, 24000, 48000)


def parse(head: Head) -> ParsedAudio | None:
    """Header facts of an Ogg file; None for what only a decoder can count.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    first = head.at(0, 27 + 255 + 64)
    if len(first) < 28 or len(first) < 27 + first[26] + 30:
        raise head.fail("truncated_media", "is cut short inside its Ogg header")
    serial = first[14:18]
    packet = first[27 + first[26] :]
    if not first[5] & 2:
        raise head.fail("unreadable_media", "is a broken Ogg: it does not start with a first page")
    opus = packet.startswith(b"OpusHead")
    if not opus and not packet.startswith(b"\1vorbis"):
        return None
    if opus:
        channels, skip, given = packet[9], *struct.unpack_from("<HL", packet, 10)
        rate = next((known for known in _OPUS_RATES if given and given <= known), 48000)
    else:
        channels, rate = struct.unpack_from("<BL", packet, 11)
        skip = 0
    if not channels or not rate:
        raise head.fail("unreadable_media", f"is an Ogg of {channels} channels at {rate} Hz")
    last = _last_page(head, serial)
    if last is None:
        return None
    granule, flags, stop, pages = last
    if pages < 3:  # the headers alone: no page with samples
        granule = skip
    begins = _starts_late(head, serial, granule)
    if begins:
        return None
    frames = max(0, granule - skip)
    if opus:
        frames = frames * rate // 48000
    return ParsedAudio(frames, rate, channels, bool(flags & 4) or stop == head.size)


def _last_page(head: Head, serial: bytes) -> tuple[int, int, int, int] | None:
    """(granule, flags, end, number + 1) of the last whole page; None for chained or shared files."""
    start = max(0, head.size - 2 * _TAIL)
    tail = head.at(start, head.size - start)
    at = tail.rfind(MAGIC)
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
        at = tail.rfind(MAGIC, 0, at)
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
        if data[at : at + 4] != MAGIC or (page[0] != serial and seen):
            break
    return False
