"""One rank of two: packs of growing directories and of streams in the HF Trainer and in TRL, one run each.

torchrun --nproc_per_node=2 kinds_ranks.py FOLDERS TOKENIZER OUT
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402
from kinds import CAP, SAMPLES  # noqa: E402

from packtrain.data import LazyShardedDataset, StreamingPackedDataset, TokenBudgetDataset  # noqa: E402
from packtrain.testing.tiny import tiny_model  # noqa: E402

torch.set_num_threads(1)


def opened(kind: str, folders: Path) -> Any:
    """Without rank and world size: they come from the launcher."""
    if kind == "growing":
        return LazyShardedDataset(folders / "growing", start="beginning")
    if kind == "stream":
        return StreamingPackedDataset(SAMPLES, pack_length=CAP, window=50)
    return TokenBudgetDataset(SAMPLES, micro_batch_size=2, max_seq_len=CAP // 2, buffer_size=50)


def noting(base: Any, told: list[Any]) -> Any:
    class Noting(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            told.append([self.state.global_step, list(inputs.sample_ids)])
            return super().training_step(model, inputs, *args, **kwargs)

    return Noting


def main() -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from packtrain.hosts import transformers as hf
    from packtrain.hosts import trl

    folders, tokenizer, out = map(Path, sys.argv[1:])
    model = tiny_model("tiny:qwen3", seed=4)
    model.config.use_cache = False
    report = {}
    for kind in ("growing", "stream", "token_budget"):
        for host in ("hf", "trl"):
            told: list[Any] = []
            source = opened(kind, folders)
            steps = {} if kind == "growing" else {"max_steps": -(-sum(1 for _ in opened(kind, folders)) // 2)}
            options = {
                "output_dir": str(out / host / kind), "per_device_train_batch_size": 1, "learning_rate": 0.01,
                "gradient_accumulation_steps": 2, "optim": "sgd", "report_to": "none", "use_cpu": True,
                "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
                "remove_unused_columns": False, **steps,
            }  # fmt: skip
            own = copy.deepcopy(model)
            if host == "hf":
                args = TrainingArguments(**options)
                trainer = noting(Trainer, told)(model=own, args=args, train_dataset=source)
                trainer = hf.pack(trainer, balance=None)
            else:
                rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])  # not read
                args = SFTConfig(**options, max_length=CAP, bf16=False, gradient_checkpointing=False)
                trainer = noting(SFTTrainer, told)(
                    model=own, args=args, train_dataset=rows,
                    processing_class=AutoTokenizer.from_pretrained(tokenizer),
                )  # fmt: skip
                trainer = trl.pack(trainer, source=source, balance=None)
            trainer.train()
            report[f"{host} {kind}"] = {"steps": trainer.state.global_step, "told": told}
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that winds down


if __name__ == "__main__":
    main()
