"""Cases K2, K3, K4: every family with real media, from template through collator into a real (tiny) model.

Packed equals alone, tampering moves no other sample, and set-ups that leak are caught by the same proof.
Crops, tiles, clips and pixel limits of the shipped processors are made small, and token ids are renumbered
to those in use, so that a proof takes seconds; classes, placeholders and code paths are the real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packtrain.collate import PackBatch, PaddingFreeCollator
from packtrain.errors import InputError
from packtrain.families import family_of
from packtrain.template import HFTemplate, dummy_samples
from packtrain.testing.tiny import tiny_model
from packtrain.train.attention import check_batch
from packtrain.train.loss import token_loss_sum
from packtrain.train.proof import prove_isolation
from packtrain.train.sft import keep_towers_busy
from packtrain.train.start_up import prove

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LLAVA = ("llava_1_5", "llava_next")  # no processor is shipped: made around the one of LLaVA-OneVision
MEDIA = (*QWEN_VL, "llava_onevision", "internvl3", "qwen2_audio", "qwen2_5_omni", *LLAVA)
TEXT = ("qwen3", "mistral", "gemma3")
MARKS = ("<|vision_start|>", "<|vision_end|>")


def small(processor: Any, name: str) -> Any:
    """The shipped processor with small media."""
    made = copy.copy(processor)
    for part in ("image_processor", "video_processor", "feature_extractor"):
        if hasattr(made, part):
            setattr(made, part, copy.deepcopy(getattr(made, part)))
    if name in (*QWEN_VL, "qwen2_5_omni"):
        side = made.image_processor.patch_size * made.image_processor.merge_size
        made.image_processor.size = {"shortest_edge": side**2, "longest_edge": 9 * side**2}
        made.video_processor.size = {"shortest_edge": side**2, "longest_edge": 8 * side**2}
    elif name == "llava_onevision":
        made.image_processor.size = made.video_processor.size = {"height": 56, "width": 56}
        made.image_processor.image_grid_pinpoints = [[56, 56], [56, 112], [112, 56], [112, 112]]
        made.num_image_tokens = 16
    elif name == "internvl3":
        made.image_processor.size = made.video_processor.size = {"height": 56, "width": 56}
        made.image_processor.max_patches = 2
        made.image_seq_length = 4
    if hasattr(made, "feature_extractor"):
        sound = made.feature_extractor
        sound.chunk_length, sound.n_samples, sound.nb_max_frames = 2, 2 * 16000, 200
    return made


def llava(name: str, base: Any) -> Any:
    """LLaVA-1.5 or LLaVA-NeXT with a square of 56 pixels."""
    from transformers import LlavaNextProcessor, LlavaProcessor
    from transformers.models.clip.image_processing_clip import CLIPImageProcessor
    from transformers.models.llava_next.image_processing_llava_next import LlavaNextImageProcessor

    shared = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    size = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    if name == "llava_1_5":
        made = LlavaProcessor(CLIPImageProcessor(**size), base.tokenizer, **shared)
    else:
        grids = [[56, 112], [112, 56], [112, 112]]
        images = LlavaNextImageProcessor(image_grid_pinpoints=grids, **size)
        made = LlavaNextProcessor(images, base.tokenizer, **shared)
    made.chat_template = base.chat_template
    return made


def chats(name: str, data: Path) -> list[dict[str, Any]]:
    """Text, one medium, two media, and each further kind the family takes."""
    images = [str(data / "mllm_demo" / "mllm_demo_data" / f"{i}.jpg") for i in (1, 2, 3)]
    sounds = [str(data / "audio" / "fsdd" / f"{n}.wav") for n in ("0_george_0", "1_jackson_23", "2_george_0")]
    modalities = family_of(name=name).modalities
    picture, sound = (
        [{"type": kind, kind: ref} for ref in refs] for kind, refs in (("image", images), ("audio", sounds))
    )
    first = picture if "image" in modalities else sound
    asked: list[list[Any]] = [["How many?"], [first[0], "What?"], ["One", first[1], "and", first[2], "?"]]
    if "video" in modalities:
        asked.append([{"type": "video", "video": images[:1] * 4, "fps": 2.0}, "See?"])
    if name == "qwen2_5_omni":
        asked.append([sound[0], picture[1], "Both?"])
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Three of them."}]}
    made = []
    for parts in asked:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        made.append({"messages": [{"role": "user", "content": content}, answer]})
    return made


def renumbered(
    samples: list[dict[str, Any]], tokenizer: Any, tokens: list[str]
) -> tuple[Any, list[dict[str, Any]]]:
    """The samples over a vocabulary of the ids in use, and that vocabulary as a tokenizer."""
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    used = sorted({int(i) for s in samples for i in s["input_ids"]} | set(special.values()))
    place = {old: new for new, old in enumerate(used)}
    table = torch.full((max(used) + 1,), -100)
    table[torch.tensor(used)] = torch.arange(len(used))
    made = []
    for number, sample in enumerate(samples):
        labels = torch.where(sample["labels"] == -100, -100, table[sample["labels"].clamp(min=0)])
        made.append(
            {**sample, "input_ids": table[sample["input_ids"]], "labels": labels, "sample_id": number}
        )
    vocabulary = {f"token {new}": new for new in place.values()} | {
        t: place[old] for t, old in special.items()
    }

    class Few:
        def get_vocab(self) -> dict[str, int]:
            return vocabulary

        def __len__(self) -> int:
            return len(used)

    return Few(), made


@pytest.fixture(scope="session")
def setup(processor: Callable[[str], Any], data: Path) -> Callable[[str], Any]:
    """Name -> (tiny model, encoded samples, template, renumbering of further samples)."""

    def make(name: str) -> Any:
        if name in LLAVA:
            template = HFTemplate(llava(name, processor("llava_onevision")))
        else:
            template = HFTemplate(small(processor(name), name))
        samples = [template.encode(chat) for chat in chats(name, data)]
        dummies = dummy_samples(template)
        family = template.family
        tokens = [t for t in (family.image_token, family.video_token, family.audio_token) if t]
        if name in (*QWEN_VL, "qwen2_5_omni"):
            tokens += MARKS if name in QWEN_VL else ()
        few, made = renumbered([*samples, *dummies], template.tokenizer, tokens)
        parts = {
            key: getattr(template.processor, key, None) for key in ("image_processor", "feature_extractor")
        }
        model = tiny_model(f"tiny:{name}", SimpleNamespace(tokenizer=few, **parts))
        return model, made[: len(samples)], made[len(samples) :]

    return lru_cache(maxsize=None)(make)


def as_double(batch: PackBatch) -> PackBatch:
    return batch.with_values(
        {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in batch.items()
        }
    )


@pytest.mark.parametrize("name", MEDIA)
def test_packed_equals_alone_with_real_media(name: str, setup: Any) -> None:
    model, samples, _ = setup(name)
    row = PaddingFreeCollator(model)([samples])
    check_batch(row, model)
    assert set(row) & set(family_of(name=name).media_keys)
    report = prove_isolation(model, samples)
    assert report.ok, report.first_leak
    assert all(found.worst == 0 for found in report.rows if found.check == "tamper")
    live = prove(model, [samples])
    assert live.ok and live.mode == "training" and live.control.startswith("caught")


@pytest.mark.parametrize("name", MEDIA)
def test_in_double_precision_loss_and_gradients_are_equal(name: str, setup: Any) -> None:
    model, samples, _ = setup(name)
    report = prove_isolation(copy.deepcopy(model).double(), samples[:3], ("sdpa",), alter=as_double)
    assert report.ok, report.first_leak
    assert max(row.worst for row in report.rows if row.check == "gradients") <= 1e-7
    assert max(row.worst for row in report.rows if row.check == "loss") <= 1e-6


def mask_of_ones(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def cache_on(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "use_cache": True}


def no_text_row(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "position_ids": batch["position_ids"][1:]}


LEAKS = [(name, alter) for name in MEDIA for alter in (mask_of_ones, cache_on)]
LEAKS += [(name, no_text_row) for name in (*QWEN_VL, "qwen2_5_omni")]


@pytest.mark.parametrize(("name", "alter"), LEAKS, ids=[f"{n}-{a.__name__}" for n, a in LEAKS])
def test_set_ups_that_leak_are_caught_and_named(name: str, alter: Any, setup: Any) -> None:
    model, samples, _ = setup(name)
    report = prove_isolation(model, samples[:2], ("sdpa",), alter=alter, gradients=False)
    assert not report.ok
    assert report.leaking_layer is not None and "layers.0" in report.leaking_layer
    assert any(row.check == "tamper" and row.worst > 0 for row in report.rows)


def gradients(model: Any, packs: list[Any], dummy: Any) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    loss = token_loss_sum(model, PaddingFreeCollator(model, dummy_media=dummy)(packs))
    loss.backward()
    made = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **made}


@pytest.mark.parametrize("name", MEDIA)
def test_a_dummy_makes_the_towers_run_and_changes_nothing(name: str, setup: Any) -> None:
    model, samples, dummies = setup(name)
    text = [samples[0]]
    plain = gradients(model, [text], False)
    with_media = gradients(model, [samples], False)
    needed = {key for key, grad in with_media.items() if grad is not None}
    idle = {key for key in needed if plain[key] is None}
    assert idle, "no tower to keep busy"
    kinds = [dummies] if name in ("llava_onevision", "llava_next") else [True, dummies]
    for dummy in kinds:
        found = gradients(model, [text], dummy)
        assert all(found[key] is not None for key in needed)
        assert all(bool((found[key] == 0).all()) for key in idle)
        for key in needed - idle:
            assert torch.allclose(found[key], plain[key], atol=1e-5), key
    batch = PaddingFreeCollator(model, dummy_media=dummies)([text])
    assert batch.dummies == len(family_of(name=name).towers) and batch.sample_ids == (0,)


def test_ddp_steps_over_rows_without_media(setup: Any) -> None:
    """DDP refuses the step after a row that left a tower idle; a dummy prevents it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, samples, _ = setup("qwen2_vl")
    text, mixed = [samples[0]], [samples[1]]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dummy in (True, False):
            wrapped = DistributedDataParallel(copy.deepcopy(model))
            collate = PaddingFreeCollator(model, dummy_media=dummy)

            def steps(collate: Any = collate, wrapped: Any = wrapped) -> None:
                for pack in (mixed, text, mixed):
                    batch = {k: v for k, v in collate([pack]).items() if k != "labels"}
                    wrapped(**batch).logits.sum().backward()

            if dummy:
                steps()
            else:
                with pytest.raises(RuntimeError, match="finished reduction"):
                    steps()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MEDIA)
