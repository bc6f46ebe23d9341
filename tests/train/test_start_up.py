"""The start-up proof on the object that trains: what it refuses, what it accepts, that it leaves no trace."""

from __future__ import annotations

import copy
import functools
import os
import random
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leaks import LEAKS, on_the_object, pooled
from torch import nn
from train_samples import ALL, VISION, samples_for, text_sample

import warm
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, PackLoader, PackSampler
from packtrain.errors import InputError, IsolationError, PacktrainError
from packtrain.planning.build import plan as make_plan
from packtrain.planning.lengths import Lengths
from packtrain.template import ensure_torchvision
from packtrain.testing.tiny import tiny_model
from packtrain.train import live, prove, prove_before_training, prove_isolation, start_up
from packtrain.train.loss import plain_head

ensure_torchvision()

NAME = "tiny:qwen3"


#: Three samples in a row; the gradients of parameters, and those at the tokens of other samples.
CHECKS = ["logits"] * 3 + ["tamper"] * 3 + ["gradients"] * 2


def fresh() -> Any:
    return tiny_model(NAME, seed=1)


def packs() -> list[list[dict[str, Any]]]:
    return [[text_sample(n, i) for i, n in enumerate((7, 5, 12))]]


@pytest.mark.parametrize(("leak", "where", "what"), LEAKS, ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_a_patched_model_is_refused_with_layer_function_and_file(
    leak: Callable[..., None], where: str, what: str
) -> None:
    model = fresh()
    assert prove_before_training(model, packs()) is not None  # clean before, and remembered
    with ExitStack() as stack:
        leak(model, stack)
        for attempt in range(2):  # what leaked is never remembered as proven
            with pytest.raises(IsolationError) as caught:
                prove_before_training(model, packs())
            line = str(caught.value)
            assert "packed samples read each other in qwen3" in line and where in line, attempt
            assert what in line and "leaks.py:" in line and "\n" not in line
            assert "take that function out" in line


def test_what_held_is_proven_again_when_a_function_of_its_file_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fresh()
    first = prove_before_training(model, packs())
    assert prove_before_training(model, packs()) is first  # the same code: nothing runs
    home = sys.modules[type(model).__module__]
    inner = home.apply_rotary_pos_emb
    monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda *given: inner(*given))
    again = prove_before_training(model, packs())
    assert again is not first and again is not None and again.ok


def test_a_layer_of_the_user_that_mixes_tokens_is_named() -> None:
    class Normed(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.norm = inner, torch.nn.BatchNorm1d(64)

        def forward(self, hidden: Any) -> Any:
            return self.norm(self.inner(hidden)[0])[None]

    model = fresh()
    model.model.layers[1].mlp = Normed(model.model.layers[1].mlp)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IsolationError, match=r"first in model\.layers\.1\.mlp\.norm: .*evaluation mode"):
        prove(model, packs())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    def train(self: Any, mode: bool = True) -> Any:
        torch.nn.Module.train(self, mode)
        self.model.layers[1].mlp.norm.eval()
        return self

    model.train = types.MethodType(train, model)
    assert prove(model, packs()).ok
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# ------------------------------------------------------------------------------------- what is clean
@pytest.mark.parametrize("name", ALL)
def test_clean_models_are_proven_with_their_media(name: str, tiny: dict[str, Any]) -> None:
    report = prove(tiny[name], [samples_for(name, tiny[name])])
    checks = [row.check for row in report.rows]
    assert checks == CHECKS
    assert report.ok and report.fused and report.mode == "training" and report.control.startswith("caught")
    assert max(row.worst for row in report.rows) < 1e-5
    assert [row.worst for row in report.rows if row.check == "tamper"] == [0.0] * 3


@pytest.mark.parametrize("padded", [{"pad_to_length": 512}, {"pad_multiple": 64}])
def test_what_pads_a_row_takes_no_part_in_what_the_head_is_asked(
    padded: dict[str, int], tiny: dict[str, Any]
) -> None:
    """A plain head stays plain: its loss goes without the logits of the row, padded or not."""
    model = tiny["tiny:qwen2_5_vl"]
    collate = PaddingFreeCollator(model, **padded)
    report = prove_before_training(model, [samples_for("tiny:qwen2_5_vl", model)], collate=collate)
    assert report is not None and report.ok and report.fused


