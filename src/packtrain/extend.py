"""How to extend packtrain: the protocols a plug-in fills, and the look-up that finds it.

This is the only file a plug-in author must read. A plug-in is one module. Its file name is its
option name: `packers/bfd.py` is `packer="bfd"`. Packages outside packtrain register the same
module under an entry point of the group `packtrain.<kind>` (for example `packtrain.packers`).
Every module of a kind's folder is a plug-in, and defines its kind's hook:

    kind       hook           signature
    packers    pack           pack(problem: PackProblem) -> Patterns | Bins | int64[n] (bin_of)
    sources    open_source    open_source(path, **options) -> Source
    families   FAMILY         a `packtrain.families.Family` value
    execute    map_shards     map_shards(work, shards, *, workers, context) -> iterator in shard order
    store      SCHEMA         save(value, folder), load(folder)
    export     write_part     write_part(job, part) -> rows about its files; finish(job, parts), OPTIONS; what
                              `open_packs` is to read also has FILES (two patterns), open_rows(out)

Modules whose name starts with an underscore are no plug-ins, nor those that the folder's `__init__` names in
`NOT_PLUGINS`. Names are found without importing a plug-in; one without its hook is told when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, SampleError, UnknownNameError

__all__ = [
    "HOOKS",
    "Bins",
    "Measured",
    "PackProblem",
    "Packer",
    "Patterns",
    "Source",
    "Template",
    "lookup",
    "measure_many",
    "names",
]

HOOKS: dict[str, str] = {
    "packers": "pack",
    "sources": "open_source",
    "families": "FAMILY",
    "execute": "map_shards",
    "store": "SCHEMA",
    "export": "write_part",
}

I64 = NDArray[np.int64]


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: name -> the module below it that has it, imported when asked for."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module("." + homes[name], package), name)

    return found


# --------------------------------------------------------------------------------------------
# packers
# --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PackProblem:
    """What a packer sees: only samples that fit, with their costs already rounded.

    Attributes:
        costs: int64[n], tokens a sample takes in its pack; 1 <= cost <= capacity. For n of a
            memory-mapped source this may be any integer array type; treat it as read-only.
        capacity: hard cap of a pack in tokens.
        sizes: int64[D], the distinct costs, ascending (the length classes).
        counts: int64[D], how many samples have each cost.
        limits: further hard caps, name -> (int64[n] cost per sample, cap). Often empty.
        max_samples: cap on the number of samples in a pack, or None.
        seed: seed of the plan, or None. The materialiser, not the packer, shuffles samples of
            equal cost; only a packer that is itself random (`random_fit`) reads it.
        workers: threads a packer may use. Results never depend on it.
        options: knobs that its module names in `OPTIONS` and checks in `check_options`.
    """

    costs: NDArray[Any]
    capacity: int
    sizes: I64
    counts: I64
    limits: Mapping[str, tuple[I64, int]] = field(default_factory=dict)
    max_samples: int | None = None
    seed: int | None = None
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """A packing as patterns over length classes: group g is `repeat[g]` packs of one content.

    Group g holds, for j in `offsets[g]:offsets[g+1]`, `number[j]` samples of cost `size[j]`.
    The order of groups is part of the plan; the order inside a group is not.
    Which sample of a class goes where is the materialiser's choice, not the packer's.
    """

    repeat: I64  # int64[G] >= 1
    offsets: I64  # int64[G+1], first 0
    size: I64  # int64[K] cost of the class
    number: I64  # int64[K] >= 1
    notes: Mapping[str, Any] = field(default_factory=dict)  # plain JSON kept in the plan: `chosen`, …


@dataclass(frozen=True, kw_only=True)
class Bins:
    """A packing as a bin for each sample, with notes. A packer without notes answers `bin_of` alone."""

    bin_of: I64  # int64[n], any numbers >= 0; -1 = left out, goes to the ledger
    notes: Mapping[str, Any] = field(default_factory=dict)  # as in Patterns


class Packer(Protocol):
    """A module in `packers/`. Pure: the same problem gives the same answer, whatever the machine.

    Optional module attributes: `HISTOGRAM = True` for a packer that reads `sizes` and `counts` only
    (`costs` is then empty where there are no limits); `LIMITS = True` for one that keeps `limits` and
    `max_samples` (others are refused when these are asked for); `SEEDED = True` for one that is itself
    random (for others the planner shuffles samples of equal cost).
    """

    VERSION: int

    def pack(self, problem: PackProblem) -> Patterns | Bins | I64: ...


# --------------------------------------------------------------------------------------------
# sources and templates
# --------------------------------------------------------------------------------------------
@runtime_checkable
class Source(Protocol):
    """An indexable collection of samples with stable ids 0..n-1.

    `source[i]` must not depend on the order of calls. It raises `SampleError` when record i alone
    is bad, `SourceError` when the source is.
    """

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def where(self, index: int) -> str:
        """Where record `index` stands, for messages: `train.jsonl:17`."""
        ...


class Measured(int):
    """A length in tokens with the other costs of the sample (an int, so it compares as the length).

    `note` is one line for people on what of a sample is not trained although the sample is; "" for nothing.

    >>> m = Measured(195, images=2, patches=1120)
    >>> m == 195, m.costs["images"]
    (True, 2)
    """

    costs: dict[str, int]
    note = ""

    def __new__(cls, tokens: int, **costs: int) -> Measured:
        self = super().__new__(cls, tokens)
        self.costs = costs
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return ((int(self),), self.costs)


@runtime_checkable
class Template(Protocol):
    """Turns a sample into what the forward pass consumes.

    Law: `measure(sample) == len(encode(sample)["input_ids"])`, and `measure` opens no pixels.
    Both raise `SampleError` with the same reason for a sample that cannot be used.
    """

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """`input_ids` int64[T], `labels` int64[T] (-100 = not trained), `position_ids` int64[T] or
        int64[3,T], and the family's media tensors."""
        ...

    def measure(self, sample: Mapping[str, Any]) -> int:
        """Length in tokens; a `Measured` when further costs are known."""
        ...

    def config(self) -> dict[str, Any]:
        """Everything that affects a length, as plain JSON values; its digest is the cache key."""
        ...


