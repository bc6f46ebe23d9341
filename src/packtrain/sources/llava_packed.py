"""Packs of LLaVA-OneVision's offline packing, read as the samples that were packed.

    ps_00000000.json         {"images": […], "prompt" or "prompts": […], "captions": […]}
    ps_00000000.img000.jpg   its images, loose beside it (or `img0.jpg`), or at the paths that `images`
                             names; in tars: members of the same key

Each place of the lists is one sample: a caption or a question with one image (flat lists), or turns with some
images or none (lists of lists). `<image>` in a prompt is where an image stands; without it images go first.
Prompts of captions are random fillers there that training does not read: `task="captions"` leaves them out.

The fingerprint covers the records (of tars: all bytes), not the place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from .. import files
from ..checks import one_of
from ..errors import SampleError, SourceError, counted
from ..files import StrPath
from ._handles import Pinned
from ._index import digest_files
from ._records import InParts, Parts, loads
from .webdataset import SUFFIXES as TARS
from .webdataset import Tars
from .webdataset import open_source as open_tars

TASKS = ("auto", "captions")
PLACEHOLDER = "<image>"
#: What their preparation writes in place of a text that it could not read.
_FAILED = re.compile(
    r"\s*(Error: File .* (does not exist|is not in valid JSON format)|An error occurred during )"
)


class LlavaPacked(InParts):
    """The samples of packs, one after the other; picklable.

    Args:
        packs: by number.
        folder: that relative image paths start from.
        task: see `open_source`.
    """

    kind = "llava_packed"

    def __init__(self, packs: _Loose | Tars, folder: str, task: str) -> None:
        self.folder, self._packs, self._task = folder, packs, task
        self._image = packs.image if isinstance(packs, _Loose) else partial(_in_tar, packs)
        counts: list[int] = []
        for number in range(len(packs)):
            captions = packs[number].get("captions")
            if not isinstance(captions, list):
                raise SourceError(
                    f"{packs.where(number)} is no pack: it has no list of captions",
                    hint="name a folder of ps_00000000.json, or their tars",
                )
            counts.append(len(captions))
        self._parts = Parts(folder, counts)
        self._read: tuple[int, dict[str, Any]] = (-1, {})
        self.fingerprint = files.digest_json(self.fields())

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        return {"kind": self.kind, "packs": self._packs.fingerprint, "task": self._task}

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, place = self._parts.place(index)
        if self._read[0] != number:
            self._read = (number, self._packs[number])
        record: Any = self._read[1]
        captions = record["captions"]
        prompts, images = record.get("prompts", record.get("prompt")), record.get("images")
        listed = isinstance(prompts, list) and isinstance(images, list)
        alike = listed and len(prompts) == len(images) == len(captions)
        self._refuse(not alike, number, "images, prompts and captions have not the same number of members")
        asked, said, names = prompts[place], captions[place], images[place]
        if self._task == "captions":
            asked = [""] if isinstance(said, list) else ""
        asked, said = ([one] if isinstance(one, str) else one for one in (asked, said))
        names = [names] if isinstance(names, str) else names
        paired = isinstance(asked, list) and isinstance(said, list) and len(asked) == len(said)
        self._refuse(not paired, number, f"member {place} has not as many prompts as captions")
        worded = isinstance(names, list) and all(isinstance(one, str) for one in [*asked, *said, *names])
        told = f"member {place} holds what is neither text nor the name of an image"
        self._refuse(not worded, number, told)
        failed = next((text for text in [*asked, *said] if _FAILED.match(text)), None)
        told = f"member {place} holds a failure in place of a text: {failed!r:.80}"
        self._refuse(failed is not None, number, told)
        refs = [self._image(number, name, place) for name in names if name]
        return {"messages": self._messages(number, place, asked, said, refs)}

    def where(self, index: int) -> str:
        number, place = self._parts.place(index)
        return f"{self._packs.where(number)}[{place}]"

    def _messages(
        self, number: int, place: int, asked: list[str], said: list[str], refs: list[str]
    ) -> list[dict[str, Any]]:
        """Turns by turns; images where `<image>` says, else in front."""
        found = sum(text.count(PLACEHOLDER) for text in asked)
        if found not in (0, len(refs)):
            raise SampleError(
                "placeholder_mismatch",
                f"{self._packs.where(number)}: member {place} has {found} {PLACEHOLDER} and "
                f"{counted(len(refs), 'images')}",
            )
        return turns(asked, said, [{"type": "image", "image": ref} for ref in refs], placed=found > 0)

    def _refuse(self, bad: bool, number: int, what: str) -> None:
        if bad:
            raise SampleError("malformed_record", f"{self._packs.where(number)}: {what}")


def turns(
    asked: Sequence[str], said: Sequence[Any], media: list[dict[str, Any]], *, placed: bool
) -> list[dict[str, Any]]:
    """Questions and contents of answers by turns; media where `<image>` stands (`placed`), else in front."""
    messages: list[dict[str, Any]] = []
    for question, answer in zip(asked, said, strict=True):
        content: list[dict[str, Any]] = []
        for number, text in enumerate(question.split(PLACEHOLDER) if placed else [question]):
            count = min(number, 1) if placed else len(media)
            content += media[:count]
            media = media[count:]
            content += [{"type": "text", "text": text}] if text else []
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages


class _Loose:
    """Packs as files of one folder: their records by number, and where an image of one is."""

    def __init__(self, folder: str, held: Sequence[Pinned]) -> None:
        self._folder, self._held = folder, list(held)
        self.fingerprint = files.digest_json([[os.path.basename(one.path), one.sha256] for one in self._held])

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._held[number].check()
        with open(self._held[number].path, "rb") as handle:
            return _record(handle.read(), self.where(number))

    def where(self, number: int) -> str:
        return os.path.basename(self._held[number].path)

    def image(self, number: int, name: str, place: int) -> str:
        beside = os.path.join(self._folder, f"{os.path.splitext(self.where(number))[0]}.{name}")
        return beside if os.path.isfile(beside) else name


def _in_tar(tars: Tars, number: int, name: str, place: int) -> str:
    """Where an image of a pack is that is a sample of tars. Its record may name where it was packed from."""
    if name.startswith("tar:"):
        return name
    tar, _, key = tars.where(number).rpartition("!")
    return f"tar:{os.path.join(tars.folder, tar)}!{key}.img{place}.jpg"


def open_source(
    path: StrPath, *, task: str = "auto", cache_dir: StrPath | None = None, verify_content: bool = False
) -> LlavaPacked:
    """Open packs of LLaVA-OneVision.

    Args:
        path: a folder of `ps_00000000.json` with their images, or tars (a tar, a folder of them, a glob).
        task: `auto`, or `captions`: prompts are left out, as its training leaves them out.
        cache_dir: where tables go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: missing, or no packs.
    """
    one_of("task", task, TASKS)
    place = os.path.abspath(os.fspath(path))
    listed = sorted(os.listdir(place)) if os.path.isdir(place) else []
    records = [os.path.join(place, name) for name in listed if name.endswith(".json") and name[0] != "."]
    if listed and records and not any(name.endswith(TARS) for name in listed):
        held = digest_files(records, place, ".packtrain-packs", cache_dir=cache_dir, verify=verify_content)
        return LlavaPacked(_Loose(place, held), place, task)
    tars = open_tars(path, cache_dir=cache_dir, verify_content=verify_content)
    return LlavaPacked(tars, tars.folder, task)


# --------------------------------------------------------------------------------------------
def _record(data: bytes, where: str) -> dict[str, Any]:
    try:
        record = loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise SourceError(f"{where} is {type(record).__name__}, not an object")
    return record
