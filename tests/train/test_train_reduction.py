"""Reductions: the gradient of a step is the formula's, however its samples were packed, split or spread."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reduction_script
import torch
from torch.nn import functional
from train_samples import image_sample, text_sample

import warm
from packtrain.collate import PaddingFreeCollator, filler_pack
from packtrain.data import PackedDataset
from packtrain.errors import ConfigError, InputError
from packtrain.pipeline.which import losses_of
from packtrain.planning.build import plan
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.loss import packed_loss, shift_labels, token_loss_sum, token_losses
from packtrain.train.reduction import Reduction, loss_normaliser, reduction_of, source_names
from packtrain.train.trace import LossTrace, sample_sums

#: Supervised tokens of the samples: K7's counts, and one without any.
COUNTS = (90, 9, 1, 0)
SOURCES = ("a", "b", "a", "b")
WEIGHTS = {"a": 2.0, "b": 0.5}

REDUCTIONS = {
    "token": Reduction(),
    "sample": Reduction("sample"),
    "sqrt": Reduction("sqrt"),
    "token by source": Reduction("token", WEIGHTS, lambda i: SOURCES[i]),
    "sqrt by source": Reduction("sqrt", WEIGHTS, lambda i: SOURCES[i]),
}

#: Rows of a step: every one is a partition of the four samples, in any order.
PACKINGS: list[list[list[int]]] = [
    [[0, 1, 2, 3]],
    [[3, 2, 1, 0]],
    [[0], [1], [2, 3]],
    [[3], [2, 0], [1]],
    [[2], [1, 3], [0]],
    [[3], [], [0, 1, 2]],
]


def samples(scaled: bool = False) -> list[dict[str, Any]]:
    made = [text_sample(n + 3 if n else 92, i, supervised=n) for i, n in enumerate(COUNTS)]
    if scaled:
        for sample in made:
            sample["loss_scale"] = torch.linspace(0.25, 2, len(sample["input_ids"]))
    return made


def weight_of(kind: str, count: int, source: str) -> float:
    """The formula, by hand."""
    name, *by_source = kind.split(" by ")
    own = {"token": 1.0, "sample": 1 / count, "sqrt": 1 / math.sqrt(count)}[name] if count else 0.0
    return own * (WEIGHTS[source] if by_source else 1.0)


def by_formula(model: Any, members: list[dict[str, Any]], kind: str) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients, one sample at a time, from the model's own logits."""
    model.zero_grad()
    collate = PaddingFreeCollator(model)
    top, bottom = torch.zeros((), dtype=torch.float64), 0.0
    for sample, count, source in zip(members, COUNTS, SOURCES, strict=True):
        row = collate([[sample]])
        labels, scale = row.pop("labels"), row.pop("loss_scale", torch.ones(1, len(sample["input_ids"])))
        losses = functional.cross_entropy(
            model(**row).logits[0], shift_labels(labels)[0], ignore_index=-100, reduction="none"
        )
        weight = weight_of(kind, count, source)
        top = top + weight * (losses[:-1] * scale[0, 1:].double()).sum()
        bottom += weight * count
    loss = top / bottom
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("tiny:qwen3", seed=3).double()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_any_packing_accumulation_and_ranks_give_the_formulas_gradient(
    model: Any, kind: str, scaled: bool
) -> None:
    """1 rank x GA 1, 1 rank x GA 3, 3 ranks x GA 1, plain and chunked; a rank may have nothing to train."""
    members = samples(scaled)
    wanted_loss, wanted = by_formula(model, members, kind)
    collate, reduction = PaddingFreeCollator(model), REDUCTIONS[kind]
    for rows, ranks, fused in itertools.product(PACKINGS, (1, 3), (True, False)):
        batches = [collate([[members[i] for i in row] or filler_pack()]) for row in rows]
        total = loss_normaliser(batches, reduction)
        model.zero_grad()
        found = 0.0
        for batch in batches:  # each its own micro step, or its own rank whose gradients are averaged
            weighed, _ = reduction.scaled(batch)
            kept = token_loss_sum(model, weighed, fused=fused, chunk=7)
            loss = kept * ranks / total / ranks
            loss.backward()
            found += float(loss.detach())
        assert found == pytest.approx(wanted_loss, abs=1e-10)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_the_trainers_own_loss_is_the_formulas(tmp_path: Path, model: Any, kind: str) -> None:
    """PackTrainer on 1 rank x GA 3 and 3 ranks x GA 1, through its own batches and normaliser."""
    members = samples()
    _, wanted = by_formula(model, members, kind)
    made = plan([len(s["input_ids"]) for s in members], pack_length=95)
    assert len(made) == 3 and [3] in [pack.tolist() for pack in made]
    for ranks, accumulation in ((1, 3), (3, 1)):
        view = made.align(ranks)
        totals, rows, trainers = [], [], []
        for rank in range(ranks):
            trainer = trainer_on(tmp_path, model, members, view, rank, accumulation)
            trainer.reduction = REDUCTIONS[kind]
            model.train()
            batches, total = trainer.get_batch_samples(
                iter(trainer.get_train_dataloader()), accumulation, torch.device("cpu")
            )
            totals.append(total)
            rows.append(batches)
            trainers.append(trainer)
        model.zero_grad()
        for trainer, batches in zip(trainers, rows, strict=True):
            for batch in batches:
                trainer.compute_loss(model, batch, num_items_in_batch=sum(totals)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def trainer_on(folder: Path, model: Any, items: Any, view: Any, rank: int, accumulation: int = 1) -> Any:
    """A PackTrainer of one of several ranks; it sees only what this rank does."""
    from transformers import TrainingArguments

    from packtrain.train.trainer import PackTrainer

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    return PackTrainer(model, arguments, PackedDataset(view, items, repeat_loss="zero"), rank=rank)


def test_known_figures_of_token_and_sample_means() -> None:
    """(90, 9, 1) with means (1, 2, 10): 1.18 by token, 13/3 by sample; 2 x 4 and 8 x 1: 1.6 and 2.5."""
    for counts, means, by_token, by_sample in (
        ((90, 9, 1), (1.0, 2.0, 10.0), 1.18, 13 / 3),
        ((2, 8), (4.0, 1.0), 1.6, 2.5),
    ):
        head = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
        torch.nn.init.eye_(head.weight)
        hidden, members = [], []
        for number, (count, mean) in enumerate(zip(counts, means, strict=True)):
            odds = torch.tensor(-mean, dtype=torch.float64).exp()
            hidden.append(torch.stack([odds, *[(1 - odds) / 3] * 3]).log().expand(count + 1, 4))
            members.append({"input_ids": [0] * (count + 1), "labels": [0] * (count + 1), "sample_id": number})
        for order in itertools.permutations(range(len(counts))):
            batch = PaddingFreeCollator()([[members[i] for i in order]])
            row = torch.cat([hidden[i] for i in order])[None]
            assert float(packed_loss(row, batch, "token", head=head).detach()) == pytest.approx(by_token)
            assert float(packed_loss(row, batch, "sample", head=head).detach()) == pytest.approx(by_sample)
            assert float(packed_loss(row, batch, "sample")) == pytest.approx(by_sample)
            apart = [PaddingFreeCollator()([[members[i]]]) for i in order]
            total = loss_normaliser(apart, "sample")
            shares = [
                packed_loss(hidden[i][None], one, "sample", total, head=head, ranks=2)
                for i, one in zip(order, apart, strict=True)
            ]
            assert sum(float(share.detach()) for share in shares) / 2 == pytest.approx(by_sample)


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_no_weight_at_all_is_zero_and_finite(model: Any, kind: str) -> None:
    members = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples()]
    for pack in (members, filler_pack()):
        batch = PaddingFreeCollator(model)([pack])
        logits = model(**{k: v for k, v in batch.items() if k != "labels"})
        model.zero_grad()
        loss = packed_loss(logits, batch, REDUCTIONS[kind])
        loss.backward()
        assert float(loss.detach()) == 0
        assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    silent = Reduction("token", {"a": 0.0, "b": 0.0}, lambda i: SOURCES[i])
    assert float(packed_loss(logits, batch, silent).detach()) == 0


