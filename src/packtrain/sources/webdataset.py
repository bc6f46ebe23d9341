"""WebDataset tars: members that share a key are one sample, read by byte range from plain tar files.

    key        folder and name up to its first dot: `a.b/x.seg.png` has key `a.b/x` and kind `seg.png`
    sample     `json` is the record; without one, or where it holds no chat, `txt` (`caption`, `text`) is
               what the assistant says, and keys of the `json` are accounted for as those of any record
    media      members of the key; a record that names some (`"images": ["jpg"]`, `["x.jpg"]`, `["img0.jpg"]`,
               in a list or in parts of its messages) gets those, one that names none gets all, in tar
               order, as `images`, `videos`, `audios`
    others     members that nothing reads are counted by kind (`.cls`), as keys of a record are
    refs       `tar:PATH!MEMBER`, which media are opened by without unpacking the tar

A member that is a link, hard or symbolic, is the member it names.

Names: keys are compared in composed form (NFC), so the two halves of a pair that were named in different
forms meet. Members of a key that are not next to each other are one sample, and a warning names them: other
readers would see two halves. A kind that a key has twice makes that sample a `malformed_record`.

A tar without its end marker was cut short. That is an error naming the last whole key; with
`truncated="keep"` the samples before the cut are read and the last one, if the cut took members that the
first sample has, is a `truncated_media`. Member tables are kept beside the tar or in the cache folder.
"""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import files
from ..checks import one_of
from ..errors import InputError, SampleError, SourceError
from ..files import StrPath
from ..media._tar import followed, walk
from ._derived import kind_of
from ._handles import Pinned, read
from ._index import cached, digest_files, merkle
from ._open import expand, root_of
from ._records import OfFiles, record_of
from .keys import FIELDS

log = logging.getLogger(__name__)

SUFFIXES = (".tar",)
MEDIA = {
    "images": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "videos": ("mp4", "mov", "avi", "mkv", "webm"),
    "audios": ("wav", "flac", "mp3", "ogg", "opus"),
}
_TEXTS = ("txt", "caption", "text")
#: Fields of a record that is a chat.
_CHAT = frozenset(
    name
    for field in ("messages", "conversations", "texts", "instruction", "prompt", "response")
    for name in FIELDS[field]
)
_KINDS = ("image", "video", "audio")
_MEDIA_KEYS = frozenset(("url", "path", *(name + end for name in _KINDS for end in ("", "s", "_url"))))
_END = bytes(512)
_SCHEMA = 2  # of stored member tables

Member = tuple[str, int, int]  # name, offset of its bytes, size


@dataclass(slots=True)
class _Sample:
    """The members of one key, by kind."""

    key: str
    members: dict[str, Member] = field(default_factory=dict)
    fault: str = ""
    cut: bool = False


class Tars(OfFiles):
    """Samples of tar files. Picklable; bytes are read through the bounded table of open files."""

    def __init__(
        self, root: str, held: Sequence[Pinned], samples: Sequence[list[_Sample]], prompt: str
    ) -> None:
        super().__init__("webdataset", root, held, map(len, samples), "samples", prompt=prompt)
        self._samples, self._prompt = list(samples), prompt
        self.fingerprint = self._identity(len(self._held), len(self))

    def _identity(self, tars: int, samples: int) -> str:
        """The fingerprint of the first so many tars."""
        digest = merkle("webdataset", self.digests[:tars])
        return files.digest_json({"tars": digest, "prompt": self._prompt, "samples": samples})

    def beginnings(self, records: int) -> list[str]:
        """As that of `Shards`."""
        return [self._identity(count, records) for count in self._parts.first(records)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._parts.place(index)
        sample, file = self._samples[shard][row], self._held[shard]
        where = self.where(index)
        if sample.fault:
            raise SampleError(
                "truncated_media" if sample.cut else "malformed_record", f"{where} {sample.fault}"
            )
        refs = {kind: f"tar:{file.path}!{member[0]}" for kind, member in sample.members.items()}
        text = next((kind for kind in _TEXTS if kind in sample.members), None)
        record: dict[str, Any] = {}
        if "json" in sample.members:
            record = record_of(read(file, *sample.members["json"][1:]), f"{where}: its json")
            if text is None or not _CHAT.isdisjoint(record):
                return _with_media(record, sample, refs)
        if text is None:
            held = ", ".join(sample.members)
            raise SampleError("malformed_record", f"{where} has neither json nor txt (it has {held})")
        try:
            said = read(file, *sample.members[text][1:]).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise SampleError("malformed_record", f"{where}: its {text} is not UTF-8") from None
        asked: list[dict[str, Any]] = [
            {"type": name[:-1], name[:-1]: ref} for name, listed in _listed(refs).items() for ref in listed
        ]
        if self._prompt:
            asked.append({"type": "text", "text": self._prompt})
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said.strip()}]
        taken = {ref for kind, ref in refs.items() if kind in (text, "json") or _is_listed(kind)}
        return {**record, **_others(sample, refs, taken), "__key__": sample.key, "messages": messages}

    def where(self, index: int) -> str:
        """`shard-000.tar!key`."""
        shard, row = self._parts.place(index)
        told = f"{self._names[shard]}!{self._samples[shard][row].key}"
        return told.encode("utf-8", "backslashreplace").decode("utf-8")


