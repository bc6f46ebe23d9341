"""One pack as plain files: its media under names of ours, and a JSON record that restores every sample.

    {"images": ["img000.jpg", ""], "prompt": ["…", "…"], "captions": ["…", "…"],        captions, vqa
     "images": [["img000.jpg"], []], "prompt": [["…"], ["…"]], "captions": …,           multi_turn
     "packtrain": {"pack": 0, "task": …, "ids": […], "tokens": […], "media": [[…], …], "samples": […]}}

The first three fields are for readers that know no other (spec: offline packing). What they cannot hold, such
as system turns, tools, roles in another order, or where in a text a picture stands, is kept in
`packtrain.samples`: null where prompts and captions give the sample back exactly, else the sample itself. A
question that nobody answers stands there alone: beside an empty caption, others would train on one.
Media are named by us (`img000.jpg`: sample 0; `img000_1.jpg`: its second image), so no name of a data set can
clash with another in any reader; the names they had are kept beside size and CRC-32 of their bytes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

from ..errors import ChecksumError, FormatError, InputError, SampleError, counted
from ..execute.local import available_cpus
from ..media.knobs import KNOB_KEYS
from ..media.location import Ref, identity_name, read_bytes, with_media
from ..sources._values import suffix_of
from ..sources.llava_packed import PLACEHOLDER, turns

# --------------------------------------------------------------------------------------------
# What LLaVA-OneVision-1.5's encoders of packs read, and what they would read wrongly
# --------------------------------------------------------------------------------------------
# For each member of a pack they take `images[i]`, `prompts[i]` and `captions[i]`, and nothing else:
#
#     captions     the image, then the caption; the prompt is not read
#     vqa          one user and one assistant text; `<image>` in the prompt becomes the image's tokens
#     multi_turn   lists of them, asked and answered by turns; one image or none
#
# So `<image>` stays in the prompts where the image stands, and a sample that these three cannot hold is
# refused: it would be trained otherwise than it was planned.
_PLACEHOLDERS = (PLACEHOLDER, "<video>", "<|image_pad|>", "<|video_pad|>")


def refusal(sample: Mapping[str, Any], task: str) -> str | None:
    """Why a sample cannot be read there as it was planned; None where it can.

    Args:
        sample: normalised, media in any form.
        task: of the export.
    """
    messages = sample["messages"]
    further = sorted(set(sample) - {"messages"})
    if further:
        return f"it has {further[0]}"
    for message in messages:
        found = _of_message(message)
        if found is not None:
            return found
    roles = [message["role"] for message in messages]
    caption = roles == ["assistant"] and task == "captions"
    if not caption and (len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2)):
        if roles[-1] == "user":
            return "it ends with a question that nobody answers"
        return f"it has the turns {', '.join(roles)}"
    kinds = [[part["type"] for part in message["content"]] for message in messages]
    if any(kind == "image" for held in kinds[1::2] for kind in held):
        return "an answer holds an image"
    images = sum(kind == "image" for held in kinds for kind in held)
    if images > 1:
        return f"it has {counted(images, 'images')}"
    if caption and (kinds[0][:1] != ["image"] or not images):
        return "its caption does not begin with the image"
    if task == "captions" and not caption and _said(messages[0]):
        return "it asks something, and a caption's prompt is not read"
    return None


def _of_message(message: Mapping[str, Any]) -> str | None:
    further = sorted(set(message) - {"role", "content"})
    if further:
        return f"a message has {further[0]}"
    for part in message["content"]:
        if part["type"] not in ("text", "image"):
            return f"it has {part['type']}"
        text = part.get("text", "") if part["type"] == "text" else ""
        word = next((word for word in _PLACEHOLDERS if word in text), None)
        if word is not None:
            return f"a text says {word}, which stands for a medium there"
        if not KNOB_KEYS.isdisjoint(part):
            return "an image has a size of its own"
    return None


def placed(content: Sequence[Mapping[str, Any]]) -> str:
    """The text of a message with `<image>` where an image stands."""
    return "".join(part["text"] if part["type"] == "text" else PLACEHOLDER for part in content)


def _said(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "text" and part["text"] for part in message["content"])


# --------------------------------------------------------------------------------------------
# CRC-32 of members: from zlib, or the same from ISA-L (`packtrain[export]`) at ten times its speed
# --------------------------------------------------------------------------------------------
crc32: Callable[..., int]
try:
    from isal.isal_zlib import crc32
except ImportError:
    crc32 = zlib.crc32
    #: Sums of large media are worth a thread of their own: zlib is slow, and there is a core for it.
    BESIDE = available_cpus() > 2
else:
    BESIDE = False


# --------------------------------------------------------------------------------------------
# One pack as plain files: its media under names of ours, and a JSON record that restores every sample
# --------------------------------------------------------------------------------------------
#: How samples are told apart by readers of the three plain fields.
TASKS = ("captions", "vqa", "multi_turn")

#: Names of the field of prompts: of the published description, and of the published code.
SPELLINGS = ("prompt", "prompts")

MEMBER = "packtrain"
_SHORT = {"image": "img", "video": "vid", "audio": "aud"}
_LARGE, _PENDING = 1 << 15, 4  # bytes of a medium; media whose CRC-32 may be outstanding
_SUFFIX = re.compile(r"\.([a-z0-9]{1,5})$")


def pack_key(number: int) -> str:
    """The key of a pack: only letters, digits and `_`, unique over an export, ascending."""
    return f"ps_{number:08d}"


@dataclass
class PackRecord:
    """Builds the record of one pack, medium by medium.

    Args:
        number: of the pack in its plan.
        ids: sample ids.
        samples: normalised chat samples.
        tokens: of each sample, as planned; None where the lengths are gone.
        task: one of `TASKS`.
        prompts: name of the field of prompts.
        width: of the number of a medium (`img000`, or `img0` with 1).
        llava: what LLaVA-OneVision-1.5's own encoders read: `<image>` in prompts, every image `imgI.jpg`.
    """

    number: int
    ids: Sequence[int]
    samples: Sequence[Mapping[str, Any]]
    tokens: Sequence[int] | None
    task: str
    prompts: str = "prompt"
    width: int = 3
    llava: bool = False
    root: str | None = None
    _media: list[list[dict[str, Any]]] = field(default_factory=list)
    _plain: list[dict[str, Any]] = field(default_factory=list)
    _pending: list[tuple[dict[str, Any], Future[int]]] = field(default_factory=list)

    def media(self) -> Iterator[tuple[str, bytes]]:
        """(member, bytes) of every medium, in order; to be read to its end before `json`.

        Raises:
            SampleError: a medium cannot be read.
        """
        self._media, self._plain, self._pending = [], [], []
        for place, sample in enumerate(self.samples):
            self._check_readable(place, sample)
            held: list[dict[str, Any]] = []
            counts: dict[str, int] = {}
            messages = []
            for message in sample["messages"]:
                content: list[dict[str, Any]] = []
                for part in message["content"]:
                    kind = part["type"]
                    if kind == "text":
                        content.append(dict(part))
                        continue
                    refs = part[kind] if isinstance(part[kind], list) else [part[kind]]
                    members: list[str] = []
                    for ref in refs:
                        data = read_bytes(ref)
                        member = self._name(place, kind, counts, ref, data)
                        original = identity_name(ref, self.root)
                        told = {"member": member, "name": original, "bytes": len(data)}
                        row: dict[str, Any] = {**told, "crc32": None}
                        held.append(row)
                        members.append(member)
                        self._check_sum(row, data)
                        yield member, data
                    content.append({**part, kind: members if isinstance(part[kind], list) else members[0]})
                messages.append({**message, "content": content})
            self._media.append(held)
            self._plain.append({**sample, "messages": messages})

    def json(self) -> bytes:
        """The record, after `media` was read."""
        self._settle(0)
        flat = self.task != "multi_turn"
        plain: dict[str, list[Any]] = {"images": [], self.prompts: [], "captions": []}
        kept: list[Any] = []
        for sample, media in zip(self._plain, self._media, strict=True):
            prompts, captions = _turns(sample["messages"], self.llava)
            images = [one["member"] for one in media if one["member"].startswith("img")]
            if flat and (len(prompts) != 1 or len(images) != 1 or len(media) != 1):
                raise InputError(
                    f"sample {self.ids[len(kept)]} has "
                    f"{counted(len(images), 'images')} and {len(prompts)} turns: "
                    f"not the one of {self.task}",
                    hint="use task='multi_turn', or leave task out",
                )
            plain["images"].append(images[0] if flat else images)
            plain[self.prompts].append(prompts[0] if flat else prompts)
            plain["captions"].append(captions[0] if flat else captions)
            members = [one["member"] for one in media]
            plainest = _rebuilt(prompts, captions, members, self.llava)
            kept.append(None if plainest == sample else sample)
        told: dict[str, Any] = {
            "pack": self.number,
            "task": self.task,
            "ids": list(self.ids),
            "tokens": None if self.tokens is None else list(self.tokens),
            "media": self._media,
            "samples": kept,
            **({"placed": True} if self.llava else {}),
        }
        try:
            text = json.dumps({**plain, MEMBER: told}, ensure_ascii=False, separators=(",", ":"))
            return text.encode("utf-8")
        except (TypeError, ValueError) as error:
            raise SampleError(
                "malformed_record", f"pack {self.number} holds a value that JSON cannot: {error}"
            ) from None

    def _check_readable(self, place: int, sample: Mapping[str, Any]) -> None:
        """InputError where LLaVA-OneVision's encoders would train on something else."""
        why = refusal(sample, self.task) if self.llava else None
        if why is not None:
            raise InputError(
                f"sample {self.ids[place]} cannot be written for LLaVA-OneVision ({self.task}): {why}",
                hint="leave it out (packtrain plan --skip-samples), or use layout='packtrain'",
            )

    def _check_sum(self, row: dict[str, Any], data: bytes) -> None:
        """Put the CRC-32 into a row; that of a large medium may be taken beside, a few at once."""
        if not BESIDE or len(data) < _LARGE:
            row["crc32"] = crc32(data)
            return
        self._pending.append((row, _beside().submit(crc32, data)))
        self._settle(_PENDING)

    def _settle(self, left: int) -> None:
        while len(self._pending) > left:
            row, later = self._pending.pop(0)
            row["crc32"] = later.result()

    def _name(self, place: int, kind: str, counts: dict[str, int], ref: Ref, data: bytes) -> str:
        number = counts[kind] = counts.get(kind, -1) + 1
        stem = f"{_SHORT[kind]}{place:0{self.width}d}" + (f"_{number}" if number else "")
        return f"{stem}.{'jpg' if self.llava else _suffix(ref, data)}"  # theirs is named so, whatever it is


