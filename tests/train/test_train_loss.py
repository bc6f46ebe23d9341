"""Chunked cross-entropy: torch's own as oracle, exact token means, memory of a real vocabulary."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

from packtrain.collate import PaddingFreeCollator
from packtrain.testing.tiny import tiny_model
from packtrain.train.loss import (
    chunked_cross_entropy,
    fused_head,
    plain_head,
    rows_at_a_time,
    shift_labels,
    token_loss_sum,
    trained_places,
)


def oracle(hidden: Any, weight: Any, labels: Any, bias: Any = None, token_weights: Any = None) -> Any:
    logits = functional.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
    losses = functional.cross_entropy(
        logits, shift_labels(labels).reshape(-1), ignore_index=-100, reduction="none"
    )
    if token_weights is not None:
        losses = losses * functional.pad(token_weights[..., 1:], (0, 1)).reshape(-1)
    return losses.sum()


def case(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(1, 37, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    bias = torch.randn(50, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 50, (1, 37))
    labels[0, [0, 5, 6, 20]] = -100
    return hidden, weight, bias, labels, torch.rand(1, 37, dtype=dtype)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_equal_torch(chunk: int, weighted: bool) -> None:
    hidden, weight, bias, labels, scale = case()
    scale = scale if weighted else None
    ours = chunked_cross_entropy(hidden, weight, labels, bias=bias, token_weights=scale, chunk=chunk)
    got = torch.autograd.grad(ours * 0.3, (hidden, weight, bias))
    theirs = oracle(hidden, weight, labels, bias, scale)
    expected = torch.autograd.grad(theirs * 0.3, (hidden, weight, bias))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_frozen_head_and_no_grad_and_half_precision() -> None:
    hidden, weight, _, labels, _ = case(torch.float32)
    frozen = chunked_cross_entropy(hidden, weight.detach(), labels)
    (grad,) = torch.autograd.grad(frozen, hidden)
    (expected,) = torch.autograd.grad(oracle(hidden, weight, labels), hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad
    half = chunked_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, chunk=8)
    assert half.dtype is torch.float32
    torch.testing.assert_close(half, frozen, rtol=2e-2, atol=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = chunked_cross_entropy(hidden, weight, labels, chunk=8)
    torch.testing.assert_close(mixed, frozen, rtol=2e-2, atol=0.5)
    for grad in torch.autograd.grad(mixed, (hidden, weight)):
        assert grad.dtype is torch.float32 and bool(grad.isfinite().all())


def test_a_share_of_the_loss_scales_16_bit_gradients_with_one_rounding() -> None:
    hidden, weight, _, labels, _ = case(torch.float32)
    narrow = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    whole = torch.autograd.grad(chunked_cross_entropy(*narrow, labels), narrow)
    share = torch.autograd.grad(chunked_cross_entropy(*narrow, labels) / 4081, narrow)
    assert torch.equal(share[0], (whole[0].float() / 4081).bfloat16())  # 1/4081 lies between two of 16 bit
    torch.testing.assert_close(share[1].float(), whole[1].float() / 4081, rtol=2**-7, atol=0)


def test_no_supervised_token_gives_exactly_zero() -> None:
    hidden, weight, bias, labels, _ = case()
    total = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias=bias)
    assert float(total.detach()) == 0
    for grad in torch.autograd.grad(total, (hidden, weight, bias)):
        assert bool((grad == 0).all())


def test_pb03_and_pb44_token_means() -> None:
    """Sums over packs divided by the tokens of the step; never a mean of means."""
    counts, means = (90, 9, 1), (1.0, 2.0, 10.0)
    assert sum(c * m for c, m in zip(counts, means, strict=True)) / sum(counts) == pytest.approx(1.18)
    weight = torch.eye(4, dtype=torch.float64)

    def sample(tokens: int, loss: float) -> tuple[Any, Any]:
        """Hidden states whose every supervised token has this loss."""
        odds = torch.tensor(float(loss), dtype=torch.float64).neg().exp()
        logits = torch.log(torch.stack([odds, *[(1 - odds) / 3] * 3]))
        labels = torch.zeros(1, tokens + 1, dtype=torch.int64)
        labels[0, 0] = -100
        return logits.expand(1, tokens + 1, 4), labels

    sums = [float(chunked_cross_entropy(h, weight, y)) for h, y in map(sample, counts, means)]
    assert sum(sums) / sum(counts) == pytest.approx(1.18)
    (a, la), (b, lb) = sample(2, 4.0), sample(8, 1.0)
    packed = chunked_cross_entropy(torch.cat([a, b], 1), weight, torch.cat([la, lb], 1))
    apart = chunked_cross_entropy(a, weight, la) + chunked_cross_entropy(b, weight, lb)
    assert float(packed) / 10 == pytest.approx(1.6) == float(apart) / 10


@pytest.mark.parametrize("name", ["tiny:qwen3", "tiny:qwen2_5_vl"])
def test_fused_head_equals_the_models_own_logits(name: str) -> None:
    model = tiny_model(name)
    torch.manual_seed(1)
    members = [
        {
            "input_ids": torch.randint(1, 500, (n,)),
            "labels": torch.randint(1, 500, (n,)),
            "loss_scale": [0.5] * n,
        }
        for n in (6, 4, 1)
    ]
    batch = PaddingFreeCollator(model)([members])
    values = []
    for fused in (True, False):
        model.zero_grad()
        total = token_loss_sum(model, batch, fused=fused, chunk=4)
        total.backward()
        values.append((total.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(values[0][0], values[1][0], rtol=1e-6, atol=1e-5)
    assert len(values[0][1]) == len(values[1][1])
    for one, other in zip(values[0][1], values[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    del batch["loss_scale"]
    tokens = int((batch["labels"] != -100).sum())
    own = model(**batch).loss
    torch.testing.assert_close(token_loss_sum(model, batch) / tokens, own, rtol=1e-6, atol=1e-6)


def test_fused_head_leaves_the_model_as_it_was() -> None:
    model = tiny_model("tiny:qwen3")
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(RuntimeError, match="boom"), fused_head(model):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
        raise RuntimeError("boom")
    assert "forward" not in vars(model.lm_head) and "_loss_function" not in vars(model)
    assert not model._forward_pre_hooks
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_softcapped_logits_are_the_models_own() -> None:
    model = tiny_model("tiny:qwen3")
    assert plain_head(model) is model.lm_head
    model.config.final_logit_softcapping = 30.0
    assert plain_head(model) is None


def test_a_real_vocabulary_at_four_thousand_tokens_stays_small() -> None:
    """Logits, softmax and gradient of [4096, 151936] would take 7.5 GB; chunks stay below 1.5 GB."""
    code = """
