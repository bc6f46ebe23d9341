"""Packs of an energon export inside Megatron-Energon 5 and 7.

    class Encoder(PackedTaskEncoder, DefaultTaskEncoder):
        pass

    encoder = Encoder(template.encode, PaddingFreeCollator())
    dataset = get_train_dataset("shards", task_encoder=encoder, batch_size=1, …)

Every sample of energon is one pack. It is restored as it was planned, its samples are encoded one by one,
checked against their planned lengths, and collated with explicit boundaries: one batch is one packed row, a
dictionary that goes into the model. A pack that does not hold what was planned stops the loader; energon's
habit of logging an error and going on with the next sample would lose it unseen.

Media reach the template as the exported bytes: energon's decoding is switched off for these data sets, in
version 5 on the data set, in version 7 by the task encoder's `decoder`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, PacktrainError, counted, optional
from ..packs.exported import check_task, encode_pack
from ..store.pack_records import MEMBER, restore

_KEYS = ("__key__", "__restore_key__", "__subflavors__", "__subflavor__", "__sources__")


class PackFault(SystemError):
    """A pack that cannot be used. Of a kind that energon does not skip."""


class PackedTaskEncoder:
    """Mixin in front of `megatron.energon.DefaultTaskEncoder`.

    Args:
        encode: restored sample -> encoded sample, such as `HFTemplate.encode`.
        collate: list of packs -> batch, such as `PaddingFreeCollator()`; None: the list of encoded samples.
        task: as for `ShardedPacks`.

    Raises:
        ConfigError: at the first pack, where `task` or the environment contradicts it.
    """

    decoder: Any = None

    def __init__(
        self,
        encode: Callable[[Any], Mapping[str, Any]],
        collate: Callable[[Any], Any] | None = None,
        *,
        task: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.encode_one = encode
        self.collate = collate
        self.task = task
        self.cookers = [_cooker()]

    def build_train_datasets(self, *, datasets: Sequence[Any], **options: Any) -> Any:
        """As energon's, with the media left as bytes."""
        _leave_bytes(datasets)
        return super().build_train_datasets(datasets=datasets, **options)  # type: ignore[misc]

    def build_val_datasets(self, *, datasets: Sequence[Any], **options: Any) -> Any:
        """As energon's, with the media left as bytes."""
        _leave_bytes(datasets)
        return super().build_val_datasets(datasets=datasets, **options)  # type: ignore[misc]

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        """One pack: its keys, and its encoded samples under `members`."""
        try:
            return {**_keys_of(sample), "members": self._members(sample)}
        except PacktrainError as error:
            raise PackFault(str(error)) from error

    encode_sample.__stateless__ = True  # type: ignore[attr-defined]

    def batch(self, samples: list[dict[str, Any]]) -> Any:
        """The packed row.

        Raises:
            PackFault: more than one pack; rows are one pack each.
        """
        if len(samples) != 1:
            raise PackFault(
                f"a batch of {counted(len(samples), 'packs')}: each is a row of its own; use batch_size=1"
            )
        return self._row(samples[0])

    batch.__stateless__ = True  # type: ignore[attr-defined]

    def encode_batch(self, batch: Any) -> Any:
        """The batch as it is; a pack alone (batch_size=None) as its row."""
        return self._row(batch) if isinstance(batch, Mapping) and "members" in batch else batch

    encode_batch.__stateless__ = True  # type: ignore[attr-defined]

    # ----------------------------------------------------------------------------------------
    def _row(self, pack: Mapping[str, Any]) -> Any:
        members = pack["members"]
        return members if self.collate is None else self.collate([members])

    def _members(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        record, where = sample["record"], str(sample["__key__"])
        told = record.get(MEMBER)
        if not isinstance(told, Mapping):
            raise ConfigError(f"{where} was not exported by packtrain", hint="packtrain export -f energon")
        check_task(str(told["task"]), self.task)
        samples = restore(record, sample["media"].__getitem__, where)
        planned = told["tokens"] or [None] * len(samples)
        total = sum(planned) if told["tokens"] else None
        return encode_pack(samples, planned, total, self.encode_one, where)


def cook(crude: Mapping[str, Any]) -> dict[str, Any]:
    """A crude sample of energon as a pack: its record and the bytes of its media."""
    record = crude["json"]
    media = {name: data for name, data in crude.items() if "." in name and not name.startswith("__")}
    if any(not isinstance(data, bytes) for data in media.values()):
        raise PackFault(
            f"{crude['__key__']}: energon decoded the media; the data set must leave them as bytes"
        )
    parsed = record if isinstance(record, Mapping) else json.loads(bytes(record))
    return {**_keys_of(crude), "record": parsed, "media": media}


cook.__stateless__ = True  # type: ignore[attr-defined]


def _cooker() -> Any:
    return optional("megatron.energon", "megatron-energon", "energon").energon.Cooker(cook)


def _keys_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in _KEYS if name in sample}


def _leave_bytes(datasets: Sequence[Any]) -> None:
    """Switch decoding off on crude data sets; an entry is (data set, weight), or has it as an attribute."""
    for entry in datasets:
        held = entry[0] if isinstance(entry, tuple) else getattr(entry, "dataset", entry)
        if hasattr(held, "_decoder"):
            held._decoder = None
