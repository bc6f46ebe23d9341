"""RawPlan: what a plan holds. Immutable CSR arrays with spec, ledger and certificate; checksum on demand.

`PackPlan` adds what is made of it: statistics, views for ranks, plans without some packs, folders.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, counted
from ..extend import I64
from ..files import canonical_json
from ..packers._jit import use_jit
from ._blocks import sum_packs
from .ledger import Ledger
from .lengths import block_digests
from .spec import PlanSpec

# --------------------------------------------------------------------------------------------
# Sums over packs: tokens, squared tokens, further costs. Compiled for many samples, numpy for few
# --------------------------------------------------------------------------------------------


def sum_over_packs(values: NDArray[Any], offsets: I64, indices: NDArray[Any]) -> tuple[I64, I64]:
    """Sum and sum of squares of `values` over each pack; no pack is empty."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if use_jit(len(values)):
        return sum_packs(values, offsets, indices)
    gathered = values[indices].astype(np.int64)
    return np.add.reduceat(gathered, offsets[:-1]), np.add.reduceat(gathered * gathered, offsets[:-1])


# --------------------------------------------------------------------------------------------
# RawPlan: what a plan holds
# --------------------------------------------------------------------------------------------
SCHEMA = "packtrain.plan/1"


@dataclass(frozen=True, slots=True)
class PackerId:
    """Which packer made a plan: `name`/`version`; `notes` is what the packer recorded (plain JSON).

    `auto` notes the packer that it `chosen`.
    """

    name: str
    version: int
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        chosen = self.notes.get("chosen")
        return f"{self.name}/{self.version}" + (f" ({chosen})" if chosen else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over each pack.

    Attributes:
        tokens: int64[P], true lengths.
        squares: int64[P], squared lengths (what attention costs).
        costs: further costs by name, int64[P].
        mixing: how packs mix sources, where the lengths name them (`stats.source_mixing`).
    """

    tokens: I64
    squares: I64
    costs: dict[str, I64]
    mixing: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The best proven lower bound: `bound` packs are needed at least, `name` says why.

    `gap` = packs / bound - 1.

    Bounds are those of `packers/_bounds.py` (volume, l2, uk). Samples longer than a pack each take a pack of
    their own and are added to every bound. `optimal` is True only when proven (packs == bound).
    """

    bound: int
    name: str
    gap: float
    optimal: bool

    @classmethod
    def of(cls, packs: int, bound: int, name: str) -> Certificate:
        gap = packs / bound - 1.0 if bound else 0.0
        return cls(bound=bound, name=name, gap=gap, optimal=packs == bound)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RawPlan:
    """Packs 0..P-1; pack p holds the sample ids `indices[offsets[p]:offsets[p+1]]`, ascending.

    Attributes:
        offsets: int64[P+1].
        indices: uint32 or int64 [N].
        spec: the PlanSpec it was made with.
        packer: PackerId.
        ledger: every sample not in the plan, with its reason.
        certificate: proven lower bound on the number of packs.
        long_samples: packs that hold one sample longer than pack_length.
        slots: token slots of all packs: pack_length each, a long sample's rounded cost where it is longer.
        folder: where the plan was opened from, or None.
    """

    def __init__(
        self,
        *,
        offsets: NDArray[Any],
        indices: NDArray[Any],
        spec: PlanSpec,
        packer: PackerId,
        ledger: Ledger,
        certificate: Certificate,
        long_samples: int,
        slots: int,
        sums: Sums | Callable[[Any], Sums],
        lengths_digest: str | Callable[[], str],
        stored: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        for array in (offsets, indices):
            array.flags.writeable = False
        self.offsets: I64 = offsets
        self.indices: NDArray[Any] = indices
        self.spec, self.packer, self.ledger, self.certificate = spec, packer, ledger, certificate
        self.long_samples, self.slots, self.folder = long_samples, slots, folder
        self._sums_from = sums
        self._digest_from = lengths_digest
        self._stored = dict(stored or {})
        self._verified = False

    # -- contents ----------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, pack: int) -> I64:
        """Sample ids of a pack, int64[k] ascending."""
        p = operator.index(pack)
        if not -len(self) <= p < len(self):
            raise IndexError(f"pack {p} of {len(self)}")
        p %= len(self)
        return np.asarray(self.indices[int(self.offsets[p]) : int(self.offsets[p + 1])]).astype(np.int64)

    def __iter__(self) -> Iterator[I64]:
        return (self[p] for p in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({counted(len(self), 'packs')}, {counted(len(self.indices), 'samples')}, "
            f"pack_length={self.spec.pack_length}, packer={self.packer}, ledger={len(self.ledger)})"
        )

    def __eq__(self, other: object) -> bool:
        """Equal packs, ledger, spec and lengths."""
        return isinstance(other, RawPlan) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.checksum)

    def _identity(self) -> tuple[object, ...]:
        return (self.checksum, list(self.ledger), self.spec, self.lengths_digest)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.folder is not None:
            return (_reopen, (type(self), self.folder, self.checksum))
        made = {"_sums_from": self.sums, "_digest_from": self.lengths_digest}
        return (object.__new__, (type(self),), {**self.__dict__, **made})

    # -- computed at first access --------------------------------------------------------------
    @cached_property
    def sums(self) -> Sums:
        """Sums over each pack of tokens, squared tokens and further costs."""
        made = self._sums_from(self) if callable(self._sums_from) else self._sums_from
        for array in (made.tokens, made.squares, *made.costs.values()):
            array.flags.writeable = False
        self._sums_from = made
        return made

    @property
    def pack_tokens(self) -> I64:
        """int64[P]: tokens in each pack (true lengths)."""
        return self.sums.tokens

    @property
    def pack_sq(self) -> I64:
        """int64[P]: sum of squared lengths in each pack."""
        return self.sums.squares

    @property
    def pack_costs(self) -> dict[str, I64]:
        """Further costs summed over each pack, by name."""
        return self.sums.costs

    @cached_property
    def lengths_digest(self) -> str:
        """Digest of the lengths that the plan was made from."""
        made = self._digest_from() if callable(self._digest_from) else self._digest_from
        self._digest_from = made
        return made

    def header(self) -> dict[str, Any]:
        """What the checksum covers besides the bytes of offsets and indices."""
        made = {
            "schema": SCHEMA,
            "packs": len(self),
            "samples": len(self.indices),
            "offsets": "<i8",
            "indices": self.indices.dtype.str,
        }
        if self.spec.samples_per_step is not None:
            made["samples_per_step"] = self.spec.samples_per_step
            made["packs_per_step"] = self.spec.packs_per_step
        return made

    @property
    def step_count(self) -> int:
        """Optimizer steps of an epoch of a plan made by steps of samples; 0 for other plans."""
        batch = self.spec.samples_per_step
        return 0 if batch is None else -(-len(self.indices) // batch)

    @cached_property
    def block_digests(self) -> dict[str, list[str]]:
        """SHA-256 (hex) of each 64 MiB block of the stored bytes."""
        if "blocks" in self._stored:
            return {name: list(blocks) for name, blocks in self._stored["blocks"].items()}
        return self._hash_blocks()

    @cached_property
    def checksum(self) -> str:
        """SHA-256 (hex) over the header and the block digests of offsets, then indices."""
        if "checksum" in self._stored:
            return str(self._stored["checksum"])
        return _checksum(self.header(), self.block_digests)

    def verify(self) -> None:
        """Hash the bytes of offsets and indices. ChecksumError when they differ from the checksum."""
        found = _checksum(self.header(), self._hash_blocks())
        if found != self.checksum:
            place = f" in {self.folder}" if self.folder else ""
            raise ChecksumError(
                f"the plan{place} hashes to {found[:12]}…, its checksum is {self.checksum[:12]}…",
                hint="the files were changed or damaged; plan again",
            )
        self._verified = True

    def verify_stored(self) -> None:
        """`verify` a plan that was opened from a folder, where nobody has yet."""
        if self.folder is not None and not self._verified:
            self.verify()

    def _hash_blocks(self) -> dict[str, list[str]]:
        return {
            "offsets": [d.hex() for d in block_digests(self.offsets)],
            "indices": [d.hex() for d in block_digests(self.indices)],
        }


def _checksum(header: Mapping[str, Any], blocks: Mapping[str, list[str]]) -> str:
    digest = hashlib.sha256(canonical_json(dict(header)))
    for name in ("offsets", "indices"):
        for block in blocks[name]:
            digest.update(bytes.fromhex(block))
    return digest.hexdigest()


def _reopen(kind: Any, folder: Path, checksum: str) -> RawPlan:
    plan: RawPlan = kind.load(folder)
    if plan.checksum != checksum:
        raise ChecksumError(f"{folder} holds another plan than the one that was sent to this process")
    return plan
