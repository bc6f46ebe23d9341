"""What packtrain must know about a model family, in one value per family.

A family groups the models that share three things: how media become tokens and tensors, the shape
of their positions, and what may be handed to them so that packed samples stay apart. Every other
part (template, collator, proof) asks here instead of naming a model.

How boundaries reach attention, measured on transformers 5.24:

- `sdpa`, `eager` and `flex_attention` build a block mask from *restarting text positions*, and only
  while there is no `attention_mask` (even one full of ones) and no cache. `cu_seq_lens_*` are
  ignored there, so they are not sent.
- flash attention takes `cu_seq_lens_*` for text models. Vision-language models forward every
  keyword to their vision tower, which has its own `cu_seq_lens`: there the restarting text row of
  four-row positions is the only way.
- `varlen` (our own function) takes `pack_cu` and `pack_max`, names no tower uses.

Trade-off: model types are listed, not guessed. An unknown type is refused until someone names a
family for it, because a wrong guess leaks between samples without any sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..checks import one_of
from ..errors import IsolationError, UnknownNameError
from ..extend import lookup, names

#: Attention backends whose behaviour is known.
BACKENDS = (
    *("eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
    *("sdpa", "varlen"),
)

#: Media keys of an audio encoder; every other media key belongs to vision.
_AUDIO_KEYS = ("input_features", "feature_attention_mask")

#: Boundary keywords of the flash attention path.
FLASH_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

#: Boundary keywords of packtrain's own variable-length attention function.
VARLEN_KWARGS = ("pack_cu", "pack_max")

#: Keys that may never be in a packed batch: any 2-D mask switches packed detection off.
MASK_KEYS = ("attention_mask",)

_STATEFUL = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm2_vl mamba mamba2
    minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
    recurrent_gemma rwkv xlstm zamba zamba2
"""

