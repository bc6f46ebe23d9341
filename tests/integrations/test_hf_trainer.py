"""The real transformers Trainer in the scripts of `examples/`, with and without their packtrain lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from packtrain.errors import ConfigError, ForeignArtefactError

# The plain script asks for pinned memory, as Trainer does by default, on a machine without an accelerator.
# peft 0.21, and scripts of today, use names that transformers 5.24 has begun to rename.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARK = re.compile(r"^.*#\s*packtrain$\n", re.M)


def script(name: str, *, packed: bool = True) -> types.ModuleType:
    """A module of `examples/`; without its packtrain lines it is the user's own script."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    module = types.ModuleType(f"{name}_{'packed' if packed else 'plain'}")
    sys.modules[module.__name__] = module  # its classes must pickle
    exec(compile(text if packed else MARK.sub("", text), name, "exec"), module.__dict__)
    return module


def recording(base: type, order: Any = None) -> type:
    """The user's own subclass: it notes losses of steps and samples, and reads `order` when given."""

    class Recording(base):  # type: ignore[misc,valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            notes = self.__dict__.setdefault("notes", {})
            notes.setdefault(self.state.global_step, []).append(float(loss))
            self.__dict__.setdefault("seen", []).extend(getattr(inputs, "sample_ids", ()))
            return loss

        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args) if order is None else order

    return Recording


def step_losses(trainer: Any) -> list[float]:
    return [sum(parts) for _, parts in sorted(trainer.notes.items())]


def two_ranks(name: str, model: Any, rows: Any, out: Path) -> list[Any]:
    """What each rank of a script of `examples/` saw, under torchrun."""
    code = str(Path(__file__).with_name("two_ranks.py"))
    launch = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", code]
    kept = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"}
    words = [name, str(model), str(rows), str(out)]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=600, env=kept)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


#: Evaluate and save after every step; the "best" model is the one with the highest loss: the first.
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


def check_best(trainer: Any) -> None:
    """The trainer ended with the weights of its best checkpoint, which is not the last."""
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-1" and trainer.state.global_step > 1
    held = type(trainer.model).from_pretrained(best, dtype="float32").state_dict()
    found = trainer.model.state_dict()
    assert sorted(held) == sorted(found)
    assert all(torch.equal(value, found[key]) for key, value in held.items())


def order_of(trainer: Any) -> list[int]:
    """Sample ids in the order in which the packed trainer's steps hold them."""
    data, found = trainer.packs.data, []
    for position in list(trainer.packs_sampler):
        found += data.packs[position].tolist() if data.pack_id(position) >= 0 else []
    return found


