"""Fine-tune with TRL's SFTTrainer, text or Qwen-VL. Lines that packtrain adds end in `# packtrain`.

python examples/trl_sft.py MODEL train.jsonl out
"""

import json
import sys

import torch
import transformers
from datasets import Dataset, Features, Image, List, Value
from trl import SFTConfig, SFTTrainer

from packtrain.hosts.trl import pack  # packtrain

TURN = List({"role": Value("string"), "content": Value("string")})


def read(path):
    """Rows {"messages": [{"role", "content"}]}, some with "images": [path], as TRL reads them."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    made = []
    for row in rows:
        turns = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in row["messages"]]
        made.append({"prompt": turns[:-1], "completion": turns[-1:], "images": row.get("images", [])})
    if not any(row["images"] for row in made):
        return Dataset.from_list([{key: row[key] for key in ("prompt", "completion")} for row in made])
    return Dataset.from_list(made, Features(prompt=TURN, completion=TURN, images=List(Image())))


def main(model_path, data_path, out, eval_path=None, trainer_class=SFTTrainer, peft_config=None, **more):
    transformers.set_seed(0)
    settings = {
        "output_dir": out,
        "max_length": 2048,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": torch.cuda.is_available(),
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
    }
    trainer = trainer_class(
        model=str(model_path),
        args=SFTConfig(**{**settings, **more}),
        train_dataset=read(data_path),
        eval_dataset=read(eval_path) if eval_path else None,
        peft_config=peft_config,
    )
    pack(trainer, samples_per_step="same")  # packtrain
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4]).train()
