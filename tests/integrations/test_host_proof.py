"""Every leak of `leaks.py` in every trainer: refused before the first step with the function and its file.

The ms-swift row is `tests/hosts/test_swift_proof.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import write_folders
from test_kinds import HF, OWN, TRL, hf, own, pytestmark, trl

from packtrain.errors import IsolationError

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

from leaks import LEAKS, on_the_object

__all__ = ["pytestmark"]

MAKERS = {OWN: own, HF: hf, TRL: trl}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planned")
    write_folders(root)
    return root


@pytest.fixture
def made(
    request: pytest.FixtureRequest, planned: Path, tmp_path: Path, saved_model: Callable[[str], Path]
) -> Any:
    """A trainer of the host on packs, before its first step."""
    more = ()
    if request.param == TRL:
        from transformers import AutoTokenizer

        more = (AutoTokenizer.from_pretrained(saved_model("tiny:qwen3")),)
    return MAKERS[request.param]("planned", planned, tmp_path, {"max_steps": 2}, *more)


@pytest.mark.parametrize("made", MAKERS, indirect=True)
@pytest.mark.parametrize(("leak", "where", "what"), LEAKS, ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_a_leak_is_refused_by_name_before_the_first_step(
    leak: Callable[..., None], where: str, what: str, made: Any, request: Any, record_property: Any
) -> None:
    with ExitStack() as stack:
        leak(made.model, stack)
        with pytest.raises(IsolationError) as caught:
            made.train()
    line = str(caught.value)
    assert "packed samples read each other in qwen3" in line and where in line and what in line
    assert "leaks.py:" in line and "\n" not in line
    assert not hasattr(made, "notes") and made.state.global_step == 0
    host, told = request.node.callspec.params["made"], "packed samples read each other"
    record_property("refused", ("attention that reads across samples", told, f"{told} in qwen3", host))


@pytest.mark.parametrize("made", MAKERS, indirect=True)
def test_the_clean_model_trains_after_one_proof(
    made: Any, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    from packtrain.train import start_up

    calls, inner = [], start_up._proven
    monkeypatch.setattr(start_up, "_proven", lambda *given: (calls.append(1), inner(*given))[1])
    made.train()
    # a host has proven it when it took over; accelerate's mark on it is no change, TRL's checkpointing is one
    assert len(calls) == {OWN: 1, HF: 0, TRL: 1}[request.node.callspec.params["made"]]
    assert made.state.global_step == 2 and len(made.notes) == 2


@pytest.mark.parametrize("made", MAKERS, indirect=True)
def test_a_callback_that_patches_when_training_begins_is_refused_too(made: Any) -> None:
    """It was added behind ours: the model is another one than was proven by then."""
    from transformers import TrainerCallback

    stack = ExitStack()

    class Late(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_the_object(kwargs["model"], stack)

    made.add_callback(Late())
    with stack, pytest.raises(IsolationError, match="forward of Qwen3Attention is plain_causal in"):
        made.train()
    assert made.state.global_step == 0


@pytest.mark.parametrize("made", MAKERS, indirect=True)
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda inputs: {"attention_mask": torch.ones_like(inputs["input_ids"])}, "holds an attention_mask"),
        (lambda inputs: {"position_ids": None}, "holds no position_ids"),
        (lambda inputs: {"use_cache": True}, "use_cache is True"),
        (lambda inputs: {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}, "restart after"),
    ],
    ids=["mask", "positions left out", "cache", "positions made anew"],
)
def test_a_pack_that_the_users_own_loss_changes_never_reaches_the_model(
    changed: Any, what: str, made: Any
) -> None:
    """The proof sees the model and the collator; what a method between them does shows in the first pass."""

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = inputs.with_values({**inputs, **changed(inputs)})
        return super(kind, self).compute_loss(model, inputs, *args, **kwargs)

    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    kind = type("Own", (type(made),), {"compute_loss": compute_loss})
    made.__class__ = kind
    if "use_cache" in what and "SFTTrainer" in str(kind.__mro__):
        made.train()  # which switches the cache off itself
        return
    with pytest.raises(IsolationError, match=rf"reaches the model changed \(.*compute_loss in .*: .*{what}"):
        made.train()
    assert made.state.global_step == 0
    assert all(torch.equal(before[name], value) for name, value in made.model.state_dict().items())


@pytest.mark.parametrize("made", MAKERS, indirect=True)
def test_an_evaluation_without_training_is_proven(made: Any) -> None:
    made.eval_dataset = made.packs.data
    with ExitStack() as stack:
        on_the_object(made.model, stack)
        with pytest.raises(IsolationError, match="forward of Qwen3Attention is plain_causal in"):
            made.evaluate()
