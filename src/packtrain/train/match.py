"""Is this processor one of this model? From the model's config alone, no weights.

    check_match(config, processor)      # transformers config, processor or tokenizer

Checked: every token id has a row in the embedding; placeholders of media have the ids that the model looks
for; patches are of one size; positions have as many rows. A sample of one that differs would train something
else, or stop the run at the first pack that holds it. A tokenizer alone fits a model with towers: its samples
are text.
"""

from __future__ import annotations

import logging
from typing import Any

from ..collate.boundaries import family_for, text_config
from ..errors import ConfigError, IsolationError, UnknownNameError, counted
from ..families import Family, family_of

logger = logging.getLogger(__name__)

_HINT = "take the processor of the model (template.processor, or processing_class of a Trainer)"

_KINDS = ("image", "video", "audio")

#: Setting of an image processor -> the same of a vision config.
_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


def check_match(config: Any, processor: Any, family: Family | None = None) -> None:
    """Refuse a processor that makes samples this model cannot take.

    Args:
        config: transformers config of the model.
        processor: loaded processor or tokenizer; None is not checked.
        family: the template's; None: found from the processor's class.

    Raises:
        ConfigError: says what differs, with both values.
    """
    if processor is None:
        return
    tokenizer = getattr(processor, "tokenizer", processor)
    _check_family(config, processor, family)
    _check_placeholders(config, processor, tokenizer)
    _check_sizes(config, getattr(processor, "image_processor", None))
    _check_vocabulary(config, tokenizer)


def _check_family(config: Any, processor: Any, family: Family | None) -> None:
    ours = family_for(config)
    try:
        theirs = family or family_of(processor=processor)
    except (UnknownNameError, IsolationError):
        return
    if ours is None or not theirs.modalities:
        return
    kind = config.model_type
    if not ours.modalities:
        raise ConfigError(f"the processor is of {theirs.name}, and {kind} takes no media", hint=_HINT)
    if theirs.position_rows != ours.position_rows:
        raise ConfigError(
            f"the processor is of {theirs.name} ({counted(theirs.position_rows, 'rows')} of "
            f"positions), {kind} takes "
            f"{ours.position_rows}",
            hint=_HINT,
        )
    if dict(theirs.media_keys) != dict(ours.media_keys):
        raise ConfigError(f"the processor is of {theirs.name}, whose media {kind} does not take", hint=_HINT)
    rules = ("image_rule", "video_rule", "audio_rule", "time_unit")
    if any(getattr(theirs, rule) != getattr(ours, rule) for rule in rules):
        logger.warning(
            "the processor is of %s, the model of %s: times of videos are counted as %s does",
            theirs.name, ours.name, theirs.name,
        )  # fmt: skip


def _check_placeholders(config: Any, processor: Any, tokenizer: Any) -> None:
    for kind in _KINDS:
        wanted = _first(config, f"{kind}_token_id", f"{kind}_token_index")
        given = _first(processor, f"{kind}_token_id")
        token = getattr(processor, f"{kind}_token", None)
        if given is None and isinstance(token, str) and hasattr(tokenizer, "convert_tokens_to_ids"):
            given = tokenizer.convert_tokens_to_ids(token)
        if isinstance(wanted, int) and isinstance(given, int) and wanted != given:
            raise ConfigError(
                f"the {kind} token of the processor is {given} ({token}), {config.model_type} looks for "
                f"{wanted}",
                hint=_HINT,
            )


def _first(thing: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def _check_sizes(config: Any, images: Any) -> None:
    vision = getattr(config, "vision_config", None)
    for ours, theirs in _SIZES.items():
        given, wanted = getattr(images, ours, None), getattr(vision, theirs, None)
        if isinstance(given, int) and isinstance(wanted, int) and given != wanted:
            raise ConfigError(
                f"{ours} of the processor is {given}, {theirs} of {config.model_type} is {wanted}", hint=_HINT
            )


def _check_vocabulary(config: Any, tokenizer: Any) -> None:
    """A pad token beyond the embedding is allowed: packs have none of it."""
    size = getattr(text_config(config), "vocab_size", None)
    if not isinstance(size, int) or not hasattr(tokenizer, "get_vocab"):
        return
    pad = getattr(tokenizer, "pad_token", None)
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= size and token != pad}
    if beyond:
        token = max(beyond, key=lambda one: beyond[one])
        raise ConfigError(
            f"the tokenizer gives ids up to {beyond[token]} ({token}), {config.model_type} has {size} "
            f"embeddings: {len(beyond)} tokens are beyond",
            hint=f"{_HINT}, or enlarge the model with resize_token_embeddings",
        )
