"""Loss flags of messages and records: is an answer trained, and with which weight?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..checks import is_finite
from ._account import Account
from ._content import fault
from .keys import LOSS

#: Flags of a record that may be any weight; others also name what was recorded there (`loss: 2.31`).
_WEIGHTS = ("weight", "loss_weight", "loss_scale")


def loss_of(message: Mapping[str, Any], flags: Iterable[str], role: str, what: str) -> float | None:
    """The weight that flags of a message ask for; None for the default.

    Args:
        message: the message.
        flags: names of the flags it has.
        role: its role; only an assistant's messages can be trained.
        what: the message, for errors.

    Raises:
        SampleError: malformed_record, for a flag that is none, flags that disagree, or a turn of another role
            that asks to be trained.
    """
    weight: float | None = None
    first = ""
    for flag in flags:
        value = message[flag]
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        if not is_finite(value) or value < 0:
            raise fault(f"{what} has {flag} {value!r}", hint="true, false, or a weight >= 0")
        asked = float(value)
        if not LOSS[flag]:
            if asked not in (0.0, 1.0):
                raise fault(
                    f"{what} has {flag} {value!r}", hint="true masks a message; loss_weight takes weights"
                )
            asked = 1.0 - asked
        if weight is not None and weight != asked:
            raise fault(f"{what} has {first} and {flag}, which disagree")
        weight, first = asked, flag
    if role != "assistant":
        if weight:
            raise fault(
                f"{what} ({role}) asks for {first} {message[first]!r}",
                hint="only assistant messages are trained on",
            )
        return None
    return None if weight == 1.0 else weight


def weigh(
    record: Mapping[str, Any], names: Iterable[str], messages: Iterable[dict[str, Any]], account: Account
) -> tuple[str, ...]:
    """The keys of a record that are no loss flags; what those say holds for all its answers.

    The weight of an answer is what the record says times what the message says. A value that is no flag
    (a mask, a text, a recorded loss) comes back, to be accounted for.

    Args:
        record: the record.
        names: keys of it that nothing read.
        messages: its messages; `loss` of the answers is set.
        account: counts the flags as read.

    Raises:
        SampleError: malformed_record, for flags that disagree.
    """
    names = tuple(names)
    flags = [name for name in names if name in LOSS and _is_flag(name, record[name])]
    if not flags:
        return names
    weight = loss_of(record, flags, "assistant", "the record")
    for message in messages:
        if message["role"] == "assistant" and weight is not None:
            message["loss"] = weight * message.get("loss", 1.0)
            if message["loss"] == 1.0:
                del message["loss"]
    for name in flags:
        account.alias(name, "loss of its answers")
    return tuple(name for name in names if name not in flags)


def _is_flag(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false")
    if not isinstance(value, (bool, int, float)):
        return False
    return name in _WEIGHTS or value in (0, 1)
