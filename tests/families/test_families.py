"""Families: who belongs where, what a model may be handed, and that the listed types really isolate."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from packtrain.errors import InputError, IsolationError, UnknownNameError
from packtrain.extend import names
from packtrain.families import (
    BACKENDS,
    FLASH_KWARGS,
    STATEFUL_MODEL_TYPES,
    VARLEN_KWARGS,
    Family,
    families,
    family_of,
)

VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
OTHERS = ("internvl3", "llava_1_5", "llava_next", "llava_onevision", "qwen2_5_omni", "qwen2_audio")


def test_file_name_is_the_name() -> None:
    assert names("families") == sorted(["text", *VISION, *OTHERS])
    assert [family.name for family in families()] == names("families")
    assert all(family_of(name=family.name) is family for family in families())


def test_nothing_is_in_two_families() -> None:
    types = [t for family in families() for t in family.model_types]
    classes = [c for family in families() for c in family.processor_classes]
    assert len(types) == len(set(types)) and len(classes) == len(set(classes))
    assert not set(types) & set(STATEFUL_MODEL_TYPES)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen2", "text"), ("llama", "text"), ("gemma3_text", "text"), ("qwen3_vl_moe", "qwen3_vl")]
    + [(name, name) for name in VISION],
)
def test_by_model_type(model_type: str, name: str) -> None:
    assert family_of(model_type).name == name


def test_unknown_and_impossible_models() -> None:
    with pytest.raises(UnknownNameError, match="unknown model type 'qwen2_5vl'") as caught:
        family_of("qwen2_5vl")
    assert "qwen2_5_vl" in str(caught.value) and "family='text'" in str(caught.value)
    for model_type in ("qwen3_5", "mamba2"):
        with pytest.raises(IsolationError, match="state"):
            family_of(model_type)
    with pytest.raises(UnknownNameError, match="unknown model type 'bloom'"):
        family_of("bloom")
    with pytest.raises(UnknownNameError):
        family_of(name="qwen4_vl")
    with pytest.raises(InputError):
        family_of()


def test_by_processor() -> None:
    class Qwen2_5_VLProcessor:
        tokenizer = image_processor = None

    class SomeTokenizer:
        def convert_tokens_to_ids(self, tokens: Any) -> Any:
            return None

    assert family_of(processor=Qwen2_5_VLProcessor()).name == "qwen2_5_vl"

    class Ours(Qwen2_5_VLProcessor):
        pass

    assert family_of(processor=Ours()).name == "qwen2_5_vl"
    assert family_of(processor=SomeTokenizer()).name == "text"
    with pytest.raises(UnknownNameError, match="unknown processor class 'object'") as caught:
        family_of(processor=object())
    assert "family=" in str(caught.value.hint)


@pytest.mark.parametrize("name", VISION)
def test_what_a_vision_model_may_get(name: str) -> None:
    family = family_of(name=name)
    assert family.position_rows == 3 and family.packed_position_rows == 4
    keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    assert dict(family.media_keys) == dict.fromkeys(keys, "cat0")
    for backend in ("sdpa", "eager", "flash_attention_2"):
        assert family.allowed_kwargs(backend) == ()  # the tower would take them for its own
        assert set(FLASH_KWARGS) < set(family.forbidden_kwargs(backend))
        assert family.isolates_by_positions(backend)
    assert family.allowed_kwargs("varlen") == VARLEN_KWARGS
    assert "attention_mask" in family.forbidden_kwargs("varlen")
    with pytest.raises(IsolationError, match="flex_attention"):
        family.allowed_kwargs("flex_attention")


def test_what_a_text_model_may_get() -> None:
    family = family_of(name="text")
    assert family.position_rows == family.packed_position_rows == 1 and family.media_keys == {}
    assert family.allowed_kwargs("flash_attention_2") == FLASH_KWARGS
    assert family.allowed_kwargs("sdpa") == family.allowed_kwargs("flex_attention") == ()
    for backend in BACKENDS:
        assert "attention_mask" in family.forbidden_kwargs(backend)
        assert not set(family.allowed_kwargs(backend)) & set(family.forbidden_kwargs(backend))
    assert family.isolates_by_positions("sdpa") and not family.isolates_by_positions("varlen")
    with pytest.raises(UnknownNameError, match="flash_attention_2"):
        family.allowed_kwargs("flash_attn_2")


def test_families_travel() -> None:
    for family in families():
        assert pickle.loads(pickle.dumps(family)) == family and hash(family) == hash(family)
    assert Family(name="x", model_types=()) != family_of(name="text")


def tiny(model_type: str, backend: str) -> Any:
    import torch

    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = {
        **dict.fromkeys(("vocab_size", "ffn_dim"), 64),
        **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 32),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head"), 4),
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    known = AutoConfig.for_model(model_type)
    config = type(known)(**{key: value for key, value in wanted.items() if key in known.to_dict()})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backend).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "isolates"),
    [("qwen3", True), ("mistral", True), ("gemma3_text", True), ("gpt2", True), ("opt", False)],
)
def test_restarting_positions_isolate_the_listed_types(model_type: str, isolates: bool, backend: str) -> None:
    """Rotary, windowed, mixed windows, learned positions; and one that is refused because it leaks."""
    import torch

    samples = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [9, 10, 11], [40], [3, 5, 7, 9, 11, 13]]
    model = tiny(model_type, backend)
    row = torch.tensor([[token for sample in samples for token in sample]])
    restart = torch.tensor([[i for sample in samples for i in range(len(sample))]])
    with torch.no_grad():
        alone = torch.cat(
            [model(input_ids=torch.tensor([sample]), use_cache=False).logits[0] for sample in samples]
        )
        packed = model(input_ids=row, position_ids=restart, use_cache=False).logits[0]
        plain = model(input_ids=row, use_cache=False).logits[0]
    assert (plain - alone).abs().max() > 0.1  # the check bites
    assert bool((packed - alone).abs().max() < 3e-5) is isolates
    assert (model_type in family_of(name="text").model_types) is isolates


def tiny_multimodal(model_type: str) -> Any:
    """The real class with two small layers of text and the smallest towers that build."""
    import torch

    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    import transformers as tr

    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    tower = {key: text[key] for key in list(text)[1:5]} | {"image_size": 28, "patch_size": 14}
    sound = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    language = {**text, "model_type": "qwen2"}
    if model_type == "qwen2_5_omni_thinker":
        from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configs
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as models

        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        config: Any = configs.Qwen2_5OmniThinkerConfig(
            text_config={**text, "rope_parameters": rope},
            audio_config={**sound, "output_dim": 32},
            vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
        )
        kind: Any = models.Qwen2_5OmniThinkerForConditionalGeneration
    elif model_type == "qwen2_audio":
        config = tr.Qwen2AudioConfig(text_config=language, audio_config=sound)
        kind = tr.Qwen2AudioForConditionalGeneration
    elif model_type == "internvl":
        sides = {"image_size": [28, 28], "patch_size": [14, 14]}
        config = tr.InternVLConfig(text_config=language, vision_config={**tower, **sides})
        kind = tr.InternVLForConditionalGeneration
    else:
        name = {"llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[model_type]
        encoder = "siglip_vision_model" if model_type == "llava_onevision" else "clip_vision_model"
        config = getattr(tr, f"{name}Config")(
            text_config=language, vision_config={**tower, "model_type": encoder}
        )
        kind = getattr(tr, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    return kind, config


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "model_type",
    ["llava", "llava_next", "llava_onevision", "internvl", "qwen2_audio", "qwen2_5_omni_thinker"],
)
def test_restarting_positions_isolate_multimodal_models(model_type: str, backend: str) -> None:
    import torch

    family = family_of(model_type)
    assert family.isolates_by_positions(backend) and family.allowed_kwargs(backend) == ()
    kind, config = tiny_multimodal(model_type)
    model = kind._from_config(config, attn_implementation=backend).float().eval()
    samples = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11], [40], [3, 5, 7, 9, 11, 13]]

    def logits(tokens: list[int], positions: list[int]) -> Any:
        rows = torch.tensor([positions])
        if family.packed_position_rows > 1:
            rows = rows[None].expand(family.packed_position_rows, 1, -1)
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens]), position_ids=rows, use_cache=False).logits[0]

    row = [token for sample in samples for token in sample]
    alone = torch.cat([logits(sample, list(range(len(sample)))) for sample in samples])
    packed = logits(row, [i for sample in samples for i in range(len(sample))])
    assert (packed - alone).abs().max() < 3e-5
    assert (logits(row, list(range(len(row)))) - alone).abs().max() > 0.01  # the check bites