@pytest.fixture(scope="session")
def files(rows: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("rows")
    text = [row for row in rows if not row["images"]]
    held = {"vl": rows[::2], "text": text[::2], "few": rows[:24], "few_text": text[:24]}
    for name, chosen in held.items():
        body = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(body, encoding="utf-8")
    return {name: str(folder / f"{name}.jsonl") for name in held}


@pytest.mark.parametrize("name", ["hf_trainer_vl", "hf_trainer_text"])
def test_the_users_script_changes_in_at_most_six_lines(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert 1 <= len(MARK.findall(text)) <= 6
    assert "packtrain" not in MARK.sub("", text).split('"""', 2)[2]


@pytest.mark.parametrize(
    ("name", "file", "model"),
    [
        pytest.param(
            "hf_trainer_vl",
            "vl",
            "tiny:qwen2_5_vl",
            marks=pytest.mark.matrix(
                "pictures (Qwen-VL), losses as unpacked", "every sample once", "lengths without encoding"
            ),
        ),
        pytest.param(
            "hf_trainer_text",
            "text",
            "tiny:qwen3",
            marks=pytest.mark.matrix(
                "text, losses as unpacked", "every sample once", "tokenised before, lengths taken"
            ),
        ),
    ],
)
def test_losses_equal_those_of_the_unpacked_script(
    name: str, file: str, model: str, files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import Trainer

    count = len(Path(files[file]).read_text().splitlines())
    # One micro step: with several, Trainer's own loss of Qwen2.5-VL is a mean over micro steps, not tokens.
    batch = {"per_device_train_batch_size": -(-count // 5), "gradient_accumulation_steps": 1}
    where = str(saved_model(model)), files[file]
    packed = script(name).main(*where, str(tmp_path / "a"), trainer_class=recording(Trainer), **batch)
    order = order_of(packed)
    assert sorted(order) == list(range(count))
    packed.train()
    assert sorted(packed.seen) == list(range(count))
    assert packed.state.global_step == 5

    plain = script(name, packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(Trainer, order), **batch
    )
    plain.train()
    assert step_losses(packed) == pytest.approx(step_losses(plain), rel=1e-4)
    assert step_losses(packed)[0] > step_losses(packed)[-1]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.matrix("LoRA, gradient checkpointing on and off")
def test_lora_and_gradient_checkpointing_change_nothing_in_the_equality(
    checkpointing: bool, files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    def lora(model: Any) -> Any:
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    batch = {
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": checkpointing,
        "wrap": lora,
    }
    where = str(saved_model("tiny:qwen2_5_vl")), files["few"]
    packed = script("hf_trainer_vl").main(
        *where, str(tmp_path / "a"), trainer_class=recording(Trainer), **batch
    )
    order = order_of(packed)
    packed.train()
    plain = script("hf_trainer_vl", packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(Trainer, order), **batch
    )
    plain.train()
    assert step_losses(packed) == pytest.approx(step_losses(plain), rel=1e-4)
    assert packed.model.config.get_text_config().use_cache == plain.model.config.get_text_config().use_cache


@pytest.mark.matrix("exact eval loss")
def test_eval_loss_is_the_token_mean_and_the_training_data_alone_decide(
    files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    where = str(saved_model("tiny:qwen2_5_vl")), files["few"]
    packed = script("hf_trainer_vl").main(*where, str(tmp_path / "a"), files["few"])
    plain = script("hf_trainer_vl", packed=False).main(*where, str(tmp_path / "b"), files["few"])
    total = tokens = 0.0
    plain.model.eval()
    for row in plain.eval_dataset:
        batch = plain.data_collator([row])
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(plain.model(**batch).loss) * count
        tokens += count
    assert packed.evaluate()["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert packed.predict(packed.eval_dataset).metrics["test_loss"] > 0  # the host's own, unpacked


@pytest.mark.matrix("resume")
def test_resume_equals_the_uninterrupted_run(
    files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import Trainer

    where = str(saved_model("tiny:qwen3")), files["few_text"]
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_train_epochs": 2}
    saves = {"save_strategy": "steps", "save_steps": 1, "trainer_class": recording(Trainer)}
    whole = script("hf_trainer_text").main(*where, str(tmp_path / "a"), **batch, **saves)
    whole.train()
    assert whole.state.global_step == 6
    for step in (2, 4):
        again = script("hf_trainer_text").main(*where, str(tmp_path / "a"), **batch, **saves)
        again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
        assert step_losses(again) == step_losses(whole)[step:]
        assert again.seen == whole.seen[24 * step // 3 :]
    other = script("hf_trainer_text").main(
        str(where[0]), files["text"], str(tmp_path / "a"), **batch, **saves
    )
    with pytest.raises(ForeignArtefactError, match="plan"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


@pytest.mark.matrix("best model at the end")
def test_the_best_model_is_loaded_at_the_end(
    files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a model that is saved under other names than its own."""
    batch = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1, **BEST}
    trainer = script("hf_trainer_vl").main(
        str(saved_model("tiny:qwen2_5_vl")), files["few"], str(tmp_path), files["few"], **batch
    )
    trainer.train()
    check_best(trainer)


@pytest.mark.matrix("two ranks")
def test_two_gloo_ranks_train_and_evaluate_as_one_unpacked(
    files: Any,
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from transformers import Trainer

    where = str(saved_model("tiny:qwen2_5_vl")), files["few"]
    ranks = two_ranks("hf_trainer_vl", *where, tmp_path)
    told = "ranks hold different numbers of tokens"
    assert all(told in rank["refused"] and "\n" not in rank["refused"] for rank in ranks)
    record_property("refused", ("loss averaged per rank", told, ranks[0]["refused"]))
    assert sorted(ranks[0]["ids"] + ranks[1]["ids"]) == list(range(24))

    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    packed = script("hf_trainer_vl").main(*where, str(tmp_path / "a"), files["few"], **batch)
    plain = script("hf_trainer_vl", packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(Trainer, order_of(packed)), **batch
    )
    plain.train()
    together = [(a + b) / 2 for a, b in zip(ranks[0]["losses"], ranks[1]["losses"], strict=True)]
    assert together == pytest.approx(step_losses(plain), rel=1e-4)
    packed.model = packed.model_wrapped = plain.model
    assert ranks[0]["eval_loss"] == pytest.approx(packed.evaluate()["eval_loss"], rel=1e-4)


def test_a_step_of_packs_without_asking_for_samples(
    files: Any, saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from packtrain.hosts.transformers import pack

    where = str(saved_model("tiny:qwen3")), files["few_text"]
    trainer = script("hf_trainer_text", packed=False).main(
        *where, str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=2
    )
    pack(trainer, 1024, packer="bfd")
    trainer.train()
    assert trainer.state.global_step == -(-len(trainer.packs) // 2)
    assert len(trainer.packs) < 24
    with pytest.raises(ConfigError, match="packs already"):
        pack(trainer, 1024)


def test_positions_of_the_encoder_are_those_of_the_template(
    rows: list[Any], saved_model: Callable[[str], Path]
) -> None:
    """The model's own rope index, without its weights, against our layout."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from packtrain.hosts._encode import HostEncoder
    from packtrain.sources.chat import ChatSource
    from packtrain.template import HFTemplate

    folder = saved_model("tiny:qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(folder)
    encode = HostEncoder(
        script("hf_trainer_vl").Collate(processor), AutoModelForImageTextToText.from_pretrained(folder)
    )
    template = HFTemplate(processor)
    chats = ChatSource(list(rows), allow_outside=True)
    for index in (0, 5, 6, 7, 11, 100):
        ours, theirs = template.encode(chats[index]), encode(rows[index])
        assert sorted(ours) == sorted(theirs)
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), (index, key)
