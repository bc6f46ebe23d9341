"""A mask that was made without the boundaries is named by its function and file, and by what helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from packtrain.errors import IsolationError
from packtrain.train import prove
from packtrain.train.culprit import blind_mask_of
from packtrain.train.model import switch_cache_off
from packtrain.train.varlen import use_varlen
from packtrain.train.weights import outline, position_table

torch.set_num_threads(1)

_WIDTH = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_NARROW = {"vocab_size": 256, "d_model": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {**_WIDTH, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 99}),
    "biogpt": ("BioGptConfig", {**_WIDTH, "intermediate_size": 32, "max_position_embeddings": 99}),
    "bloom": ("BloomConfig", {"vocab_size": 256, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "mpt": ("MptConfig", {**_NARROW, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2}),
    "xglm": ("XGLMConfig", {**_NARROW, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32}),
}


def config_of(name: str) -> Any:
    kind, settings = CONFIGS[name]
    return getattr(transformers, kind)(**settings)


def sample(number: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(5, 200, (tokens,), generator=torch.Generator().manual_seed(number))
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(tokens),
        "sample_id": number,
    }


PACKS = [[sample(0, 9), sample(1, 7), sample(2, 12)], [sample(3, 8), sample(4, 11)]]


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    switch_cache_off(model)
    return model


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_proof_names_the_mask_and_the_config_alone_tells_it_too(name: str) -> None:
    blind = blind_mask_of(outline(config_of(name)), "sdpa")
    if blind is None:  # this release passes the positions on, or makes its own mask: the proof decides alone
        pytest.skip(f"{name} does not ask for a mask without positions on {transformers.__version__}")
    with pytest.raises(IsolationError) as refused:
        prove(made(name), PACKS)
    told = str(refused.value)
    assert f"models/{name}/modeling_{name}.py:" in told and "without position_ids" in told
    assert "\n" not in told and "packing: false" in told and "attn: sdpa" not in told
    assert blind.where in told


@pytest.mark.parametrize("name", ["opt", "biogpt"])
def test_the_backend_that_is_named_holds(name: str) -> None:
    with pytest.raises(IsolationError) as refused:
        prove(made(name), PACKS)
    if "model.attn: varlen" not in str(refused.value):
        pytest.skip(f"{name} does not hand positions to its attention on {transformers.__version__}")
    assert prove(use_varlen(made(name)), PACKS).ok


def test_models_that_hand_on_positions_are_not_blamed() -> None:
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=40)
    net = outline(config)
    assert blind_mask_of(net, "sdpa") is None and position_table(net) == 40
    assert position_table(outline(config_of("opt"))) == 99
    assert position_table(outline(transformers.LlamaConfig(**_WIDTH, intermediate_size=32))) is None
    assert all(p.device.type == "meta" for p in net.parameters())


def test_a_model_that_takes_no_boundaries_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As BLOOM of transformers 4.57, which refuses any argument that it does not know."""
    model = made("bloom")
    plain = model.forward

    def strict(input_ids: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        if kwargs:
            raise ValueError(f"Got unexpected arguments:\n {kwargs}")
        return plain(input_ids=input_ids, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", strict)
    with pytest.raises(IsolationError, match="does not take the inputs of packs: Got unexpected") as refused:
        prove(model, PACKS)
    assert "\n" not in str(refused.value)


def test_layers_with_a_state_are_told_what_to_call() -> None:
    config = transformers.RwkvConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    with pytest.raises(IsolationError, match="rwkv carries a state"):
        outline(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    switch_cache_off(model)
    with pytest.raises(IsolationError, match="isolate_states"):
        prove(model, PACKS)