def test_a_forward_that_wants_several_values_of_its_loss_is_proven_and_keeps_its_logits() -> None:
    """As models of VeOmni do: the head alone gives them no loss."""
    model = fresh()
    own = type(model)

    class Several(own):  # type: ignore[valid-type, misc]
        def forward(self, labels: Any = None, **kwargs: Any) -> Any:
            made = super().forward(**kwargs)
            if labels is not None:
                made.loss, _ = self.loss_function(made.logits, labels, self.vocab_size)
            return made

    model.__class__ = Several
    report = prove(model, packs())
    assert report.ok and not report.fused


@pytest.mark.parametrize("low", [-torch.inf, -1e30])
def test_a_head_that_rules_tokens_out_is_proven_and_its_leaks_are_found(low: float) -> None:
    """A padded vocabulary: logits that no token moves are no size, and equal infinities do not differ."""
    model = fresh()
    bias = torch.zeros(model.lm_head.out_features)
    used = torch.cat([sample["input_ids"] for sample in packs()[0]]).tolist()
    bias[[token for token in range(len(bias)) if token not in used][-24:]] = low
    model.lm_head.bias = torch.nn.Parameter(bias)
    report = prove(model, packs())
    assert report.ok and report.fused and [row.check for row in report.rows] == CHECKS
    assert max(row.limit for row in report.rows if row.check == "logits") < 1e-3
    assert prove_isolation(model, packs()[0], ("sdpa",)).ok
    with ExitStack() as stack:
        on_the_object(model, stack)
        with pytest.raises(IsolationError, match=r"layers\.0\.self_attn"):
            prove(model, packs())
        failed = prove_isolation(model, packs()[0], ("sdpa",))
        assert not failed.ok and str(failed.leaking_layer).endswith("layers.0")


def _scaled(made: Any, loss: bool) -> None:
    made.logits = made.logits * 1.001


def _another_loss(made: Any, loss: bool) -> None:
    made.loss = made.loss * 1.001 if loss else None


def _with_a_routers(made: Any, loss: bool) -> None:
    made.loss = made.loss + 0.5 if loss else None


@pytest.mark.parametrize(
    ("change", "fused"), [(_scaled, False), (_another_loss, False), (_with_a_routers, True)]
)
@pytest.mark.parametrize("trained", [0, 1, 4])
def test_a_head_is_plain_by_its_bits_however_few_tokens_are_trained(
    change: Any, fused: bool, trained: int
) -> None:
    model = fresh()
    own = type(model)

    class Changed(own):  # type: ignore[valid-type, misc]
        def forward(self, labels: Any = None, **kwargs: Any) -> Any:
            made = super().forward(labels=labels, **kwargs)
            change(made, labels is not None and self.loss_function is not None)
            return made

    model.__class__ = Changed
    assert plain_head(model) is model.lm_head  # by its names
    rows = packs()
    for sample in rows[0]:
        sample["labels"] = torch.full_like(torch.as_tensor(sample["labels"]), -100)
        sample["labels"][1 : 1 + trained] = 5
    report = prove(model, rows)
    assert report.ok and report.fused is fused


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    made = LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        return get_peft_model(model, made)


