"""Old names: where modules, names and keywords of earlier versions are now.

The tables below are the only place that knows an old spelling. An import of an old path gives the module
of the new one (the same object), so pickles and `isinstance` agree; one DeprecationWarning a row names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from .errors import ConfigError, InputError, nearest

# old module -> new one. The row of a package holds for the modules below it that have no row of their own.
MODULES: dict[str, str] = {
    "packtrain.collate.boundaries": "packtrain.collate.model_traits",
    "packtrain.collate.dummy": "packtrain.collate.media",
    "packtrain.collate.padding": "packtrain.collate.padding_free",
    "packtrain.collate.rotations": "packtrain.collate.model_traits",
    "packtrain.data.chunked": "packtrain.packs.exported",
    "packtrain.data.encode_cache": "packtrain.packs.encode_cache",
    "packtrain.data.equal_steps": "packtrain.packs.equal_steps",
    "packtrain.data.lazy": "packtrain.packs.growing",
    "packtrain.data.loader": "packtrain.packs.loader",
    "packtrain.data.pack_row": "packtrain.packs.pack",
    "packtrain.data.packed": "packtrain.packs.packed",
    "packtrain.data.sampler": "packtrain.packs.loader",
    "packtrain.data.shards": "packtrain.packs.exported",
    "packtrain.data.streaming": "packtrain.packs.streaming",
    "packtrain.data.token_budget": "packtrain.packs.token_budget",
    "packtrain.data.weighted": "packtrain.packs.weighted",
    "packtrain.demo": "packtrain.testing.demo",
    "packtrain.hosts.energon_reading": "packtrain.hosts.energon",
    "packtrain.integrations": "packtrain.hosts",
    "packtrain.measuring.audio": "packtrain.measuring.audio_tokens",
    "packtrain.measuring.crops": "packtrain.measuring.image_tokens",
    "packtrain.measuring.image": "packtrain.measuring.image_tokens",
    "packtrain.measuring.video": "packtrain.measuring.video_tokens",
    "packtrain.packs.planned": "packtrain.packs.source",
    "packtrain.packs.sampler": "packtrain.packs.loader",
    "packtrain.pipeline.append": "packtrain.pipeline.measure",
    "packtrain.pipeline.cache": "packtrain.pipeline.prepare",
    "packtrain.pipeline.export_guards": "packtrain.pipeline.export",
    "packtrain.pipeline.growth": "packtrain.pipeline.measure",
    "packtrain.pipeline.ranges": "packtrain.pipeline.publish",
    "packtrain.pipeline.step_times": "packtrain.pipeline.page",
    "packtrain.pipeline.truncated": "packtrain.pipeline.plan",
    "packtrain.pipeline.unread": "packtrain.pipeline.publish",
    "packtrain.planning.asking": "packtrain.planning._materialise",
    "packtrain.planning.certificate": "packtrain.planning.raw_plan",
    "packtrain.planning.classes": "packtrain.planning.long_samples",
    "packtrain.planning.digests": "packtrain.planning.lengths",
    "packtrain.planning.order": "packtrain.planning.epoch_order",
    "packtrain.planning.steps": "packtrain.planning.permutation",
    "packtrain.store.pack_files": "packtrain.store.shards",
    "packtrain.store.rows": "packtrain.store._chunk_reader",
    "packtrain.store.growing": "packtrain.store.chunk_folder",
    "packtrain.template.control": "packtrain.template.conversation",
    "packtrain.template.options": "packtrain.template.processor",
    "packtrain.template.positions": "packtrain.template.layout",
    "packtrain.train.blind_mask": "packtrain.train.culprit",
    "packtrain.train.evaluate": "packtrain.train.consumed",
    "packtrain.train.lazy": "packtrain.train.opened",
    "packtrain.train.log_file": "packtrain.train.trace",
    "packtrain.train.match": "packtrain.train.early",
    "packtrain.train.passes": "packtrain.train.resume",
    "packtrain.train.standing": "packtrain.train.resume",
    "packtrain.train.steps": "packtrain.train.runtime",
    "packtrain.train.streaming": "packtrain.train.opened",
    "packtrain.train.tiny": "packtrain.testing.tiny",
    "packtrain.train.tiny_media": "packtrain.testing.tiny",
    "packtrain.train.tiny_parts": "packtrain.testing.tiny",
    "packtrain.train.untouched": "packtrain.train.live",
}
# module:name -> module:name. For a module that is still there, its `__getattr__` asks `attribute`.
NAMES: dict[str, str] = {
    "packtrain.data:IterablePackedDataset": "packtrain.packs.streaming:StreamingPackedDataset",
    "packtrain.data:IterablePackingDataset": "packtrain.packs.streaming:StreamingPackedDataset",
    "packtrain.data:PackingDataset": "packtrain.packs.packed:PackedDataset",
    "packtrain.data:SimpleFusionDataset": "packtrain.sources.mixture:mix",
    "packtrain.train.opened:train_lazy": "packtrain.train.sft:train",
    "packtrain.train.opened:train_streaming": "packtrain.train.sft:train",
}
# old keyword -> the keyword now. A function takes the old ones that its `@renamed(...)` names.
KEYWORDS: dict[str, str] = {"max_wait_time": "timeout_s", "poll_interval": "poll_s"}

logger = logging.getLogger(__name__)

_told: set[str] = set()
F = TypeVar("F", bound=Callable[..., Any])


def new_path(module: str) -> str | None:
    """The path of an old module now, or None where the table has no row for it or a package above it."""
    head, tail = module, ""
    while head:
        if head in MODULES:
            return MODULES[head] + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return None


def attribute(module: str, name: str) -> Any:
    """The object that `module` once held under `name`; for the `__getattr__` of a module.

    Raises:
        AttributeError: the table has no row for it.
    """
    target = NAMES.get(f"{module}:{name}")
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _tell(f"{module}:{name}", f"{module}.{name}", target.replace(":", "."), stacklevel=4)
    home, _, attr = target.partition(":")
    return getattr(importlib.import_module(home), attr)


_STREAM: dict[str, Any] = {
    "dataset": "source",
    "packing_length": "pack_length",
    "packing_interval": "window",
    "num_proc": "encode_workers",
    "strict": ("on_error", {True: "raise", False: "skip"}),
}
_CAP = {"packing_length": "pack_length", "max_len": "pack_length", "box_capacity": "pack_length"}
#: What takes keywords -> the names that other systems have for them -> ours; a pair also
#: maps the value, and None has no effect.
THEIRS: dict[str, dict[str, Any]] = {
    "plan": {
        **_CAP,
        "packing_strategy": ("packer", {"binpack": "auto"}),
        "packing_allow_single_long": ("long_samples", {True: "single", False: "drop"}),
    },
    "align": {"dataloader_drop_last": "drop_last"},
    "measure": {
        "num_proc": "workers",
        "packing_length_precompute_workers": "workers",
        "packing_length_cache_persist_every": "persist_every",
    },
    "PackedDataset": {
        "dataset": "samples",
        "template": "encode",
        "packing_length": "pack_length",
        "num_proc": None,
        "strict": ("on_error", {True: "raise", False: "zero"}),
    },
    "StreamingPackedDataset": _STREAM,
    "TokenBudgetDataset": {
        **{name: ours for name, ours in _STREAM.items() if not name.startswith("packing_")},
        "dyn_bsz_buffer_size": "buffer_size",
        "dyn_bsz_count_mode": "count_mode",
        "dyn_bsz_overflow_ratio": "overflow_ratio",
        "dyn_bsz_physical_overflow_ratio": "overflow_ratio",
        "bsz_warmup_ratio": "warmup_ratio",
        "bsz_warmup_init_mbtoken": "warmup_tokens",
        "pad_packed_to_length": "pad_to_length",
    },
    "PaddingFreeCollator": {"pad_packed_to_length": "pad_to_length", "padding_to": "pad_to_length"},
    "LazyShardedDataset": {
        "data_dir": "directory",
        "dataset": "directory",
        "dp_rank": "rank",
        "dp_world_size": "world_size",
    },
    "PackingProducer": {
        **_CAP,
        "input_dir": "inputs",
        "output_dir": "output",
        "num_proc": "workers",
        "packing_strategy": ("packer", {"binpack": "auto"}),
    },
    "mix": {"datasets": "sources"},
}


def also_named(
    where: str, further: Callable[..., Any] | None = None, but: Sequence[str] = ()
) -> Callable[[F], F]:
    """Lets a function take keywords under the names that other systems have for them (`THEIRS[where]`).

    Called with both names of one keyword, with one that it does not have, or without one that it needs, it
    raises `ConfigError`: one line, and the nearest name.

    Args:
        further: takes the function's `**options`, but those of `but`.
    """
    names = THEIRS[where]

    def wrap(function: F) -> F:
        known = inspect.signature(function)
        more = inspect.signature(further).parameters if further else ()
        words = [*known.parameters, *names, *(name for name in more if name not in but)]
        passes = further is None and "options" in words  # what they go to refuses them

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for theirs in [name for name in options if name in names]:
                row = names[theirs]
                if row is None:
                    logger.warning("%s: %s=%r has no effect", where, theirs, options.pop(theirs))
                    continue
                ours, values = row if isinstance(row, tuple) else (row, {})
                if ours in options:
                    raise ConfigError(f"{theirs} and {ours} are one keyword", hint=f"keep {ours}")
                value = options.pop(theirs)
                options[ours] = values.get(value, value) if isinstance(value, bool | str) else value
            for name in options:
                if name not in words and not passes:
                    close = nearest(name, [word for word in words if word not in ("self", "options")])
                    hint = f"did you mean {close}?" if close else f"see help({where})"
                    raise ConfigError(f"{where} has no keyword {name}", hint=hint)
            try:
                known.bind(*args, **options)
            except TypeError as error:
                raise ConfigError(f"{where}: {error}", hint=f"see help({where})") from None
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return wrap


def renamed(*old: str) -> Callable[[F], F]:
    """Lets a function take the old keywords named here, rows of `KEYWORDS`, for the ones it has now.

    Calling it with an old keyword warns once; with both spellings raises `InputError`.
    """
    names = {name: KEYWORDS[name] for name in old}

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if not names.keys().isdisjoint(options):
                options = _new_keywords(function.__qualname__, names, options)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return wrap


def _new_keywords(where: str, names: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in options.items():
        name = names.get(key, key)
        if name in out or (name != key and name in options):
            raise InputError(f"{where}: {key} and {name} are one option", hint=f"give {name} alone")
        if name != key:
            _tell(f"{where}({key})", f"{where}: keyword {key}", name, stacklevel=4)
        out[name] = value
    return out


def _tell(row: str, old: str, new: str, *, stacklevel: int) -> None:
    if row not in _told:
        _told.add(row)
        warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=stacklevel)


class _Alias(Loader):
    """Puts the module of the new path in the place of the old one."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        row = self.old
        while row not in MODULES:
            row = row.rpartition(".")[0]
        _tell(row, row, MODULES[row], stacklevel=3)
        found = importlib.import_module(self.new)
        module.__dict__.update(found.__dict__)  # for a thread that took the placeholder meanwhile
        sys.modules[self.old] = found  # the import system hands this one out


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_path(fullname) if fullname.startswith("packtrain.") else None
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, _Alias(fullname, new))


def install() -> None:
    """Old paths of the table can be imported from now on; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # In front: `__path__` of a renamed package would otherwise load the modules below it a second time.
        sys.meta_path.insert(0, _Finder())