def test_tails_and_fillers_weigh_nothing() -> None:
    members = samples()
    for kind in REDUCTIONS.values():
        bare = loss_normaliser([PaddingFreeCollator()([members])], kind)
        padded = loss_normaliser([PaddingFreeCollator(pad_to_length=256)([members])], kind)
        beside = loss_normaliser(
            [PaddingFreeCollator()([members]), PaddingFreeCollator()([filler_pack()])], kind
        )
        assert float(bare) == float(padded) == float(beside) > 0


def test_plain_mappings_need_boundaries() -> None:
    batch = PaddingFreeCollator()([samples()])
    plain = dict(batch)
    assert float(loss_normaliser([plain], "sample")) == float(loss_normaliser([batch], "sample")) == 3
    del plain["cu_seq_lens_q"]
    assert float(loss_normaliser([plain])) == sum(COUNTS)
    with pytest.raises(InputError, match="no boundaries"):
        loss_normaliser([plain], "sample")
    with pytest.raises(ConfigError, match="did you mean sample"):
        Reduction("samples")


def test_sample_losses_are_those_of_the_samples_alone(model: Any) -> None:
    vision = tiny_model("tiny:qwen2_5_vl", seed=1).double()
    pictures = [image_sample(vision, 1), text_sample(9, 3, rows=3), image_sample(vision, 2, ((1, 4, 4),))]
    for pictured in pictures:
        if "pixel_values" in pictured:
            pictured["pixel_values"] = pictured["pixel_values"].double()
    for network, members in ((model, samples()), (vision, pictures)):
        collate = PaddingFreeCollator(network, pad_multiple=64)
        batch = collate([members])
        for fused in (True, False):
            with torch.no_grad(), token_losses() as losses:
                total = token_loss_sum(network, batch, fused=fused, chunk=5)
            sums = sample_sums(batch, losses)
            assert float(sums[0].sum()) == pytest.approx(float(total))
            for place, member in enumerate(members):
                with torch.no_grad():
                    alone = token_loss_sum(network, collate([[member]]))
                assert float(sums[0, place]) == pytest.approx(float(alone), abs=1e-9)
                assert int(sums[1, place]) == int((member["labels"][1:] != -100).sum())