def checkpointed(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name from transformers 6 on is another
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def overridden(model: Any) -> Any:
    """As ms-swift does: what is asked for says otherwise than what runs."""
    from torch.utils.checkpoint import checkpoint

    for module in checkpointed(model).modules():
        if vars(module).get("gradient_checkpointing") is True:
            module._gradient_checkpointing_func = functools.partial(
                _reentrant(checkpoint), use_reentrant=False
            )
    return model


def _reentrant(checkpoint: Any) -> Any:
    return lambda *args, use_reentrant: checkpoint(*args, use_reentrant=True)


def dropping(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def noisy(model: Any) -> Any:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) + (torch.randn_like(hidden) if mlp.training else 0)
    return model


def experts(model: Any) -> Any:
    """A small mixture: the kernels of its experts see how many tokens of the row they get."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512}
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**size, **heads, num_experts=8, num_experts_per_tok=2, use_cache=False)
    )


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    "made",
    [
        adapted,
        checkpointed,
        overridden,
        dropping,
        noisy,
        experts,
        frozen,
        torch.nn.Module.bfloat16,
        torch.nn.Module.half,
    ],
    ids=lambda made: made.__name__,
)
def test_what_trains_in_other_ways_is_proven_as_it_is(made: Callable[[Any], Any]) -> None:
    model = made(fresh())
    model.train()
    report = prove(model, packs())
    assert report.ok and report.mode == ("evaluation" if made is noisy else "training")
    assert all(module.training for module in model.modules())
    layer = getattr(model, "base_model", model)
    assert all(p.grad is None for p in layer.parameters())
    if made is dropping:
        assert {one.self_attn.attention_dropout for one in model.model.layers} == {0.5}
    if made in (checkpointed, overridden):
        assert model.model.gradient_checkpointing or model.model.layers[0].gradient_checkpointing


class WholeRow(torch.nn.Module):
    """A layer that rounds by the largest value of the row, as quantised activations may."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Any) -> Any:
        step = hidden.detach().abs().max() / 8192
        rounded = (hidden / step).round() * step
        return self.inner(hidden + (rounded - hidden).detach())


def test_rounding_is_excused_in_quantised_layers_of_libraries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounding() -> Any:
        model = fresh()
        model.model.layers[1].mlp = WholeRow(model.model.layers[1].mlp)
        return model

    model = rounding()
    with pytest.raises(IsolationError, match=r"first in model\.layers\.1\.mlp.*tamper on sdpa.*limit 0\)"):
        prove(model, packs())
    model.is_quantized = True
    with pytest.raises(IsolationError, match=r"first in model\.layers\.1\.mlp.*limit 0\)"):
        prove(model, packs())  # a class of the user's is never excused
    monkeypatch.setattr("packtrain.train.culprit._is_of_somebody", lambda *kinds: False)
    report = prove(model, packs())
    assert any(0 < row.worst <= row.limit for row in report.rows if row.check == "tamper")
    for leak, what in ((pooled, "with_mean"), (on_the_object, "plain_causal")):
        model = rounding()
        model.is_quantized = True
        leak(model, ExitStack())
        with pytest.raises(IsolationError, match=what):
            prove(model, packs())


class Mixing(torch.nn.Module):
    """A layer of the user's: every token gets some of the mean over the row, which no gradient shows."""

    def __init__(self, inner: Any, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: Any) -> Any:
        return self.inner(hidden) + self.share * hidden.mean(1, keepdim=True).detach()


@pytest.mark.parametrize(("kind", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)], ids=str)
def test_a_layer_of_the_user_among_experts_is_never_taken_for_rounding(kind: Any, share: float) -> None:
    model = experts(None).to(kind)
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp, share)
    with pytest.raises(IsolationError, match="packed samples read each other in qwen3_moe"):
        prove(model, packs())


def test_a_leak_among_experts_is_named_though_they_round() -> None:
    model = experts(None)
    pooled(model, ExitStack())
    with pytest.raises(IsolationError, match=r"first in model\.layers\.1\.mlp: .* is pooled\."):
        prove(model, packs())


def test_a_compiled_model_is_proven_through_its_graph_and_a_leak_found_in_it() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    model = fresh()
    report = prove(torch.compile(model, backend=backend), packs())
    assert report.ok and calls
    torch._dynamo.reset()
    leaking = fresh()
    on_the_object(leaking, ExitStack())
    with pytest.raises(
        IsolationError,
        match=r"first in model\.layers\.0\.self_attn: forward of Qwen3Attention is plain_causal",
    ):
        prove(torch.compile(leaking, backend=backend), packs())
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------- no trace
@pytest.fixture
def random_states() -> Iterator[Callable[[], tuple[Any, ...]]]:
    yield lambda: (
        random.getstate(),
        [np.asarray(part).tolist() for part in np.random.get_state()],  # noqa: NPY002
        torch.get_rng_state().tolist(),
    )


