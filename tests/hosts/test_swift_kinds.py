"""Packs of every kind through `install(source=…)`: the losses of the own trainer on the same 200 samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kinds import CAP, FORMATS, KINDS, open_kind
from swift_sft import losses, sft

pytestmark = pytest.mark.hosts

RATE, ACCUMULATION = 0.05, 2


def own(kind: str, network: Path, root: Path, out: Path, steps: dict[str, int]) -> list[float]:
    from transformers import AutoModelForCausalLM, TrainingArguments

    from packtrain.train.trainer import PackTrainer

    class Noting(PackTrainer):
        def training_step(self, *given: Any, **more: Any) -> Any:
            loss = super().training_step(*given, **more)
            self.__dict__.setdefault("notes", {}).setdefault(self.state.global_step, []).append(float(loss))
            return loss

    model = AutoModelForCausalLM.from_pretrained(network, dtype="float32")
    model.config.use_cache = False
    args = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=1, num_train_epochs=1, optim="sgd",
        gradient_accumulation_steps=ACCUMULATION, learning_rate=RATE, lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        logging_strategy="no", remove_unused_columns=False, **steps,
    )  # fmt: skip
    trainer = Noting(model, args, open_kind(kind, root), shuffle=False)
    trainer.train()
    return [sum(parts) for _, parts in sorted(trainer.notes.items())]


@pytest.mark.spec(
    "001",
    "in ms-swift: exports, growing directories, streams and token budgets",
    key="`data.kind`",
    api="`install(source=)`",
)
@pytest.mark.parametrize("kind", [*KINDS, *FORMATS])
def test_ms_swift_has_the_losses_of_the_own_trainer(
    kind: str, network: Path, folders: Path, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    steps = {} if kind in ("planned", "exported", "growing", *FORMATS) else {"max_steps": 8}
    switches = {
        "model": network, "model_type": "qwen3", "template": "qwen3", "dataset": folders / "rows.jsonl",
        "packing": "true", "packing_length": CAP, "per_device_train_batch_size": 1, "optim": "sgd",
        "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "max_grad_norm": 0,
        "lr_scheduler_type": "constant", "warmup_ratio": 0, "weight_decay": 0,
        "train_dataloader_shuffle": "false", "remove_unused_columns": "false", **steps,
    }  # fmt: skip
    if kind == "growing":
        switches["max_steps"] = 20  # ms-swift counts its own rows
    (seen,) = sft(tmp_path, "packed", switches, plugin=True, kind=[kind, str(folders)])
    expected = own(kind, network, folders, tmp_path / "own", steps)
    assert losses(seen) == pytest.approx(expected[: len(losses(seen))], abs=1e-5)
    assert len(losses(seen)) == len(expected)
    if kind in KINDS:
        record_property("kind", ("ms-swift", kind))
