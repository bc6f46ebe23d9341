"""Variable-length attention: packed equals alone, segment by segment as a CPU runs it; a test per trap."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from train_samples import ALL, VISION, image_sample, samples_for, text_sample

from packtrain.collate import PackBatch, PaddingFreeCollator
from packtrain.collate.pack_batch import on_host
from packtrain.errors import IsolationError
from packtrain.template import ensure_torchvision
from packtrain.testing.tiny import tiny_model
from packtrain.train import load_model, prove_isolation, register_varlen_attention, use_varlen, versions
from packtrain.train.attention import check_attention, choose_backend
from packtrain.train.loss import token_loss_sum
from packtrain.train.segments import of_lengths, of_offsets, of_positions
from packtrain.train.varlen import TOWER, VARLEN, _is_causal, attend, varlen_refusal

ensure_torchvision()

from transformers import masking_utils  # noqa: E402

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.08,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _logits(model: Any, samples: list[dict[str, Any]], **more: Any) -> torch.Tensor:
    batch = {**PaddingFreeCollator(model)([samples]), **more}
    batch = {name: value for name, value in batch.items() if value is not None and name != "labels"}
    with torch.no_grad():
        return model(**batch).logits[0]


def _alone_on_sdpa(model: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([_logits(model, [sample]) for sample in samples])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_equals_alone_tamper_is_bitwise_gradients_agree(name: str, dtype: torch.dtype) -> None:
    model = use_varlen(tiny_model(name).to(dtype))
    report = prove_isolation(model, samples_for(name, model), (VARLEN,))
    assert report.ok, report.first_leak
    limit = 3e-5 if dtype is torch.float32 else 1e-7
    assert max(row.worst for row in report.rows) <= limit
    assert model.config.get_text_config()._attn_implementation == VARLEN


@pytest.mark.parametrize("name", ALL)
def test_varlen_computes_what_sdpa_computes_alone(name: str) -> None:
    model = tiny_model(name).double()
    samples = samples_for(name, model)
    expected = _alone_on_sdpa(model, samples)
    assert torch.allclose(_logits(use_varlen(model), samples), expected, atol=1e-12)


@pytest.mark.parametrize(
    "kind", ["Mistral", "Qwen2", "Gemma3Text", "Cohere2", "Olmo3", "Llama", "Phi3", "GPTNeoX", "Starcoder2"]
)
def test_windows_and_grouped_heads_are_honoured(kind: str) -> None:
    """Against sdpa alone: a window lost on varlen would agree with itself, but not with sdpa."""
    import transformers

    more: dict[str, Any] = {"sliding_window": 4}
    if kind == "Qwen2":
        more |= {"use_sliding_window": True, "max_window_layers": 1}
    if kind in ("Llama", "GPTNeoX"):
        more = {}
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).double().eval()
    model.set_attn_implementation("sdpa")
    samples = [text_sample(n, i) for i, n in enumerate((11, 3, 17, 1))]
    expected = _alone_on_sdpa(model, samples)
    if more:
        config.sliding_window, lost = 1000, config.sliding_window
        assert not torch.allclose(_alone_on_sdpa(model, samples), expected, atol=1e-6) or kind == "Gemma3Text"
        config.sliding_window = lost
    assert torch.allclose(_logits(use_varlen(model), samples), expected, atol=1e-10)


def test_what_the_kernel_does_not_have_is_refused() -> None:
    import transformers

    for config, words in (
        (transformers.Gemma2Config(), "caps scores"),
        (transformers.Llama4TextConfig(), "fixed chunks"),
        (transformers.GptOssConfig(), "sinks"),
        (transformers.Qwen3Config(attention_dropout=0.1), "attention_dropout is 0.1"),
        (transformers.Gemma3Config(), "both directions"),
    ):
        assert words in (varlen_refusal(config) or "")
        with pytest.raises(IsolationError, match=words):
            choose_backend(config, "varlen")
    assert varlen_refusal(transformers.Qwen3Config()) is None
    model = use_varlen(tiny_model("tiny:qwen3"))
    with pytest.raises(IsolationError, match="does not decode"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False, use_cache=True)


def test_t1_a_mask_of_ones_does_not_switch_isolation_off_and_padding_is_refused() -> None:
    model = use_varlen(tiny_model("tiny:qwen3").double())
    samples = samples_for("tiny:qwen3", model)
    expected = _alone_on_sdpa(model, samples)
    ones = torch.ones(1, expected.shape[0], dtype=torch.long)
    assert torch.equal(_logits(model, samples, attention_mask=ones), _logits(model, samples))
    ones[0, -1] = 0
    with pytest.raises(IsolationError, match="padded"):
        _logits(model, samples, attention_mask=ones)


def test_t2_a_cache_does_not_switch_isolation_off() -> None:
    model = use_varlen(tiny_model("tiny:qwen3").double())
    samples = samples_for("tiny:qwen3", model)
    assert torch.equal(_logits(model, samples, use_cache=True), _logits(model, samples))


def test_t3_flash_offsets_are_kept_from_towers_and_serve_text_models() -> None:
    tower = use_varlen(tiny_model("tiny:qwen2_5_vl"))
    with pytest.raises(IsolationError, match="cu_seq_lens_q cannot be given"):
        PaddingFreeCollator(tower, boundary_kwargs="cu_seq_lens_q")
    assert not any(
        key.startswith(("cu_", "max_length"))
        for key in PaddingFreeCollator(tower)([[text_sample(4, 0, rows=3)]])
    )
    text = use_varlen(tiny_model("tiny:qwen3").double())
    samples = samples_for("tiny:qwen3", text)
    offsets = torch.tensor([0, 7, 11, 23, 25], dtype=torch.int32)
    flat = torch.arange(25)[None]
    moved = _logits(
        text, samples, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=12, max_length_k=12
    )
    assert torch.equal(moved, _logits(text, samples))
    relative = _logits(text, samples, cu_seq_lens_q=offsets, position_ids=flat)  # rotary is relative
    assert torch.allclose(relative, moved, atol=1e-4)


@pytest.mark.parametrize("name", VISION)
def test_t4_positions_without_the_text_row_are_refused(name: str) -> None:
    model = use_varlen(tiny_model(name))
    samples = samples_for(name, model)
    three = PaddingFreeCollator(model)([samples])["position_ids"][1:]
    with pytest.raises(IsolationError, match=r"no boundaries reach|as \["):
        _logits(model, samples, position_ids=three)


@pytest.mark.parametrize("name", VISION)
def test_t5_t7_the_tower_is_one_call_and_ignores_text_boundaries(name: str, monkeypatch: Any) -> None:
    model = use_varlen(tiny_model(name).double())
    samples = [
        text_sample(6, 0, rows=3),
        image_sample(model, 1),
        image_sample(model, 2, ((1, 4, 4), (1, 6, 4))),
    ]
    clean = _logits(model, samples)
    lengths = [sample["input_ids"].shape[0] for sample in samples]
    offsets = of_lengths(tuple(lengths), torch.device("cpu")).cu
    assert torch.equal(_logits(model, samples, pack_cu=offsets, pack_max=max(lengths)), clean)
    calls: list[int] = []
    from packtrain.train import varlen

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(0 if kwargs["causal"] else 1)
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(varlen, "attend", counted)
    assert torch.equal(_logits(model, samples), clean)
    assert sum(calls) == model.config.vision_config.depth  # one a tower layer, not one an image


@pytest.mark.parametrize("name", VISION)
def test_t6_the_name_loads_everywhere_and_other_backends_come_back(name: str) -> None:
    model = load_model(name, attn="varlen")
    tower = model.config.vision_config
    assert tower._attn_implementation == TOWER and check_attention(model).backend == VARLEN
    samples = samples_for(name, model)
    assert prove_isolation(model, samples, ("sdpa",), gradients=False).ok
    assert tower._attn_implementation == TOWER and model.config._attn_implementation == VARLEN
    assert "varlen" not in model.config.to_json_string()
    slow = tiny_model(name)
    register_varlen_attention()
    slow.set_attn_implementation("varlen")  # as from_pretrained(attn_implementation="varlen") does
    assert torch.allclose(_logits(slow, samples), _logits(model, samples), atol=1e-6)


def test_gradient_checkpointing_and_windows_with_several_rows() -> None:
    model = use_varlen(tiny_model("tiny:qwen3").double()).train()
    batch = PaddingFreeCollator(model)([samples_for("tiny:qwen3", model)])
    model(**batch).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model(**batch).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_segments_are_read_once_and_again_after_a_change() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    first = of_positions(positions)
    assert first.lengths == (2, 3, 1) and first.cu.tolist() == [0, 2, 5, 6] and first.longest == 3
    assert of_positions(positions) is first
    positions[0, 5] = 3
    assert of_positions(positions).lengths == (2, 4)
    assert of_positions(torch.tensor([[0, 1], [2, 3]])).lengths == (2, 2)
    assert of_offsets(torch.tensor([0, 2, 2, 5])).lengths == (2, 0, 3)
    with pytest.raises(IsolationError, match="do not start at 0"):
        of_offsets(torch.tensor([1, 2]))
    with pytest.raises(IsolationError, match="cover 6 tokens"):
        model = use_varlen(tiny_model("tiny:qwen3"))
        model(input_ids=torch.ones(1, 5, dtype=torch.long), pack_cu=torch.tensor([0, 6]))


def test_auto_is_varlen_only_where_its_kernel_runs(monkeypatch: Any) -> None:
    from packtrain.train import attention

    config = tiny_model("tiny:qwen3").config
    assert choose_backend(config, "auto", dtype="bfloat16") == "sdpa"  # no GPU here
    monkeypatch.setattr(attention, "kernel_available", lambda: True)
    assert choose_backend(config, "auto", dtype="bfloat16") == "varlen"
    assert choose_backend(config, "auto", dtype="float32") == "sdpa"
    config.attn_logit_softcapping = 30.0
    assert choose_backend(config, "auto", dtype="bfloat16") == "sdpa"


def test_versions_nobody_tested_are_told_and_never_refused(monkeypatch: Any) -> None:
    model = tiny_model("tiny:qwen3")
    before = check_attention(model).proven
    monkeypatch.setattr(versions, "TESTED", {"transformers": ("4.40",), "torch": ("1.0",)})
    assert check_attention(model).proven == before
    assert (
        "transformers" in versions.told()
        and "newer" in versions.told()
        and "proof decides" in versions.told()
    )


def test_a_step_reads_nothing_back_from_the_device() -> None:
    """On the meta device every look at a value is an error; boundaries come from the batch on the host."""
    model = use_varlen(tiny_model("tiny:qwen3")).train()
    samples = samples_for("tiny:qwen3", model)
    batch = PaddingFreeCollator(model)([samples])
    expected = of_positions(batch["position_ids"]).lengths
    moved = batch.to("meta")
    moved.count_trained(batch["labels"])
    loss = token_loss_sum(model.to("meta"), moved, count=moved.trained)
    loss.backward()
    assert loss.device.type == "meta" and of_positions(moved["position_ids"]).lengths == expected
    assert len(expected) == len(samples)


def test_what_a_batch_moved_is_read_on_the_host_until_either_changes() -> None:
    model = tiny_model("tiny:qwen2_5_vl")
    batch = PaddingFreeCollator(model)([samples_for("tiny:qwen2_5_vl", model)])
    assert on_host(batch["position_ids"]) is None and on_host(batch.to("cpu")["position_ids"]) is None
    rows = batch.to("meta")["position_ids"]
    assert rows.shape[0] == 4 and on_host(rows) is batch["position_ids"]
    assert torch.equal(on_host(rows[0]), batch["position_ids"][0])
    assert of_positions(rows[0]).lengths == batch.lengths
    assert on_host(rows[1]) is None and on_host(rows[0, :, 1:]) is None and on_host(rows.clone()) is None
    rows[0].add_(1)
    assert on_host(rows) is None and on_host(rows[0]) is None
    rows = batch.to("meta")["position_ids"]
    batch["position_ids"].add_(1)
    assert on_host(rows) is None


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), _saved]
)
def test_a_copy_of_a_changed_tensor_knows_nothing_of_before(copied: Any) -> None:
    """Copies count their changes anew, to the number that the first one had when it was read."""
    before, after = (torch.cat([torch.arange(n) for n in lengths])[None] for lengths in ((4, 4), (2, 6)))
    for noted in range(3):
        for changes in range(4):
            row, labels = before.clone(), torch.ones(1, 8, dtype=torch.long)
            moved = PackBatch(position_ids=row, labels=labels).to("meta")
            for tensor in (row, labels, *moved.values()):
                for _ in range(noted):
                    tensor.mul_(1)
            batch = PackBatch(position_ids=row, labels=labels)
            moved = batch.to("meta")
            batch.count_trained(labels)
            assert of_positions(row).lengths == (4, 4) and batch.trained == 7
            for _ in range(changes):
                row.copy_(after)
                labels.fill_(-100)
                moved["position_ids"].copy_(after)
            changed = changes > 0
            assert of_positions(copied(row)).lengths == ((2, 6) if changed else (4, 4))
            assert PackBatch(labels=copied(labels)).trained is None
            assert on_host(copied(moved["position_ids"])) is None


def test_tensors_of_inference_and_without_a_first_part_are_moved() -> None:
    with torch.inference_mode():
        batch = PackBatch(position_ids=torch.arange(8)[None])
    assert on_host(batch.to("meta")["position_ids"]) is None
    moved = PackBatch(one=torch.tensor(3), none=torch.zeros(0, 3)).to("meta")
    assert on_host(moved["one"].view(1)) is None and on_host(moved["none"].view(3, 0)) is None


def test_a_model_compiled_by_its_owner_sees_positions_that_changed() -> None:
    """Whose graphs hold the version of the tensor that they were traced with."""
    model = use_varlen(tiny_model("tiny:qwen3")).eval()
    rows = [
        torch.cat([torch.arange(n) for n in lengths])[None] for lengths in ((8, 8), (16,), (4, 12), (3, 13))
    ]
    given = {"input_ids": torch.arange(16)[None] + 5, "use_cache": False}
    with torch.no_grad():
        expected = [model(**given, position_ids=row.clone()).logits for row in rows]
        compiled, positions = torch.compile(model, backend="aot_eager"), rows[0].clone()
        for is_in_place in (False, False, True):
            for row, logits in zip(rows, expected, strict=True):
                given["position_ids"] = positions.copy_(row) if is_in_place else row.clone()
                torch.testing.assert_close(compiled(**given).logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", [[[0, 1, 0, 1, 2, 0]], [[0, 1, 2, 3]], [[3, 4], [0, 0]]])
def test_samples_that_transformers_finds_are_the_same_on_the_host(row: list[list[int]]) -> None:
    register_varlen_attention()
    look = masking_utils.find_packed_sequence_indices
    batch = PackBatch(position_ids=torch.tensor(row))
    expected = look.__wrapped__(batch["position_ids"])
    found = look(batch["position_ids"])
    told = look(batch.to("meta")["position_ids"])
    if expected is None:
        assert found is told is None
    else:
        assert torch.equal(found, expected) and told.shape == expected.shape


def test_causal_masks_are_known_without_being_computed() -> None:
    rows = torch.tensor([[0, 0, 1, 1]])
    causal, packed = masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(rows)
    both, either = masking_utils.and_masks, masking_utils.or_masks
    known = [causal, both(causal, packed), masking_utils.sliding_window_causal_mask_function(2)]
    unknown = [
        packed,
        either(causal, packed),
        both(either(causal, packed), packed),
        lambda *at: at[2] >= at[3],
    ]
    if remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None):
        apart = remap(causal, torch.tensor([[0, 1, 0, 1]]))
        known.append(both(apart, packed))
        unknown += [apart, both(apart, apart), both(remap(packed, rows), packed)]
    zero = torch.tensor(0)
    assert all(map(_is_causal, known)) and not any(map(_is_causal, unknown))
    assert not any(bool(mask(zero, zero, at, at + 1)) for mask in known for at in torch.arange(3))