def test_nothing_of_the_model_and_no_random_state_moves(random_states: Any) -> None:
    class Counting(torch.nn.Module):
        """A cache of a forward pass, a counter as a buffer, and buffers made anew."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.seen = inner, 0
            self.losses, self.lengths, self.steps = [1.0], {1: 1}, torch.zeros(())
            self.draws, self.dice = torch.Generator().manual_seed(3), random.Random(4)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("table", torch.ones(2), persistent=False)

        def forward(self, hidden: Any) -> Any:
            self.seen += 1
            self.last = hidden
            self.count += 1
            self.steps += 1
            self.losses.append(hidden.mean())
            self.lengths[hidden.shape[1]] = 2
            torch.rand(1, generator=self.draws), self.dice.random()
            self.table = torch.full((2,), float(self.seen))
            return self.inner(hidden)

    model = fresh()
    counting = Counting(model.model.layers[0].mlp)
    model.model.layers[0].mlp = counting
    model.model.layers[1].eval()
    model.model.norm.weight.grad = torch.ones(64)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    states = random_states()
    drawn, rolled = counting.draws.get_state(), counting.dice.getstate()

    def read() -> list[Any]:
        random.random(), torch.rand(1), np.random.rand()  # noqa: NPY002  # a transform of the samples
        return packs()

    assert prove_before_training(model, read) is not None
    assert random_states() == states
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert (counting.losses, counting.lengths, float(counting.steps)) == ([1.0], {1: 1}, 0.0)
    assert torch.equal(drawn, counting.draws.get_state()) and rolled == counting.dice.getstate()
    assert counting.seen == 0 and not hasattr(counting, "last") and counting.table.tolist() == [1.0, 1.0]
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert torch.equal(model.model.norm.weight.grad, torch.ones(64))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["model.norm.weight"]


def test_training_with_and_without_the_proof_gives_the_same_losses(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from packtrain.hosts.transformers import pack

    def losses(place: Path, proof: bool) -> list[float]:
        torch.manual_seed(7)
        model = dropping(fresh())
        rows = [text_sample(n, i) for i, n in enumerate((7, 5, 12, 3, 9, 6))]
        args = TrainingArguments(
            str(place), max_steps=4, per_device_train_batch_size=1, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=rows, data_collator=lambda batch: {
            k: v[None] for k, v in batch[0].items() if k in ("input_ids", "labels")
        })  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if not proof:
                for home in ("packtrain.train.mixin", "packtrain.train.mixin"):
                    patch.setattr(f"{home}.prove_before_training", lambda *args, **kwargs: None)
            pack(trainer, 16)
            trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    with_proof = losses(tmp_path / "a", True)
    assert len(with_proof) == 4 and with_proof == losses(tmp_path / "b", False)


# --------------------------------------------------------------------------------- own training loops
def test_a_loader_is_proven_without_moving_it() -> None:
    samples = [text_sample(n, i) for i, n in enumerate((7, 5, 12, 3, 9, 6))]
    plan = make_plan(Lengths(np.array([7, 5, 12, 3, 9, 6])), pack_length=16)
    aligned = plan.align(1)
    model = fresh()
    sampler = PackSampler(aligned, rank=0)
    loader = PackLoader(PackedDataset(aligned, samples), sampler, collate_fn=PaddingFreeCollator(model))
    state = loader.state_dict()
    assert prove(model, loader).ok and loader.state_dict() == state
    assert prove(model, PackLoader(PackedDataset(aligned, samples), PackSampler(aligned, rank=0))).ok
    with pytest.raises(InputError, match="no pack to prove"):
        prove(model, [])
    with pytest.raises(InputError, match="cannot be looked into"):
        prove(model, iter(packs()))


def test_a_model_of_no_library_is_proven_too() -> None:
    class Small(torch.nn.Module):
        def __init__(self, mixes: bool) -> None:
            super().__init__()
            self.table, self.head, self.mixes = torch.nn.Embedding(512, 8), torch.nn.Linear(8, 512), mixes

        def forward(self, input_ids: Any, **boundaries: Any) -> Any:
            rows = self.table(input_ids)
            rows = rows + rows.cumsum(1) if self.mixes else rows
            return self.head(rows)

    assert prove(Small(False), packs()).ok
    with pytest.raises(IsolationError, match="read each other in Small"):
        prove(Small(True), packs())


def test_one_sample_long_samples_and_empty_ranks() -> None:
    model = fresh()
    assert prove(model, [[text_sample(9, 1)]]).ok
    assert prove(model, [[text_sample(4000, 1), text_sample(5000, 2)]]).ok
    assert prove_before_training(model, []) is None
    assert prove_before_training(model, packs(), proof=False) is None
    with pytest.raises(IsolationError, match="nobody has shown that qwen3 isolates packed samples on sdpa"):
        prove_before_training(model, packs(), proof=False, known=False)


def test_a_sharded_model_that_does_not_use_its_embeddings_is_not_called_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradients are watched at the embeddings of the row: without them nothing is compared."""
    model = tiny_model("tiny:qwen3", seed=1)
    assert prove(model, packs()).ok
    own = nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach().clone(), freeze=False)
    inner = model.model.forward

    def forward(input_ids: Any = None, **kwargs: Any) -> Any:
        return inner(**{**kwargs, "inputs_embeds": own(input_ids)})

    model.model.forward = forward
    monkeypatch.setattr(live, "is_sharded", lambda _: True)
    monkeypatch.setattr(start_up, "is_sharded", lambda _: True)
    with pytest.raises(PacktrainError, match="does not use its input embeddings"):
        prove_before_training(model, packs())


