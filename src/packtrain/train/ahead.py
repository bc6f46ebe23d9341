"""`training.encode_cache`: the packs of the training plan are encoded before the first step.

Every rank encodes its share of the chunks and reads those of all ranks; what another rank has not written
yet is encoded as ever, so no rank waits for another here. A later run with the same plan and template finds
everything encoded. The validation plan is read once an evaluation and is not cached.
"""

from __future__ import annotations

import logging
from typing import Any

from ..data import EncodeCache, PackedDataset
from ..errors import ConfigError
from ..planning.packplan import PackPlan
from ..world import World
from .config import RunConfig

__all__ = ["encode_ahead"]

logger = logging.getLogger(__name__)


def encode_ahead(
    config: RunConfig, plan: PackPlan, source: Any, template: Any, lengths: Any, place: World
) -> EncodeCache | None:
    """The filled cache of the run, or None without `training.encode_cache`.

    Raises:
        ConfigError: a setting with which encoded packs cannot be kept.
        ForeignArtefactError: the folder holds packs of another plan or template.
    """
    folder = config.training.encode_cache
    if folder is None:
        return None
    for name, value in (("replan", config.training.replan), ("on_error", config.training.on_error)):
        if value not in (None, "raise"):
            raise ConfigError(
                f"training.encode_cache and training.{name} {value!r}: encoded packs would not stay true",
                hint=f"remove training.{name}, or training.encode_cache",
            )
    key = {"template": template_key(template), "source": getattr(source, "fingerprint", None)}
    cache = EncodeCache(folder, plan, key=key)
    plain = PackedDataset(plan, source, template.encode, lengths=lengths)
    made = cache.fill(plain, share=(place.rank, place.size), workers=config.training.encode_cache_workers)
    if place.is_writer:
        logger.info("encode cache %s: %d of %d chunks encoded by this rank", folder, made, cache.chunks)
    return cache


def template_key(template: Any) -> Any:
    """What decides the encoding, as plain JSON; the class alone where a template does not say."""
    config = getattr(template, "config", None)
    return type(template).__name__ if config is None else config() if callable(config) else config