def test_media_that_slid_to_a_neighbour_are_refused(name: str, setup: Any) -> None:
    """Case K4: counts are compared per sample, in every modality; the row's sum alone would agree."""
    model, samples, _ = setup(name)
    collate = PaddingFreeCollator(model)
    keys = set(family_of(name=name).media_keys)
    bare = {key: value for key, value in samples[1].items() if key not in keys}
    carrier = {**samples[0], **{key: samples[1][key] for key in keys & set(samples[1])}}
    if "position_ids" in carrier and carrier["position_ids"].ndim == 1:
        carrier["position_ids"] = torch.arange(len(carrier["input_ids"]))
    for pack in ([carrier, bare], [bare, carrier]):
        with pytest.raises(InputError, match="placeholders for"):
            collate([pack])


@pytest.mark.parametrize("name", TEXT)
def test_text_families_are_isolated_and_their_leaks_are_caught(name: str) -> None:
    model = tiny_model(f"tiny:{name}")
    samples = [
        {"input_ids": torch.randint(1, 500, (n,), generator=torch.Generator().manual_seed(n)), "sample_id": n}
        for n in (9, 3, 14, 6)
    ]
    samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
    report = prove_isolation(model, samples)
    assert report.ok, report.first_leak
    double = prove_isolation(copy.deepcopy(model).double(), samples, ("sdpa",))
    assert double.ok, double.first_leak
    for alter in (mask_of_ones, cache_on):
        leak = prove_isolation(model, samples, ("sdpa",), alter=alter, gradients=False)
        assert not leak.ok and "layers." in str(leak.leaking_layer)