# --------------------------------------------------------------------------------------- several ranks
@pytest.mark.parametrize(("how", "what"), [("ddp", "nothing"), ("fully_shard", "leak")])
def test_ranks_prove_together_through_their_wrapper(how: str, what: str) -> None:
    here = Path(__file__).parent
    words = ["torchrun", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d"]
    words += ["--rdzv_endpoint=localhost:0", str(here / "proof_ranks_script.py"), how, what]
    paths = os.pathsep.join([str(here), *sys.path])
    done = subprocess.run(
        [warm.python(), "-m", "torch.distributed.run", *words[1:]],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("rank "))
    assert set(told) == {"rank 0", "rank 1"}
    if what == "leak":
        assert "on another rank" in told["rank 0"]
        assert "plain_causal in" in told["rank 1"] and "layers.0.self_attn" in told["rank 1"]
    else:
        assert told["rank 0"] == told["rank 1"] == f"True {CHECKS}"


def _hidden(change: Any) -> Any:
    """Puts a function over the first layer's output [1, T, H], with where the samples of the row begin."""

    def leak(model: Any) -> None:
        layer = model.model.layers[0]
        inner = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = inner(*args, **kwargs)
            hidden = made[0] if isinstance(made, tuple) else made
            places = kwargs["position_ids"].reshape(-1, hidden.shape[1])[0]
            hidden = change(hidden, (places == 0).nonzero().flatten().tolist())
            return (hidden, *made[1:]) if isinstance(made, tuple) else hidden

        layer.forward = forward

    return leak


def _from(number: int) -> Any:
    """Samples from this one on see the mean of those before."""

    def change(hidden: Any, begins: list[int]) -> Any:
        if len(begins) < number:
            return hidden
        start = begins[number - 1]
        return torch.cat([hidden[:, :start], hidden[:, start:] + hidden[:, :start].mean(1, keepdim=True)], 1)

    return change


def _in_long_rows(hidden: Any, begins: list[int]) -> Any:
    return hidden + hidden.mean(1, keepdim=True) if hidden.shape[1] > 48 else hidden


class _Back(torch.autograd.Function):
    """The same forward; backward each token gets a little of the mean over the row."""

    @staticmethod
    def forward(context: Any, hidden: Any) -> Any:
        return hidden.clone()

    @staticmethod
    def backward(context: Any, given: Any) -> Any:
        return given + 0.005 * given.mean(1, keepdim=True)


class _BackFromTheThird(torch.autograd.Function):
    """The same forward; backward the tokens before the third sample get some of what comes behind."""

    @staticmethod
    def forward(context: Any, hidden: Any, start: int) -> Any:
        context.start = start
        return hidden.clone()

    @staticmethod
    def backward(context: Any, given: Any) -> Any:
        made = given.clone()
        made[:, : context.start] += 0.01 * given[:, context.start :].mean(1, keepdim=True)
        return made, None


def _back_from_the_third(hidden: Any, begins: list[int]) -> Any:
    return _BackFromTheThird.apply(hidden, begins[2]) if len(begins) > 2 else hidden


def _closed_gate(model: Any) -> None:
    """A gate that is zero when training begins: only its own gradient tells what it will let through."""
    mlp = model.model.layers[1].mlp
    forward, mlp.gate = mlp.forward, torch.nn.Parameter(torch.zeros(()))
    mlp.forward = lambda hidden: forward(hidden) + mlp.gate * hidden.mean(1, keepdim=True)


def _noisy_in_training(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def noisy_mean(hidden: Any) -> Any:
        if not mlp.training:
            return forward(hidden)
        return forward(hidden) + 1e-3 * torch.randn_like(hidden) + 1e-2 * hidden.mean(1, keepdim=True)

    mlp.forward = noisy_mean


def _last_token(model: Any) -> None:
    """The first token of a sample sees a bit of the last one before it, as it is embedded."""

    def hook(module: Any, args: Any, made: Any) -> Any:
        row = made.clone()
        if row.shape[1] > 12:
            row[:, 1:] += 1e-4 * made[:, :-1]
        return row

    model.model.embed_tokens.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("leak", "check"),
    [
        (_hidden(_from(3)), "forward of Qwen3DecoderLayer is _hidden"),
        (_hidden(_from(8)), "forward of Qwen3DecoderLayer is _hidden"),
        (_hidden(_in_long_rows), "forward of Qwen3DecoderLayer is _hidden"),
        (_hidden(lambda hidden, begins: _Back.apply(hidden)), "the gradient of other samples at sample "),
        (_hidden(_back_from_the_third), "the gradient of other samples at sample "),
        (_closed_gate, "the gradient of model.layers.1.mlp.gate"),
        (_noisy_in_training, "_noisy_in_training.<locals>.noisy_mean"),
        (_last_token, "_last_token"),
    ],
    ids=[
        "third sample",
        "eighth sample",
        "long rows",
        "backward alone",
        "backward from the third",
        "closed gate",
        "noisy and in training alone",
        "last token embedded",
    ],
)
def test_small_and_late_leaks_are_refused(leak: Any, check: str) -> None:
    model = fresh()
    assert prove(model, packs()).ok
    leak(model)
    with pytest.raises(IsolationError, match=check):
        prove(model, packs())


# ------------------------------------------------------------------------------------------- towers
def _over_all_images(model: Any) -> None:
    """Patches of all images of a row attend to each other."""
    for module in model.model.visual.modules():
        if type(module).__name__.endswith("VisionAttention"):

            def over_all(hidden_states: Any, cu_seqlens: Any, *args: Any, inner: Any, **more: Any) -> Any:
                whole = torch.tensor([0, len(hidden_states)], dtype=torch.int32)
                return inner(hidden_states, whole, *args, **more)

            module.forward = functools.partial(over_all, inner=module.forward)


def _pooled_images(model: Any) -> None:
    merger = model.model.visual.merger
    inner = merger.forward

    def with_mean(*args: Any, **more: Any) -> Any:
        made = inner(*args, **more)
        return made + 1e-2 * made.mean(0)

    merger.forward = with_mean


@pytest.mark.parametrize("count", [4, 2], ids=["two with images", "one with an image"])
@pytest.mark.parametrize("leak", [_over_all_images, _pooled_images], ids=lambda leak: leak.__name__)
@pytest.mark.parametrize("name", VISION)
def test_a_tower_that_mixes_images_is_refused_whatever_the_text_does(
    name: str, leak: Callable[[Any], None], count: int
) -> None:
    model = tiny_model(name, seed=1)
    leak(model)
    with pytest.raises(IsolationError, match=f"packed samples read each other in {name.partition(':')[2]}"):
        prove(model, [samples_for(name, model)[:count]])


# ---------------------------------------------------------------------------------- what is remembered
def test_what_held_is_forgotten_with_its_functions_settings_and_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import masking_utils

    model = fresh()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def held() -> Any:
        return prove_before_training(model, packs())

    first = held()
    mlp.share = 0.5  # a setting of a layer
    second = held()
    assert second is not first and held() is second
    for _ in range(8):  # an address is often given to the next function made
        before = held()
        mlp.forward = lambda hidden: forward(hidden)
        assert held() is not before
        del mlp.forward
    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, "sdpa", lambda *args, **kwargs: None)
    with pytest.raises(IsolationError, match=r"the mask function is .*<lambda> in"):
        held()


@pytest.mark.parametrize(
    ("base", "first", "others", "clean"),
    [
        (2e-2, 0.0, 0.026, True),  # a clean 0.5 B in bf16 on a card: other kernels for other lengths
        (2e-2, 0.019, 0.026, True),
        (2e-2, 0.03, 0.03, True),
        (2e-2, 0.0, 0.2, False),  # positions that run on
        (2e-2, 0.03, 0.2, False),
        (1e-4, 0.0, 2e-4, False),
        (1e-4, 1e-5, 9e-5, True),
    ],
)
def test_what_rounding_may_make(base: float, first: float, others: float, clean: bool) -> None:
    """The first sample of a causal row reads no other; where it shows no rounding, 16 bit still may."""
    limit = start_up.relative_limit(base, first)
    assert (max(first, others) <= limit) is clean
