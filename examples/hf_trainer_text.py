"""Fine-tune a language model with the transformers Trainer. Lines that packtrain adds end in `# packtrain`.

python examples/hf_trainer_text.py MODEL train.jsonl out
"""

import json
import sys

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from packtrain.hosts.transformers import pack  # packtrain


def encode(tokenizer, row):
    """Chat {"messages": [{"role", "content"}]} -> tokens; only the last answer is trained."""
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    asked = len(tokenizer(prompt)["input_ids"])
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * asked + ids[asked:]}


def read(tokenizer, path):
    with open(path, encoding="utf-8") as lines:
        return [encode(tokenizer, json.loads(line)) for line in lines]


def main(model_path, data_path, out, eval_path=None, trainer_class=Trainer, wrap=lambda model: model, **more):
    transformers.set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = wrap(AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"))
    settings = {
        "output_dir": out,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
    }
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(**{**settings, **more}),
        train_dataset=read(tokenizer, data_path),
        eval_dataset=read(tokenizer, eval_path) if eval_path else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    pack(trainer, pack_length=2048, samples_per_step="same")  # packtrain
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4]).train()
