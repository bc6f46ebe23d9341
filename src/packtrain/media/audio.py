"""Lengths of sound files from their headers, and the samples themselves, agreeing with each other.

`read_header` answers how many sample frames a decoder gives, without decoding:

    WAVE        `data` chunk over bytes per frame (RIFF, RIFX, RF64, BW64; PCM, float, A-law, µ-law)
    FLAC        total of STREAMINFO, and the last frame is there
    MP3         Xing/Info (less the padding a LAME tag names) or VBRI, else the frames are walked
    Ogg         granule of the last page: Vorbis, and Opus at the rate libsndfile decodes it to
    others      what the library soundfile says (AIFF, AU, CAF, W64, ADPCM in WAVE, FLAC in Ogg, …)

The format is told by content, never by the suffix. `open_audio` decodes with soundfile (extra `audio`) and
checks that the decoder gave as many frames as the header said, so the length measured is the length
trained on. Both raise the same `SampleError` reasons: missing_media, truncated_media (a decoder would give
fewer samples, silently), unreadable_media (empty, broken, no samples), unsupported_media (no sound format
that is read here, such as AAC in MP4).
"""

from __future__ import annotations

import io
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, one_line, optional
from . import _sound_headers as headers
from .location import Head, ParsedAudio, Ref, as_file, open_head, open_whole

MOST_VALUES = 1 << 31  # samples of all channels: 6 hours of CD sound, 8 GiB decoded

_OTHERS = {b"FORM": "AIFF", b".snd": "AU", b"caff": "CAF", b"riff": "W64", b"RIFF": "WAV", b"fLaC": "FLAC"}


class AudioHeader(NamedTuple):
    """What the header of a sound file says.

    Attributes:
        frames: samples per channel, as a decoder gives them.
        sample_rate: Hz.
        channels: 1 or more.
        format: "WAV", "FLAC", "MP3", "OGG", or soundfile's name of another format.
    """

    frames: int
    sample_rate: int
    channels: int
    format: str

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.sample_rate


def read_header(ref: Ref) -> AudioHeader:
    """Length of a sound file without decoding it.

    Args:
        ref: path, URL, tar member, data URL or bytes (`packtrain.media.location`).

    Raises:
        SampleError: missing_media, truncated_media, unreadable_media, unsupported_media.
        MissingExtraError: a format that needs soundfile, and it is not installed.
    """
    with open_head(ref) as head:
        return _read(head)


def open_audio(ref: Ref) -> tuple[NDArray[np.float32], int]:
    """(samples float32[frames, channels] in -1..1, sample rate in Hz).

    Raises:
        SampleError: the reasons of `read_header`, for the same files.
        MissingExtraError: soundfile is not installed.
    """
    with open_whole(ref) as head:
        header = _read(head)
        soundfile = optional("soundfile", "soundfile", "audio")
        if header.format == "OGG":
            headers.check_pages(head)
        try:
            most = header.frames + 1  # one too many is enough to tell
            samples, rate = soundfile.read(io.BytesIO(head.bytes), most, dtype="float32", always_2d=True)
        except Exception as error:
            raise _broken(head, error) from None
        if samples.shape != (header.frames, header.channels) or rate != header.sample_rate:
            raise head.fail(
                "unreadable_media",
                f"says {header.frames} frames of {header.channels} channels at {header.sample_rate} Hz "
                f"in its header but decodes to {'more' if len(samples) == most else len(samples)} of "
                f"{samples.shape[1]} at {rate} Hz",
            )
        return samples, int(rate)


# --------------------------------------------------------------------------------------------
def _read(head: Head) -> AudioHeader:
    name, parsed = _parse(head)
    if parsed is None:
        name, parsed = _ask(head)
    ended = f"is cut short: its {name} data end before its samples do"
    head.refuse(not parsed.complete, ended, "truncated_media")
    if not 0 < parsed.frames * parsed.channels <= MOST_VALUES:
        told = f"says {parsed.frames:,} frames of {parsed.channels} channels"
        raise head.fail("unreadable_media", f"{told}, a sound has at most {MOST_VALUES:,} values, and one")
    return AudioHeader(parsed.frames, parsed.sample_rate, parsed.channels, name)