def members_of_row(row: Mapping[str, Any]) -> dict[str, bytes]:
    """Name behind the key -> bytes, of a pack that is a row of a table (`export._job`).

    Raises:
        KeyError, TypeError, ValueError: it is no such row.
    """
    text, media = row["json"], row["media"]
    if isinstance(media, bytes | bytearray | memoryview):
        held = memoryview(media)
        told = [one for member in json.loads(text)[MEMBER]["media"] for one in member]
        ends = [*accumulate((one["bytes"] for one in told), initial=0)]
        if ends[-1] != len(held):
            raise ValueError(f"{len(held)} bytes of media, told are {ends[-1]}")
        members = {one["member"]: bytes(held[a:b]) for one, (a, b) in zip(told, pairwise(ends), strict=True)}
    else:
        members = {one["path"]: bytes(one["bytes"]) for one in media}
    return {**members, "json": text.encode("utf-8")}


def restore(
    record: Mapping[str, Any], read: Callable[[str], bytes], where: str, *, check: bool = True
) -> list[dict[str, Any]]:
    """The samples of a pack, media as their bytes, each with its `sample_id`.

    Args:
        record: what `PackRecord.json` made, parsed.
        read: member -> bytes.
        where: named in messages.
        check: compare sizes and CRC-32 of the media.

    Raises:
        FormatError: no record of ours. ChecksumError: a medium is missing or not what was written.
    """
    told = record.get(MEMBER)
    if not isinstance(told, Mapping):
        raise FormatError(f"{where} was not written by packtrain: it has no field {MEMBER!r}")
    prompts = record["prompts"] if "prompts" in record else record["prompt"]
    flat = told["task"] != "multi_turn"
    out = []
    for place, sample_id in enumerate(told["ids"]):
        media = told["media"][place]
        sample = told["samples"][place]
        if sample is None:
            asked, said = prompts[place], record["captions"][place]
            members = [one["member"] for one in media]
            asked, said = ([asked], [said]) if flat else (asked, said)
            sample = _rebuilt(asked, said, members, told.get("placed") is True)
        data = {one["member"]: _checked(one, read, where, check) for one in media}
        out.append({**with_media(sample, partial(_bytes_of, data)), "sample_id": sample_id})
    return out


