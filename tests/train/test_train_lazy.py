"""Training on a directory of chunks while it grows: every pack once, resume, the launch recipe's refusals."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import warm
from packtrain import files
from packtrain.data import PackedDataset
from packtrain.errors import ConfigError, WaitTimeoutError
from packtrain.export import PackingProducer
from packtrain.planning.packplan import PackPlan
from packtrain.sources.chat import ChatSource
from packtrain.sources.jsonl import open_source
from packtrain.template import HFTemplate
from packtrain.train.compare import evaluate_packed_vs_unpacked
from packtrain.train.config import load_config
from packtrain.train.model import load_model
from packtrain.train.sft import train

ROWS = 60


def put(folder: Path, name: str, first: int, count: int) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        {"question": f"Count to {i}.", "answer": " ".join(map(str, range(i % 20 + 1)))}
        for i in range(first, first + count)
    ]
    part = folder.parent / f"{name}.part"  # a producer that watches takes a file as soon as it sees it
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(folder / name)


def producer(root: Path, tokenizer: Path, **options: Any) -> PackingProducer:
    columns = {"prompt": "question", "response": "answer"}
    return PackingProducer(
        root / "in",
        root / "out",
        HFTemplate(str(tokenizer)),
        pack_length=128,
        packs_per_chunk=2,
        window=20,
        poll_s=0.02,
        open_shard=lambda path: ChatSource(open_source(path), columns=columns),
        **options,
    )


def values(root: Path, tokenizer: Path, **training: Any) -> dict[str, Any]:
    return {
        "model": {"name_or_path": "tiny:qwen3"},
        "template": {"processor": str(tokenizer)},
        "custom": {"dataset": str(root / "out")},
        "training": {
            "output_dir": str(root / "run"),
            "sharded_lazy": True,
            "sharded_lazy_pre_packed": True,
            "sharded_lazy_poll_s": 0.02,
            "packing": False,
            "train_dataloader_shuffle": False,
            "save_strategy": "no",
            "logging_steps": 1,
            **training,
        },
    }


def consumed(root: Path) -> list[int]:
    rows = [json.loads(line) for line in (root / "run" / "train_log.jsonl").read_text().splitlines()]
    return [int(row["packs"]) for row in rows if "loss" in row]


def test_training_reads_along(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Training begins before there is anything, waits, and ends with the stream; checkpoints acknowledge."""
    made = producer(tmp_path, tokenizer_folder, flush_s=0.2)
    (tmp_path / "in").mkdir()

    def bursts() -> None:
        thread = threading.Thread(target=lambda: made.run(watch=True))
        thread.start()
        for number in range(3):
            put(tmp_path / "in", f"{number}.jsonl", 20 * number, 20)
            thread.join(0.4)
        (tmp_path / "in" / "END").touch()
        thread.join(60)

    feeding = threading.Thread(target=bursts)
    feeding.start()
    config = load_config(
        values(
            tmp_path,
            tokenizer_folder,
            max_steps=1000,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=5,
            sharded_lazy_max_wait_s=60,
        )
    )
    trained = train(config)
    feeding.join(60)
    assert sum(consumed(tmp_path)) == made.stats.packs and made.stats.packed == ROWS
    assert trained.metrics["steps"] == -(-made.stats.packs // 2)
    assert trained.proof is not None and trained.proof.ok
    state = files.read_json(tmp_path / "run" / "checkpoint-5" / "stream.json")
    assert (
        state["step"] == 10 and len(list((tmp_path / "run").glob("consumed/*/chunk_*4.arrow.completed"))) == 1
    )
    assert not list((tmp_path / "out").glob("*.completed")), "marks lie in the run's folder"


def test_resume_continues_the_stream(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Stopped at a checkpoint and resumed: the losses of the rest are those of an uninterrupted run."""
    put(tmp_path / "in", "a.jsonl", 0, ROWS)
    packs = producer(tmp_path, tokenizer_folder).run().packs
    whole = train(load_config(values(tmp_path, tokenizer_folder, output_dir=str(tmp_path / "whole"))))
    assert whole.metrics["steps"] == packs
    part = values(tmp_path, tokenizer_folder, max_steps=4, save_strategy="steps", save_steps=4)
    part["training"].update(lr_scheduler_type="constant")
    train(load_config(part))
    rest = values(tmp_path, tokenizer_folder, lr_scheduler_type="constant", resume_from_checkpoint=True)
    resumed = train(load_config(rest))
    assert resumed.metrics["steps"] == packs
    assert [step for step, _ in resumed.losses] == list(range(1, packs + 1))
    constant = values(
        tmp_path, tokenizer_folder, output_dir=str(tmp_path / "constant"), lr_scheduler_type="constant"
    )
    straight = train(load_config(constant))  # another experiment reads all chunks again, without a key
    assert [loss for _, loss in resumed.losses] == pytest.approx(
        [loss for _, loss in straight.losses], abs=1e-5
    )
    rest["training"].pop("resume_from_checkpoint")
    with pytest.raises(ConfigError, match="an earlier run has used"):
        train(load_config(rest))
    rest["training"]["resume_from_checkpoint"] = True
    with pytest.raises(ConfigError, match=r"holds no stream\.json"):
        (tmp_path / "run" / "checkpoint-4" / "stream.json").unlink()
        train(load_config(rest))


def test_evaluation_while_reading_along(
    tmp_path: Path,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same packs, losses and weights as without; a pack length that nobody named is that of the packs."""
    import yaml

    from packtrain.cli import main

    put(tmp_path / "in", "a.jsonl", 0, ROWS)
    packs = producer(tmp_path, tokenizer_folder).run().packs
    put(tmp_path, "val.jsonl", 100, 9)

    def run(name: str, **changes: Any) -> dict[str, Any]:
        given = values(tmp_path, tokenizer_folder, save_strategy="epoch", sharded_lazy_start="beginning")
        given["training"].update(output_dir=str(tmp_path / name), packing_length_precompute_workers=1)
        for section, keys in changes.items():
            given[section].update(keys)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
        with pytest.raises(SystemExit) as stop:
            main(["train", str(tmp_path / "run.yaml"), "--json"])
        told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return {**told, "code": int(stop.value.code or 0)}

    val = {
        "val_jsonl": str(tmp_path / "val.jsonl"),
        "columns": {"prompt": "question", "response": "answer"},
    }
    none = run("none")
    often = run("often", custom=val, training={"eval_steps": 4})
    assert none["steps"] == often["steps"] == packs and often["eval_samples"] == 9
    rows = [json.loads(line) for line in (tmp_path / "often" / "train_log.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in rows if "eval_loss" in row]
    assert evaluated == sorted({*range(4, packs, 4), packs})
    assert files.read_json(tmp_path / "often" / "val_plan" / "plan.json")["spec"]["pack_length"] == 128
    trace = Path("sample_loss") / "rank-0.jsonl"
    assert (tmp_path / "none" / trace).read_bytes() == (tmp_path / "often" / trace).read_bytes()
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("none", "often")]
    assert models[0] == models[1]
    source = ChatSource(open_source(tmp_path / "val.jsonl"), columns=val["columns"])
    plan = PackPlan.load(tmp_path / "often" / "val_plan")
    dataset = PackedDataset(plan, source, HFTemplate(str(tokenizer_folder)).encode)
    planned = evaluate_packed_vs_unpacked(load_model(str(tmp_path / "often" / "model")), dataset)
    assert often["eval_loss"] == pytest.approx(planned.packed, abs=1e-6)
    assert "another template" not in caplog.text
    other = run("other", custom=val, template={"system": "Count."})
    assert other["code"] == 0 and other["eval_tokens"] == often["eval_tokens"]
    assert "packed with another template" in caplog.text
    unnamed = values(tmp_path, tokenizer_folder, sharded_lazy_start="beginning")
    unnamed["template"] = {}
    with pytest.raises(ConfigError, match="no processor is named"):
        train(load_config(unnamed), val=(plan, source, None))


@pytest.mark.spec(
    "002",
    "flags of the launch line that contradict each other",
    key="`data.packing`, `data.shuffle`",
    api="`load_config`",
)
def test_what_the_recipe_refuses(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = values(tmp_path, tokenizer_folder)

    def refused(match: str, section: str = "training", **changes: Any) -> None:
        changed = {**base, section: {**base[section], **changes}}
        with pytest.raises(ConfigError, match=match):
            load_config(changed)

    load_config(base)
    refused("packing is true, but the data are packs already", packing=True)
    refused("train_dataloader_shuffle is true", train_dataloader_shuffle=True)
    refused("sharded_lazy_pre_packed is not true", sharded_lazy_pre_packed=False)
    off = {"sharded_lazy": False, "sharded_lazy_pre_packed": False}
    refused(r"custom\.dataset has no effect without training\.sharded_lazy", **off)
    refused(r"custom\.dataset has no effect without", sharded_lazy=False)
    again = load_config(load_config(base).to_dict())
    assert again.training.sharded_lazy and not again.training.packing
    assert load_config(load_config({}).to_dict()) == load_config({})
    refused("needs custom.dataset", "custom", dataset=None)
    with caplog.at_level("WARNING"):
        told = {**base["training"], "replan": "epoch", "packing_mode": "static", "samples_per_step": 4}
        custom = {**base["custom"], "train_jsonl": "a.jsonl"}
        assert load_config({**base, "training": told, "custom": custom}).data == load_config(base).data
    assert [record.getMessage() for record in caplog.records] == [
        "custom.train_jsonl, training.replan, training.packing_mode, training.samples_per_step have no "
        "effect on data of kind growing: their packs were made before; packtrain produce has the options of "
        "packing"
    ]
    refused("a stream is read once", num_train_epochs=2)
    recipe = {"custom": {"dataset": "x"}, "training": {"packing": True}}
    with pytest.raises(ConfigError, match="packs already"):
        load_config(base, recipe)


def test_max_steps_before_the_end(tmp_path: Path, tokenizer_folder: Path) -> None:
    put(tmp_path / "in", "a.jsonl", 0, ROWS)
    producer(tmp_path, tokenizer_folder).run()
    (tmp_path / "out" / "END").unlink()
    with pytest.raises(ConfigError, match=r"max_steps is not set, and the stream has no end"):
        train(load_config(values(tmp_path, tokenizer_folder)))
    late = values(tmp_path, tokenizer_folder, max_steps=1000, sharded_lazy_max_wait_s=0.1)
    with pytest.raises(WaitTimeoutError, match=r"the producer .* has stopped"):
        train(load_config(late))


@pytest.mark.spec(
    "002",
    "the launch line (`--sharded_lazy true --packing false` …) on two ranks",
    key="the options of that line",
    api="`train`",
)
def test_two_ranks_with_the_launch_recipe(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Two real ranks wait for a producer that starts later, make the same steps, and use every pack once."""
    import yaml

    plain = values(tmp_path, tokenizer_folder, save_strategy="steps", save_steps=3)
    recipe = {
        name: plain["training"].pop(name)
        for name in ("sharded_lazy", "sharded_lazy_pre_packed", "packing", "train_dataloader_shuffle")
    }
    recipe["dataset"] = plain["custom"].pop("dataset")
    plain["training"].pop("sharded_lazy_poll_s")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    said = {True: "true", False: "false"}
    options = [word for name, value in recipe.items() for word in (f"--{name}", said.get(value, value))]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "packtrain", "train", str(tmp_path / "run.yaml"), *options, "--max_steps", "50", "--json"]
    process = subprocess.Popen(
        [warm.python(), *launch, *train],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    put(tmp_path / "in", "a.jsonl", 0, ROWS)
    stats = producer(tmp_path, tokenizer_folder).run()
    out, error = process.communicate(timeout=200)
    assert process.returncode == 0, error
    told = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    rounds = [sum(files.read_json(path)["packs"] for path in chunks(tmp_path)[rank::2]) for rank in range(2)]
    assert told["steps"] == max(rounds) and sum(consumed(tmp_path)) == stats.packs
    assert "the stream ended after step" in error
    (marks,) = (tmp_path / "run" / "consumed").iterdir()
    acks = [files.read_json(marks / "acks" / f"w00002_r0000{rank}.json") for rank in range(2)]
    assert [ack["step"] for ack in acks] == [max(rounds) // 3 * 3] * 2 or acks[0]["step"] == max(rounds)


def chunks(root: Path) -> list[Path]:
    return sorted((root / "out").glob("chunk_*.json"))
