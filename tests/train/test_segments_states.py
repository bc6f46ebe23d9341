"""Layers with a state: one real tiny model of each kind, packed equals alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_samples import text_sample

from packtrain.collate import PaddingFreeCollator, attention_of
from packtrain.errors import IsolationError
from packtrain.template import ensure_torchvision
from packtrain.train import isolate_states, prove, prove_isolation
from packtrain.train.attention import check_attention

ensure_torchvision()

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.08,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_STATES = {"state_size": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 512, "use_cache": False}


def _model(kind: str) -> Any:
    import transformers

    configs: dict[str, Any] = {
        "Qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_SIZES, **_LINEAR),
        "Lfm2": lambda: transformers.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"]),
        "Mamba": lambda: transformers.MambaConfig(**_STATES, initializer_range=0.08),
        "Mamba2": lambda: transformers.Mamba2Config(
            **_STATES, num_heads=4, head_dim=16, n_groups=1, chunk_size=8, initializer_range=0.08
        ),
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(configs[kind]()).double().eval()


SAMPLES = [text_sample(n, i) for i, n in enumerate((7, 4, 12, 2))]


@pytest.mark.parametrize("kind", ["Qwen3_5", "Lfm2", "Mamba", "Mamba2"])
def test_packed_equals_alone_for_every_kind_of_state(kind: str) -> None:
    model = _model(kind)
    if kind.startswith("Mamba"):  # its logits are float32 in any case
        model = model.float()
    with pytest.raises(IsolationError, match="carry a state"):
        check_attention(model)
    backend = attention_of(model) or "eager"
    batch = PaddingFreeCollator(model)([SAMPLES])
    bare = {key: batch[key] for key in ("input_ids", "position_ids", "use_cache")}
    with torch.no_grad():
        leaking = model(**bare).logits[0]
    isolate_states(model)
    assert not check_attention(model).proven  # the start-up proof decides
    report = prove_isolation(model, SAMPLES, (backend,))
    assert report.ok, report.first_leak
    assert max(row.worst for row in report.rows) <= (3e-5 if kind.startswith("Mamba") else 1e-7)
    assert prove(model, [SAMPLES]).ok
    with torch.no_grad():
        isolated = model(**bare).logits[0]
    assert torch.allclose(leaking[:7], isolated[:7], atol=1e-5)
    assert (leaking[7:] - isolated[7:]).abs().max() > 1e-4  # the control leaks


def test_checkpointing_gives_the_same_gradients_and_mixed_rows_are_refused() -> None:
    model = isolate_states(_model("Qwen3_5")).train()
    one = PaddingFreeCollator(model)([SAMPLES])
    two = PaddingFreeCollator(model)([SAMPLES[::-1]])
    model(**one).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for _ in range(2):
        model.zero_grad()
        model(**one).loss.backward()
    assert all(torch.allclose(a, p.grad, atol=1e-12) for a, p in zip(plain, model.parameters(), strict=True))
    both = model(**one).loss + model(**two).loss
    with pytest.raises(IsolationError, match="replays a state layer"):
        both.backward()


def test_a_cache_or_missing_positions_are_refused() -> None:
    model = isolate_states(_model("Qwen3_5"))
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(IsolationError, match="boundaries are of None"):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(IsolationError, match="cache"):
        model(input_ids=ids, position_ids=torch.arange(5)[None], use_cache=True)