#: Model types with convolution or recurrent layers: state crosses samples whatever the mask is.
STATEFUL_MODEL_TYPES = tuple(_STATEFUL.split())


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. Plain data: picklable, comparable, no torch.

    Attributes:
        name: option name, equal to the module's file name.
        model_types: values of `config.model_type` that belong to the family.
        processor_classes: class names of the Hugging Face processors that belong to it.
        modalities: media it takes besides text, for example `("image",)`.
        position_rows: 1 = `position_ids` int64[T]; 3 = mRoPE int64[3,T] (time, height, width).
        media_keys: media tensors of an encoded sample -> how a collator joins them
            (`"cat0"`: concatenated along dimension 0 in sample order).
        image_token: placeholder of one image in the rendered text (a processor's own
            `image_token` has precedence), or None.
        video_token: placeholder of one video, or None.
        audio_token: placeholder of one audio clip, or None.
        image_rule: how an image becomes tokens: `"pixels"` (area limits), `"square"` (always the same),
            `"anyres"` (crops on a grid), `"tiles"` (tiles and a thumbnail). The numbers come from the
            processor. None: asked from the processor (`measuring.oracle`).
        video_rule: the same for a video: `"frames"` (area limits per frame), `"clip"` (for all frames
            together, with times as text), `"omni"` (frames, sound between them), `"pooled"`, `"tiles"`.
        audio_rule: `"whisper"` (mel frames of a Whisper extractor, halved twice).
        grounding: how a name and a box of `objects` are written, and what a box counts in (`thousandths` of
            the image, or `pixels` of what the processor makes of it); None: it has no published notation.
        time_unit: step of the time row inside a video: `"frame"` (1), `"seconds"` (real time times
            `tokens_per_second`), `"omni"` (fixed, and later text starts behind the time row).
        tokens_per_second: positions a second where `time_unit` is `"seconds"`.
        boundary_kwargs: backend -> keywords that carry boundaries into the model. A backend that is
            absent takes none: its boundaries are the restarting text positions.
        position_backends: backends on which restarting text positions alone isolate samples.
        refused: backend -> why this family cannot run packed on it.
    """

    name: str
    model_types: tuple[str, ...]
    processor_classes: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ()
    position_rows: int = 1
    media_keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    image_token: str | None = None
    video_token: str | None = None
    audio_token: str | None = None
    image_rule: str | None = None
    video_rule: str | None = None
    audio_rule: str | None = None
    grounding: tuple[str, str, str] | None = None
    time_unit: str = "frame"
    tokens_per_second: float | None = None
    boundary_kwargs: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    position_backends: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def packed_position_rows(self) -> int:
        """Rows of `position_ids` in a packed batch: mRoPE gets the restarting text row in front."""
        return 1 if self.position_rows == 1 else self.position_rows + 1

    @property
    def towers(self) -> dict[str, tuple[str, ...]]:
        """Encoder ("vision", "audio") -> the media keys that make it run; empty for text."""
        sound = tuple(key for key in self.media_keys if key in _AUDIO_KEYS)
        sight = tuple(key for key in self.media_keys if key not in _AUDIO_KEYS)
        return {name: keys for name, keys in (("vision", sight), ("audio", sound)) if keys}

    def allowed_kwargs(self, backend: str) -> tuple[str, ...]:
        """Boundary keywords a packed batch may hand to the model on `backend`.

        Raises:
            IsolationError: the family cannot run packed on this backend.
            UnknownNameError: no such backend.
        """
        one_of("attention backend", backend, BACKENDS)
        if backend in self.refused:
            raise IsolationError(
                f"{self.name} cannot run packed on {backend}: {self.refused[backend]}",
                hint=f"use one of {', '.join(b for b in BACKENDS if b not in self.refused)}",
            )
        return tuple(self.boundary_kwargs.get(backend, ()))

    def forbidden_kwargs(self, backend: str) -> tuple[str, ...]:
        """Boundary and mask keywords that must not reach the model on `backend`."""
        allowed = self.allowed_kwargs(backend)
        return (*MASK_KEYS, *(key for key in FLASH_KWARGS + VARLEN_KWARGS if key not in allowed))

    def isolates_by_positions(self, backend: str) -> bool:
        """True where restarting text positions (no mask, no cache) keep samples apart."""
        return backend in self.position_backends


def families() -> list[Family]:
    """Every known family, by name."""
    return [lookup("families", name).FAMILY for name in names("families")]


def family_of(model_type: str | None = None, processor: Any = None, *, name: str | None = None) -> Family:
    """The family of a model type, a processor or tokenizer object, or an option name.

    Args:
        model_type: `config.model_type` of a Hugging Face model.
        processor: a loaded processor, or a tokenizer (which makes a text family).
        name: option name of a family; has precedence.

    Raises:
        IsolationError: the model carries state from sample to sample, so it cannot be packed.
        UnknownNameError: no family lists it.
    """
    if name is not None:
        family: Family = lookup("families", name).FAMILY
        return family
    known = families()
    if model_type is not None:
        return _by_model_type(model_type, known)
    if processor is None:
        raise UnknownNameError("family", "", [family.name for family in known])
    kinds = [cls.__name__ for cls in type(processor).__mro__]
    for kind in kinds:  # a subclass belongs to the family of its nearest known base
        for family in known:
            if kind in family.processor_classes:
                return family
    if hasattr(processor, "convert_tokens_to_ids") and not hasattr(processor, "tokenizer"):
        return family_of(name="text")
    error = UnknownNameError("processor class", kinds[0], [c for f in known for c in f.processor_classes])
    error.hint = f"packtrain has families {', '.join(f.name for f in known)}; pass family= if one fits"
    raise error


def _by_model_type(model_type: str, known: list[Family]) -> Family:
    if model_type in STATEFUL_MODEL_TYPES:
        raise IsolationError(
            f"model type {model_type!r} has recurrent or convolution layers whose state runs from one "
            "packed sample into the next",
            hint="train it unpacked, or choose a model with attention layers only",
        )
    for family in known:
        if model_type in family.model_types:
            return family
    error = UnknownNameError("model type", model_type, [t for f in known for t in f.model_types])
    error.hint = f"{error.hint}; pass family='text' if it is a plain causal language model"
    raise error


# --------------------------------------------------------------------------------------------
# What the LLaVA-like families share: one-row positions, a language model that takes them as they are.
# --------------------------------------------------------------------------------------------
# Their vision part turns each crop into a fixed number of features, so packing touches only the
# language model, which isolates samples like any text model. Measured (fp32, CPU, transformers 5.24,
# small random models): logits of packed samples equal those of the samples alone on sdpa and eager.
# Flash and varlen keywords are not sent: the classes forward every keyword to the vision tower too.
_PROVEN = ("eager", "sdpa")

#: A family of one-row positions whose boundaries are the restarting text positions.
llava_like = partial(
    Family,
    position_backends=_PROVEN,
    refused={name: "only sdpa and eager are proven for it" for name in BACKENDS if name not in _PROVEN},
)


# --------------------------------------------------------------------------------------------
# What the Qwen vision-language families share.
# --------------------------------------------------------------------------------------------
# Measured (fp32, CPU, transformers 5.24): with four-row positions, no mask and no cache they isolate
# on sdpa and eager; three rows without the text row leak on every backend; flash keywords raise in
# the vision tower ("multiple values"); their classes refuse flex attention.
#: Names and boxes between the family's own tokens, coordinates in thousandths.
GROUNDING = ("<|object_ref_start|>{}<|object_ref_end|>", "<|box_start|>{points}<|box_end|>", "thousandths")


#: A Qwen vision-language family; the members differ in names, not in layout.
qwen_vl = partial(
    Family,
    modalities=("image", "video"),
    position_rows=3,
    media_keys=dict.fromkeys(
        ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"), "cat0"
    ),
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    image_rule="pixels",
    video_rule="frames",
    grounding=GROUNDING,
    boundary_kwargs={"varlen": VARLEN_KWARGS},
    position_backends=("eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa"),
    refused={"flex_attention": "its model classes do not support flex attention"},
)
