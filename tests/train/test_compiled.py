"""Compiled layers train what plain ones train, at every length, and are proven like them.

dynamo traces the layers for real; its graphs run without a C++ compiler (`backend="eager"`).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leaks import on_the_object
from train_samples import ALL, samples_for, text_sample

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.errors import ConfigError, IsolationError
from packtrain.sources.encoded import EncodedTemplate
from packtrain.testing.tiny import tiny_model
from packtrain.train import compile_layers, varlen
from packtrain.train.arguments import compile_options
from packtrain.train.config import load_config
from packtrain.train.loss import token_loss_sum
from packtrain.train.sft import train
from packtrain.train.varlen import use_varlen

#: dynamo asks tensors for it and hides the warning from logs, not from here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

#: Rows of other lengths and other numbers of samples.
ROWS = [(5, 7), (20,), (9, 3, 8), (11,), (4, 4), (11, 2), (6, 13, 5), (19,), (3, 17)]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "_outside", None)
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def losses_of(model: Any, packs: list[list[dict[str, Any]]]) -> tuple[list[float], torch.Tensor, list[int]]:
    """Loss of each pack, the gradient of all parameters, and the graphs there were after each pack."""
    collate, made, counts = PaddingFreeCollator(model), [], []
    model.zero_grad()
    for pack in packs:
        loss = token_loss_sum(model, collate([pack]))
        loss.backward()
        made.append(loss.item())
        counts.append(graphs())
    return made, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), counts


@pytest.mark.parametrize("attn", ["sdpa", "varlen"])
def test_every_length_has_the_losses_of_plain_layers_and_few_graphs(attn: str) -> None:
    model = tiny_model("tiny:qwen3").train()
    if attn == "varlen":
        use_varlen(model)
    packs = [[text_sample(n, 10 * k + i) for i, n in enumerate(row)] for k, row in enumerate(ROWS)]
    plain, gradient, _ = losses_of(model, packs)
    names, before = list(model.state_dict()), graphs()
    assert compile_layers(model, backend="eager") == 2
    assert list(model.state_dict()) == names
    found, moved, counts = losses_of(model, packs)
    assert found == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-5)
    assert counts[0] > before  # something was compiled
    assert counts[-1] == counts[3]  # and nothing after the lengths are known to move


@pytest.mark.parametrize("attn", ["sdpa", "varlen"])
def test_a_model_that_its_owner_compiled_as_a_whole(attn: str) -> None:
    model = tiny_model("tiny:qwen3").train()
    del model.model.layers[1:]  # a graph ends at every attention: one is as good as two
    if attn == "varlen":
        use_varlen(model)
    packs = [[text_sample(n, 10 * k + i) for i, n in enumerate(row)] for k, row in enumerate(ROWS[:2])]
    plain = losses_of(model, packs)[0]
    collate, found = PaddingFreeCollator(model), []
    whole = torch.compile(model, backend="eager")
    for pack in packs:
        batch = collate([pack])
        logits = whole(**{k: v for k, v in batch.items() if k != "labels"}).logits[0]
        targets = torch.nn.functional.pad(batch["labels"][0, 1:], (0, 1), value=-100)
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item())
    assert found == pytest.approx(plain, rel=1e-5)


def stood_in(query: Any, key: Any, value: Any, cu: Any, longest: int, **how: Any) -> torch.Tensor:
    """What the kernel of a GPU computes, of operations that a CPU has."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    places = torch.arange(query.shape[0])
    number = torch.bucketize(places, cu.to(torch.int64), right=True)
    sees = (number[:, None] == number[None]) & (places[:, None] >= places[None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * how["scale"]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


def test_attention_inside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a layer is one graph, by the boundaries that are handed down; never by others."""
    model = use_varlen(tiny_model("tiny:qwen3").train())
    packs = [[text_sample(n, 10 * k + i) for i, n in enumerate(row)] for k, row in enumerate(ROWS)]
    plain, gradient, _ = losses_of(model, packs)
    monkeypatch.setattr(varlen, "kernel_takes", lambda query, value: True)
    monkeypatch.setattr(varlen, "kernel", stood_in)
    before = graphs()
    compile_layers(model, backend="eager")
    found, moved, counts = losses_of(model, packs)
    assert found == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-5)
    assert counts[-1] == counts[3] <= before + 3 and counts[-1] > before
    row = {"input_ids": torch.arange(1, 13)[None], "position_ids": torch.arange(12)[None], "use_cache": False}
    short = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(IsolationError, match="the boundaries cover 5 tokens, the row has 12"):
        model(**row, pack_cu=short, pack_max=5)
    two = {name: value.repeat(2, 1) if name == "input_ids" else value for name, value in row.items()}
    torch.testing.assert_close(model(**two).logits[1], model(**row).logits[0])


@pytest.mark.parametrize("name", ALL)
def test_every_family_trains_the_same(name: str) -> None:
    model = tiny_model(name).train()
    packs = [samples_for(name, model)]
    plain, gradient, _ = losses_of(model, packs)
    assert compile_layers(model, backend="eager") > 0
    found, moved, _ = losses_of(model, packs)
    assert found == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(moved, gradient, rtol=1e-4, atol=1e-5)


def run(folder: Path, model: Any, **more: Any) -> Any:
    samples = [
        {key: value.numpy() for key, value in text_sample(n, k).items() if torch.is_tensor(value)}
        for k, n in enumerate([5, 7, 9, 3, 8, 11, 2, 6, 13, 5])
    ]
    planned = pt.plan([len(s["input_ids"]) for s in samples], 24)
    config = load_config(
        {"training": {"output_dir": str(folder), "max_steps": 4, "logging_steps": 1, **more}}
    )
    return train(config, planned, samples, EncodedTemplate(), model=model)


def test_a_run_compiles_proves_and_trains_the_same(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", tiny_model("tiny:qwen3"))
    before = graphs()
    made = run(tmp_path / "b", tiny_model("tiny:qwen3"), compile=True, torch_compile_backend="eager")
    assert graphs() > before
    assert made.proof is not None and made.proof.ok
    assert [s for s, _ in made.losses] == [s for s, _ in plain.losses]
    np.testing.assert_allclose([x for _, x in made.losses], [x for _, x in plain.losses], rtol=1e-5)
    saved = [set(r.model.state_dict()) for r in (plain, made)]
    assert saved[0] == saved[1]


def test_a_leak_inside_compiled_layers_is_refused(tmp_path: Path) -> None:
    model = tiny_model("tiny:qwen3")
    on_the_object(model, ExitStack())
    with pytest.raises(IsolationError, match="samples"):
        run(tmp_path, model, compile=True, torch_compile_backend="eager")


def test_keys_of_transformers_ask_for_it() -> None:
    def asked(**training: Any) -> Any:
        return compile_options(load_config({"training": {"output_dir": "out", **training}}))

    assert asked() is None and asked(torch_compile=False) is None
    assert asked(compile=True) == {} == asked(torch_compile=True)
    assert asked(torch_compile_mode="max-autotune") == {"mode": "max-autotune"}
    assert asked(compile=True, torch_compile_backend="eager") == {"backend": "eager"}
    with pytest.raises(ConfigError, match="compile"):
        asked(compile=True, torch_compile=False)


def test_a_model_without_repeated_layers_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("tiny:qwen3")
    model._no_split_modules = None
    assert compile_layers(model) == 0
    assert "training.compile has no effect" in caplog.text


@pytest.mark.parametrize(
    ("mode", "used"), [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")]
)
def test_modes_that_record_graphs_are_told_and_compile_without_them(
    mode: str, used: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append(options["mode"]))
    compile_layers(tiny_model("tiny:qwen3"), mode=mode)
    assert set(seen) == {used} and f"it is '{used}'" in caplog.text
