"""Keys of the rows of `swift sft`, accounted for before ms-swift drops them.

ms-swift turns every row, of a set or of a stream, into its own keys in one place: the `batched_preprocess` of
its preprocessors. There the keys that it does not read are noted in a column beside the row. Who reads the
rows for packs takes the column off (`unmarked`): a row with a key that changes training is left out.
Preprocessors that are written for one data set read what they know, and are not asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import SampleError
from ..sources._account import UNREAD, Account
from ._unread import Reads, unread_keys

MARK = "unread_key"

_MEDIA = ("images", "videos", "audios")
_COLUMNS = {"messages", *_MEDIA, "tools", "objects", "channel", "chat_template_kwargs"}
_SAYS = {"role", "content", "tool_calls", "tool_call_id", "name", "loss", "loss_scale"}
_PARTS = {"text", "source", "id", "name", "input", "content", "tool_use_id"}

#: Of rows that ms-swift has prepared before.
READS = Reads(
    columns=_COLUMNS | {"lengths", "dataset", MARK},
    chats=("messages",),
    says=_SAYS,
    parts=_PARTS,
    media=_MEDIA,
)


class Watch:
    """The account of the rows of one run.

    Args:
        ignore: keys that the user leaves out.

    Attributes:
        seen: counts of the rows so far.
    """

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        self.account, self.seen = Account(ignore), Account()

    def __reduce__(self) -> tuple[Any, ...]:
        """What a cache of prepared rows depends on."""
        return Watch, (tuple(sorted(self.account.ignore)),)

    def mark(self, row: Mapping[str, Any], reads: Reads) -> str:
        """What a row holds that is not read: JSON text, or ""."""
        fault: list[str] = []
        try:
            unread_keys(row, reads, self.account)
        except SampleError as error:
            fault = [error.message, error.hint or ""]
        counts = self.account.drain()
        self.seen.counts.update(counts)
        return json.dumps({"keys": sorted(counts), "fault": fault}) if counts or fault else ""


def watch_rows(watch: Watch) -> None:
    """Let `watch` note what ms-swift does not read of the rows that it prepares."""
    from swift.dataset.preprocessor import core

    row = core.RowPreprocessor
    plain = {one.preprocess for one in (core.MessagesPreprocessor, core.AlpacaPreprocessor)}
    plain.add(core.ResponsePreprocessor.preprocess)
    real = row.batched_preprocess

    def batched_preprocess(self: Any, batched_row: Mapping[str, Any], **options: Any) -> Any:
        if type(self).preprocess in plain and batched_row:
            names = {name.removeprefix("__@"): name for name in batched_row if not name.startswith("__#")}
            rows = [
                dict(zip(names, values, strict=True))
                for values in zip(*(batched_row[name] for name in names.values()), strict=True)
            ]
            reads = _reads(self)
            batched_row = {**batched_row, MARK: [watch.mark(one, reads) for one in rows]}
        return real(self, batched_row, **options)

    row.batched_preprocess = batched_preprocess
    row.standard_keys = [*row.standard_keys, MARK]
    row.cache_format_version = f"{row.cache_format_version}-keys-{'-'.join(watch.__reduce__()[1][0])}"


def _reads(preprocessor: Any) -> Reads:
    """What a preprocessor reads of a row, its columns renamed."""
    if not hasattr(preprocessor, "role_keys"):
        asked = {"query", "response", "history", "system", "instruction", "input", "output"}
        return Reads(columns=_COLUMNS | asked, media=_MEDIA)
    roles = {*preprocessor.role_keys, *preprocessor.content_keys, *preprocessor.user_roles}
    return Reads(
        columns=_COLUMNS | {"system"},
        chats=("messages",),
        says=_SAYS | roles | {*preprocessor.assistant_roles},
        parts=_PARTS,
        media=_MEDIA,
    )


def unmarked(row: Mapping[str, Any], account: Account | None = None) -> Mapping[str, Any]:
    """A row without its note.

    Args:
        row: as ms-swift has prepared it.
        account: counts the keys.

    Raises:
        SampleError: `unread_key`.
    """
    if MARK not in row:
        return row
    held = json.loads(row[MARK]) if row[MARK] else {"keys": [], "fault": []}
    if account is not None:
        account.counts.update(held["keys"])
    if held["fault"]:
        raise SampleError(UNREAD, held["fault"][0], hint=held["fault"][1])
    return {name: value for name, value in row.items() if name != MARK}


class RowReader:
    """`convert` of a `ChatReader`: counts the keys of the rows that it reads."""

    def __init__(self) -> None:
        self.account = Account()

    def __call__(self, row: Any) -> Any:
        return unmarked(row, self.account)