class Mixed:
    """Samples of two sources."""

    class _Part:
        source = None

        def __init__(self, name: str) -> None:
            self.name = name

    parts = (_Part("x"), _Part("y"))

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def place(self, index: int) -> tuple[int, int, int]:
        return index % 2, index // 2, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Encoded:
    processor = None

    @staticmethod
    def encode(sample: Any) -> Any:
        return sample


def test_a_run_writes_the_loss_of_every_sample_under_its_step(tmp_path: Path) -> None:
    """The file's steps are those of `which`, its means those of the logged loss; sources add up."""
    from packtrain.train.sft import train

    items = [text_sample(4 + i % 5, i, supervised=1 + i % 4) for i in range(12)]
    made = plan([len(sample["input_ids"]) for sample in items], pack_length=16)
    config = load_config(
        {
            "template": {"max_length": 16},
            "training": {
                "output_dir": str(tmp_path),
                "gradient_accumulation_steps": 2,
                "logging_steps": 1,
                "learning_rate": 0.0,
                "save_strategy": "no",
                "loss_reduction": "sample",
                "source_weights": {"x": 3.0},
                "log_source_loss": True,
            },
        }
    )
    model = tiny_model("tiny:qwen3", seed=2)
    val = {name: (made, Mixed(items), None) for name in ("one", "two")}
    result = train(config, made, Mixed(items), Encoded(), model=model, val=val)
    rows = [json.loads(line) for line in (tmp_path / "sample_loss" / "rank-0.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows))) and len(rows) == result.metrics["steps"]
    assert sorted(i for row in rows for i in row["ids"]) == list(range(12))
    for row, logged in zip(rows, [r for r in result.history if "loss" in r], strict=True):
        weights = [3.0 if i % 2 == 0 else 1.0 for i in row["ids"]]
        assert row["sources"] == ["xy"[i % 2] for i in row["ids"]]
        mean = sum(w * x for w, x in zip(weights, row["loss"], strict=True)) / sum(weights)
        assert logged["loss"] == pytest.approx(mean, abs=1e-4)
        for name in "xy":
            pairs = [
                p
                for p, s in zip(zip(row["loss"], row["tokens"], strict=True), row["sources"], strict=True)
                if s == name
            ]
            if pairs:
                own = sum(x * n for x, n in pairs) / sum(n for _, n in pairs)
                assert logged[f"loss/{name}"] == pytest.approx(own, abs=1e-4)
    every = {i: x for row in rows for i, x in zip(row["ids"], row["loss"], strict=True)}
    told = losses_of(tmp_path, 1)
    assert {row["id"]: row["loss"] for row in told} == dict(zip(rows[1]["ids"], rows[1]["loss"], strict=True))
    assert [row["loss"] for row in told] == sorted((row["loss"] for row in told), reverse=True)
    with pytest.raises(InputError, match="no losses of step 99"):
        losses_of(tmp_path, 99)
    mean = sum((3 if i % 2 == 0 else 1) * x for i, x in every.items()) / 24
    for name in ("one", "two"):
        assert result.metrics[f"eval_{name}_loss"] == pytest.approx(mean, abs=1e-5)
        assert result.metrics[f"eval_{name}_samples"] == 12 and f"eval_{name}_loss/x" in result.metrics


@pytest.mark.parametrize("kind", ["stream", "token_budget", "packed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixture_names_its_parts_also_where_the_run_has_no_plan(
    tmp_path: Path, kind: str, weighted: bool
) -> None:
    """Weights and losses of parts are those of the ids that packs hold, whatever makes the packs."""
    from packtrain.data import PackedDataset, StreamingPackedDataset, TokenBudgetDataset, WeightedSources
    from packtrain.train.sft import train

    items = [text_sample(4 + i % 5, i, supervised=1 + i % 4) for i in range(12)]
    mixed = WeightedSources({"x": items[::2], "y": items[1::2]}, stopping="all") if weighted else Mixed(items)
    data: Any = {
        "stream": lambda: StreamingPackedDataset(mixed, None, pack_length=16, seed=3, cyclic=True),
        "token_budget": lambda: TokenBudgetDataset(mixed, None, max_seq_len=16, cyclic=True),
        "packed": lambda: PackedDataset(plan([len(s["input_ids"]) for s in items], pack_length=16), mixed),
    }[kind]()
    training = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.0,
        "save_strategy": "no",
        "source_weights": {"x": 3.0},
        "log_source_loss": True,
    }
    config = load_config({"template": {"max_length": 16}, "training": training})
    result = train(config, data, model=tiny_model("tiny:qwen3", seed=2))
    rows = [json.loads(line) for line in (tmp_path / "sample_loss" / "rank-0.jsonl").read_text().splitlines()]
    logged = [row for row in result.history if "loss" in row]
    assert len(rows) == len(logged) == 3
    for row, told in zip(rows, logged, strict=True):
        assert row["sources"] == ["xy"[i % 2] for i in row["ids"]]
        weights = [n * (3.0 if i % 2 == 0 else 1.0) for i, n in zip(row["ids"], row["tokens"], strict=True)]
        mean = sum(w * x for w, x in zip(weights, row["loss"], strict=True)) / sum(weights)
        assert told["loss"] == pytest.approx(mean, abs=1e-4)
        assert {key for key in told if key.startswith("loss/")} == {f"loss/{name}" for name in row["sources"]}


def test_a_weighted_mixture_says_where_each_place_comes_from() -> None:
    from packtrain.data import WeightedSources

    sources = {"a": list(range(7)), "b": list(range(100, 103)), "c": list(range(200, 211))}
    for stopping in ("first", "all"):
        mixed: Any = WeightedSources(sources, {"a": 2, "b": 0.7, "c": 1}, stopping)
        found = [mixed.place(index) for index in range(len(mixed))]
        assert [mixed.parts[k].source[row] for k, row, _ in found] == [mixed[i] for i in range(len(mixed))]
        assert [mixed[i] for i in range(len(mixed))] == list(mixed)
        assert [part.count for part in mixed.parts] == [sum(k == n for k, _, _ in found) for n in range(3)]
        assert len(set(found)) == len(mixed) and source_names(mixed)[0] == ("a", "b", "c")


@pytest.mark.parametrize("kind", ["token", "sample", "sqrt"])
def test_evaluation_counts_each_sample_once_on_any_number_of_ranks(tmp_path: Path, kind: str) -> None:
    items = [text_sample(5, i, supervised=1 + i) for i in range(3)]
    made = plan([5, 5, 5], pack_length=5)
    model = tiny_model("tiny:qwen3", seed=2)
    found = []
    for ranks in (1, 2):
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            trainer = trainer_on(tmp_path, model, items, made.align(ranks), rank)
            trainer.reduction = Reduction(kind)
            trainer.packs_summed = lambda values, into=sums: into.append(values) or values
            trainer.evaluate(trainer.train_dataset)
        loss, weight, tokens, _, counted, _ = torch.stack(sums).sum(0).tolist()
        assert (tokens, counted) == (6, 3)
        found.append(loss / weight)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_real_processes_leave_the_weights_of_one_rank(tmp_path: Path) -> None:
    """3 ranks x GA 1 under DDP (one of them without supervised tokens) and 1 rank x GA 3: same update."""
    for ranks in (1, 3):
        here = tmp_path / str(ranks)
        here.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = str(Path(__file__).parent / "reduction_script.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [warm.python(), *(launcher if ranks > 1 else []), script, str(here)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
    one, three = (torch.load(tmp_path / str(ranks) / "found.pt") for ranks in (1, 3))
    start = tiny_model("tiny:qwen3", seed=2).double().state_dict()
    for kind in reduction_script.KINDS:
        for name, weight in one[kind][0].items():
            torch.testing.assert_close(three[kind][0][name], weight, rtol=0, atol=1e-10)
        moved = max(float((one[kind][0][name] - start[name]).abs().max()) for name in start)
        assert moved > 1e-4
        assert one[kind][1] == pytest.approx(three[kind][1], abs=1e-4)  # the logged loss
        assert one[kind][2] == pytest.approx(three[kind][2], abs=1e-9)  # evaluation
        files = sorted((tmp_path / "3" / kind / "sample_loss").iterdir())
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        assert [row["rank"] for row in rows] == [0, 1, 2] and {row["step"] for row in rows} == {0}
        assert sorted(i for row in rows for i in row["ids"]) == [0, 1, 2, 3]
        assert next(row for row in rows if row["ids"] == [3])["loss"] == [None]


def test_a_mixture_names_its_sources(tmp_path: Path) -> None:
    for name in ("one", "two"):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": name}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "mix.yaml").write_text("sources: [{path: one.jsonl}, {path: two.jsonl, name: second}]")
    source = ChatSource(open_source(str(tmp_path / "mix.yaml")))
    names, of = source_names(source)
    assert names == ("one", "second") or names == ("one.jsonl", "second")
    for i in range(2):
        text = source[i]["messages"][1]["content"][0]["text"]
        assert of(i) == {"one": names[0], "two": "second"}[text]


def test_names_of_sources_are_checked() -> None:
    source = Mixed([])
    assert source_names(source)[0] == ("x", "y") and source_names([])[0] == ("data",)
    assert reduction_of("sqrt", {"y": 2.0}, source).source_weights == {"y": 2.0}
    with pytest.raises(ConfigError, match="'z'"):
        reduction_of("token", {"z": 2.0}, source)
    with pytest.raises(ConfigError, match="no such source"):
        reduction_of("token", {"data": 2.0}, [])
    with pytest.raises(ConfigError, match="source_weights"):
        load_config({"training": {"source_weights": {"x": -1}}})
    assert LossTrace(None, ("a",), lambda i: "a").means(lambda values: values) == {}
