"""Which fields a sample may carry, on which axis, and how each is read.

Nothing is guessed by shape: a field is a per-token field because it is declared here (or through
`PaddingFreeCollator(token_fields=…)`), a media field because its family declares it, or a per-sample
value. Anything else is an error that names the sample and the field: a per-token field that travels
unpadded or unshifted is wrong training without a sign.

    kind          fields                                  axis           padded with
    per token     input_ids labels loss_scale             the only one   `TOKEN_FIELDS`
                  token_type_ids mm_token_type_ids
    positions     position_ids [T], [3,T] or [4,T]        the last       0, 1, 2, … of the pad segment
    media         the family's `media_keys`               the first      never
    per sample    sample_id source channel weight length  none           -

Values may be torch tensors, numpy arrays or lists. The caller's values are never written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import InputError, nearest
from ..families import Family, families

#: Label of a token that is not trained.
IGNORE = -100

#: Per-token fields and the value of a pad token; an int pads int64, a float pads float32.
TOKEN_FIELDS: dict[str, int | float] = {
    "input_ids": 0,
    "labels": IGNORE,
    "loss_scale": 0.0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
}

#: The field that says of which medium a token is; 0 on every token of text.
MEDIA_TYPES = "mm_token_type_ids"

#: Per-sample values: they never become a model input.
SAMPLE_FIELDS = frozenset({"sample_id", "source", "channel", "weight", "length", "filler", "stand_in"})

#: Those that travel on `PackBatch.sample_values`.
CARRIED_FIELDS = ("source", "channel", "weight")

#: Fields of a sample of plain text.
_TEXT = frozenset({"sample_id", "input_ids", "labels", "position_ids"})

#: What the collator makes itself, or must never send: no field of a sample may take these names.
_OWN_KEYS = frozenset(
    {"position_ids", "attention_mask", "use_cache", "padding_mask", "seq_idx"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
)

#: Joining rules a family may declare for a media key.
MEDIA_RULES = frozenset({"cat0"})

_HINT_VALUES = "give a tensor, an array or a list of numbers, one per token for a per-token field"

_HINT_FIELD = "declare it with PaddingFreeCollator(token_fields={name: pad value}), or leave it out"


@dataclass(slots=True)
class Segment:
    """One sample as it enters the row: T tokens, its positions and its media.

    Attributes:
        sample_id: id of the sample; None for a filler.
        tokens: field -> tensor [T].
        positions: int64 [T] (text), [3,T] (t, h, w), [4,T] (text, t, h, w), or None.
        media: key -> tensor with at least one row.
        weightless: a filler or a stand-in: optional token fields are padded, never missing.
        values: `source`, `channel` and `weight` where the sample has them.
    """

    sample_id: Any
    where: str
    length: int
    tokens: dict[str, torch.Tensor]
    positions: torch.Tensor | None = None
    media: dict[str, torch.Tensor] = field(default_factory=dict)
    weightless: bool = False
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sample(self) -> bool:
        """Not a filler or a dummy; a stand-in takes the place of a sample."""
        return self.sample_id is not None or not self.weightless


def media_rules(family: Family | None) -> dict[str, str]:
    """Media key -> joining rule, of one family or (None) of all known families together."""
    rules: dict[str, str] = {}
    for one in [family] if family is not None else families():
        for key, rule in one.media_keys.items():
            if rule not in MEDIA_RULES:
                raise InputError(
                    f"family {one.name} declares the unknown rule {rule!r} for {key}",
                    hint=f"rules: {', '.join(sorted(MEDIA_RULES))}",
                )
            rules[key] = rule
    return rules


def mrope_keys(family: Family | None) -> frozenset[str]:
    """Media keys whose samples need t, h, w positions."""
    chosen = [family] if family is not None else families()
    keys = [frozenset(one.media_keys) for one in chosen if one.position_rows == 3]
    flat = [frozenset(one.media_keys) for one in chosen if one.position_rows == 1]
    return frozenset[str]().union(*keys) - frozenset[str]().union(*flat)


def check_token_fields(declared: Any, media: Mapping[str, str]) -> dict[str, int | float]:
    """The declared per-token fields, checked: a mapping of free names to pad values.

    Raises:
        InputError: not such a mapping, or a name that already means something else in a row.
    """
    if not isinstance(declared, Mapping):
        raise InputError(
            f"token_fields is a {type(declared).__name__}, not a mapping",
            hint='name -> pad value: token_fields={"advantages": 0.0}',
        )
    for name, pad in declared.items():
        if name in _OWN_KEYS or name in SAMPLE_FIELDS or name in media:
            raise InputError(
                f"token_fields names {name!r}, which the collator reads or makes in its own way",
                hint="leave it out, or give the field another name",
            )
        if isinstance(pad, bool) or not isinstance(pad, (int, float)):
            raise InputError(
                f"token_fields: the pad value of {name!r} is {pad!r}",
                hint="an integer pads int64, a float pads float32",
            )
    return dict(declared)


def read_sample(
    sample: Mapping[str, Any],
    where: str,
    *,
    token_fields: Mapping[str, int | float],
    media: Mapping[str, str],
) -> Segment:
    """Check one encoded sample against the declared fields.

    Raises:
        InputError: a field is missing, undeclared, of another length, or not of the declared type.
    """
    if type(sample) is dict and sample.keys() <= _TEXT and (plain := _plain(sample, where)) is not None:
        return plain
    if type(sample) is not dict and not isinstance(sample, Mapping):
        raise InputError(
            f"{where} is a {type(sample).__name__}, not a mapping of fields",
            hint="a pack is a list of encoded samples",
        )
    sample_id = sample.get("sample_id")
    where = where if sample_id is None else f"sample {sample_id}"
    weightless = any(_flag(name, sample.get(name)) for name in ("filler", "stand_in"))
    input_ids = _input_ids(sample, where, weightless)
    length = input_ids.numel()
    segment = Segment(sample_id, where, length, {"input_ids": input_ids}, None, weightless=weightless)
    for name, value in sample.items():
        if value is None or name == "input_ids" or name == "sample_id":
            continue
        if name not in token_fields:
            _take(segment, name, value, token_fields, media)
        elif name != "loss_scale" or len(value):  # empty as in ms-swift's rows where nothing is weighed
            values = _token_values(name, value, token_fields[name], where)
            _check_length(name, values.numel(), length, where)
            segment.tokens[name] = values
    return segment


def _input_ids(sample: Mapping[str, Any], where: str, weightless: bool) -> torch.Tensor:
    for required in ("input_ids", "labels"):
        if sample.get(required) is None and not (required == "labels" and weightless):
            raise InputError(f"{where} has no {required}", hint="encode the sample with its template first")
    input_ids = _token_values("input_ids", sample["input_ids"], 0, where)
    if input_ids.numel() == 0:
        raise InputError(
            f"{where} has no tokens", hint="an empty sample belongs to the ledger, never to a pack"
        )
    return input_ids


def _take(
    segment: Segment, name: str, value: Any, token_fields: Mapping[str, int | float], media: Mapping[str, str]
) -> None:
    """Read a field that is not one per token into the segment of its sample."""
    length, where = segment.length, segment.where
    if name == "position_ids":
        segment.positions = _positions(value, length, where)
    elif name in media:
        tensor = _media(name, value, where)
        if tensor.shape[0]:
            segment.media[name] = tensor
    elif name == "attention_mask":  # ones say nothing and are left out
        if not bool((_tensor(name, value, where) != 0).all()):
            raise InputError(
                f"{where}: attention_mask has zeros, so the sample carries padding",
                hint="encode samples without padding; the collator needs no attention_mask",
            )
    elif name in CARRIED_FIELDS:
        segment.values[name] = _single(name, value, length, where)
    elif name == "length":
        if _single(name, value, length, where) != length:
            raise InputError(
                f"{where} says length {value} but has {length} input_ids",
                hint="length is that of the encoded sample; leave it out, or encode again",
            )
    elif name not in SAMPLE_FIELDS:
        _undeclared(name, value, length, where, [*token_fields, *media, *SAMPLE_FIELDS])


def _plain(sample: dict[str, Any], where: str) -> Segment | None:
    """A sample of text as it enters the row: no further value of it needs a look; else None."""
    ids: Any = sample.get("input_ids")
    labels: Any = sample.get("labels")
    if type(ids) is not torch.Tensor or type(labels) is not torch.Tensor:
        return None
    shape = ids.shape
    if ids.dtype is not torch.int64 or labels.dtype is not torch.int64:
        return None
    if len(shape) != 1 or labels.shape != shape or not shape[0]:
        return None
    positions: Any = sample.get("position_ids")
    if positions is not None:
        if type(positions) is not torch.Tensor or positions.dtype is not torch.int64:
            return None
        if positions.shape != shape or positions.layout is not torch.strided or positions.is_meta:
            return None
    sample_id = sample.get("sample_id")
    where = where if sample_id is None else f"sample {sample_id}"
    return Segment(sample_id, where, shape[0], {"input_ids": ids, "labels": labels}, positions)


def _single(name: str, value: Any, length: int, where: str) -> Any:
    """A value of the sample as a whole: a string, a number, or one number in an array."""
    if isinstance(value, (str, int, float)):
        return value
    array = _tensor(name, value, where)
    size = array.numel()
    if size != 1:
        kind = "one per token" if size == length else "expected one"
        raise InputError(
            f"{where}: {name} has {size} values, {kind}",
            hint=f"{name} belongs to the sample; declare a field per token under another name (token_fields)",
        )
    return array.reshape(-1)[0].item()


def _flag(name: str, value: Any) -> bool:
    if value is None or isinstance(value, (bool, int)) or getattr(value, "shape", None) == ():
        return bool(value)
    raise InputError(f"{name} is a {type(value).__name__}, expected True or False", hint="leave it out")


def _token_values(name: str, value: Any, pad: int | float, where: str) -> torch.Tensor:
    """A per-token field as int64 or float32 [T]; a leading axis of 1 is dropped."""
    if type(value) is torch.Tensor and value.dtype is torch.int64 and value.ndim == 1 and type(pad) is int:
        return value
    tensor = _tensor(name, value, where)
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1:
        raise InputError(
            f"{where}: {name} has shape {list(tensor.shape)}, expected [tokens]", hint=_HINT_VALUES
        )
    if isinstance(pad, float):
        return tensor.to(torch.float32)
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype is torch.bool):
        raise InputError(f"{where}: {name} holds {tensor.dtype} values, expected integers", hint=_HINT_VALUES)
    return tensor.to(torch.int64)


def _positions(value: Any, length: int, where: str) -> torch.Tensor:
    """Positions as int64 [T], [3,T] or [4,T]: declared by the axes, never guessed from sizes."""
    tensor = _tensor("position_ids", value, where)
    shape = list(tensor.shape)
    if tensor.ndim == 1:
        tensor = tensor[None]
    elif tensor.ndim == 3 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 2 or tensor.shape[0] not in (1, 3, 4) or tensor.is_floating_point():
        raise InputError(
            f"{where}: position_ids have shape {shape} and type {tensor.dtype}",
            hint="give integers [tokens] or [3,tokens], made for the sample alone",
        )
    _check_length("position_ids", int(tensor.shape[1]), length, where)
    return (tensor[0] if tensor.shape[0] == 1 else tensor).to(torch.int64)


def _media(name: str, value: Any, where: str) -> torch.Tensor:
    tensor = _tensor(name, value, where)
    if tensor.ndim == 0:
        raise InputError(
            f"{where}: {name} is a single value, expected rows", hint="one row per medium or patch"
        )
    return tensor


def _check_length(name: str, found: int, length: int, where: str) -> None:
    if found != length:
        raise InputError(
            f"{where}: {name} has {found} values for {length} input_ids",
            hint="every per-token field has exactly one value per token",
        )


def _undeclared(name: str, value: Any, length: int, where: str, known: list[str]) -> None:
    size = getattr(value, "shape", None)
    last = int(size[-1]) if size is not None and len(size) else None
    if last is None and isinstance(value, (list, tuple)):
        last = len(value)
    kind = f"of {last} values, one per token" if last == length else f"of type {type(value).__name__}"
    close = nearest(name, known)
    hint = f"did you mean {close!r}? Else {_HINT_FIELD}" if close else _HINT_FIELD
    raise InputError(f"{where}: undeclared field {name!r} {kind}", hint=hint)


def _tensor(name: str, value: Any, where: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_complex():
            kind = "meta" if value.is_meta else f"{value.layout} {value.dtype}"
            raise InputError(f"{where}: {name} is a {kind} tensor", hint="give a dense tensor of numbers")
        return value.detach() if value.requires_grad else value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(f"{where}: {name} is not an array: {error}", hint=_HINT_VALUES) from None
    if array.dtype.kind not in "iufb":
        if array.size:
            raise InputError(
                f"{where}: {name} holds {array.dtype} values, expected numbers", hint=_HINT_VALUES
            )
        array = array.astype(np.int64)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise InputError(f"{where}: {name} holds {array.max()}, beyond int64", hint=_HINT_VALUES)
        array = array.astype(np.int64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch refuses or warns; the copy also keeps a read-only map untouched
    return torch.from_numpy(array)