def task_of(samples: Sequence[Mapping[str, Any]]) -> str:
    """The narrowest task that holds every sample: `captions`, `vqa` or `multi_turn`.

    >>> say = lambda *parts: {"messages": [{"role": "user", "content": list(parts)},
    ...                       {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]}
    >>> image, text = {"type": "image", "image": "x.jpg"}, {"type": "text", "text": "what?"}
    >>> task_of([say(image)]), task_of([say(image), say(image, text)]), task_of([say(text)])
    ('captions', 'vqa', 'multi_turn')
    """
    asked = False
    for sample in samples:
        prompts, _ = _turns(sample["messages"])
        if sample["messages"][-1]["role"] != "assistant":
            return "multi_turn"
        kinds = [part["type"] for message in sample["messages"] for part in message["content"]]
        media = [kind for kind in kinds if kind != "text"]
        if len(prompts) != 1 or media != ["image"]:
            return "multi_turn"
        asked = asked or bool(prompts[0])
    return "vqa" if asked else "captions"


# --------------------------------------------------------------------------------------------
@cache
def _beside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="packtrain-crc")


def _turns(messages: Sequence[Mapping[str, Any]], where: bool = False) -> tuple[list[str], list[str]]:
    """(prompts, captions): what was said before each assistant turn, and that turn.

    Args:
        where: `<image>` says where an image of a prompt stands.
    """
    prompts: list[str] = []
    captions: list[str] = []
    waiting: list[str] = []
    seen = False
    for message in messages:
        text, seen = _text(message["content"], seen)
        if message["role"] == "assistant":
            prompts.append("\n".join(waiting))
            captions.append(text)
            waiting = []
        else:
            waiting.append(placed(message["content"]) if where else text)
    if where and [message["role"] for message in messages] == ["assistant"]:
        prompts = [PLACEHOLDER]  # a caption whose image stands before it
    return prompts, captions