def _parse(head: Head) -> tuple[str, ParsedAudio | None]:
    """(format, facts) by magic bytes; no facts where only a decoder can tell."""
    data = head.bytes
    head.refuse(not data, "is empty (0 bytes)")
    start = _after_id3(data) if data.startswith(b"ID3") else 0
    magic = head.at(start, 12)
    if headers.is_wav(magic):
        return "WAV", headers.parse_wav(head) if not start else None
    if magic.startswith(headers.FLAC_MAGIC):
        return "FLAC", headers.parse_flac(head, start)
    if magic.startswith(headers.OGG_MAGIC):
        return "OGG", headers.parse_ogg(head)
    if start or headers.is_mp3(magic):
        return "MP3", headers.parse_mp3(head, start)
    magics = (*_OTHERS, headers.OGG_MAGIC)
    short = len(data) < 12 and any(one.startswith(data) or data.startswith(one) for one in magics)
    head.refuse(short, f"is cut short: {len(data)} bytes are no sound file", "truncated_media")
    return "", None


def _after_id3(data: bytes) -> int:
    """Where an ID3v2 tag at the start ends (its size has 7 bits a byte)."""
    if len(data) < 10:
        return len(data)
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return size + (20 if data[5] & 0x10 else 10)


def _ask(head: Head) -> tuple[str, ParsedAudio]:
    """What soundfile says, for formats without an own header reader."""
    head.refuse(_is_cut(head), "is cut short: it holds fewer bytes than its header says", "truncated_media")
    soundfile = optional("soundfile", "soundfile", "audio")
    if head.bytes.startswith(headers.OGG_MAGIC):
        headers.check_pages(head)
    try:
        with soundfile.SoundFile(as_file(head)) as sound:
            # `parse_mp3` found none; to decode junk takes time with the square of its size
            junk = f"begins with {headers.LEADING:,} bytes without MPEG audio"
            head.refuse(sound.format in ("MPEG", "MP3"), junk)
            frames, known = sound.frames, sound.frames < 1 << 62
            if not known or sound.format in ("OGG", "FLAC"):
                # its length is an estimate there: count
                frames = 0
                for block in sound.blocks(1 << 16, dtype="int16", always_2d=True):
                    frames += len(block)
                    if frames * sound.channels > MOST_VALUES:
                        break
            return sound.format, ParsedAudio(frames, sound.samplerate, sound.channels)
    except SampleError:
        raise
    except Exception as error:
        raise _broken(head, error) from None


def _broken(head: Head, error: Exception) -> SampleError:
    if head.bytes[:4] in _OTHERS or head.bytes.startswith((b"ID3", headers.OGG_MAGIC, b"\xff")):
        return head.fail("unreadable_media", f"cannot be decoded ({one_line(error, 160)})")
    return head.fail(
        "unsupported_media",
        f"is no sound format that is read here (it starts with {head.bytes[:8]!r})",
        hint="WAVE, FLAC, MP3, Ogg (Vorbis, Opus), AIFF, AU and CAF are read; convert it",
    )


_W64 = b"riff\x2e\x91\xcf\x11"


def _is_cut(head: Head) -> bool:
    """True when the header promises more bytes than the file holds; False where it does not say.

    libsndfile decodes what is left of such a file and says nothing. Layouts: Apple's AIFF ("FORM", bytes that
    follow, big-endian u32) and CAF ("caff" and a chain of chunks, type and size, big-endian i64; -1 = to the
    end), the NeXT/Sun .au header (".snd", offset and size of the data, big-endian u32; all ones = not known),
    Sony's Wave64 (16-byte id, whole size, little-endian u64).
    """
    data = head.bytes
    if data[:4] == b"FORM" and len(data) >= 8:
        return int.from_bytes(data[4:8], "big") + 8 > head.size + 1  # an odd last chunk may lack its pad byte
    if data[:4] == b".snd" and len(data) >= 12:
        offset, size = struct.unpack_from(">LL", data, 4)
        return bool(size != 0xFFFFFFFF and offset + size > head.size)
    if data.startswith(_W64) and len(data) >= 24:
        return int.from_bytes(data[16:24], "little") > head.size
    return data[:4] == b"caff" and _caf_is_cut(head)


def _caf_is_cut(head: Head) -> bool:
    position = 8
    while position < head.size:
        field = head.at(position, 12)
        if len(field) < 12:
            return True
        kind, size = struct.unpack(">4sq", field)
        if size < 0:
            return False  # runs to the end of the file
        position += 12 + size
        if kind == b"data":
            return bool(position > head.size)
    return True  # no sound before the end
