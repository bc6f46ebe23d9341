"""The family of a loaded processor, and the media rules of that family bound to it.

Every number comes from the processor object that will be used, with the precedence it has itself: what a
processor class hands to its parts (`videos_kwargs` …) goes before the attributes of those parts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, SampleError, UnknownNameError, one_line
from ..families import BACKENDS, Family, family_of
from ..measuring.audio_tokens import audio_rule
from ..measuring.image_tokens import crop_rule, rule_of
from ..measuring.media import MediaRules
from ..measuring.video_tokens import video_rule

logger = logging.getLogger(__name__)

#: Settings of a video processor that say nothing of which frames are taken.
_NOT_SAMPLED_BY = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
_UNEQUAL = ("frames", "clip", "omni")  # video rules whose processors take videos of unlike lengths


#: What a processor needs for each modality.
_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}


def choose_family(family: Family | str | None, processor: Any) -> Family:
    """The family that was named, or the one the processor's class belongs to."""
    if isinstance(family, Family):
        return family
    if family is not None:
        found = family_of(name=family)
    else:
        try:
            found = family_of(processor=processor)
        except UnknownNameError:
            found = _unknown(processor)
    for kind in found.modalities:
        if not hasattr(processor, _PARTS[kind]):
            raise ConfigError(
                f"family {found.name} needs a processor with an {_PARTS[kind].replace('_', ' ')}, "
                f"got {type(processor).__name__}",
                hint="load the processor, not the tokenizer alone",
            )
    return found


def _unknown(processor: Any) -> Family:
    """A family for a processor that none describes: it can be measured and encoded, not packed.

    Its media are counted by asking the processor; which attention keeps its packed samples apart, and
    what shape its positions have, is not known, so every backend is refused.
    """
    kinds = [kind for kind, part in _PARTS.items() if getattr(processor, part, None) is not None]
    if not kinds or getattr(processor, "tokenizer", None) is None:
        return family_of(processor=processor)  # raises, naming what is known
    why = f"no family describes {type(processor).__name__}"
    return Family(
        name="oracle", model_types=(), modalities=tuple(kinds), refused=dict.fromkeys(BACKENDS, why)
    )


