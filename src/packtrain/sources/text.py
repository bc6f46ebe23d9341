"""Raw text: the documents of a source as they are, for `task: text`.

A sample is `{"text": str}`. The text stands in the field `text` (`content`, `document`, `raw_content`), or
where `columns={"text": name}` says. Other keys are accounted for as those of chats: a medium, a list of
turns, spans or a mask beside the text is refused (`unread_key`), what else nothing reads is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import one_of
from ..extend import Source
from ._account import Account
from ._content import check_object, check_text, fault, refuse
from ._memory import Over, as_source
from .keys import TEXT


class TextSource(Over):
    """Documents of a source of raw records.

    Args:
        source: any source whose items are mappings.
        columns: `{"text": name of the field}`.
        ignore_keys: keys that are left out.
    """

    reads = "text"

    def __init__(
        self, source: Source, *, columns: Mapping[str, str] | None = None, ignore_keys: Sequence[str] = ()
    ) -> None:
        for field in columns or {}:
            one_of("columns key", field, ("text",))
        self.source = as_source(source)
        self._names = (columns["text"],) if columns else TEXT
        self.account = Account(ignore_keys)

    def config(self) -> dict[str, Any]:
        return {"schema": 1, "names": list(self._names), "ignore_keys": sorted(self.account.ignore)}

    def read(self, record: Any) -> dict[str, Any]:
        record = check_object(record, "the record")
        self.account.begin()
        name = next((name for name in self._names if record.get(name) is not None), None)
        if name is None:
            texts = [name for name, held in record.items() if isinstance(held, str) and held]
            field = texts[0] if len(texts) == 1 and texts[0].isidentifier() else "FIELD"
            raise fault(
                f"has no field {' or '.join(map(repr, self._names))}",
                hint=f"it has {', '.join(map(repr, record))}; columns={{'text': '{field}'}} names the text",
            )
        text = check_text(record[name], f"field {name!r}")
        refuse(not text, f"field {name!r} is empty", reason="empty")
        self.account.rest(record, [key for key in record if key != name], media=False)
        self.account.alias(name, "text")
        self.account.end()
        return {"text": text}