def test_padding_inside_segments_moves_no_real_token(setup: Any) -> None:
    model, samples, _ = setup("qwen2_5_vl")
    plain = PaddingFreeCollator(model)([samples])
    padded = PaddingFreeCollator(model, context_parallel=4, pad_multiple=64)([samples])
    check_batch(padded, model)
    assert padded.tail and padded.unpadded[: len(samples)] == plain.lengths != padded.lengths
    with torch.no_grad():
        found = [model(**{k: v for k, v in b.items() if k != "labels"}).logits[0] for b in (plain, padded)]
    parts = found[1].split(list(padded.lengths))[: len(samples)]
    kept = torch.cat([part[:real] for part, real in zip(parts, padded.unpadded, strict=False)])
    assert (kept - found[0]).abs().max() < 3e-5
    losses = [float(token_loss_sum(model, batch).detach()) for batch in (plain, padded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_pb82_two_packs_in_a_row_equal_two_micro_steps(setup: Any) -> None:
    model, samples, _ = setup("qwen2_vl")
    packs = [samples[:2], samples[2:]]
    together = gradients(model, packs, False)
    single = [gradients(model, [pack], False) for pack in packs]
    assert float(together["loss"]) == pytest.approx(sum(float(one["loss"]) for one in single), rel=1e-6)
    for key, grad in together.items():
        parts = [one[key] for one in single if one[key] is not None]
        assert grad is None or torch.allclose(grad, sum(parts), atol=1e-5, rtol=1e-4), key


def test_a_run_takes_its_dummies_from_its_template(
    processor: Any, setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, _samples, _ = setup("qwen2_vl")
    template = HFTemplate(small(processor("qwen2_vl"), "qwen2_vl"))
    trainer = SimpleNamespace(model=model, packs_collator="before")
    keep_towers_busy(trainer, False, template)
    assert trainer.packs_collator == "before"
    keep_towers_busy(trainer, True, HFTemplate(template.tokenizer))
    assert trainer.packs_collator == "before"
    assert caplog.text.count("training.dummy_media has no effect: family text has no media") == 1
    keep_towers_busy(trainer, True, template)
    assert len(trainer.packs_collator._dummies) == 1
    assert trainer.packs_collator._dummies[0][1]["labels"].count(-100) == 3