def bind_media(
    processor: Any,
    tokenizer: Any,
    family: Family,
    *,
    tokens_per_second: float | None = None,
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> MediaRules | None:
    """The rules by which this processor's media are counted; None for a family of text.

    Args:
        options: of `MediaRules`.

    Raises:
        ConfigError: the processor lacks a setting or the tokenizer a placeholder of the family.
    """
    if not family.modalities:
        return None
    tokens = {kind: _token(processor, tokenizer, family, kind) for kind in family.modalities}
    image: Any = None
    video = audio = oracle = None
    own = {kind: processor_options(processor, f"{kind}s_kwargs") for kind in ("image", "video")}
    if family.image_rule == "pixels":
        held = getattr(processor, "image_processor", None)
        image = rule_of(held, size=own["image"].get("size")).check("image")
    elif family.image_rule is not None:
        try:
            image = crop_rule(processor, family.image_rule, tokens["image"], own["image"])
        except ConfigError as error:
            logger.warning("%s; images are counted by asking or probing it", error.message)
    if family.video_rule is not None and "video" in tokens:
        video = video_rule(processor, family.video_rule, tokens, own["video"])
        if family.time_unit == "seconds":
            clock = family.tokens_per_second if tokens_per_second is None else tokens_per_second
            video = replace(video, clock=clock)
    sampler = _sampler(processor, tokens, own["video"], sampling)
    if family.audio_rule is not None:
        audio = audio_rule(processor, tokens["audio"])
    rules = {"image": image, "video": video, "audio": audio}
    if any(rules[kind] is None for kind in tokens):
        from ..measuring.oracle import Oracle

        oracle = Oracle(processor, tokenizer, tokens)
    return MediaRules(
        tokens,
        image=image,
        video=video,
        audio=audio,
        sampler=sampler,
        sampling=sampling,
        oracle=oracle,
        unequal_videos=family.video_rule in _UNEQUAL,
        **options,
    )


def _sampler(
    processor: Any, tokens: Mapping[str, str], options: dict[str, Any], sampling: Mapping[str, Any] | None
) -> VideoSampler | None:
    """The processor's own choice of frames; None where it makes none, and nothing is asked of it."""
    part = getattr(processor, "video_processor", None) if "video" in tokens else None
    sampler = None if part is None else VideoSampler(part, options)
    if sampling and (sampler is None or not sampler.samples):
        raise ConfigError(
            f"{type(processor).__name__} does not choose frames of videos, so it has no "
            f"{' and '.join(sampling)}",
            hint="leave template.fps and template.max_frames out",
        )
    return sampler


def _token(processor: Any, tokenizer: Any, family: Family, kind: str) -> str:
    if family.name == "oracle":
        token: Any = _found_placeholder(processor, tokenizer, kind)
    else:
        token = getattr(processor, f"{kind}_token", None) or getattr(family, f"{kind}_token")
    found = tokenizer.convert_tokens_to_ids(token) if token is not None else None
    if not isinstance(found, int) or found == tokenizer.unk_token_id:
        raise ConfigError(
            f"the tokenizer has no {kind} token {token!r}",
            hint="use the tokenizer that belongs to the processor",
        )
    return str(token)


def _found_placeholder(processor: Any, tokenizer: Any, kind: str) -> str | None:
    """What the chat template writes for one medium: the added token by which two renderings differ."""
    named = getattr(processor, f"{kind}_token", None)
    try:
        text = processor.apply_chat_template([{"role": "user", "content": [{"type": kind, kind: kind}]}])
    except Exception:
        return named
    if named is not None and named in text:
        return str(named)
    plain = processor.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": ""}]}])
    added = [token for token in tokenizer.get_added_vocab() if text.count(token) == plain.count(token) + 1]
    return min(added, key=text.index) if added else named


def media_ids(processor: Any, tokenizer: Any, rules: MediaRules) -> tuple[int, ...]:
    """Ids of the tokens that runs are made of, ascending."""
    tokens = set(rules.tokens.values())
    if rules.video is not None and rules.video.token != rules.tokens["video"]:
        tokens.discard(rules.tokens["video"])  # a placeholder that is replaced by other tokens
    return tuple(sorted(int(tokenizer.convert_tokens_to_ids(token)) for token in tokens))


def processor_options(processor: Any, name: str) -> dict[str, Any]:
    """What a processor hands to one of its parts on its own account, for example `videos_kwargs`."""
    try:
        merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
        return dict(merged.get(name) or {})
    except (AttributeError, TypeError, ValueError, KeyError):
        return dict(getattr(processor, name, None) or {})


class VideoSampler:
    """Frame numbers that a video processor takes of a video: its own sampler with its own settings."""

    def __init__(self, video_processor: Any, options: dict[str, Any]) -> None:
        self.video_processor = video_processor
        known = getattr(video_processor.valid_kwargs, "__annotations__", {})
        settings = {name: getattr(video_processor, name, None) for name in known}
        settings.update({name: value for name, value in options.items() if name in known})
        self.samples = bool(settings.get("do_sample_frames"))
        self.settings = {name: value for name, value in settings.items() if name not in _NOT_SAMPLED_BY}

    def __call__(self, frames: int, fps: float | None) -> NDArray[np.int64]:
        """int64[k], ascending, all below `frames`.

        Raises:
            SampleError: `unsupported_media`, a video it cannot sample.
        """
        if not self.samples:
            return np.arange(frames, dtype=np.int64)
        from transformers.video_utils import VideoMetadata

        duration = None if fps is None else frames / fps
        metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=duration)
        try:
            taken = self.video_processor.sample_frames(metadata=metadata, **self.settings)
        except (ValueError, ZeroDivisionError, RuntimeError) as error:
            raise SampleError(
                "unsupported_media",
                f"a video of {frames} frames at {fps} frames a second cannot be sampled: "
                f"{one_line(error, 200)}",
                hint="cut, resample or drop the video",
            ) from None
        indices = np.asarray(taken, dtype=np.int64)
        return indices[indices < frames]  # some samplers count one frame too many
