"""Datasets of LLaMA-Factory, as its `dataset_info.json` describes them: files, columns, tags and formats.

    open_source("data/dataset_info.json", kind="llamafactory", dataset="mllm_demo,identity")

Each record comes out as `{"messages": [{"role", "content"}, …], "system", "tools", "images", …}` with every
key that its entry does not name beside it, so that `ChatSource` accounts for all of them. What LLaMA-Factory
would leave unread (a `system` column that `columns` does not name) is refused here by name.
`num_samples` takes exactly so many, seeded; without it every record comes once, dataset after dataset.

Preference data is refused: entries with `ranking: true` as a whole, answers that are not wanted (`kto_tag`)
record by record, as those of any other source. Datasets of a hub are not downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import whole
from ..errors import ConfigError, meant
from ..extend import Source
from ..files import StrPath
from ._account import Account, unread
from ._content import check_object, fault, refuse
from ._memory import Over
from ._values import absent
from .keys import FIELDS
from .mixture import Mixture, Part, read_spec

INFO = "dataset_info.json"
FORMATS = ("alpaca", "sharegpt", "openai")
_KINDS = {".json": "json", ".jsonl": "jsonl"}
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_BESIDE = ("system", "tools", "images", "videos", "audios", "kto_tag", "chosen", "rejected")
_COLUMNS = ("prompt", "query", "response", "history", "messages", *_BESIDE)
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {"user": "user", "assistant": "assistant", "observation": "tool", "system": "system"}
_ENTRY = ("file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags")
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
#: Spellings that a chat reader would take for what the entry does not name.
_READ = frozenset(
    name for field in (*_BESIDE[:5], "image", "video", "audio", "messages") for name in FIELDS[field]
)


class Dataset(Over):
    """The records of one entry, under the names that every chat reader knows.

    Args:
        source: raw records.
        entry: what `dataset_info.json` says of them.
    """

    reads = "llamafactory"

    def __init__(self, source: Source, entry: Mapping[str, Any]) -> None:
        self.source, self.account = source, Account()
        self.format = str(entry.get("formatting", "alpaca"))
        columns = entry.get("columns")
        default: dict[str, str] = _ALPACA if self.format == "alpaca" else {"messages": "conversations"}
        self.columns = {name: held for name, held in (columns or default).items() if held}
        tags = entry.get("tags")
        self.tags: dict[str, Any] = {name: tags.get(name) for name in _TAGS} if tags else dict(_TAGS)
        self._roles = {
            self.tags[f"{name}_tag"]: role for name, role in _ROLES.items() if self.tags[f"{name}_tag"]
        }
        if self.tags["function_tag"]:
            self._roles.setdefault(self.tags["function_tag"], "function_call")

    def config(self) -> dict[str, Any]:
        return {"format": self.format, "columns": self.columns, "tags": self.tags}

    def read(self, record: Any) -> dict[str, Any]:
        record = check_object(record, "the record")
        made: dict[str, Any] = {
            "messages": self._alpaca(record) if self.format == "alpaca" else self._turns(record)
        }
        for name in _BESIDE:
            value = record.get(self.columns.get(name))
            if not absent(value):
                made[name] = value
        used = set(self.columns.values())
        for key, value in record.items():
            if key in used or absent(value):
                continue
            if key in _READ or key in made:
                raise unread(
                    key, f"is no column of its entry in {INFO}", hint="name it in columns, or rename it"
                )
            made[key] = value
        return made

    def _alpaca(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        history = self._column(record, "history")
        for pair in history if isinstance(history, (list, tuple)) else ():
            alone = not isinstance(pair, (list, tuple)) or len(pair) != 2
            refuse(alone, f"column {self.columns['history']!r} is not a list of [question, answer] pairs")
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        asked = [self._column(record, name) for name in ("prompt", "query")]
        refuse(any(not isinstance(text, str | None) for text in asked), "its question is no text")
        turns.append({"role": "user", "content": "\n".join(text for text in asked if text)})
        said = self._column(record, "response")
        return turns if said is None else [*turns, {"role": "assistant", "content": said}]

    def _turns(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages = self._column(record, "messages")
        unlisted = not isinstance(messages, (list, tuple))
        refuse(unlisted, f"column {self.columns.get('messages')!r} is no list of messages")
        role, content = self.tags["role_tag"], self.tags["content_tag"]
        turns: list[dict[str, Any]] = []
        for number, message in enumerate(messages):
            given = message.get(role) if isinstance(message, Mapping) else None
            if given not in self._roles:
                raise fault(
                    f"message {number} has the role {given!r}", hint=f"roles: {', '.join(self._roles)}"
                )
            rest = {key: value for key, value in message.items() if key not in (role, content)}
            if beside := [key for key in ("role", "content") if not absent(rest.pop(key, None))]:
                raise unread(f"messages[].{beside[0]}", "is no tag of its entry")
            turns.append({"role": self._roles[given], "content": message.get(content), **rest})
        return turns

    def _column(self, record: Mapping[str, Any], name: str) -> Any:
        return record.get(self.columns[name]) if name in self.columns else None


class Datasets(Mixture):
    """Several of them; records are read as chats behind it."""

    normalised = False


def open_source(
    path: StrPath,
    *,
    dataset: str | Sequence[str] | None = None,
    media_dir: StrPath | None = None,
    seed: int = 42,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Datasets:
    """Open datasets of a `dataset_info.json`.

    Args:
        path: the file, or its folder (LLaMA-Factory's `dataset_dir`).
        dataset: names in it, as a list or with commas; None: the only one.
        media_dir: folder of relative media paths; None: that of the file.
        seed: of the records that `num_samples` takes.
        cache_dir, verify_content: passed to the sources of the files.

    Raises:
        ConfigError: an unknown dataset or key, preference data, a dataset that lies elsewhere.
        SourceError: the file, or a file of a dataset, cannot be opened.
    """
    full = os.path.abspath(os.fspath(path))
    full = os.path.join(full, INFO) if os.path.isdir(full) else full
    info, folder = read_spec(full, "names no datasets"), os.path.dirname(full)
    chosen = (
        [one.strip() for one in dataset.split(",")] if isinstance(dataset, str) else list(dataset or info)
    )
    if dataset is None and len(info) != 1:
        raise ConfigError(f"{full} names {len(info)} datasets", hint=f"dataset=NAME, of {', '.join(info)}")
    parts = []
    for name in chosen:
        if name not in info:
            raise ConfigError(f"{full} has no dataset {name!r}", hint=meant(name, info))
        made = _open(name, info[name], folder, {"cache_dir": cache_dir, "verify_content": verify_content})
        parts.append(Part(name, made, _count(name, info[name], len(made))))
    return Datasets(
        parts, seed=seed, shuffle=False, folder=folder if media_dir is None else os.fspath(media_dir)
    )


# --------------------------------------------------------------------------------------------
def _open(name: str, entry: Any, folder: str, shared: Mapping[str, Any]) -> Dataset:
    from ._open import open_source as open_any

    what = f"dataset {name!r}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{what} is {type(entry).__name__}, not an object")
    elsewhere = next((key for key in _ELSEWHERE if entry.get(key)), None)
    if elsewhere is not None and not entry.get("file_name"):
        raise ConfigError(f"{what} lies elsewhere ({elsewhere})", hint="download it and give its file_name")
    for held, known, of in (
        (entry, (*_ENTRY, *_ELSEWHERE), what),
        (entry.get("columns") or {}, _COLUMNS, f"columns of {what}"),
        (entry.get("tags") or {}, tuple(_TAGS), f"tags of {what}"),
    ):
        odd = next((key for key in held if key not in known), None)
        if odd is not None:
            raise ConfigError(f"{of} hold the unknown key {odd!r}", hint=meant(str(odd), known))
    if entry.get("ranking"):
        raise ConfigError(
            f"{what} is preference data (ranking: true): its answers are not trained as such",
            hint="leave it out, or write the chosen answers to a file of their own",
        )
    if entry.get("formatting", "alpaca") not in FORMATS:
        raise ConfigError(
            f"{what} has the format {entry['formatting']!r}", hint=f"formats: {', '.join(FORMATS)}"
        )
    path = os.path.join(folder, str(entry.get("file_name")))
    suffix = os.path.splitext(path)[1].lower()
    if os.path.isdir(path) and any(one.lower().endswith(tuple(_KINDS)) for one in os.listdir(path)):
        return Dataset(open_any(path, kind="shards", **shared), entry)
    return Dataset(open_any(path, kind=_KINDS.get(suffix), **shared), entry)


def _count(name: str, entry: Mapping[str, Any], size: int) -> int:
    number = entry.get("num_samples")
    if number is None:
        return size
    return whole(f"dataset {name!r}: num_samples", number, 1, error=ConfigError)
