"""A folder of sound clips with transcripts, as chats: the clip and PROMPT, answered by the transcript.

Transcripts come from, in this order:

    manifest.jsonl, metadata.jsonl   {"file" | "file_name" | "audio" | "audio_filepath" | "path", "text" | …}
    metadata.csv                     Hugging Face (header with `file_name`) or LJSpeech (`id|text|normalised`)
    *.trans.txt                      LibriSpeech: `CLIP-ID words of the clip`
    X.txt, X.lab                     beside X.wav

With a manifest or `metadata` file the samples are its rows, in its order, one each; else they are the clips
of the folder and the folders in it, in natural order. Text is `text`, `transcription`, `transcript`,
`sentence` or `normalized_text`. `frames`, `samplerate` (`sample_rate`), `channels` and `duration` of a row
stay beside the ref as hints.

A clip without a transcript is a sample that raises `no_assistant_turn`: it is counted, not lost. An id of a
table that two clips have (`a.wav`, `a.flac`) is a `malformed_record`. Names match to the letter, else in
composed form (NFC).
"""

from __future__ import annotations

import csv
import io
import logging
import operator
import os
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import SampleError, SourceError
from ..files import StrPath
from ..media.knobs import ENDS, STARTS
from ..media.location import identity
from ._handles import contents
from ._open import natural
from ._records import loads, numbered

PROMPT = "Transcribe the audio."
SUFFIXES_OF_CLIPS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au")
TABLES = ("manifest.jsonl", "metadata.jsonl", "metadata.csv")

_FILES = ("file", "file_name", "audio", "audio_filepath", "path", "wav")
_TEXTS = ("text", "transcription", "transcript", "sentence", "normalized_text")
_HINTS = {
    **dict.fromkeys(("samplerate", "sample_rate", "sampling_rate"), "sample_rate"),
    **{name: name for name in ("frames", "channels", "duration")},
}
_KNOWN = frozenset((*_FILES, *_TEXTS, *_HINTS, *STARTS, *ENDS))

Row = dict[str, Any]

log = logging.getLogger(__name__)


class Clips:
    """Clips of a folder. Rows are held in memory; clips are opened by whoever measures or encodes them."""

    def __init__(self, folder: str, kind: str, rows: list[Row], prompt: str, unlisted: int = 0) -> None:
        self.folder, self._kind, self._rows, self._prompt = folder, kind, rows, prompt
        self.unlisted = unlisted  # clips of the folder that its table does not name
        # of names, texts, hints and prompt; the clips are no part of it, as with other media
        self.fingerprint = files.digest_json({"kind": "audio_dir", "rows": rows, "prompt": prompt})

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        told = {"kind": "audio_dir", "from": self._kind, "records": len(self), "prompt": self._prompt}
        return {**told, "unlisted": self.unlisted} if self.unlisted else told

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[numbered(index, len(self), self.folder)]
        if row.get("fault"):
            raise SampleError("malformed_record", f"{self.where(index)} {row['fault']}")
        if row["text"] is None:
            raise SampleError("no_assistant_turn", f"{self.where(index)} has no transcript")
        asked: list[Row] = [{"type": "audio", "audio": row["file"], **row["hints"]}]
        if self._prompt:
            asked.append({"type": "text", "text": self._prompt})
        return {
            **row.get("left", {}),
            "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": row["text"]}],
        }

    def where(self, index: int) -> str:
        """`manifest.jsonl:17`, or the clip's name."""
        row = self._rows[operator.index(index)]
        return f"{self._kind}:{row['line']}" if "line" in row else str(row["file"])

    def __repr__(self) -> str:
        return f"<audio_dir {self.folder}: {len(self)} records, {self.fingerprint[:7]}>"


def open_source(
    path: StrPath, *, prompt: str = PROMPT, cache_dir: StrPath | None = None, verify_content: bool = False
) -> Clips:
    """Open a folder of clips.

    Args:
        path: the folder, or its manifest or metadata file.
        prompt: what the user says after the clip; "" for the clip alone.
        cache_dir: not used: nothing is stored.
        verify_content: open every clip now (its size and header), so that a missing one is named at once.

    Raises:
        SourceError: no such folder, or no clips in it.
    """
    text = os.path.abspath(os.fspath(path))
    table = None
    if os.path.isfile(text):
        text, table = os.path.split(text)
        if not table.lower().endswith((".jsonl", ".csv")):
            raise SourceError(f"{table} is no manifest of clips", hint="name its folder, a .jsonl or a .csv")
    elif not os.path.isdir(text):
        raise SourceError(f"{text} is not a folder")
    table = table or next((name for name in TABLES if os.path.isfile(os.path.join(text, name))), None)
    rows = list(_of_table(text, table) if table else _of_folder(text))
    if not rows:
        raise SourceError(f"{text} holds no sound clips", hint=f"suffixes: {', '.join(SUFFIXES_OF_CLIPS)}")
    if verify_content:
        for row in rows:
            if not row.get("fault"):
                identity(os.path.join(text, row["file"]))
    unlisted = _unlisted(text, rows) if table else []
    if unlisted:
        told = "%s: %d clips stand in no row of %s and are no samples, such as %s"
        log.warning(told, text, len(unlisted), table, unlisted[0])
    return Clips(text, table or "folder", rows, prompt, len(unlisted))


