"""The training laws in the environment that runs this script: one line of JSON a law, `null` where it holds.

    version_laws.py [LAW …]

Plain Python beside packtrain, torch and transformers: nothing of the development environment is needed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packtrain import Lengths, plan
from packtrain.collate import PaddingFreeCollator
from packtrain.errors import IsolationError
from packtrain.template import ensure_torchvision
from packtrain.testing.tiny import tiny_model
from packtrain.train import load_config, prove
from packtrain.train.loss import token_loss_sum

ensure_torchvision()

TEXT, VISION = "tiny:qwen3", "tiny:qwen2_5_vl"
SIZES = (7, 5, 12, 3, 9, 6)


def sample(length: int, number: int, rows: int = 1) -> dict[str, Any]:
    ids = torch.randint(1, 500, (length,), generator=torch.Generator().manual_seed(number))
    places = torch.arange(length)
    positions = places if rows == 1 else places.expand(rows, -1)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "sample_id": number}


def pictured(model: Any, number: int) -> dict[str, Any]:
    """Text, one picture of 4 x 6 patches, text."""
    config, tower = model.config, model.config.vision_config
    grid = torch.tensor([[1, 4, 6]])
    count = 24 // tower.spatial_merge_size**2
    text = [int(i) for i in sample(5, number)["input_ids"]]
    ids = [*text, config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
    row = torch.tensor([*ids, *text])
    kinds = (row == config.image_token_id).long()
    known: dict[str, Any] = {"mm_token_type_ids": kinds[None]}
    try:
        positions, _ = model.model.get_rope_index(row[None], image_grid_thw=grid, **known)
    except TypeError:  # before transformers 5.? it finds the pictures itself
        positions, _ = model.model.get_rope_index(row[None], image_grid_thw=grid)
    labels = torch.full_like(row, -100)
    labels[-5:] = row[-5:]
    width = getattr(tower, "in_channels", 3) * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.randn(24, width, generator=torch.Generator().manual_seed(number))
    return {
        "input_ids": row, "labels": labels, "position_ids": positions[:, 0], "sample_id": number,
        "pixel_values": pixels, "image_grid_thw": grid,
    }  # fmt: skip


def rows_of(name: str, model: Any) -> list[dict[str, Any]]:
    if name == TEXT:
        return [sample(length, number) for number, length in enumerate(SIZES)]
    return [sample(6, 0, 3), pictured(model, 1), pictured(model, 2), sample(9, 3, 3)]


def collated(name: str) -> None:
    """The loss of a packed row is that of its samples one by one."""
    model = tiny_model(name, seed=1)
    rows, collate = rows_of(name, model), PaddingFreeCollator(model)
    with torch.no_grad():
        packed = float(token_loss_sum(model, collate([rows]), fused=False))
        alone = sum(float(token_loss_sum(model, collate([[row]]), fused=False)) for row in rows)
        fused = float(token_loss_sum(model, collate([rows])))
    assert abs(packed - alone) < 1e-3 * alone, (packed, alone)
    assert abs(packed - fused) < 1e-3 * alone, (packed, fused)


def proven(name: str) -> None:
    """The proof accepts the clean model and refuses a patched one, naming the function."""
    model = tiny_model(name, seed=1)
    report = prove(model, [rows_of(name, model)])
    assert report.ok and report.control.startswith("caught"), report
    attention = next(m for n, m in model.named_modules() if n.endswith("self_attn"))
    forward = type(attention).forward

    def whole_row(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = None
        return forward(self, *args, **kwargs)

    for module in model.modules():
        if type(module) is type(attention):
            module.forward = types.MethodType(whole_row, module)
    try:
        prove(model, [rows_of(name, model)])
    except IsolationError as error:
        assert "whole_row" in str(error) and "self_attn" in str(error), error
        return
    raise AssertionError("a patched attention was accepted")


class Encoded:
    """A template of samples that are encoded already."""

    processor = None

    def encode(self, row: Any) -> Any:
        return row


def own_trainer(name: str) -> None:
    from packtrain.train.sft import train

    model = tiny_model(name, seed=1)
    rows = rows_of(name, model)
    made = plan(Lengths(np.array([len(row["input_ids"]) for row in rows])), pack_length=32)
    with tempfile.TemporaryDirectory() as place:
        text = f"model: {{name_or_path: {name}}}\ntemplate: {{max_length: 32}}\n"
        text += f"custom: {{train_jsonl: none.jsonl}}\ntraining: {{output_dir: {place}/run, max_steps: 4, "
        text += "logging_steps: 1, save_strategy: 'no', learning_rate: 5.0e-3}\n"
        file = Path(place) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        result = train(load_config(file), made, rows, Encoded(), model=model)
    losses = [loss for _, loss in result.losses]
    assert len(losses) == 4 and losses[-1] < losses[0] and np.isfinite(losses).all(), losses
    assert result.proof is not None and result.proof.ok


def host_trainer(name: str) -> None:
    """Trainer on packs, its loss against the mean over the same tokens one by one."""
    from transformers import Trainer, TrainingArguments

    from packtrain.hosts.transformers import pack

    model = tiny_model(name, seed=1)
    rows = rows_of(name, model)
    collate = PaddingFreeCollator(model)
    with torch.no_grad():
        total = sum(float(token_loss_sum(model, collate([[row]]), fused=False)) for row in rows)
        count = sum(int((row["labels"][1:] != -100).sum()) for row in rows)

    def host(batch: list[dict[str, Any]]) -> dict[str, Any]:
        kept = ("input_ids", "labels", "pixel_values", "image_grid_thw")
        return {k: v[None] if k in kept[:2] else v for k, v in batch[0].items() if k in kept}

    with tempfile.TemporaryDirectory() as place:
        args = TrainingArguments(
            place, max_steps=1, per_device_train_batch_size=1, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=rows, data_collator=host)
        pack(trainer, 128)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 1 and abs(losses[0] - total / count) < 2e-3, (losses, total / count)


LAWS: dict[str, Callable[[], None]] = {
    f"{law}, {'Qwen3' if name == TEXT else 'Qwen2.5-VL'}": (lambda check=check, name=name: check(name))
    for law, check in {
        "collator": collated,
        "proof": proven,
        "own trainer": own_trainer,
        "Trainer": host_trainer,
    }.items()
    for name in (TEXT, VISION)
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def main(chosen: list[str]) -> None:
    import transformers

    sys.stdout.write(
        json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}) + "\n"
    )
    for law, check in LAWS.items():
        if chosen and law not in chosen:
            continue
        told = None
        try:
            with _quiet():
                check()
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if chosen:
                raise
        sys.stdout.write(json.dumps({"law": law, "broken": told}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
