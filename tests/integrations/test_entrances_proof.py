"""The proof at every entrance: packs of every kind, resumed runs, adapters, loops of one's own.

A leaking model is refused before the first optimizer step with nothing changed; a clean one trains exactly as
without the proof: to the last digit, dropout and all.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kinds import KINDS, open_kind, write_folders
from test_kinds import HF, OWN, TRL, fresh, hf, own, pytestmark, trl

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackLoader, PackSampler
from packtrain.errors import IsolationError
from packtrain.train import prove, start_up

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

from leaks import on_the_object

__all__ = ["pytestmark"]

MAKERS = {OWN: own, HF: hf, TRL: trl}
EVERY = [*KINDS, "webdataset"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("entrances")
    write_folders(root)
    return root


@pytest.fixture
def make(
    folders: Path, tmp_path: Path, saved_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes the trainer of a host on packs of a kind, around a model with dropout."""

    def made(host: str, kind: str, change: Callable[[Any], Any] = lambda model: model, **more: Any) -> Any:
        torch.manual_seed(3)
        model = copy.deepcopy(fresh())
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        changed = change(model)
        monkeypatch.setattr("test_kinds.fresh", lambda: changed)
        monkeypatch.setattr("test_kinds.copy", SimpleNamespace(deepcopy=lambda thing: thing))
        tokenizer = ()
        if host == TRL:
            from transformers import AutoTokenizer

            tokenizer = (AutoTokenizer.from_pretrained(saved_model("tiny:qwen3")),)
        return MAKERS[host](kind, folders, tmp_path, {"max_steps": 2, **more}, *tokenizer)

    return made


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(before: dict[str, torch.Tensor], model: Any) -> bool:
    after = model.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def refused(trainer: Any, stack: ExitStack, **options: Any) -> None:
    """Training is refused by name; weights, gradients and the packs stand where they stood."""
    base = getattr(trainer.model, "base_model", trainer.model)
    on_the_object(base.model if hasattr(base, "peft_config") else trainer.model, stack)
    before = held(trainer.model)
    with pytest.raises(IsolationError, match=r"is plain_causal in .*leaks\.py:") as caught:
        trainer.train(**options)
    assert "\n" not in str(caught.value) and not hasattr(trainer, "notes")
    assert same(before, trainer.model)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("host", MAKERS)
def test_packs_of_every_kind_are_refused_on_a_leak(host: str, kind: str, make: Callable[..., Any]) -> None:
    trainer = make(host, kind)
    with ExitStack() as stack:
        refused(trainer, stack)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("kind", "change"),
    [*((kind, lambda model: model) for kind in EVERY), ("planned", adapted)],
    ids=[*EVERY, "planned with adapters"],
)
@pytest.mark.parametrize("host", MAKERS)
def test_losses_with_the_proof_and_without_are_the_same_to_the_last_digit(
    host: str, kind: str, change: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = make(host, kind, change)
    proven.train()
    assert proven.proof is not None and proven.proof.ok
    monkeypatch.setattr(start_up, "_proven", lambda *given: None)
    plain = make(host, kind, change)
    plain.train()
    assert plain.proof is None and proven.state.global_step == 2
    assert proven.notes == plain.notes
    assert same(held(proven.model), plain.model)


@pytest.mark.parametrize("host", MAKERS)
def test_adapters_on_a_leaking_model_are_refused(host: str, make: Callable[..., Any]) -> None:
    trainer = make(host, "planned", adapted)
    with ExitStack() as stack:
        refused(trainer, stack)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("kind", ["planned", "stream"])
@pytest.mark.parametrize("host", MAKERS)
def test_a_resumed_run_is_proven_before_it_goes_on(
    host: str, kind: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    saved = make(host, kind, save_strategy="steps", save_steps=1)
    saved.train()
    again = make(host, kind, save_strategy="steps", save_steps=1)
    with ExitStack() as stack:
        base = again.model
        on_the_object(base, stack)
        with pytest.raises(IsolationError, match="forward of Qwen3Attention is plain_causal"):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not hasattr(again, "notes") and again.state.global_step <= 1
    whole = make(host, kind)
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert {step: notes for step, notes in saved.notes.items() if step} == whole.notes


# ----------------------------------------------------------------------------- loops of one's own
def loop(folders: Path, precision: str, *, proven: bool, leaks: bool = False) -> tuple[list[float], Any]:
    """Three steps of plain accelerate over a PackLoader."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    torch.manual_seed(5)
    model = copy.deepcopy(fresh()).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    data = open_kind("planned", folders)
    loader = PackLoader(data, PackSampler(data.packs, seed=1), collate_fn=PaddingFreeCollator(model))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses: list[float] = []
    with ExitStack() as stack:
        if leaks:
            on_the_object(accelerator.unwrap_model(model), stack)
        if proven:
            prove(model, loader)
        for step, batch in enumerate(loader):
            if step == 3:
                break
            with accelerator.autocast():
                loss = model(**{key: value for key, value in batch.items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_prepared_loop_is_refused_on_a_leak_and_untouched_without(folders: Path, precision: str) -> None:
    with pytest.raises(IsolationError, match="plain_causal in"):
        loop(folders, precision, proven=True, leaks=True)
    losses, model = loop(folders, precision, proven=True)
    others, plain = loop(folders, precision, proven=False)
    assert len(losses) == 3 and losses == others
    assert same(held(model), plain)