# --------------------------------------------------------------------------------------------
def _of_table(folder: str, table: str) -> Iterator[Row]:
    lines = _text(os.path.join(folder, table)).split("\n")
    ids = _stems(folder) if table.endswith(".csv") else {}
    read = _json_lines(lines) if table.endswith(".jsonl") else _csv_lines(lines)
    for number, record in read:
        yield {"line": number, **_row(record, ids)}


def _row(record: Row | str, ids: Mapping[str, list[str]]) -> Row:
    """A row of a table: its clip, text and hints, or what is wrong with it."""
    if isinstance(record, str):
        return {"file": "", "fault": record}
    name = next((record[key] for key in _FILES if record.get(key)), None)
    name = name.get("path") if isinstance(name, Mapping) else name
    if not isinstance(name, str) or not name:
        return {"file": "", "fault": "names no clip"}
    if not name.lower().endswith(SUFFIXES_OF_CLIPS):  # LJSpeech names clips by their stem
        found = ids.get(_composed(name), [name])
        if len(found) > 1:
            return {"file": "", "fault": f"names {name!r}, which is {' and '.join(found)}"}
        name = found[0]
    said = next((record[key] for key in _TEXTS if isinstance(record.get(key), str)), None)
    hints: Row = {}
    for key, hint in _HINTS.items():
        if isinstance(record.get(key), (int, float)) and record[key]:
            hints.setdefault(hint, record[key])
    hints.update({key: record[key] for key in (*STARTS, *ENDS) if record.get(key) not in (None, "")})
    left = {key: value for key, value in record.items() if key not in _KNOWN}
    return {"file": name, "text": said or None, "hints": hints, **({"left": left} if left else {})}


def _json_lines(lines: list[str]) -> Iterator[tuple[int, Row | str]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"is not valid JSON: {error}"
            continue
        yield number, record if isinstance(record, dict) else "is not an object"


def _csv_lines(lines: list[str]) -> Iterator[tuple[int, Row | str]]:
    first = next((line for line in lines if line.strip()), "")
    if first.count("|") >= 1 and "," not in first.partition("|")[0]:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                cells = line.rstrip("\r").split("|")
                yield number, {"file": cells[0], "text": next(filter(None, cells[2:0:-1]), "")}
        return
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    for record in reader:
        yield reader.line_num, {key: value for key, value in record.items() if key is not None}


def _of_folder(folder: str) -> Iterator[Row]:
    spoken: dict[str, str] = {}
    for path in sorted(Path(folder).rglob("*.trans.txt")):
        for line in _text(str(path)).split("\n"):
            name, _, words = line.strip().partition(" ")
            if words:
                spoken[_composed(os.path.relpath(path.parent / name, folder))] = words
    for name in sorted(_clips(folder), key=natural):
        stem = os.path.splitext(name)[0]
        text = spoken.get(_composed(stem))
        for suffix in (".txt", ".lab"):
            beside = os.path.join(folder, stem + suffix)
            if text is None and os.path.isfile(beside):
                text = _text(beside).strip()
        yield {"file": name.replace(os.sep, "/"), "text": text or None, "hints": {}}


def _clips(folder: str) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if path.suffix.lower() in SUFFIXES_OF_CLIPS and not path.name.startswith(".")
    ]


def _unlisted(folder: str, rows: list[Row]) -> list[str]:
    """Clips of a folder that no row of its table names."""
    named = {_composed(os.path.normpath(row["file"])) for row in rows if row["file"]}
    return [name for name in sorted(_clips(folder), key=natural) if _composed(name) not in named]


def _stems(folder: str) -> dict[str, list[str]]:
    """Stem of a clip's name (without folders) -> the clips that have it."""
    found: dict[str, list[str]] = {}
    for name in sorted(_clips(folder), key=natural):
        stem = os.path.splitext(os.path.basename(name))[0]
        found.setdefault(_composed(stem), []).append(name.replace(os.sep, "/"))
    return found


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name.replace(os.sep, "/"))


def _text(path: str) -> str:
    try:
        return contents(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(f"{path} is not UTF-8") from None