def open_source(
    path: StrPath,
    *,
    prompt: str = "",
    truncated: str = "error",
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Tars:
    """Open tars of samples.

    Args:
        path: a tar, a folder of them, a glob or braces (`shard-{000000..000099}.tar`).
        prompt: what the user says after the media of a sample that has only a caption.
        truncated: "error", or "keep": read what stands before the end of a tar that was cut short.
        cache_dir: where tables go.
        verify_content: hash every tar again instead of trusting sizes and times.

    Raises:
        SourceError: missing, compressed, cut short, no tar, no samples.
    """
    one_of("truncated", truncated, ("error", "keep"))
    paths = expand(path, SUFFIXES)
    root = root_of(path)
    held = digest_files(paths, root, ".packtrain-tars", cache_dir=cache_dir, verify=verify_content)
    samples = []
    for file in held:
        members, whole = _members(file, cache_dir)
        samples.append(_group(file, members, whole, keep=truncated == "keep"))
    return Tars(root, held, samples, prompt)


# --------------------------------------------------------------------------------------------
def _members(file: Pinned, cache_dir: StrPath | None) -> tuple[list[Member], bool]:
    """(members in order, the tar has its end marker), from the stored table or from the tar."""
    place = cached(file.path, ".packtrain-members", cache_dir)
    try:
        stored = files.parse_json(place.read_bytes())
        if (
            stored["schema"] == _SCHEMA
            and stored["sha256"] == file.sha256
            and stored["digest"] == files.digest_json(stored["members"])
        ):
            return [(str(n), int(o), int(s)) for n, o, s in stored["members"]], bool(stored["whole"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    members, whole = _list(file)
    table = {"schema": _SCHEMA, "sha256": file.sha256, "whole": whole}
    table |= {"digest": files.digest_json(members), "members": members}
    try:
        with files.publish(place) as handle:
            handle.write(files.canonical_json(table))
    except (InputError, OSError) as error:
        log.debug("no table at %s: %s", place, error)
    return members, whole


def _list(file: Pinned) -> tuple[list[Member], bool]:
    with open(file.path, "rb") as handle:
        packed = kind_of(handle.read(8))
        if packed is not None:
            raise SourceError(
                f"{file.path} is compressed ({packed}): it has no byte ranges",
                hint="unpack it to a plain tar",
            )
        handle.seek(0)
        members, links, end, error = walk(handle)
        if error is not None and not members:
            raise SourceError(f"{file.path} is no tar file: {error}")
        if error is not None:
            return members, False
        table = {name: (offset, size) for name, offset, size in members if offset >= 0}
        followed(table, links)
        members = [
            (name, *table.get(name, (-1, 0))) if name in links else (name, offset, size)
            for name, offset, size in members
        ]
        handle.seek(end)
        return members, handle.read(len(_END)) == _END


def _group(file: Pinned, members: Sequence[Member], whole: bool, *, keep: bool) -> list[_Sample]:
    """Members by key, in order of first appearance."""
    samples: dict[str, _Sample] = {}
    last = ""
    apart: list[str] = []
    for number, member in enumerate(members):
        folder, _, name = member[0].rpartition("/")
        stem, dot, kind = name.partition(".")
        if not dot or not stem:
            continue  # a name without a kind belongs to no sample
        key = unicodedata.normalize("NFC", f"{folder}/{stem}" if folder else stem)
        sample = samples.get(key)
        if sample is None:
            sample = samples[key] = _Sample(f"{folder}/{stem}" if folder else stem)
        elif key != last:
            apart.append(f"key {sample.key!r} is opened again at member {number} ({member[0]!r})")
        kind = kind.lower()
        if kind in sample.members:
            sample.fault = f"has two members of kind {kind!r}: {sample.members[kind][0]!r}, {member[0]!r}"
        if member[1] < 0:
            sample.fault = f"has the member {member[0]!r}, a link to what is not in its tar"
        sample.members[kind] = member
        last = key
    if apart:
        told = f"{apart[0]} and {len(apart) - 1} more" if len(apart) > 1 else apart[0]
        log.warning("%s: %s; other readers see half samples there", file.path, told)
    found = list(samples.values())
    if not whole:
        _mark_cut(file, found, keep=keep)
    return found


def _mark_cut(file: Pinned, found: list[_Sample], *, keep: bool) -> None:
    """What a tar that was cut short means for its last sample."""
    for sample in found:
        if any(offset + size > file.size for _, offset, size in sample.members.values()):
            sample.fault, sample.cut = "is cut short: its tar ends inside it", True
    if found and not found[-1].fault and set(found[-1].members) < set(found[0].members):
        missing = ", ".join(sorted(set(found[0].members) - set(found[-1].members)))
        found[-1].fault, found[-1].cut = f"lacks {missing}: its tar is cut short behind it", True
    good = [sample.key for sample in found if not sample.fault]
    told = f"the last whole key is {good[-1]!r}" if good else "no sample in it is whole"
    if not keep:
        raise SourceError(
            f"{file.path} was cut short: it has no end marker; {told}",
            hint='copy it again, or read what is there with truncated="keep"',
        )
    log.warning("%s was cut short: %s", file.path, told)


def _with_media(record: dict[str, Any], sample: _Sample, refs: Mapping[str, str]) -> dict[str, Any]:
    """The record with the members it names as refs, or with all media listed where it names none."""
    names = {**refs}
    for kind, member in sample.members.items():
        names.setdefault(member[0], refs[kind])
        names.setdefault(os.path.basename(member[0]), refs[kind])
    used: set[str] = set()
    linked: dict[str, Any] = _link(record, names, used, named=False)
    read = {names[name] for name in used} | {refs["json"]}
    if not used and not any(linked.get(name) for name in (*MEDIA, "image", "video", "audio")):
        linked.update({name: listed for name, listed in _listed(refs).items() if listed})
        read |= {ref for kind, ref in refs.items() if _is_listed(kind)}
    return {"__key__": sample.key, **_others(sample, refs, read), **linked}


def _others(sample: _Sample, refs: Mapping[str, str], read: set[str]) -> dict[str, int]:
    """Members that are not read, with their sizes: the account of keys counts them as `.cls`."""
    return {f".{kind}": sample.members[kind][2] for kind, ref in refs.items() if ref not in read}


def _link(value: Any, names: Mapping[str, str], used: set[str], *, named: bool) -> Any:
    """A copy of a record in which names of members are refs, under keys that hold media."""
    if isinstance(value, dict):
        of_value = "value" in value and value.get("type") in tuple(_MEDIA_KEYS)  # a type may be anything
        return {
            key: _link(held, names, used, named=key in _MEDIA_KEYS or (of_value and key == "value"))
            for key, held in value.items()
        }
    if isinstance(value, list):
        return [_link(held, names, used, named=named) for held in value]
    if named and isinstance(value, str) and value in names:
        used.add(value)
        return names[value]
    return value


def _is_listed(kind: str) -> bool:
    """Whether a member of this kind is listed as a medium."""
    return any(kind.rpartition(".")[2] in suffixes for suffixes in MEDIA.values())


def _listed(refs: Mapping[str, str]) -> dict[str, list[str]]:
    return {
        name: [ref for kind, ref in refs.items() if kind.rpartition(".")[2] in suffixes]
        for name, suffixes in MEDIA.items()
    }
