"""The isolation proof on real (tiny) models, and the leaks that it must catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from train_samples import ALL, VISION, samples_for, text_sample

from packtrain.collate import PackBatch, attention_of
from packtrain.errors import InputError, IsolationError
from packtrain.testing.tiny import tiny_model
from packtrain.train.proof import CONTROLS, proof_samples, prove_isolation, run_controls


@pytest.mark.parametrize("name", ALL)
def test_packed_equals_alone_on_sdpa_and_eager(name: str, tiny: dict[str, Any]) -> None:
    model = tiny[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = prove_isolation(model, samples_for(name, model))
    assert report.ok, report.first_leak
    assert report.first_leak is None
    found = {(row.backend, row.order, row.check) for row in report.rows}
    for backend in ("sdpa", "eager"):
        for order in ("in order", "reversed", "rotated", "padded"):
            assert {(backend, order, check) for check in ("logits", "loss", "gradients")} <= found
        assert {(backend, "in order", "tamper"), (backend, "reversed", "tamper")} <= found
    assert all(row.worst == 0 for row in report.rows if row.check == "tamper")
    assert max(row.worst for row in report.rows) <= 3e-5
    assert attention_of(model) == "sdpa" and not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def mask_of_ones(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def cache_on(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "use_cache": True}


def three_rows(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "position_ids": batch["position_ids"][1:]}


def running_positions(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


LEAKS = [(name, alter) for name in ALL for alter in (mask_of_ones, cache_on)]
LEAKS += [(name, three_rows) for name in VISION] + [("tiny:qwen3", running_positions)]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "alter"), LEAKS, ids=[f"{n[5:]}-{a.__name__}" for n, a in LEAKS])
def test_leaks_are_caught_and_the_layer_is_named(
    name: str, alter: Any, backend: str, tiny: dict[str, Any]
) -> None:
    report = prove_isolation(tiny[name], samples_for(name, tiny[name]), (backend,), alter=alter)
    assert not report.ok
    failed = {row.check for row in report.rows if not row.ok}
    assert failed == {"logits", "loss", "gradients", "tamper"}
    assert report.first_leak is not None and f"on {backend}" in report.first_leak
    assert report.leaking_layer is not None and report.leaking_layer.endswith("layers.0")


@pytest.mark.parametrize("name", ALL)
def test_controls_are_caught_by_name_and_leave_the_model(name: str, tiny: dict[str, Any]) -> None:
    model = tiny[name]
    backends = ("sdpa", "eager") if name == "tiny:qwen3" else ("sdpa",)
    found = run_controls(model, samples_for(name, model), backends)
    assert {(c.backend, c.name) for c in found} == {(b, n) for b in backends for n in CONTROLS}
    assert all(c.caught for c in found), [c for c in found if not c.caught]
    assert all("differs by" in c.what and "layers.0" in c.what for c in found)
    assert prove_isolation(model, samples_for(name, model), ("sdpa",), gradients=False).ok


def test_a_harmless_or_refused_control_says_so(tiny: dict[str, Any], monkeypatch: Any) -> None:
    def refuse(batch: PackBatch) -> Mapping[str, Any]:
        raise ValueError("no such row")

    monkeypatch.setattr("packtrain.train.proof.CONTROLS", {"nothing": lambda batch: batch, "no": refuse})
    harmless, refused = run_controls(tiny["tiny:qwen3"], samples_for("tiny:qwen3", None), ("sdpa",))
    assert harmless.caught is False and "harmless" in harmless.what
    assert refused.caught is None and refused.what == "the model refuses it: no such row"


def test_a_wrong_position_is_traced_to_its_layer_without_a_leak(tiny: dict[str, Any]) -> None:
    """Rows of t, h, w that run on over the row change logits, and no sample reads another."""

    def running_rows(batch: PackBatch) -> Mapping[str, Any]:
        positions = batch["position_ids"].clone()
        positions[1:] += torch.arange(positions.shape[-1]) ** 2 % 7
        return {**batch, "position_ids": positions}

    model = tiny["tiny:qwen2_vl"]
    spoiled = {"on": False}

    def only_packs(batch: PackBatch) -> Mapping[str, Any]:
        spoiled["on"] = len(batch.lengths) > 1
        return running_rows(batch) if spoiled["on"] else batch

    report = prove_isolation(model, samples_for("tiny:qwen2_vl", model), ("sdpa",), alter=only_packs)
    assert not report.ok and all(row.ok for row in report.rows if row.check == "tamper")
    assert report.leaking_layer is not None and report.leaking_layer.endswith("layers.0")


def test_double_precision_is_held_to_its_own_limit() -> None:
    model = tiny_model("tiny:qwen3").double()
    report = prove_isolation(model, samples_for("tiny:qwen3", model), ("sdpa",))
    assert report.ok and {row.limit for row in report.rows} == {1e-7, 0.0}


def test_proof_refuses_too_little_and_unknown_backends(tiny: dict[str, Any]) -> None:
    model = tiny["tiny:qwen3"]
    with pytest.raises(InputError, match="1 sample given"):
        prove_isolation(model, [text_sample(4, 0)])
    foreign = {**text_sample(4, 0), "input_ids": torch.tensor([1, 2, 999_999, 3])}
    with pytest.raises(InputError, match="hold token 999999, the model has") as told:
        prove_isolation(model, [text_sample(4, 1), foreign])
    assert "processor of this model" in str(told.value.hint)
    with pytest.raises(IsolationError, match="does not run on flash_attention_2"):
        prove_isolation(model, samples_for("tiny:qwen3", model), ("flash_attention_2",))
    assert attention_of(model) == "sdpa"


def test_proof_samples_are_few_short_and_mixed(tiny: dict[str, Any]) -> None:
    model = tiny["tiny:qwen2_vl"]
    members = samples_for("tiny:qwen2_vl", model)
    long = [text_sample(900, 10 + i, rows=3) for i in range(3)]
    chosen = proof_samples([members, long], model, tokens=100)
    assert sum(len(sample["input_ids"]) for sample in chosen) <= 100
    assert any("pixel_values" in s for s in chosen) and any("pixel_values" not in s for s in chosen)
    cut = proof_samples([long, members[1:2]], model, tokens=20)
    assert [len(sample["input_ids"]) for sample in cut] == [5, 5]
    assert all("pixel_values" not in sample for sample in cut)
    assert prove_isolation(model, cut, ("sdpa",)).ok