import json, resource, torch
from packtrain.train.loss import chunked_cross_entropy
torch.set_num_threads(2)
hidden = torch.randn(1, 4096, 32, requires_grad=True)
weight = torch.nn.Parameter(torch.randn(151936, 32) * 0.02)
labels = torch.randint(0, 151936, (1, 4096))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(chunked_cross_entropy(hidden, weight, labels) / 4095).backward()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown_mb": (after - before) / 1024, "grad": float(weight.grad.abs().sum())}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["grown_mb"] < 1500 and result["grad"] > 0


def test_places_are_the_same_whether_they_are_looked_for_or_counted():
    drawn = torch.Generator().manual_seed(0)
    for length in (1, 2, 7, 300):
        for share in (0.0, 0.3, 1.0):
            targets = torch.randint(0, 9, (length,), generator=drawn)
            targets[torch.rand(length, generator=drawn) >= share] = -100
            looked = trained_places(targets)
            assert torch.equal(looked, trained_places(targets, len(looked)))
            assert (targets[looked] != -100).all()


@pytest.mark.parametrize(("vocabulary", "device", "rows"), [(151936, "cpu", 512), (151936, "cuda", 1536)])
def test_chunks_are_bounded_by_their_bytes(vocabulary, device, rows):
    assert rows_at_a_time(vocabulary, device) == rows
    assert rows_at_a_time(10**9, device) == 256