def measure_many(template: Template, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """`measure` of several samples, through the template's `measure_batch` where it has one.

    Each item of the result is a length, or the `SampleError` of that sample.
    """
    batch = getattr(template, "measure_batch", None)
    if batch is not None:
        return list(batch(samples))
    out: list[Any] = []
    for sample in samples:
        try:
            out.append(template.measure(sample))
        except SampleError as error:
            out.append(error)
    return out


# --------------------------------------------------------------------------------------------
# look-up
# --------------------------------------------------------------------------------------------
def names(kind: str) -> list[str]:
    """Option names of a kind: the modules of its folder, and registered entry points."""
    return list(_names(kind, tuple(sys.path)))


@lru_cache(maxsize=64)
def _names(kind: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """`names`; reading the metadata of every installed package takes long, and is done once for a path."""
    _hook(kind)
    package = importlib.import_module(f"{__package__}.{kind}")
    found = {
        module.name for module in pkgutil.iter_modules(package.__path__) if _declared(package, module.name)
    }
    found.update(point.name for point in importlib.metadata.entry_points(group=f"packtrain.{kind}"))
    return tuple(sorted(found))


def lookup(kind: str, name: str) -> ModuleType | Any:
    """The plug-in `name` of `kind`. Unknown names raise `UnknownNameError` with the nearest one."""
    hook = _hook(kind)
    package = importlib.import_module(f"{__package__}.{kind}")
    dotted = f"{package.__name__}.{name}"
    if name.isidentifier() and _declared(package, name) and importlib.util.find_spec(dotted) is not None:
        module = importlib.import_module(dotted)
        if not hasattr(module, hook):
            raise InputError(
                f"{dotted} does not define {hook}, the hook of {kind}",
                hint=f"define it; a module that is no plug-in starts with _ or is in NOT_PLUGINS of {kind}",
            )
        return module
    for point in importlib.metadata.entry_points(group=f"packtrain.{kind}", name=name):
        return point.load()
    raise UnknownNameError(kind.removesuffix("s"), name, names(kind))


def _declared(package: ModuleType, name: str) -> bool:
    return not name.startswith("_") and name not in getattr(package, "NOT_PLUGINS", ())


def _hook(kind: str) -> str:
    try:
        return HOOKS[kind]
    except KeyError:
        raise InputError(f"no plug-ins of kind {kind!r}", hint=f"kinds: {', '.join(HOOKS)}") from None
