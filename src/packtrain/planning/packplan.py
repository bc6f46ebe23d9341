"""PackPlan: which samples form which pack. Immutable CSR arrays with checksum, ledger and certificate.

A plan made in memory computes its checksum, per-pack sums and statistics at first access; a plan opened
from a folder is memory-mapped, holds them ready, and never hashes when it is indexed. A plan from a
folder pickles as its path, so worker processes share one mapping.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import extend
from ..errors import ChecksumError, PlanError
from .align import AlignedPlan, align
from .certificate import Certificate
from .digests import block_digests, checksum_of
from .ledger import Ledger
from .spec import PlanSpec
from .stats import plan_stats

__all__ = ["SCHEMA", "PackPlan", "PackerId"]

SCHEMA = "packtrain.plan/1"
I64 = NDArray[np.int64]


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
        mixing: how packs mix sources, where the lengths name them (`mixing.py`).
    """

    tokens: I64
    squares: I64
    costs: dict[str, I64]
    mixing: Mapping[str, Any] = field(default_factory=dict)


class PackPlan:
    """Packs 0..P-1; pack p holds the sample ids `indices[offsets[p]:offsets[p+1]]`, ascending.

    Made by `packtrain.plan` or `PackPlan.load`; the constructor is for them.

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
        sums: Sums | Callable[[PackPlan], Sums],
        lengths_digest: str | Callable[[], str],
        stored: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        for array in (offsets, indices):
            array.flags.writeable = False
        self.offsets: I64 = offsets
        self.indices: NDArray[Any] = indices
        self.spec = spec
        self.packer = packer
        self.ledger = ledger
        self.certificate = certificate
        self.long_samples = long_samples
        self.slots = slots
        self.folder = folder
        self._sums_from = sums
        self._digest_from = lengths_digest
        self._stored = dict(stored or {})

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
            f"PackPlan({len(self)} packs, {len(self.indices)} samples, pack_length={self.spec.pack_length}, "
            f"packer={self.packer}, ledger={len(self.ledger)})"
        )

    def __eq__(self, other: object) -> bool:
        """Equal packs, ledger, spec and lengths."""
        return isinstance(other, PackPlan) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.checksum)

    def _identity(self) -> tuple[object, ...]:
        ledger = list(self.ledger)
        return (self.checksum, ledger, self.spec, self.lengths_digest)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.folder is not None:
            return (_reopen, (type(self), self.folder, self.checksum))
        state = dict(self.__dict__)
        state["_sums_from"] = self.sums
        state["_digest_from"] = self.lengths_digest
        return (_rebuild, (type(self), state))

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

    def _hash_blocks(self) -> dict[str, list[str]]:
        return {
            "offsets": [d.hex() for d in block_digests(self.offsets)],
            "indices": [d.hex() for d in block_digests(self.indices)],
        }

    def stats(self) -> dict[str, Any]:
        """Statistics of the plan (plain JSON values); see `planning/stats.py` for the keys."""
        if "over_long_packs" not in self._stored.get("stats", {}):  # also of plans written before it was told
            self._stored["stats"] = plan_stats(self)
        return dict(self._stored["stats"])

    # -- derived plans and files ---------------------------------------------------------------
    def align(self, world_size: int, drop_last: bool = False) -> AlignedPlan:
        """The view in which `world_size` ranks get equally many packs."""
        return align(self, world_size, drop_last)

    def without(self, packs: Any, reason: str) -> PackPlan:
        """A new plan whose named packs (bool[P] mask or int[k] ids) went to the ledger for `reason`."""
        if self.spec.samples_per_step is not None:
            raise PlanError(
                "packs of a plan by steps of samples cannot be taken out: every step would lose its samples",
                hint="plan with skip=… instead",
            )
        gone = _as_mask(packs, len(self))
        sizes = np.diff(self.offsets)
        keep_item = np.repeat(~gone, sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes[~gone])]).astype(np.int64)
        costs = {name: array[~gone] for name, array in self.pack_costs.items()}
        cap = self.spec.pack_length
        long_gone = gone & (sizes == 1) & (self._pack_cost() > cap)
        slots_gone = int(np.maximum(self._pack_cost()[gone], cap).sum())
        kept = len(offsets) - 1
        return PackPlan(
            offsets=offsets,
            indices=np.asarray(self.indices)[keep_item],
            spec=self.spec,
            packer=PackerId(
                self.packer.name,
                self.packer.version,
                {**self.packer.notes, f"packs_{reason}": int(gone.sum())},
            ),
            ledger=self.ledger.with_more(np.asarray(self.indices)[~keep_item], reason),
            certificate=Certificate.of(kept, min(kept, self._bound_without(gone)), "volume"),
            long_samples=self.long_samples - int(long_gone.sum()),
            slots=self.slots - slots_gone,
            sums=Sums(self.pack_tokens[~gone], self.pack_sq[~gone], costs),
            lengths_digest=self.lengths_digest,
        )

    def _pack_cost(self) -> I64:
        """A lower bound of each pack's cost; exact for a pack of one sample."""
        m = self.spec.multiple_of
        return -(-self.pack_tokens // m) * m

    def _bound_without(self, gone: NDArray[np.bool_]) -> int:
        """Volume bound of the packs that stay."""
        cost = self._pack_cost()[~gone]
        cap = self.spec.pack_length
        return int((cost > cap).sum()) + -(-int(cost[cost <= cap].sum()) // cap)

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write the plan folder; see `packtrain.store.plans.save` for the options."""
        extend.lookup("store", "plans").save(self, folder, **options)

    @classmethod
    def load(cls, folder: str | Path) -> PackPlan:
        """Open a plan folder, memory-mapped. Header and sizes are checked, bytes are not hashed."""
        loaded: PackPlan = extend.lookup("store", "plans").load(folder)
        return loaded


def _checksum(header: Mapping[str, Any], blocks: Mapping[str, list[str]]) -> str:
    return checksum_of(header, [bytes.fromhex(d) for name in ("offsets", "indices") for d in blocks[name]])


def _as_mask(packs: Any, n: int) -> NDArray[np.bool_]:
    array = np.asarray(packs)
    if array.dtype == np.bool_:
        if array.shape != (n,):
            raise PlanError(f"the mask has shape {array.shape}, the plan has {n} packs")
        return array
    mask = np.zeros(n, dtype=np.bool_)
    if array.size:
        if array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= n:
            raise PlanError(f"pack ids outside 0..{n - 1}", hint="pass bool[P] or pack ids")
        mask[array] = True
    return mask


def _reopen(kind: type[PackPlan], folder: Path, checksum: str) -> PackPlan:
    plan = kind.load(folder)
    if plan.checksum != checksum:
        raise ChecksumError(f"{folder} holds another plan than the one that was sent to this process")
    return plan


def _rebuild(kind: type[PackPlan], state: dict[str, Any]) -> PackPlan:
    plan = kind.__new__(kind)
    plan.__dict__.update(state)
    return plan
