"""The losses of the golden set: short runs of tiny models by command line, `train` and `pack(trainer)`."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packtrain as pt
from golden import Values, called, hashed, rows, written

#: Plain gradient descent: rounding of another CPU stays rounding, where Adam makes steps of it.
TRAINING: Values = {
    "logging_steps": 1,
    "save_strategy": "no",
    "proof": False,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "packing_length_precompute_workers": 1,
    "use_cpu": True,
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def text_config(root: Path, name: str, **training: Any) -> Path:
    """The YAML of a run on the encoded rows; JSON is YAML."""
    values = {
        "global_max_length": 64,
        "model": {"name_or_path": "tiny:qwen3"},
        "custom": {"train_jsonl": str(written(root / "rows.jsonl")), "kind": "encoded"},
        "training": {"output_dir": str(root / name), **TRAINING, **training},
    }
    if "sharded_lazy" in training:
        values["custom"] = {"dataset": str(root / "growing")}
        del values["global_max_length"]
    path = root / f"{name}.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


RUNS: dict[str, Values] = {
    "planned": {"effective_batch_size": 4, "num_train_epochs": 2},
    "balanced": {"effective_batch_size": 4, "max_steps": 6, "packing_strategy": "ffd"},
    "replanned": {"effective_batch_size": 4, "num_train_epochs": 2, "replan": "epoch"},
    "steps of samples": {"samples_per_step": 12, "max_steps": 6},
    "sample mean": {"effective_batch_size": 4, "max_steps": 4, "loss_reduction": "sample"},
    "stream": {
        "packing_mode": "streaming", "max_steps": 9, "stream_window": 16, "stream_shuffle_buffer": 8,
        "gradient_accumulation_steps": 2,
    },
    "budget": {
        "packing_mode": "streaming", "max_steps": 7, "stream_window": 16, "dyn_bsz": True,
        "micro_batch_size": 2,
    },
    "growing": {
        "sharded_lazy": True, "sharded_lazy_pre_packed": True, "packing": False, "max_steps": 7,
        "train_dataloader_shuffle": False, "gradient_accumulation_steps": 2,
        "sharded_lazy_start": "beginning",
    },
}  # fmt: skip

#: Checkpoint whose state file is kept: run -> (step, file).
CHECKPOINTS = {
    "planned": (3, "packs.json"),
    "replanned": (3, "packs.json"),
    "stream": (4, "stream.0.json"),
    "budget": (4, "stream.0.json"),
    "growing": (4, "stream.json"),
}


def losses_of(folder: Path) -> list[float]:
    lines = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(row["loss"]) for row in map(json.loads, lines) if "loss" in row]


def run_losses(root: Path, name: str, folders: Path, **training: Any) -> list[float]:
    """One run of the command line."""
    if name == "growing" and not (root / "growing").exists():
        shutil.copytree(folders / "growing", root / "growing")
    output = name.replace(" ", "_")
    with one_thread():
        called("train", text_config(root, output, **{**RUNS[name], **training}))
    return losses_of(root / output)


def vision_losses(root: Path) -> list[float]:
    """A tiny vision-language model on samples with pictures."""
    import torch

    from packtrain.train import load_config, tiny_model, train

    model = tiny_model("tiny:qwen2_5_vl", seed=1)
    samples = [_picture(model, i) for i in range(16)]

    class Encoded:
        def encode(self, sample: Values) -> Values:
            return dict(sample)

    plan = pt.plan([len(sample["input_ids"]) for sample in samples], 40)
    options = {**TRAINING, "output_dir": str(root), "learning_rate": 0.1, "max_steps": 5}
    del options["packing_length_precompute_workers"]
    with one_thread():
        torch.manual_seed(0)
        result = train(
            load_config({"training": {**options, "gradient_accumulation_steps": 2}}),
            plan, samples, Encoded(), model=model,
        )  # fmt: skip
    return [loss for _, loss in result.losses]


def _picture(model: Any, number: int) -> Values:
    """A sample with no, one or two pictures; the last five tokens are trained."""
    import torch

    config, tower = model.config, model.config.vision_config
    grids = [(1, 4, 6), (1, 4, 4)][: number % 3]
    ids: list[int] = hashed(5, 1, 500, 50 + number).tolist()
    types = [0] * 5
    for t, h, w in grids:
        count = t * h * w // tower.spatial_merge_size**2
        ids += [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
        types += [0, *[1] * count, 0]
    ids += hashed(5, 1, 500, 90 + number).tolist()
    types += [0] * 5
    tokens = torch.tensor(ids)
    sample = {
        "input_ids": tokens,
        "labels": torch.cat([torch.full_like(tokens[:-5], -100), tokens[-5:]]),
        "position_ids": torch.arange(len(ids)).expand(3, -1),
        "sample_id": number,
    }
    if grids:
        grid = torch.tensor(grids)
        positions, _ = model.model.get_rope_index(
            tokens[None], mm_token_type_ids=torch.tensor(types)[None], image_grid_thw=grid
        )
        width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        patches = int(grid.prod(-1).sum())
        pixels = hashed(patches * width, -1000, 1000, number).reshape(patches, width)
        sample |= {
            "position_ids": positions[:, 0],
            "pixel_values": torch.tensor(pixels, dtype=torch.float32) / 1000,
            "image_grid_thw": grid,
        }
    return sample


class Padded:
    """A user's own collator: rows of one length each, padded with zeros."""

    def __call__(self, batch: list[Values]) -> Values:
        import torch

        longest = max(len(row["input_ids"]) for row in batch)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in batch]
        return {
            key: torch.tensor([list(row[key]) + [value] * (longest - len(row[key])) for row in rows])
            for key, value in fill.items()
        }


def packed_trainer_losses(root: Path, **options: Any) -> list[float]:
    """`pack(trainer)` around transformers' own Trainer."""
    import transformers

    from packtrain.hosts.transformers import pack
    from packtrain.train import tiny_model

    batch = 2 if options else 1
    arguments = transformers.TrainingArguments(
        output_dir=str(root), per_device_train_batch_size=batch, gradient_accumulation_steps=2, max_steps=6,
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        save_strategy="no", use_cpu=True, disable_tqdm=True, seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    with one_thread():
        model = tiny_model("tiny:qwen3", seed=2)
        trainer = pack(
            transformers.Trainer(model=model, args=arguments, train_dataset=rows(48), data_collator=Padded()),
            pack_length=64,
            **options,
        )
        trainer.train()
    return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]


def losses(folders: Path, states: Path | None = None) -> Values:
    """Losses of every run; with `states`, the state files of checkpoints are kept there."""
    out: Values = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in RUNS:
            saving = (
                {"save_strategy": "steps", "save_steps": CHECKPOINTS[name][0]} if name in CHECKPOINTS else {}
            )
            out[name] = run_losses(root, name, folders, **saving)
            if states is not None and name in CHECKPOINTS:
                step, file = CHECKPOINTS[name]
                states.mkdir(exist_ok=True)
                shutil.copy(root / name / f"checkpoint-{step}" / file, states / f"{name}.{file}")
        out["vision"] = vision_losses(root / "vision")
        out["pack(trainer)"] = packed_trainer_losses(root / "hf")
        out["pack(trainer) same"] = packed_trainer_losses(root / "same", samples_per_step="same")
    return out