def _text(content: Sequence[Mapping[str, Any]], seen: bool) -> tuple[str, bool]:
    """The text of a message; a medium behind the first text of the sample leaves `<image>` in it."""
    parts: list[str] = []
    for part in content:
        if part["type"] == "text":
            parts.append(part["text"])
            seen = True
        elif seen:
            parts.append(f"<{part['type']}>")
    return "".join(parts), seen


def _rebuilt(
    prompts: Sequence[str], captions: Sequence[str], members: Sequence[str], where: bool = False
) -> dict[str, Any]:
    """The plainest sample with these turns: media first (or where `<image>` says), question and answer."""
    kinds = {short: kind for kind, short in _SHORT.items()}
    ahead = [{"type": kinds[name[:3]], kinds[name[:3]]: name} for name in members]
    answers = [[{"type": "text", "text": said}] for said in captions]
    return {"messages": turns(prompts, answers, ahead, placed=where)}


def _bytes_of(data: Mapping[str, bytes], held: Any) -> Any:
    return [data[name] for name in held] if isinstance(held, list) else data[held]


def _checked(told: Mapping[str, Any], read: Callable[[str], bytes], where: str, check: bool) -> bytes:
    try:
        data = read(told["member"])
    except KeyError:
        raise ChecksumError(
            f"{where} lacks {told['member']}", hint="the shard was cut or edited: export again"
        ) from None
    if check and (len(data) != told["bytes"] or crc32(data) != told["crc32"]):
        raise ChecksumError(
            f"{where}: {told['member']} differs from what was exported", hint="copy or export the shard again"
        )
    return data


def _suffix(ref: Ref, data: bytes) -> str:
    """The suffix of a medium: of its name, else by its first bytes."""
    if isinstance(ref, (str, os.PathLike)) and not str(ref).startswith("data:"):
        found = _SUFFIX.search(os.fspath(ref).lower())
        if found:
            return found[1]
    return suffix_of(data[:16])
