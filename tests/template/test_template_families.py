"""Law 5 for every family and modality, against the real processors, and positions against the models'."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.errors import DriftError, SampleError
from packtrain.measuring.audit import encoded_costs
from packtrain.template import HFTemplate

ALL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl3", "qwen2_audio", "qwen2_5_omni")
BUILT = ("llava_1_5", "llava_next")


def llava(name: str, tokenizer: Any) -> Any:
    """LLaVA-1.5 and LLaVA-NeXT as their published settings have them, around a shipped tokenizer."""
    from transformers import LlavaNextProcessor, LlavaProcessor
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor
    from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor

    shared = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    if name == "llava_1_5":
        return LlavaProcessor(CLIPImageProcessor(**size), tokenizer, **shared)
    grids = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    return LlavaNextProcessor(
        LlavaNextImageProcessor(image_grid_pinpoints=grids, **size), tokenizer, **shared
    )


@pytest.fixture(scope="session")
def any_template(processor: Callable[[str], Any]) -> Callable[[str], HFTemplate]:
    def make(name: str) -> HFTemplate:
        if name in BUILT:
            base = processor("llava_onevision")
            made = llava(name, base.tokenizer)
            made.chat_template = base.chat_template
            return HFTemplate(made)
        return HFTemplate(processor(name))

    return lru_cache(maxsize=None)(make)


def part(kind: str, reference: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, kind: reference, **more}


def ask(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    answer = [{"type": "text", "text": "An answer."}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def same(template: HFTemplate, sample: dict[str, Any]) -> dict[str, Any]:
    measured, encoded = template.measure(sample), template.encode(sample)
    assert int(measured) == len(encoded["input_ids"]) == encoded["position_ids"].shape[-1]
    for name, value in encoded_costs(encoded).items():
        assert {"tokens": int(measured), **measured.costs}[name] == value, name
    assert set(encoded) <= {"input_ids", "labels", "position_ids", *template.family.media_keys}
    kept = encoded["labels"] != -100
    assert torch.equal(encoded["labels"][kept], encoded["input_ids"][kept]) and not kept[0]
    return encoded


@pytest.fixture(scope="session")
def demo(data: Path) -> Path:
    return data / "mllm_demo" / "mllm_demo_data"


@pytest.mark.parametrize("name", ["llava_onevision", "internvl3", "qwen2_5_omni", *BUILT])
def test_images(name: str, data: Path, demo: Path, any_template: Any) -> None:
    template = any_template(name)
    found = sorted(p for p in (data / "images_real").rglob("*") if p.suffix in (".jpg", ".png"))
    for path in found[::25]:
        same(template, ask(part("image", str(path)), "What?"))
    three = [part("image", str(demo / f"{i}.jpg")) for i in (1, 2, 3)]
    encoded = same(template, ask("a", three[0], "b", *three[1:], "c"))
    if name == "llava_onevision":  # several images: one square of 729 features and a line end each
        token = template.image_token_id
        assert int((encoded["input_ids"] == token).sum()) == 3 * 730
        assert encoded["pixel_values"].shape == (3, 3, 384, 384)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"])
def test_videos(name: str, demo: Path, any_template: Any) -> None:
    template = any_template(name)
    for file in ("4.mp4", "2.avi"):
        encoded = same(template, ask("see", part("video", str(demo / file)), "What?"))
        assert len(encoded["video_grid_thw"]) == 1
    frames = [str(demo / "1.jpg")] * 5
    encoded = same(
        template, ask({**part("video", frames), "fps": 2.0}, "and", part("video", str(demo / "4.mp4")))
    )
    assert encoded["video_grid_thw"][0, 0] == 3  # five frames in pairs, none sampled away
    one = same(template, ask({**part("video", frames[:2]), "fps": 2.0}, part("image", frames[0])))
    assert {"pixel_values", "pixel_values_videos"} <= set(one)
    mixed = part("video", [str(demo / "1.jpg"), str(demo / "2.jpg")])
    with pytest.raises(SampleError) as caught:
        template.measure(ask(mixed))
    assert caught.value.reason == "unsupported_media"


@pytest.mark.parametrize("name", ["llava_onevision", "internvl3"])
def test_frames(name: str, demo: Path, any_template: Any) -> None:
    template = any_template(name)
    frames = [str(demo / "1.jpg")] * 3
    picture = part("image", str(demo / "2.jpg"))
    same(template, ask(picture, part("video", frames), picture, "What?"))
    same(template, ask(part("video", frames), "then", part("video", frames)))
    unlike = ask(part("video", frames), part("video", frames[:2]))
    for call in (template.measure, template.encode):
        with pytest.raises(SampleError, match="frames") as caught:
            call(unlike)
        assert caught.value.reason == "unsupported_media"


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_sounds(name: str, data: Path, demo: Path, any_template: Any, caplog: Any) -> None:
    template = any_template(name)
    rows = [json.loads(line) for line in (data / "audio" / "manifest.jsonl").read_text().splitlines()]
    files = sorted(p for p in (data / "audio").rglob("*") if p.suffix in (".wav", ".flac", ".mp3", ".ogg"))
    assert rows and files
    for path in files[:: 12 if name == "qwen2_audio" else 60]:
        same(template, ask(part("audio", str(path)), "What?"))
    same(template, ask(part("audio", str(demo / "1.mp3")), "and", part("audio", str(demo / "2.wav"))))


def test_the_cut_is_counted_and_said(any_template: Any, tmp_path: Path, caplog: Any) -> None:
    import soundfile

    path = tmp_path / "long.wav"
    soundfile.write(path, np.zeros(31 * 8000, np.float32), 8000)
    sample = ask(part("audio", str(path)), "What?")
    template = HFTemplate(any_template("qwen2_audio").processor)
    with caplog.at_level(logging.WARNING):
        cut = template.measure(sample)
    assert cut.costs["audio_cut"] == 1 and cut.costs["audio_frames"] == 3000 and "gets cut" in caplog.text
    assert any_template("qwen2_5_omni").measure(sample).costs["audio_cut"] == 0
    assert len(template.encode(sample)["input_ids"]) == cut


def test_frames_are_those_the_processor_takes(demo: Path, any_template: Any) -> None:
    """Our choice of frames and their pixels equal what the processor makes of the whole video."""
    from packtrain.media.video import read_frames, read_header

    path = str(demo / "4.mp4")
    header, whole = read_header(path), read_frames(path)
    facts = {"total_num_frames": header.frames, "fps": header.fps, "duration": header.duration}
    for name in ("qwen2_5_vl", "qwen3_vl"):
        template = any_template(name)
        ours = template.encode(ask(part("video", path)))
        theirs = template.processor.video_processor(
            [whole], video_metadata=[facts], input_data_format="channels_last", return_tensors="pt"
        )
        assert torch.equal(ours["pixel_values_videos"], theirs["pixel_values_videos"])


# ------------------------------------------------------------------------------------- positions
def vision(name: str, template: HFTemplate) -> tuple[Any, Any]:
    """get_rope_index of the real model class on the template's token ids."""
    from types import SimpleNamespace

    ids = template.tokenizer.convert_tokens_to_ids
    if name == "qwen2_5_omni":
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as module

        kind: Any = module.Qwen2_5OmniThinkerForConditionalGeneration
        config = SimpleNamespace(
            image_token_id=ids("<|IMAGE|>"),
            video_token_id=ids("<|VIDEO|>"),
            audio_token_id=ids("<|AUDIO|>"),
            vision_start_token_id=ids("<|vision_bos|>"),
            audio_start_token_id=ids("<|audio_bos|>"),
            position_id_per_seconds=25,
            seconds_per_chunk=2,
        )
        return kind, SimpleNamespace(config=config, spatial_merge_size=2)
    import importlib

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind = getattr(
        module, {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[name] + "Model"
    )
    inner = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    return kind, SimpleNamespace(config=SimpleNamespace(vision_config=inner))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_video_positions(name: str, demo: Path, any_template: Any) -> None:
    template = any_template(name)
    kind, bare = vision(name, template)
    bare.get_vision_position_ids = lambda *a, **k: kind.get_vision_position_ids(bare, *a, **k)
    picture, frames = part("image", str(demo / "3.jpg")), [str(demo / "1.jpg")] * 7
    videos = [part("video", str(demo / "4.mp4")), {**part("video", frames), "fps": 24.0}]
    encoded = template.encode(ask("a", picture, "b", videos[0], videos[1], picture, "c"))
    token = template.tokenizer.convert_tokens_to_ids
    row = encoded["input_ids"]
    kinds = (row == token("<|image_pad|>")).int() + 2 * (row == token("<|video_pad|>")).int()
    more = {}
    if name == "qwen2_5_vl":
        from packtrain.media.video import read_header

        facts = read_header(str(demo / "4.mp4"))
        taken = len(template.media.frames_of(facts.frames, facts.fps))
        more["second_per_grid_ts"] = torch.tensor([2 / (taken / facts.frames * facts.fps), 2 / 24])
    theirs, _ = kind.get_rope_index(
        bare,
        row[None],
        mm_token_type_ids=kinds[None],
        image_grid_thw=encoded["image_grid_thw"],
        video_grid_thw=encoded["video_grid_thw"].clone(),
        **more,
    )
    assert torch.equal(encoded["position_ids"], theirs[:, 0])


# the processor makes numpy arrays of torch scalars, which torch 2.13 does not do as numpy 2 asks
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize("sound", [False, True])
def test_omni_positions(sound: bool, demo: Path, any_template: Any) -> None:
    """Image, audio and video; with `audio` on the video its sound stands between the frames."""
    template = any_template("qwen2_5_omni")
    kind, bare = vision("qwen2_5_omni", template)
    for name in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        method = getattr(kind, name)
        setattr(bare, name, lambda *a, _method=method, **k: _method(bare, *a, **k))
    more = {"audio": str(demo / "4.mp3")} if sound else {}
    picture, clip = part("image", str(demo / "3.jpg")), part("audio", str(demo / "2.wav"))
    video = part("video", str(demo / "4.mp4"), **more)
    sample = ask("a", picture, "b", *([] if sound else [clip]), video, "c", picture)
    encoded = same(template, sample)
    lengths = encoded["feature_attention_mask"].sum(-1)
    theirs, _ = kind.get_rope_index(
        bare,
        encoded["input_ids"][None],
        image_grid_thw=encoded["image_grid_thw"],
        video_grid_thw=encoded["video_grid_thw"],
        use_audio_in_video=sound,
        audio_seqlens=lengths,
        second_per_grids=torch.tensor([1.0]),
    )
    assert torch.equal(encoded["position_ids"], theirs[:, 0])
    if sound:
        plain = template.measure(ask("a", picture, "b", part("video", video["video"]), "c", picture))
        alone = template.measure(ask(part("audio", more["audio"]))) - template.measure(ask())
        assert template.measure(sample) == plain + alone  # its audio tokens and the two marks around them


# ----------------------------------------------------------------------------------------- hints
def test_trusted_hints_are_used_and_audited(demo: Path, any_template: Any) -> None:
    processor = any_template("qwen2_5_vl").processor
    path = str(demo / "1.jpg")
    plain = HFTemplate(processor).measure(ask(part("image", path)))
    wrong = ask(part("image", path, width=2000, height=1500))
    assert HFTemplate(processor).measure(wrong) == plain
    trusting = HFTemplate(processor, trust_hints=True)
    assert trusting.measure(wrong) > plain and len(trusting.encode(wrong)["input_ids"]) == plain
    assert trusting.config() != HFTemplate(processor).config()


def test_a_changed_video_limit_is_caught(demo: Path, data: Path) -> None:
    from packtrain.template import load_processor

    loaded = load_processor(data / "processors" / "qwen2_vl")
    ours = HFTemplate(loaded)
    size = loaded.video_processor.size
    loaded.video_processor.size = type(size)(shortest_edge=3136, longest_edge=28 * 28 * 40)
    with pytest.raises(DriftError, match="measuring gives"):
        ours.encode(ask(part("video", str(demo / "4.mp4"))))


@pytest.mark.parametrize("name", BUILT)
def test_two_thousand_sizes_as_the_library_counts_them(
    name: str, any_template: Callable[[str], HFTemplate]
) -> None:
    template = any_template(name)
    sizes = [(int(h), int(w)) for h, w in np.random.default_rng(7).integers(1, 5000, (2000, 2))]
    theirs = template.processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    assert [template.media.image.expand(h, w).widths[0] for h, w in sizes] == list(theirs)
