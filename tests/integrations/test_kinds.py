"""Packs of every kind in every trainer: the same 200 samples, the losses of the own trainer on them.

What each shows is entered into the table of modes and hosts (docs/hosts.md); the ms-swift column is
`tests/hosts/test_swift_kinds.py`.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import CAP, FORMATS, KINDS, SAMPLES, open_kind, write_folders
from torch.nn import functional

import warm
from packtrain.errors import ConfigError
from packtrain.testing.tiny import tiny_model

# TRL 1.16 uses names that transformers 5.24 has begun to rename.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]

ACCUMULATION = 2
RATE = 0.05
OWN, HF, TRL = "own trainer", "transformers Trainer", "TRL SFTTrainer"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    write_folders(root)
    return root


@cache
def fresh() -> Any:
    model = tiny_model("tiny:qwen3", seed=4)
    model.config.use_cache = False
    return model


def arguments(kind: type, folder: Path, **more: Any) -> Any:
    options = {
        "output_dir": str(folder), "per_device_train_batch_size": 1, "num_train_epochs": 1,
        "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "optim": "sgd", "max_grad_norm": 0.0, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no", "remove_unused_columns": False,
        "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip
    return kind(**options)


def noting(base: type) -> type:
    """The trainer class, with the loss and the samples of every micro step."""

    class Noting(base):  # type: ignore[misc,valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            notes = self.__dict__.setdefault("notes", {})
            notes.setdefault(self.state.global_step, []).append((float(loss), list(inputs.sample_ids)))
            return loss

    return Noting


def own(kind: str, root: Path, out: Path, steps: dict[str, int]) -> Any:
    from transformers import TrainingArguments

    from packtrain.train.trainer import PackTrainer

    args = arguments(TrainingArguments, out, **steps)
    return noting(PackTrainer)(copy.deepcopy(fresh()), args, open_kind(kind, root), shuffle=False)


def hf(kind: str, root: Path, out: Path, steps: dict[str, int]) -> Any:
    from transformers import Trainer, TrainingArguments

    from packtrain.hosts.transformers import pack

    data = open_kind(kind, root)
    args = arguments(TrainingArguments, out, **steps)
    trainer = noting(Trainer)(model=copy.deepcopy(fresh()), args=args, train_dataset=data)
    return pack(trainer, balance=None)


def trl(kind: str, root: Path, out: Path, steps: dict[str, int], tokenizer: Any = None) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from packtrain.hosts.trl import pack

    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])  # not read
    args = arguments(SFTConfig, out, max_length=CAP, bf16=False, **steps)
    trainer = noting(SFTTrainer)(
        model=copy.deepcopy(fresh()), args=args, train_dataset=rows, processing_class=tokenizer
    )
    return pack(trainer, source=open_kind(kind, root), balance=None)


@cache
def _losses(make: Callable[..., Any], kind: str, root: Path, out: Path, more: tuple[Any, ...]) -> Any:
    steps = (
        {}
        if kind in ("planned", "exported", "growing", *FORMATS)
        else {"max_steps": len(packs(kind, root)) // 2}
    )
    trainer = make(kind, root, out, steps, *more)
    trainer.train()
    ids = [number for _, step in sorted(trainer.notes.items()) for _, ids in step for number in ids]
    return [sum(loss for loss, _ in step) for _, step in sorted(trainer.notes.items())], ids


def packs(kind: str, root: Path) -> list[list[int]]:
    """Samples of every pack in the order in which they come."""
    return [[member["sample_id"] for member in members(pack)] for pack in open_kind(kind, root)]


def members(pack: Any) -> Any:
    return pack.members() if hasattr(pack, "members") else pack


def unpacked(kind: str, root: Path) -> list[float]:
    """The losses of the steps when every sample is a row of its own, in a loop of plain torch."""
    model = copy.deepcopy(fresh()).train()
    given, found = packs(kind, root), []
    for first in range(0, len(given), ACCUMULATION):
        chosen = [SAMPLES[number] for pack in given[first : first + ACCUMULATION] for number in pack]
        total = sum(int((sample["labels"][1:] != -100).sum()) for sample in chosen)
        model.zero_grad()
        step = 0.0
        for sample in chosen:
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            loss = functional.cross_entropy(logits, sample["labels"][1:], reduction="sum") / total
            loss.backward()
            step += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        found.append(step)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_trainer_has_the_losses_of_unpacked_samples(
    kind: str, folders: Path, tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> None:
    losses, ids = _losses(own, kind, folders, folders / "own" / kind, ())
    expected = unpacked(kind, folders)
    assert losses == pytest.approx(expected[: len(losses)], abs=1e-5)
    assert len(losses) in (len(expected), len(packs(kind, folders)) // 2)
    assert len(set(ids)) == len(ids) and (len(ids) == 200 or kind in ("stream", "token_budget"))
    record_property("kind", (OWN, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [HF, TRL])
def test_a_host_has_the_losses_of_the_own_trainer(
    kind: str,
    host: str,
    folders: Path,
    tmp_path: Path,
    saved_model: Callable[[str], Path],
    record_property: Any,
) -> None:
    make, more = hf, ()
    if host == TRL:
        from transformers import AutoTokenizer

        make, more = trl, (AutoTokenizer.from_pretrained(saved_model("tiny:qwen3")),)
    expected, order = _losses(own, kind, folders, folders / "own" / kind, ())
    losses, ids = _losses(make, kind, folders, tmp_path, more)
    assert ids == order
    assert losses == pytest.approx(expected, abs=1e-5)
    told = json.loads((tmp_path / "packs" / "run.json").read_text())
    assert told["config"]["data"]["kind"] == kind and told["result"]["metrics"]["steps"] == len(losses)
    assert told["result"]["consumed"]["samples"] == len(ids) and told["result"]["proof"] > 0
    record_property("kind", (host, kind))


@pytest.mark.spec(
    "003",
    "exports of all four formats train in every host with the losses of the plan",
    key="`data.kind: exported`",
    api="`pack(trainer, source=open_packs(…))`",
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("host", [OWN, HF, TRL])
def test_exports_of_every_format_train_in_every_host(
    form: str, host: str, folders: Path, tmp_path: Path, saved_model: Callable[[str], Path]
) -> None:
    """As the plan itself in the own trainer; `chunks` is the kind `exported` above."""
    make, more = {OWN: own, HF: hf, TRL: trl}[host], ()
    if host == TRL:
        from transformers import AutoTokenizer

        more = (AutoTokenizer.from_pretrained(saved_model("tiny:qwen3")),)
    expected, order = _losses(own, "planned", folders, folders / "own" / "planned", ())
    losses, ids = _losses(make, form, folders, tmp_path, more)
    assert ids == order and sorted(ids) == list(range(200))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_two_ranks_read_what_grows_and_streams_once(
    folders: Path, tmp_path: Path, saved_model: Callable[[str], Path]
) -> None:
    """Real processes over gloo: growing, stream and token budget in the HF Trainer and TRL, equal steps."""
    code = str(Path(__file__).with_name("kinds_ranks.py"))
    launch = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", code]
    words = [str(folders), str(saved_model("tiny:qwen3")), str(tmp_path)]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for name in ranks[0]:
        one, two = (rank[name] for rank in ranks)
        assert one["steps"] == two["steps"] and len(one["told"]) == len(two["told"]), name
        ids = [number for rank in (one, two) for _, members in rank["told"] for number in members]
        assert sorted(ids) == list(range(200)), name


def test_what_packs_of_a_source_cannot_keep_is_refused(folders: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from packtrain.hosts.transformers import pack

    data = open_kind("planned", folders)
    args = arguments(TrainingArguments, tmp_path)
    trainer = Trainer(model=copy.deepcopy(fresh()), args=args, train_dataset=data)
    with pytest.raises(ConfigError, match="pack_length cannot be kept: the packs of the source are made"):
        pack(trainer, 64)
    with pytest.raises(ConfigError, match="samples_per_step cannot be kept"):
        pack(trainer, samples_per_step="same")
    with pytest.raises(ConfigError, match="max_steps is not set, and nobody knows how many packs"):
        pack(trainer, source=open_kind("stream", folders))
    assert type(trainer) is Trainer
    trainer.eval_dataset = data
    told = pack(trainer).evaluate()  # before any training: the log of the run begins with it
    rows = (tmp_path / "packs" / "train_log.jsonl").read_text().splitlines()
    assert [json.loads(row)["eval_loss"] for row in rows] == [told["eval_loss"]]


def test_a_step_of_fillers_alone_is_not_taken(folders: Path, tmp_path: Path) -> None:
    """Chunks dealt to three ranks, and one rank goes on: slots without a pack are no step."""
    from transformers import TrainingArguments

    from packtrain.data import LazyShardedDataset
    from packtrain.train.trainer import PackTrainer

    held = len(packs("growing", folders))
    state = LazyShardedDataset(folders / "growing", 0, 3, start="beginning").at_step(1)
    data = LazyShardedDataset(folders / "growing", 0, 1, start="beginning")
    data.load_state_dict(state)
    slots = data.steps
    assert slots > held - 3  # the fourth chunk is alone in its round
    args = arguments(TrainingArguments, tmp_path, gradient_accumulation_steps=1, max_steps=slots + 5)
    trainer = noting(PackTrainer)(copy.deepcopy(fresh()), args, data)
    trainer.train()
    seen = [ids for step in trainer.notes.values() for _, ids in step]
    assert all(seen) and trainer.state.global_step == len(seen) == held - 3


def test_the_last_step_of_a_directory_is_taken_with_what_is_left(folders: Path, tmp_path: Path) -> None:
    """Trainer steps behind full windows only where it does not know the length: the rest would be lost."""
    from transformers import TrainingArguments

    from packtrain.train.trainer import PackTrainer

    held = len(packs("growing", folders))
    args = arguments(TrainingArguments, tmp_path, gradient_accumulation_steps=3)
    trainer = noting(PackTrainer)(copy.deepcopy(fresh()), args, open_kind("growing", folders))
    trainer.train()
    assert held % 3 and trainer.state.global_step == -(-held // 3)
    seen = [number for step in trainer.notes.values() for _, ids in step for number in ids]
    assert sorted(seen) == list(range(200))
