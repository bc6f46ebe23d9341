"""Processors that no family knows are measured exactly: by their own count, by probing, or by encoding."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import IsolationError, SampleError
from packtrain.families import BACKENDS
from packtrain.template import HFTemplate


def base() -> Any:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    from transformers.feature_extraction_utils import BatchFeature

    class Own:
        """A small processor of its own: w // 40 + h // 30 image tokens between two marks."""

        image_token = "<|image_pad|>"
        image_processor = object()

        def __init__(self, tokenizer: Any, chat_template: str) -> None:
            self.tokenizer = tokenizer
            self.chat_template = chat_template
            self.runs = 0

        def apply_chat_template(self, messages: Any) -> str:
            parts = messages[0]["content"]
            return "".join(p.get("text", self.image_token) for p in parts)

        def tokens(self, image: Any, others: int) -> int:
            return image.width // 40 + image.height // 30 + 1

        def __call__(self, text: Any, images: Any = None, return_tensors: str = "np", **options: Any) -> Any:
            self.runs += 1
            (row,) = text
            images = images or []
            pieces = row.split(self.image_token)
            assert len(pieces) == len(images) + 1
            out = pieces[0]
            for image, after in zip(images, pieces[1:], strict=True):
                if image.width > 5000:
                    raise ValueError("too wide")
                count = self.tokens(image, len(images))
                out += "<|box_start|>" + self.image_token * count + "<|box_end|>" + after
            ids = self.tokenizer([out], add_special_tokens=False)["input_ids"]
            pixels = {"pixels": np.zeros((len(images), 3), np.float32)} if images else {}
            return BatchFeature({"input_ids": ids, **pixels}, tensor_type=return_tensors)

    return Own


def with_api(truthful: bool) -> Any:
    class WithApi(base()):  # type: ignore[misc]
        def _get_num_multimodal_tokens(self, image_sizes: Any) -> Any:
            extra = 0 if truthful else image_sizes[0][0] % 2
            return {"num_image_tokens": [w // 40 + h // 30 + 1 + extra for h, w in image_sizes]}

    return WithApi


def dependent() -> Any:
    class Dependent(base()):  # type: ignore[misc]
        def tokens(self, image: Any, others: int) -> int:
            return 1 if others > 1 else image.width // 10 + 2

    return Dependent


def from_three_on() -> Any:
    class FromThreeOn(base()):  # type: ignore[misc]
        def tokens(self, image: Any, others: int) -> int:
            return 1 if others > 2 else image.width // 40 + 1

    return FromThreeOn


@pytest.fixture
def make(processor: Any) -> Any:
    shipped = processor("qwen2_vl")
    return lambda cls: cls(shipped.tokenizer, shipped.chat_template)


def picture(folder: Path, width: int, height: int) -> dict[str, Any]:
    from PIL import Image

    path = folder / f"{width}x{height}.png"
    if not path.exists():
        Image.new("RGB", (width, height)).save(path)
    return {"type": "image", "image": str(path)}


def ask(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    answer = [{"type": "text", "text": "An answer."}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (base, "probe"),
        (lambda: with_api(True), "api"),
        (lambda: with_api(False), "probe"),
        (dependent, "encode"),
        (from_three_on, "encode"),
    ],
)
def test_unknown_processors(kind: Any, mode: str, make: Any, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        processor = make(kind())
        template = HFTemplate(processor)
    assert template.config()["media"]["oracle"] == mode and template.family.name == "oracle"
    assert ("every sample is encoded" in caplog.text) == (mode == "encode")
    rng = np.random.default_rng(2)
    sizes = [(int(w), int(h)) for w, h in rng.integers(1, 900, (12, 2))]
    samples = [ask("see", picture(tmp_path, *size), "?") for size in sizes]
    for a, b in itertools.pairwise(sizes):
        samples.append(ask(picture(tmp_path, *a), " and\n", picture(tmp_path, *b)))
    samples.append(ask(*(picture(tmp_path, *size) for size in sizes[:3])))
    samples.append(ask("no picture"))
    for sample, measured in zip(samples, template.measure_batch(samples), strict=True):
        encoded = template.encode(sample)
        assert int(measured) == len(encoded["input_ids"]) == len(encoded["position_ids"])
        assert measured.costs["supervised"] == int((encoded["labels"] != -100).sum()) == 4
        trained = encoded["labels"][encoded["labels"] != -100]
        assert template.tokenizer.decode(trained) == "An answer.<|im_end|>"
    runs = processor.runs
    template.measure_batch(samples)
    assert (processor.runs == runs) == (mode != "encode")  # sizes are remembered
    wide = ask(picture(tmp_path, 6000, 3))
    if mode == "probe":
        with pytest.raises(SampleError, match="too wide") as caught:
            template.measure(wide)
        assert caught.value.reason == "unsupported_media"


def test_it_cannot_be_packed_without_a_family(make: Any) -> None:
    template = HFTemplate(make(base()))
    for backend in BACKENDS:
        with pytest.raises(IsolationError, match="no family describes Own"):
            template.family.allowed_kwargs(backend)


def test_a_known_class_with_settings_of_no_known_rule_is_probed(processor: Any, tmp_path: Path) -> None:
    """LLaVA-1.5 without its centre crop: tokens follow the image's shape."""
    shipped = processor("llava_onevision")
    from transformers import CLIPImageProcessor, LlavaProcessor

    own = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 336}, do_center_crop=False),
        shipped.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=shipped.chat_template,
    )
    template = HFTemplate(own)
    assert template.config()["media"]["oracle"] == "probe"
    for width, height in ((640, 300), (300, 640), (77, 500)):
        sample = ask(picture(tmp_path, width, height), "what?")
        assert template.measure(sample) == len(template.encode(sample)["input_ids"]) > 576
