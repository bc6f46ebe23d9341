"""HFTemplate: a Hugging Face processor or tokenizer as a packtrain template.

`encode` runs the real processor on real pixels. `measure` is its twin on metadata: it renders and
tokenises the same text and reads image sizes from file headers. Both share rendering, tokenising,
the header checks and the layout of labels, so they can differ only where the processor itself
departs from our arithmetic, and `encode` raises `DriftError` when it does.

Trade-off: `encode` tokenises the text twice (once with offsets for the labels, once inside the
processor). That costs some 0.1 ms per sample against the certainty that `input_ids` are the
processor's own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DriftError, SampleError
from ..extend import Measured
from ..families import Family
from ..measuring.image import PixelRule, grids, rule_of, verify_limits
from ..measuring.text import TokenizedText, check_text, supervised_mask, tokenize
from ..media.image import open_image, read_header
from ._torchvision_shim import ensure_torchvision
from .identity import processor_identity
from .layout import Layout, media_layout, text_layout
from .load import load_processor
from .options import check_options, choose_family, positive
from .positions import mrope_positions, text_positions
from .render import ChatRenderer, Rendered

__all__ = ["HFTemplate"]

I64 = NDArray[np.int64]

IGNORED = -100  # label of a token that is not trained


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
        variables: further variables of the chat template, for example `{"enable_thinking": False}`.

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
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        ensure_torchvision()
        if isinstance(processor, (str, Path)):
            processor = load_processor(processor)
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.family = choose_family(family, processor)
        self.system = system
        self.max_length = positive("max_length", max_length)
        self.truncation = truncation
        self.model_limit = positive("model_limit", model_limit)
        self.variables = dict(variables or {})
        check_options(self)
        self.rule: PixelRule | None = None
        self.image_token: str | None = None
        self.image_token_id: int | None = None
        self.video_token: str | None = None
        if "image" in self.family.modalities:
            self._bind_images()
        self.renderer = ChatRenderer(
            processor,
            self.tokenizer,
            takes_images=self.rule is not None,
            system=system,
            variables=self.variables,
        )

    def _bind_images(self) -> None:
        self.rule = rule_of(getattr(self.processor, "image_processor", None))
        self.image_token = getattr(self.processor, "image_token", None) or self.family.image_token
        self.video_token = getattr(self.processor, "video_token", None) or self.family.video_token
        found = self.tokenizer.convert_tokens_to_ids(self.image_token)
        if not isinstance(found, int) or found == self.tokenizer.unk_token_id:
            raise ConfigError(
                f"the tokenizer has no image token {self.image_token!r}",
                hint="use the tokenizer that belongs to the processor",
            )
        self.image_token_id = found

    # ---------------------------------------------------------------------------------- measure
    def measure(self, sample: Mapping[str, Any]) -> Measured:
        """Length of the encoded sample in tokens, with the costs images, patches and supervised.

        Opens no pixels. Raises the `SampleError` that `encode` would raise, except for faults that
        only decoding finds.
        """
        (outcome,) = self.measure_batch([sample])
        if isinstance(outcome, SampleError):
            raise outcome
        return outcome

    def measure_batch(self, samples: Sequence[Mapping[str, Any]]) -> list[Measured | SampleError]:
        """`measure` of several samples; a sample that cannot be used gives its `SampleError`."""
        out: list[Any] = [None] * len(samples)
        rendered: dict[int, Rendered] = {}
        for place, sample in enumerate(samples):
            try:
                rendered[place] = self._render(sample)
            except SampleError as error:
                out[place] = error
        patches = self._grids({place: item.images for place, item in rendered.items()})
        ready: list[int] = []
        for place in rendered:
            if isinstance(patches[place], SampleError):
                out[place] = patches[place]
            else:
                ready.append(place)
        for place, tokens in zip(ready, self._tokenize([rendered[p] for p in ready]), strict=True):
            try:
                layout = self._layout(rendered[place], tokens, patches[place])
                out[place] = self._measured(layout, patches[place])
            except SampleError as error:
                out[place] = error
        return out

    def _measured(self, layout: Layout, patches: I64) -> Measured:
        begin, end = self._cut(layout)
        total = layout.total
        costs: dict[str, int] = {}
        if self.rule is not None:
            costs["images"] = len(patches)
            costs["patches"] = int((patches[:, 0] * patches[:, 1]).sum()) if len(patches) else 0
        costs["supervised"] = int(layout.expand(layout.trained)[begin:end][1:].sum())
        if self.truncation != "error":
            costs["truncated"] = int(end - begin < total)
        return Measured(end - begin, **costs)

    # ----------------------------------------------------------------------------------- encode
    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Encode one sample with the real processor.

        Returns:
            torch tensors `input_ids` int64[T]; `labels` int64[T], -100 except on assistant turns
            (never on media tokens or the first token); `position_ids` int64[T], or int64[3,T] for
            mRoPE families; `pixel_values` and `image_grid_thw` where the sample has images.

        Raises:
            SampleError: the sample cannot be used; `reason` says why.
            DriftError: the processor's tokens are not those the length was computed from.
        """
        import torch

        rendered = self._render(sample)
        patches = self._grids({0: rendered.images})[0]
        if isinstance(patches, SampleError):
            raise patches
        (tokens,) = self._tokenize([rendered])
        layout = self._layout(rendered, tokens, patches)
        begin, end = self._cut(layout)
        ids = layout.expand(layout.ids)
        media = self._run_processor(rendered, ids, patches)
        image = layout.expand(layout.image)[begin:end]
        trained = layout.expand(layout.trained)[begin:end]
        trained[:1] = False
        ids = ids[begin:end]
        if self.family.position_rows == 1 or self.rule is None:
            positions = text_positions(len(ids))
        else:
            positions = mrope_positions(image, patches, self.rule.merge)
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(np.where(trained, ids, IGNORED)),
            "position_ids": torch.from_numpy(positions),
            **media,
        }

    def _run_processor(self, rendered: Rendered, ids: I64, patches: I64) -> dict[str, Any]:
        """Run the real processor; returns its media tensors after checking its tokens against ours."""
        if self.rule is None:
            return {}
        images = [open_image(reference) for reference in rendered.images]
        options = {} if self._adds_special_tokens(rendered.text) else {"add_special_tokens": False}
        batch = self.processor(text=[rendered.text], images=images or None, return_tensors="pt", **options)
        theirs = batch["input_ids"][0].numpy()
        if not np.array_equal(theirs, ids):
            raise DriftError(
                f"{type(self.processor).__name__} gives {len(theirs)} tokens, measuring gives {len(ids)} "
                f"(image grids {patches.tolist()})",
                hint="the processor follows another rule than its family; run template.verify_limits()",
            )
        media = {key: batch[key] for key in self.family.media_keys if key in batch}
        if images:
            grid = media["image_grid_thw"].numpy()
            if not np.array_equal(grid[:, 1:], patches):
                raise DriftError(
                    f"image grids are {grid[:, 1:].tolist()}, the headers say {patches.tolist()}"
                )
        return media

    # ----------------------------------------------------------------------------------- shared
    def _render(self, sample: Mapping[str, Any]) -> Rendered:
        rendered = self.renderer.render(sample)
        check_text(rendered.text)
        if self.image_token is not None:
            found = rendered.text.count(self.image_token)
            if found != len(rendered.images):
                raise SampleError(
                    "placeholder_mismatch",
                    f"the rendered text has {found} image placeholders for {len(rendered.images)} images",
                    hint=f"write images as parts, not as {self.image_token} in the text",
                )
        if self.video_token is not None and self.video_token in rendered.text:
            raise SampleError(
                "placeholder_mismatch",
                f"the rendered text has {self.video_token} but the sample has no video",
                hint="remove the placeholder from the text",
            )
        return rendered

    def _grids(self, images: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Patch grids int64[k,2] of each sample's images from their headers, or its SampleError."""
        out: dict[int, Any] = {}
        sizes: list[tuple[int, int]] = []
        where: dict[int, tuple[int, int]] = {}
        for place, references in images.items():
            try:
                mine = [_size(reference) for reference in references]
            except SampleError as error:
                out[place] = error
                continue
            where[place] = (len(sizes), len(sizes) + len(mine))
            sizes += mine
        if self.rule is None:
            return {place: np.zeros((0, 2), dtype=np.int64) for place in images}
        table, problems = grids([h for h, _ in sizes], [w for _, w in sizes], self.rule)
        for place, (first, last) in where.items():
            refused = next((p for p in problems[first:last] if p is not None), None)
            if refused is not None:
                out[place] = SampleError("unsupported_media", refused, hint="crop or drop the image")
            else:
                out[place] = table[first:last]
        return out

    def _tokenize(self, rendered: Sequence[Rendered]) -> list[TokenizedText]:
        out: list[Any] = [None] * len(rendered)
        for flag in (False, True):
            chosen = [i for i, item in enumerate(rendered) if self._adds_special_tokens(item.text) is flag]
            texts = [rendered[i].text for i in chosen]
            for i, tokens in zip(
                chosen, tokenize(self.tokenizer, texts, add_special_tokens=flag), strict=True
            ):
                out[i] = tokens
        return out

    def _adds_special_tokens(self, text: str) -> bool:
        """What `apply_chat_template` does: tokenizers never add, processors add unless bos is there."""
        if self.tokenizer is self.processor:
            return False
        bos = self.tokenizer.bos_token
        return not (bos is not None and text.startswith(bos))

    def _layout(self, rendered: Rendered, tokens: TokenizedText, patches: I64) -> Layout:
        trained = supervised_mask(tokens, rendered.spans)
        if self.rule is None:
            return text_layout(tokens.ids, trained)
        return media_layout(tokens.ids, trained, self.image_token_id, patches, self.rule.merge)

    def _cut(self, layout: Layout) -> tuple[int, int]:
        return layout.cut(self.truncation, self.max_length)

    # ----------------------------------------------------------------------------------- config
    def config(self) -> dict[str, Any]:
        """Everything that affects a length, as plain JSON values; equal whatever path it came from."""
        return {
            **processor_identity(self.processor, self.tokenizer),
            "chat_template": dict(self.renderer.templates),
            "family": self.family.name,
            "image": None if self.rule is None else self.rule.to_dict(),
            "image_token": self.image_token,
            "max_length": None if self.truncation == "error" else self.max_length,
            "model_limit": self.model_limit,
            "system": self.system,
            "truncation": self.truncation,
            "variables": self.variables,
        }

    def verify_limits(self, probes: Sequence[tuple[int, int]] | None = None) -> dict[tuple[int, int], int]:
        """Run probe images (height, width) through the real image processor and compare the counts.

        Takes some tenths of a second; empty for text families. Raises `ConfigError` when a pixel
        limit is not in effect.
        """
        if self.rule is None:
            return {}
        from PIL import Image

        def real_tokens(height: int, width: int) -> int:
            probe = Image.new("RGB", (width, height), (127, 127, 127))
            grid = self.processor.image_processor(images=[probe], return_tensors="pt")["image_grid_thw"]
            return int(grid.prod()) // int(self.processor.image_processor.merge_size) ** 2

        return verify_limits(real_tokens, self.rule, probes=probes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickling imports torchvision through the processor, so the shim has to come first."""
        options = {
            "family": self.family,
            "system": self.system,
            "max_length": self.max_length,
            "truncation": self.truncation,
            "model_limit": self.model_limit,
            "variables": self.variables,
        }
        return (_restore, (pickle.dumps(self.processor), options))


def _restore(processor: bytes, options: dict[str, Any]) -> HFTemplate:
    ensure_torchvision()
    return HFTemplate(pickle.loads(processor), **options)


def _size(reference: Any) -> tuple[int, int]:
    """Height and width of an image as displayed, from its header."""
    header = read_header(reference)
    return header.height, header.width
