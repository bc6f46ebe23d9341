"""Versions of transformers and torch: which were tested, and where the installed ones stand beside them.

No version is refused for its number: the start-up proof decides on the installed one. `packtrain doctor` and
the first line of a run say whether a version was tested, or is newer or older than those that were.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass

#: Minor versions that the tests, `make test-versions` or the GPU runs of docs/benchmarks*.md passed on.
TESTED = {
    "transformers": ("4.57", "5.9", "5.17", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"),
    "torch": ("2.6", "2.9", "2.11", "2.13", "2.14"),
}


@dataclass(frozen=True)
class Feature:
    """Something that rests on a name of another package.

    Attributes:
        module, name: what is needed.
        cost: what there is without it.
    """

    module: str
    name: str
    cost: str


#: What breaks when another package renames something; only what is missing is told.
FEATURES = (
    Feature("torch.nn.attention.varlen", "varlen_attn", "attention varlen runs segment by segment, slower"),
    Feature("torch.nn.attention.flex_attention", "flex_attention", "model.attn: flex_attention cannot run"),
    Feature("torch.distributed.fsdp", "fully_shard", "no FSDP2; FSDP1 and DDP remain"),
    Feature("transformers", "AttentionInterface", "model.attn: varlen cannot run; use sdpa"),
    Feature("transformers", "AttentionMaskInterface", "model.attn: varlen cannot run; use sdpa"),
    Feature("transformers.masking_utils", "sdpa_mask", "model.attn: varlen cannot run; use sdpa"),
    Feature(
        "transformers.masking_utils",
        "find_packed_sequence_indices",
        "sdpa and eager may not see the boundaries of packs; the start-up proof decides",
    ),
    Feature(
        "transformers.modeling_utils",
        "ALL_ATTENTION_FUNCTIONS",
        "a leak is found, but not the function that it comes from",
    ),
)


def standings() -> dict[str, bool]:
    """Every package of `TESTED` that is installed, in words -> was its version tested?"""
    found = {}
    for package, tested in TESTED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        minor, known = _minor(version), [_minor(one) for one in tested]
        word = "newer" if minor > max(known) else "older" if minor < min(known) else "between"
        words = "tested" if minor in known else f"{word}: tested are {tested[0]} to {tested[-1]}"
        found[f"{package} {version} ({words})"] = minor in known
    return found


def told() -> str:
    """One line about versions that were not tested; "" where all were."""
    others = [words for words, tested in standings().items() if not tested]
    return f"{'; '.join(others)}: the start-up proof decides" if others else ""


def missing_features() -> list[str]:
    """One line for each of `FEATURES` that the installed packages do not have."""
    return [f"{one.module}.{one.name} is missing here: {one.cost}" for one in FEATURES if not _has(one)]


def _has(feature: Feature) -> bool:
    try:
        return hasattr(importlib.import_module(feature.module), feature.name)
    except (ImportError, RuntimeError):
        return False


def _minor(version: str) -> tuple[int, ...]:
    digits = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
