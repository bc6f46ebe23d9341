"""What `packtrain init` writes: a commented YAML and the host's launch script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

__all__ = ["files_for"]

_YAML = """\
# Written by `packtrain init`. `packtrain measure`, `plan`, `forecast` and `run` read the same data by it.
# {samples} samples, {kinds}; of {looked} measured: mean {mean} tokens, longest {longest}.
global_max_length: {pack_length}        # cap of a pack, in tokens
model:
  name_or_path: {model}
custom:
  train_jsonl: {data}
{more_yaml}training:
  output_dir: {out}
  samples_per_step: 32                  # samples of an optimizer step, however many packs they fill
  num_train_epochs: 1
  learning_rate: 1.0e-5
"""

_HF = '''\
"""transformers Trainer on packs. Written by `packtrain init`; run: python {script}, or torchrun {script}"""

from packtrain.hosts.transformers import pack
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate, load_processor

from transformers import {auto}, Trainer, TrainingArguments

MODEL = {model!r}
processor = load_processor(MODEL)
template = HFTemplate(processor)
rows = ChatSource(open_source({data!r}){given})


def collate(rows):
    """One row: packs are made of rows, encoded one at a time."""
    sample = template.encode(rows[0])
    sample.pop("position_ids")
    return {{**sample, "input_ids": sample["input_ids"][None], "labels": sample["labels"][None]}}


trainer = Trainer(
    model={auto}.from_pretrained(MODEL, dtype="auto"),
    args=TrainingArguments(
        output_dir={out!r},
        per_device_train_batch_size=32,  # samples of a step, on every rank
        num_train_epochs=1,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        remove_unused_columns=False,
    ),
    train_dataset=rows,
    data_collator=collate,
    processing_class=processor,
)
pack(trainer, pack_length={pack_length}, samples_per_step="same", measure=template)
trainer.train()
'''

_TRL = '''\
"""TRL's SFTTrainer on packs. Written by `packtrain init`; run: python {script}, or torchrun {script}"""

from packtrain.hosts.trl import pack
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

import torch
from datasets import Dataset, Features, Image, List, Value
from trl import SFTConfig, SFTTrainer


def row(sample):
    """A chat as prompt and completion (the last turn is trained), its pictures beside it."""
    turns, images = [], []
    for message in sample["messages"]:
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        images += [part["image"] for part in message["content"] if part["type"] == "image"]
        turns.append({{"role": message["role"], "content": "".join(texts)}})
    return {{"prompt": turns[:-1], "completion": turns[-1:], "images": images}}


TURN = List({{"role": Value("string"), "content": Value("string")}})
source = ChatSource(open_source({data!r}){given})
data = Dataset.from_list(
    [row(source[number]) for number in range(len(source))],
    Features(prompt=TURN, completion=TURN, images=List(Image())),
)
{text_only}
trainer = SFTTrainer(
    model={model!r},
    args=SFTConfig(
        output_dir={out!r},
        max_length={pack_length},
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=32,  # samples of a step, on every rank
        num_train_epochs=1,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=data,
)
pack(trainer, samples_per_step="same")
trainer.train()
'''

_SWIFT = """\
#!/usr/bin/env bash
# ms-swift on packs. Written by `packtrain init`; runs in ms-swift's environment, with packtrain installed.
set -euo pipefail
{root_line}swift sft \\
  --model {model} \\{template_line}
  --dataset {data} \\
  --output_dir {out} \\
  --packing true \\
  --packing_length {pack_length} \\
  --max_length {pack_length} \\
  --attn_impl sdpa \\
  --per_device_train_batch_size 32 \\
  --gradient_accumulation_steps 1 \\
  --num_train_epochs 1 \\
  --learning_rate 1e-5 \\
  --split_dataset_ratio 0 \\
  --external_plugins "$(dirname "$0")/packtrain_plugin.py" "$@"
"""

_PLUGIN = '''\
"""Plugin of ms-swift: `swift sft --packing true --external_plugins` this file."""

from packtrain.hosts.ms_swift import install

install(samples_per_step="same")
'''


def files_for(host: str, folder: Path, values: dict[str, Any]) -> dict[Path, str]:
    """Files to write, by path.

    Args:
        host: "hf", "trl" or "swift".
        values: data, model, out, pack_length, samples, kinds, looked, mean, longest, template, options
            (of `ChatSource`), sees (whether the model takes media). `kinds` are those that any sample
            declares: no column of media is dropped.
    """
    options = dict(values.get("options") or {})
    values = {**values, "given": "".join(f", {name}={value!r}" for name, value in options.items())}
    values["more_yaml"] = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in options.items())
    plain = {
        key: yaml.safe_dump(value).split("\n")[0] if isinstance(value, str) else value
        for key, value in values.items()
    }
    plain["more_yaml"] = values["more_yaml"]
    made = {folder / "packtrain.yaml": _YAML.format(**plain)}
    if host == "swift":
        import shlex

        quoted = {
            key: shlex.quote(value) if isinstance(value, str) else value for key, value in values.items()
        }
        root = options.get("media_root")
        quoted["root_line"] = f"export ROOT_IMAGE_DIR={shlex.quote(root)}\n" if root else ""
        named = quoted.get("template")
        quoted["template_line"] = f"\n  --template {named} \\" if named else ""
        return {
            **made,
            folder / "train.sh": _SWIFT.format(**quoted),
            folder / "packtrain_plugin.py": _PLUGIN,
        }
    pictures = values["kinds"] != "text"
    more = {
        "script": "train.py",
        "auto": "AutoModelForImageTextToText"
        if pictures and values.get("sees", True)
        else "AutoModelForCausalLM",
        "text_only": "" if pictures else 'data = data.remove_columns("images")\n',
    }
    return {**made, folder / "train.py": (_HF if host == "hf" else _TRL).format(**values, **more)}
