"""Sources over what is there already: rows in memory, and another source whose records are read otherwise."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..errors import SampleError
from ..extend import Source
from ..files import digest_json
from ._account import Account


class InMemory:
    """Indexable rows (a list, a Hugging Face `datasets.Dataset`, …) as an `extend.Source`.

    Args:
        rows: they may listen to epochs, and may say where a row stands.
        name: of a row in messages.
    """

    def __init__(self, rows: Any, name: str = "row") -> None:
        self.source, self.name = rows, name

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the rows' content."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(json.dumps(self[index], sort_keys=True, default=_named).encode() + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self.source[int(index)]
        return row

    def where(self, index: int) -> str:
        known = getattr(self.source, "where", None)
        return f"{self.name} {index}" if known is None else str(known(index))


class Over(ABC):
    """A source of what another one's records are read as.

    Attributes:
        reads: what they are read as.
        source: of raw records.
        account: of their keys.
    """

    reads: str
    source: Source
    account: Account

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The options that affect a sample, as plain JSON."""

    @abstractmethod
    def read(self, record: Any) -> dict[str, Any]:
        """The sample of a record.

        Raises:
            SampleError: there is none.
        """

    @property
    def fingerprint(self) -> str:
        return digest_json({"source": self.source.fingerprint, self.reads: self.config()})

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        return {"source": fields_of(self.source), self.reads: self.config()}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.source[index]
        try:
            return self.read(record)
        except SampleError as error:
            self.account.left_out(error)
            raise error.at(self.where(index)) from None

    def where(self, index: int) -> str:
        return self.source.where(index)

    def __repr__(self) -> str:
        return f"<{self.reads} over {self.source!r}, {self.fingerprint[:7]}>"


def fields_of(source: Any) -> Any:
    """What a source's fingerprint is made of, as plain JSON: its own account, or the fingerprint alone."""
    inner = getattr(source, "fields", None)
    return inner() if callable(inner) else {"fingerprint": source.fingerprint}


def as_source(rows: Any) -> Any:
    """A source as it is; a list or dataset of rows as one, whose media columns are not decoded."""
    if isinstance(rows, Sequence) or (hasattr(rows, "features") and hasattr(rows, "column_names")):
        return rows if hasattr(rows, "where") else InMemory(undecoded(rows))
    return rows


def _named(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def undecoded(rows: Any) -> Any:
    """Rows of `datasets` whose columns of media are the bytes that were stored."""
    features = getattr(rows, "features", None)
    if features is None:
        return rows
    import datasets

    kinds = tuple(getattr(datasets, name) for name in ("Image", "Audio", "Video") if hasattr(datasets, name))
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, kinds):
            plain = type(inner)(decode=False)
            rows = rows.cast_column(name, plain if inner is feature else datasets.List(plain))
    return rows
