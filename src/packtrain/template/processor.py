"""HFTemplate: a Hugging Face processor or tokenizer as a packtrain template.

`encode` runs the real processor on decoded media. `measure` is its twin on metadata: it renders and
tokenises the same text and reads sizes and lengths of media from their headers. Both share rendering,
tokenising, the header checks and the layout of labels, so they can differ only where the processor itself
departs from our arithmetic, and `encode` raises `DriftError` when it does.

Trade-off: `encode` tokenises the text twice (once with offsets for the labels, once inside the
processor). That costs some 0.1 ms per sample against the certainty that `input_ids` are the
processor's own.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of, whole
from ..errors import ConfigError, SampleError
from ..extend import Measured
from ..families import Family
from ..measuring.encoding import good, tried
from ..measuring.expansion import Expansion, Spliced, splice
from ..measuring.image_tokens import PixelRule, smart_resize, verify_limits
from ..measuring.text import TokenizedText, check_text, tokenize
from ..media.hints import header_of
from ._torchvision_shim import ensure_torchvision
from .account import DROPPABLE, check_decoded
from .batch import Measurer
from .binding import bind_media, choose_family, media_ids
from .conversation import check_closed, check_control, control_tokens, grounded
from .layout import TRUNCATIONS, Layout, check_supervised, layout_positions, media_layout, text_positions
from .load import chat_template_of, load_processor, processor_identity
from .render import ChatRenderer, Rendered
from .running import run_processor

I64 = NDArray[np.int64]

IGNORED = -100  # label of a token that is not trained

#: Options that a template keeps under their names; those of `sampling` come beside them.
_KEPT = (
    *("family", "system", "max_length", "truncation", "model_limit", "tokens_per_second", "trust_hints"),
    *("text_counter", "variables", "long_audio", "chat_template", "allow_dropped", "train_on", "reasoning"),
    *("answer_end", "max_aspect_ratio"),
)


#: Option -> what it may be.
_CHOICES = {
    "long_audio": ("error", "cut", "drop"),  # what becomes of a clip that the processor would cut
    "truncation": TRUNCATIONS,
    "train_on": ("all", "last"),  # which answers
    "reasoning": ("keep", "mask", "drop_history"),
    "answer_end": ("mark", "line"),  # where what is trained of an answer ends
}


def positive(name: str, value: int | None) -> int | None:
    """`value` if it is a positive integer or None."""
    if value is None:
        return None
    return whole(name, value, 1, hint=f"give {name} in tokens", error=ConfigError)


def check_options(template: Any) -> None:
    """Refuse variables, truncation and tokenizers that cannot hold."""
    try:
        json.dumps(template.variables)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"template variables are not plain values: {error}",
            hint="use strings, numbers, lists and mappings",
        ) from None
    for name, known in _CHOICES.items():
        one_of(name, getattr(template, name), known)
    if template.truncation != "error" and template.max_length is None:
        raise ConfigError(
            f"truncation {template.truncation!r} has no max_length to cut to", hint="set template.max_length"
        )
    for kind in template.allow_dropped:
        one_of("allow_dropped", kind, DROPPABLE)
    if not getattr(template.tokenizer, "is_fast", False):
        raise ConfigError(
            f"{type(template.tokenizer).__name__} cannot say which characters a token covers",
            hint="use a tokenizer backed by tokenizer.json (use_fast=True)",
        )


class HFTemplate:
    """Template of a Hugging Face processor (`extend.Template`). Picklable, so workers can have it.

    Args:
        processor: loaded processor or tokenizer, or a folder or hub name to load it from.
        family: model family or its name; by default found from the processor's class.
        system: system turn for samples that have none (templates with a default system turn of
            their own add that only when this is None).
        max_length: cap of `truncation`; with `truncation="error"` lengths stay true and the
            long-sample policy of the plan decides.
        truncation: `"error"` never cuts; `"left"` and `"right"` cut samples to `max_length` tokens
            (counted in the cost `truncated`) and refuse samples whose media would be cut.
        model_limit: longest sample the model can take; longer ones are measured with status
            "beyond model".
        tokens_per_second: positions a second of a video where the family counts real time (Qwen2.5-VL;
            the number is in the model's config).
        trust_hints: take sizes of media from the sample where it gives them, without looking at the
            medium; the audit compares them.
        text_counter: `auto`, `hf`, `tiktoken` or `gigatoken`: how texts are counted when measuring. The
            counts are the same; a counter that cannot prove it is not used.
        variables: further variables of the chat template, for example `{"enable_thinking": False}`.
        long_audio: what measuring a source does with a clip that the processor would cut: `cut` counts it,
            `drop` leaves the sample out, `error` stops.
        chat_template: Jinja text, a file of it, or `trl` (`load.chat_template_of`), instead of its own.
        allow_dropped: what the chat template may leave out of a sample: text, system, reasoning, tools,
            tool_calls, tool_results. Anything else that it drops is an error.
        train_on: `all` answers, or the `last`: those behind the last question.
        reasoning: `keep`, `mask` (rendered and not trained), `drop_history` (taken out of answers in front
            of the last question).
        answer_end: an answer is trained up to its end `mark`, or with the `line` break that the chat template
            writes behind that, as ms-swift trains it.
        fps, max_frames: frames taken of a second of video, and the most of one video, instead of the
            processor's settings.
        max_aspect_ratio: a sample with a picture that is longer or narrower cannot be used.

    Raises:
        ConfigError: no chat template, a tokenizer without offsets, or options that cannot hold.
    """

    def __init__(
        self,
        processor: Any,
        *,
        family: Family | str | None = None,
        system: str | None = None,
        max_length: int | None = None,
        truncation: str = "error",
        model_limit: int | None = None,
        tokens_per_second: float | None = None,
        trust_hints: bool = False,
        text_counter: str = "auto",
        variables: Mapping[str, Any] | None = None,
        long_audio: str = "cut",
        chat_template: str | None = None,
        allow_dropped: Sequence[str] = (),
        train_on: str = "all",
        reasoning: str = "keep",
        answer_end: str = "mark",
        fps: float | None = None,
        max_frames: int | None = None,
        max_aspect_ratio: float | None = None,
    ) -> None:
        ensure_torchvision()
        if isinstance(processor, (str, Path)):
            processor = load_processor(processor)
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.family = choose_family(family, processor)
        self.max_length = positive("max_length", max_length)
        self.model_limit = positive("model_limit", model_limit)
        self.variables = dict(variables or {})
        self.system, self.truncation, self.long_audio = system, truncation, long_audio
        self.tokens_per_second, self.trust_hints = tokens_per_second, trust_hints
        self.text_counter = text_counter
        self.chat_template = None if chat_template is None else chat_template_of(chat_template, processor)
        self.allow_dropped = tuple(sorted(set(allow_dropped)))
        self.train_on, self.reasoning, self.answer_end = train_on, reasoning, answer_end
        self.sampling = {k: v for k, v in (("fps", fps), ("max_frames", max_frames)) if v is not None}
        self.max_aspect_ratio = None if max_aspect_ratio is None else float(max_aspect_ratio)
        check_options(self)
        self.media = bind_media(
            processor,
            self.tokenizer,
            self.family,
            tokens_per_second=tokens_per_second,
            trust_hints=trust_hints,
            sampling=self.sampling,
            max_aspect_ratio=max_aspect_ratio,
        )
        self.media_ids = () if self.media is None else media_ids(processor, self.tokenizer, self.media)
        self.renderer = ChatRenderer(self)
        self._control = control_tokens(self.tokenizer, self.renderer.templates.values(), self.media)
        self._special = int(self.tokenizer.num_special_tokens_to_add(pair=False))
        self._measurer = Measurer(self)

    @property
    def rule(self) -> Any:
        """The rule by which images are counted, or None for a family without images."""
        return None if self.media is None else self.media.image

    @property
    def image_token_id(self) -> int | None:
        """Id of the token that image runs are made of."""
        if self.media is None or "image" not in self.media.tokens:
            return None
        return int(self.tokenizer.convert_tokens_to_ids(self.media.tokens["image"]))

    # ---------------------------------------------------------------------------------- measure
    def measure(self, sample: Mapping[str, Any]) -> Measured:
        """Length of the encoded sample in tokens, with its costs: supervised, and those of the media.

        Media costs: images, patches (rows of its pixel tensors), video_frames, audio_frames (mel frames),
        audio_cut (clips that the processor cuts). Decodes no media. Raises the `SampleError` that `encode`
        would raise, except for faults that only decoding finds.
        """
        return good(self.measure_batch([sample])[0])

    def measure_batch(self, samples: Sequence[Mapping[str, Any]]) -> list[Measured | SampleError]:
        """`measure` of several samples; a sample that cannot be used gives its `SampleError`."""
        return self._measurer.measure(samples)

    @property
    def cost_names(self) -> tuple[str, ...]:
        """Names of the costs that `measure` gives: what a limit of a pack may name."""
        return self._measurer.cost_names

    # ----------------------------------------------------------------------------------- encode
    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Encode one sample with the real processor.

        Returns:
            torch tensors `input_ids` int64[T]; `labels` int64[T], -100 except on assistant turns
            (never on media tokens or the first token); `loss_scale` float32[T] where the record weighs its
            messages; `position_ids` int64[T], or int64[3,T] for
            mRoPE families; and the family's media tensors where the sample has such media.

        Raises:
            SampleError: the sample cannot be used; `reason` says why.
            DriftError: the processor's tokens are not those the length was computed from.
        """
        import torch

        rendered = self.rendered(sample)
        expansions = self.expansions({0: rendered.media}, trusted=False)[0]
        layout = good(self.layouts([self.spliced(rendered, expansions)])[0])
        layout, media = self.run(rendered, layout, expansions)
        begin, end = self.cut(layout)
        ids = media.pop("input_ids", None)
        ids = layout.expand(layout.ids) if ids is None else ids.numpy()
        trained = layout.expand(layout.trained)[begin:end]
        trained[:1] = False
        ids = ids[begin:end]
        check_supervised(layout, int(trained.sum()), begin, end)
        if layout.scale is not None:
            media["loss_scale"] = torch.from_numpy(layout.expand(layout.scale)[begin:end])
        if self.family.position_rows == 1:
            positions = text_positions(len(ids))
        else:  # a cut keeps all media
            positions = layout_positions(layout, behind_time=self.family.time_unit == "omni")[:, begin:end]
            positions = positions - positions[:, :1]
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(np.where(trained, ids, IGNORED)),
            "position_ids": torch.from_numpy(positions),
            **media,
        }

    def check_decoded(self, sample: Mapping[str, Any], encoded: Mapping[str, Any]) -> None:
        """Everything the sample says is in its decoded ids, and its answers in the trained ones.

        Args:
            encoded: what `encode` gave for the sample.

        Raises:
            ConfigError: names what is lost.
        """
        if self.truncation == "error":
            sample = self.grounded(sample) if sample.get("objects") else sample
            pieces, trained = self.renderer.said(sample)
            check_decoded(self.tokenizer, self.renderer.name, encoded, pieces, trained, self.media_ids)

    def run(
        self, rendered: Rendered, layout: Layout, expansions: Mapping[str, Sequence[Expansion]]
    ) -> tuple[Layout, dict[str, Any]]:
        """The media tensors of a sample, and its layout (another one where only the processor knows it)."""
        return (layout, {}) if self.media is None else run_processor(self, rendered, layout, expansions)

    @property
    def by_encoding(self) -> bool:
        """Whether samples with media are encoded to be measured."""
        oracle = None if self.media is None else self.media.oracle
        return oracle is not None and oracle.mode == "encode"

    # ----------------------------------------------------------------------------------- shared
    def rendered(self, sample: Mapping[str, Any]) -> Rendered:
        """The rendered sample, its text checked."""
        check_closed(sample)
        if sample.get("objects"):
            sample = self.grounded(sample)
        rendered = self.renderer.render(sample)
        check_text(rendered.text)
        if self._control is not None:
            check_control(sample, self._control)
        return rendered

    def grounded(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """The sample with its `objects` written into its texts (`grounding`)."""
        return grounded(sample, self.family, self._sizes)

    def _sizes(self, part: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
        """(height, width) of an image, and of what the processor makes of it."""
        header: Any = header_of(part)
        whole = header.height, header.width
        if self.media is None or not isinstance(self.rule, PixelRule):
            return whole, whole
        return whole, smart_resize(*self.media.size_of(part, *whole), self.rule)

    def expansions(self, media: Mapping[int, Sequence[Any]], *, trusted: bool = True) -> dict[int, Any]:
        """Of each sample its media as expansions by kind, or its `SampleError`."""
        if self.media is None:
            return {place: {} for place in media}
        return self.media.expand(media, trusted=trusted)

    def spliced(
        self, rendered: Rendered, expansions: Mapping[str, Sequence[Expansion]] | SampleError
    ) -> Spliced:
        """The text with its media; raises the `SampleError` of those."""
        held = good(expansions)
        tokens = {} if self.media is None else self.media.tokens
        owners = rendered.owners if self.truncation != "error" else ()
        return splice(rendered.text, rendered.spans, tokens, held, rendered.weights, owners)

    def layouts(self, items: Sequence[Spliced]) -> list[Layout | SampleError]:
        """Texts as tokens."""
        found = zip(self._tokenize([item.text for item in items]), items, strict=True)
        return [tried(media_layout, tokens, item, self.media_ids) for tokens, item in found]

    def _tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        out: list[Any] = [None] * len(texts)
        for flag in (False, True):
            chosen = [i for i, text in enumerate(texts) if self.adds_special_tokens(text) is flag]
            mine = [texts[i] for i in chosen]
            for i, tokens in zip(
                chosen, tokenize(self.tokenizer, mine, add_special_tokens=flag), strict=True
            ):
                out[i] = tokens
        return out

    def adds_special_tokens(self, text: str) -> bool:
        """What `apply_chat_template` does: tokenizers never add, processors add unless bos is there."""
        if self.tokenizer is self.processor or not self._special:
            return False
        bos = self.tokenizer.bos_token
        return not (bos is not None and text.startswith(bos))

    def cut(self, layout: Layout) -> tuple[int, int]:
        """First and one-past-last token that stay under `truncation`."""
        return layout.cut(self.truncation, self.max_length)

    # ----------------------------------------------------------------------------------- config
    def config(self) -> dict[str, Any]:
        """Everything that affects a length, as plain JSON values; equal whatever path it came from."""
        return {
            **processor_identity(self.processor, self.tokenizer),
            "chat_template": dict(self.renderer.templates),
            "family": self.family.name,
            "media": None if self.media is None else self.media.to_dict(),
            "media_tokens": None if self.media is None else dict(self.media.tokens),
            "max_length": None if self.truncation == "error" else self.max_length,
            "model_limit": self.model_limit,
            "system": self.system,
            "truncation": self.truncation,
            "trust_hints": self.trust_hints,
            "variables": self.variables,
            **({"long_audio": "drop"} if self.long_audio == "drop" else {}),
            **self._chosen(),
        }

    def _chosen(self) -> dict[str, Any]:
        """Options that are not at their default: digests of runs without them stay what they were."""
        chosen = {
            "allow_dropped": (list(self.allow_dropped), []),
            "train_on": (self.train_on, "all"),
            "reasoning": (self.reasoning, "keep"),
            "answer_end": (self.answer_end, "mark"),
            "sampling": (dict(self.sampling), {}),
            "max_aspect_ratio": (self.max_aspect_ratio, None),
        }
        return {name: value for name, (value, default) in chosen.items() if value != default}

    def verify_limits(self, probes: Sequence[tuple[int, int]] | None = None) -> dict[tuple[int, int], int]:
        """Run probe images (height, width) through the real image processor and compare the counts.

        Takes some tenths of a second; empty for text families. Raises `ConfigError` when a pixel
        limit is not in effect.
        """
        if not isinstance(self.rule, PixelRule):
            return {}
        from PIL import Image

        def real_tokens(height: int, width: int) -> int:
            probe = Image.new("RGB", (width, height), (127, 127, 127))
            grid = self.processor.image_processor(images=[probe], return_tensors="pt")["image_grid_thw"]
            return int(grid.prod()) // int(self.processor.image_processor.merge_size) ** 2

        return verify_limits(real_tokens, self.rule, probes=probes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling imports torchvision through the processor, so the shim has to come first."""
        options = {name: getattr(self, name) for name in _KEPT}
        return (_restore, (pickle.dumps(self.processor), {**options, **self.sampling}))


def _restore(processor: bytes, options: dict[str, Any]) -> HFTemplate:
    ensure_torchvision()
    return HFTemplate(pickle.loads(processor), **options)


def open_template(
    processor: str, *, min_pixels: int | None = None, max_pixels: int | None = None, **options: Any
) -> HFTemplate:
    """The template of a processor by its name or folder.

    Args:
        min_pixels, max_pixels: set on the processor, as `load_processor` does.
        options: of `HFTemplate`.
    """
    return HFTemplate(load_processor(processor, min_pixels=min_pixels, max_pixels=max_pixels), **options)
