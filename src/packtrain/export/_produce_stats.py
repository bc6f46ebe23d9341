"""What a producer has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["ProduceStats"]


@dataclass
class ProduceStats:
    """Counts since the beginning of the stream, restarts included.

    Attributes:
        pack_length: cap of a pack in tokens.
        read: samples of all raw shards that were planned.
        packed, packs, chunks, tokens: what was published.
        dropped: samples by reason; read = packed + dropped + waiting, always.
        shards: raw shards that were taken; of these `faulty` could not be read, `duplicates` had been read
            under another name.
        keys: counts of keys that nothing read, and of spellings that were read as a field.
        truncated: samples that are packed without answers that truncation removed, or cut short.

    >>> stats = ProduceStats(pack_length=1000, read=100, packed=100, packs=10, tokens=8000)
    >>> stats.samples_per_pack, stats.efficiency
    (10.0, 0.8)
    """

    pack_length: int
    read: int = 0
    packed: int = 0
    packs: int = 0
    chunks: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    shards: int = 0
    faulty: int = 0
    duplicates: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    truncated: int = 0

    @property
    def waiting(self) -> int:
        """Samples that were read and are not published yet: the lag of the producer."""
        return self.read - self.packed - sum(self.dropped.values())

    @property
    def samples_per_pack(self) -> float:
        return self.packed / self.packs if self.packs else 0.0

    @property
    def efficiency(self) -> float:
        """Real tokens of all slots."""
        return self.tokens / (self.packs * self.pack_length) if self.packs else 0.0

    def drop(self, reason: str) -> None:
        """One more sample that is in no pack."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        plain = {**asdict(self), "dropped": dict(sorted(self.dropped.items()))}
        plain["keys"] = dict(sorted(self.keys.items()))
        return {name: value for name, value in plain.items() if value or name not in ("keys", "truncated")}

    def tell(self, keys: Mapping[str, int]) -> None:
        """Add counts of keys."""
        for name, count in keys.items():
            self.keys[name] = self.keys.get(name, 0) + count

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> ProduceStats:
        counts = {name: dict(values.get(name, {})) for name in ("dropped", "keys")}
        return cls(**{**values, **counts})

    def figures(self, **more: Any) -> dict[str, Any]:
        """For people and machines: the counts and what follows from them."""
        return {
            **self.to_dict(),
            "lag_samples": self.waiting,
            "samples_per_pack": round(self.samples_per_pack, 4),
            "efficiency": round(self.efficiency, 6),
            **more,
        }
