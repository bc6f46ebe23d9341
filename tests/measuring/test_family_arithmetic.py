"""Counts by arithmetic equal the library's own functions: 2,000 random sizes or durations per family."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import InputError, SampleError
from packtrain.families import family_of
from packtrain.measuring.audio_tokens import AudioRule
from packtrain.measuring.expansion import Expansion, splice
from packtrain.measuring.video_tokens import Clip, chunk_bounds
from packtrain.template import load_processor
from packtrain.template.binding import bind_media

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")


@pytest.fixture(scope="module")
def rules(data: Path) -> Any:
    @cache
    def load(name: str) -> tuple[Any, Any]:
        processor = load_processor(data / "processors" / name)
        return processor, bind_media(processor, processor.tokenizer, family_of(processor=processor))

    return load


def sizes(count: int = 2000, largest: int = 5000) -> list[tuple[int, int]]:
    rng = np.random.default_rng(5)
    near = rng.integers(1, 60, (count // 10, 2))
    return [(int(h), int(w)) for h, w in np.concatenate([rng.integers(1, largest, (count, 2)), near])]


@pytest.mark.parametrize("name", ["llava_onevision", "internvl3"])
def test_crops(name: str, rules: Any) -> None:
    processor, media = rules(name)
    table = sizes()
    theirs = processor._get_num_multimodal_tokens(image_sizes=table)["num_image_tokens"]
    marks = 2 if name == "internvl3" else 0
    ours = [media.image.expand(h, w).widths[0] + marks for h, w in table]
    assert ours == theirs


def test_onevision_images_of_one_sample(rules: Any) -> None:
    image = rules("llava_onevision")[1].image
    assert image.expand(900, 300, 2).widths == (730,) and image.expand(900, 300, 1).widths[0] > 730


@pytest.mark.parametrize("name", QWEN)
def test_video_patches(name: str, rules: Any) -> None:
    """Frames and patches of random clips; the sampler's frame behind the end is left out."""
    processor, media = rules(name)
    rng = np.random.default_rng(8)
    off_by_one = 0
    for _ in range(2000):
        frames, fps = int(rng.integers(1, 3000)), float(rng.choice([24, 25, 29.97, 30, 60, 5]))
        high, wide = (int(side) for side in rng.integers(16, 2000, 2))
        try:
            taken = media.frames_of(frames, fps)
        except SampleError as error:
            assert error.reason == "unsupported_media" and frames < 4
            continue
        assert taken.max() < frames and (np.diff(taken) >= 0).all()
        if name != "qwen3_vl":
            wanted = min(max(frames / fps * 2, 4), min(768, frames) // 2 * 2, frames) // 2 * 2
            off_by_one += len(taken) != wanted
        try:
            theirs = processor.video_processor.get_num_of_video_patches(len(taken), high, wide, {})
        except ValueError:
            with pytest.raises(SampleError):
                media.video.expand(Clip(frames, fps, high, wide), taken)
            continue
        assert media.video.expand(Clip(frames, fps, high, wide), taken).costs["patches"] == theirs
    assert off_by_one < 40


def test_the_sampler_that_names_a_frame_too_many(rules: Any) -> None:
    """382 frames at 24 a second: Qwen2-VL's sampler names frame 382, on which its processor stops."""
    processor, media = rules("qwen2_vl")
    from transformers.video_utils import VideoMetadata

    named = processor.video_processor.sample_frames(VideoMetadata(total_num_frames=382, fps=24.0), fps=2.0)
    assert int(named[-1]) == 382
    taken = media.frames_of(382, 24.0)
    assert len(taken) == len(named) - 1 == 30 and taken[-1] < 382


def test_timestamps_of_qwen3(rules: Any) -> None:
    processor, media = rules("qwen3_vl")
    clip = Clip(3000, 25.0, 480, 640)
    taken = media.frames_of(3000, 25.0)
    text = media.video.expand(clip, taken).text
    theirs = processor._calculate_timestamps(taken.tolist(), 25.0, 2)
    assert [f"<{t:.1f} seconds>" for t in theirs] == text.replace("<|vision_end|>", "<|vision_start|>").split(
        "<|vision_start|>"
    )[0:-1:2]
    assert text.startswith("<0.3 seconds>") and "<119.7 seconds>" in text


def test_caps_are_pinned(rules: Any) -> None:
    """cap_pixels_per_frame changes counts: both settings equal the library's resize."""
    from dataclasses import replace

    for name in ("qwen2_vl", "qwen3_vl"):
        processor, media = rules(name)
        for cap in (False, True):
            rule = replace(media.video, cap=cap)
            for frames in (4, 33, 768):
                found = rule.grid(frames, 720, 1280)
                assert found == library_grid(processor, frames, 720, 1280, cap)


def library_grid(processor: Any, frames: int, high: int, wide: int, cap: bool) -> tuple[int, int, int]:
    import torch

    video = processor.video_processor
    kept: list[Any] = []

    class Same(type(video)):  # the library's own resize, up to the pixels
        pass

    base = type(video).__mro__[1]
    original = base.resize
    try:
        base.resize = lambda self, image, size, resample: kept.append(size)
        type(video).resize(
            video,
            torch.zeros(1, 1, 1, 1, 1).expand(1, frames, 3, high, wide),
            size=video.size,
            resample=3,
            factor=video.patch_size * video.merge_size,
            temporal_factor=2,
            cap_pixels_per_frame=cap,
        )
    finally:
        base.resize = original
    return -(-frames // 2), kept[0].height // video.patch_size, kept[0].width // video.patch_size


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_audio(name: str, rules: Any) -> None:
    """The mask of mel frames and the encoder's halving, for 2,000 lengths around every edge."""
    processor, media = rules(name)
    rule: AudioRule = media.audio
    rng = np.random.default_rng(3)
    limit = processor.feature_extractor.n_samples
    lengths = np.concatenate([rng.integers(1, 2 * limit, 1900), limit + np.arange(-50, 50)])
    for samples in lengths.tolist():
        mel = len(range(0, min(samples, limit), processor.feature_extractor.hop_length))  # as its mask is cut
        assert rule.mel_frames(samples) == mel
        if hasattr(processor, "_get_num_audio_tokens"):
            assert rule.tokens(mel) == processor._get_num_audio_tokens(samples)
        if rule.tokens(mel) > 0:
            assert rule.expand(samples, rule.rate).costs["audio_cut"] == int(samples > limit)
    with pytest.raises(SampleError, match="too short"):
        rule.expand(300, 16_000)
    with pytest.raises(InputError, match="mel frames"):
        rule.tokens(480_001)


def test_chunks() -> None:
    assert chunk_bounds((0, 25, 50, 75, 100), 50) == ((0, 2), (2, 4), (4, 5))
    assert chunk_bounds(tuple(range(3)), 50) == ((0, 3),)
    assert chunk_bounds((0, 200, 200, 200), 50) == ((0, 1), (1, 2), (2, 3), (3, 4))


def test_splice_moves_ranges() -> None:
    long = Expansion("<f1><v><f2><v>", (3, 4))
    done = splice("a<v>b[c]d<v>e", [(5, 8), (9, 13)], {"video": "<v>"}, {"video": [long, long]})
    assert done.text == "a<f1><v><f2><v>b[c]d<f1><v><f2><v>e" and done.widths == (3, 4, 3, 4)
    assert [done.text[a:b] for a, b in done.spans] == ["[c]", "<f1><v><f2><v>e"]
    assert [done.text[a:b] for a, b in done.inserted] == ["<f1><v><f2><v>"] * 2
    with pytest.raises(SampleError, match="1 video placeholder"):
        splice("<v>", [], {"video": "<v>"}, {"video": []})
