"""Which setups may run packed, and which inputs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_samples import ALL, VISION, samples_for, text_sample

from packtrain.collate import PaddingFreeCollator, state_layers
from packtrain.errors import ConfigError, IsolationError, UnknownNameError
from packtrain.testing.tiny import tiny_model
from packtrain.train.attention import check_attention, check_batch, choose_backend, segments_of
from packtrain.train.model import load_model


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_known_families_may_start(name: str, backend: str) -> None:
    setup = check_attention(tiny_model(name, attn=backend))
    assert setup.proven and setup.backend == backend and backend in setup.why


@pytest.mark.parametrize("name", ALL)
def test_inputs_that_switch_isolation_off_are_refused(name: str, tiny: dict[str, Any]) -> None:
    model = tiny[name]
    batch = PaddingFreeCollator(model)([samples_for(name, model)])
    check_batch(batch, model)
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])}
    flat = {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}
    for change, words in (
        (mask, "attention_mask"),
        ({"use_cache": True}, "use_cache is True"),
        ({"use_cache": None}, "use_cache is None"),
        ({"position_ids": None}, "no position_ids"),
        (flat, r"\[4,1,T\]|restart after"),
    ):
        with pytest.raises(IsolationError, match=words):
            check_batch(batch.with_values({**batch, **change}), model)
    if name in VISION:
        with pytest.raises(IsolationError, match="restarting text row"):
            check_batch(batch.with_values({**batch, "position_ids": batch["position_ids"][1:]}), model)


def test_boundaries_transformers_derives_equal_ours() -> None:
    lengths = (1, 1, 5, 2, 1)
    members = [text_sample(n, i) for i, n in enumerate(lengths)]
    batch = PaddingFreeCollator(pad_to_length=13)([members])
    assert segments_of(batch["position_ids"][0]) == [*lengths, 3] == list(batch.lengths)
    from transformers.masking_utils import find_packed_sequence_indices

    theirs = find_packed_sequence_indices(batch["position_ids"])[0]
    assert torch.bincount(theirs).tolist() == list(batch.lengths)


def test_layers_with_a_state_are_refused() -> None:
    import transformers

    config = transformers.Qwen3_5TextConfig(num_hidden_layers=4, hidden_size=32, vocab_size=64)
    assert state_layers(config) == ["linear_attention"]
    with pytest.raises(IsolationError, match="carry a state from sample to sample"):
        check_attention(config)
    with torch.device("meta"):
        mamba = transformers.MambaForCausalLM(
            transformers.MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=64, state_size=4)
        )
    with pytest.raises(IsolationError, match="mamba has layers that carry a state"):
        check_attention(mamba)
    assert state_layers(tiny_model("tiny:qwen2_vl")) == []


@pytest.mark.spec(
    "001",
    "attention that would mix packed samples is refused, with the fix",
    key="`model.attn` (`attn_impl`)",
    api="`check_attention`",
)
def test_refusals_of_backends_name_the_fix() -> None:
    assert choose_backend("qwen3") == "sdpa" and choose_backend("qwen3", "eager") == "eager"
    with pytest.raises(IsolationError, match=r"qwen2_vl cannot run packed on flex_attention.*attn: sdpa"):
        choose_backend("qwen2_vl", "flex_attention")
    assert choose_backend("qwen3", "varlen") == "varlen"
    unknown = tiny_model("tiny:qwen3")
    unknown.config.model_type = "brand_new"
    assert not check_attention(unknown).proven


def test_load_model_refuses_clearly(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be found"):
        load_model(str(tmp_path))
    with pytest.raises(UnknownNameError, match="tiny:qwen3"):
        load_model("tiny:qwen33")


def test_tiny_models_are_seeded_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (tiny_model("tiny:qwen3", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert load_model("tiny:qwen3", seed=1, dtype="bfloat16").lm_head.weight.dtype is torch.bfloat16


def test_models_without_sdpa_are_sent_to_eager() -> None:
    import transformers

    config = transformers.GptOssConfig(num_hidden_layers=1)
    assert choose_backend(config) == choose_backend("gpt_oss") == "eager"
    with pytest.raises(IsolationError, match="sinks") as caught:
        choose_backend(config, "varlen")
    assert "eager" in str(caught.value.hint)
