"""What `packtrain init` writes: a commented YAML and the host's launch script."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

_YAML = """\
# Written by `packtrain init`. `packtrain run` and `train` read it: measure, plan, train, report.
{by}
# {samples} samples, {kinds}; of {looked} measured: mean {mean} tokens, longest {longest}.
global_max_length: {pack_length}        # cap of a pack, in tokens
model:
  name_or_path: {model}
custom:
  train_jsonl: {data}
{more_yaml}{template_yaml}training:
  output_dir: {own}
  samples_per_step: 32                  # samples of an optimizer step, however many packs they fill
  num_train_epochs: 1
  learning_rate: 1.0e-5
"""

_ENDS = "  answer_end: {end}                      # ms-swift trains the line break behind an answer, too\n"
_DROPS = "  allow_dropped: [{kinds}]         # what the chat template leaves out\n"

_SCRIPT = '''\
"""{title} on packs. Written by `packtrain init`; run: python {script}, or torchrun {script}"""
{by}

from packtrain.hosts.{module} import pack
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate, load_processor

{imports}

MODEL = {model!r}
processor = load_processor(MODEL)
template = HFTemplate(processor{may_drop})
source = ChatSource(open_source({data!r}){given})


def collate(rows):
    """One row: packs are made of rows, encoded one at a time."""
    sample = template.encode({row})
    sample.pop("position_ids")
    return {{**sample, "input_ids": sample["input_ids"][None], "labels": sample["labels"][None]}}


trainer = {trainer}(
    model={loaded},
    args={arguments}(
        output_dir={out!r},
        per_device_train_batch_size=32,  # samples of a step, on every rank
        num_train_epochs=1,
        learning_rate=1e-5,
        logging_steps=1,
        report_to="none",
        remove_unused_columns=False,{own_arguments}
    ),
    train_dataset={dataset},
    data_collator=collate,
    processing_class=processor,
)
pack(trainer, pack_length={pack_length}, samples_per_step="same", measure={measure})
trainer.train()
'''

_HF = {
    "title": "transformers Trainer",
    "module": "transformers",
    "imports": "from transformers import {auto}, Trainer, TrainingArguments",
    "trainer": "Trainer",
    "loaded": '{auto}.from_pretrained(MODEL, dtype="auto")',
    "arguments": "TrainingArguments",
    "own_arguments": "",
    "dataset": "source",
    "row": "rows[0]",
    "measure": "template",
}

_TRL = {
    "title": "TRL's SFTTrainer",
    "module": "trl",
    "imports": "import torch\nfrom datasets import Dataset\nfrom trl import SFTConfig, SFTTrainer",
    "trainer": "SFTTrainer",
    "loaded": "MODEL",
    "arguments": "SFTConfig",
    "own_arguments": """
        bf16=torch.cuda.is_available(),
        dataset_kwargs={"skip_prepare_dataset": True},  # the template encodes""",
    "dataset": 'Dataset.from_dict({"sample": range(len(source))})',  # TRL takes no other class
    "row": 'source[rows[0]["sample"]]',
    "measure": 'lambda row: template.measure(source[row["sample"]])',
}

_SWIFT = """\
#!/usr/bin/env bash
# ms-swift on packs. Written by `packtrain init`; runs in ms-swift's environment, with packtrain installed.
{by}
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


def command_line(*words: str) -> str:
    """The comment that says with which words `init` wrote a file."""
    return "# packtrain init " + " ".join(shlex.join(words).split())


def places_of(host: str, folder: Path) -> list[Path]:
    """The files that hold `command_line`."""
    return [folder / "packtrain.yaml", folder / ("train.sh" if host == "swift" else "train.py")]


def files_for(host: str, folder: Path, values: dict[str, Any]) -> dict[Path, str]:
    """Files to write, by path.

    Args:
        host: "hf", "trl" or "swift".
        values: data, model, out, pack_length, samples, kinds, looked, mean, longest, template, options
            (of `ChatSource`), answer_end and allow_dropped (of the template), sees (whether the model takes
            media), by (`command_line`). `kinds` are those that any sample declares: no column of media is
            dropped.
    """
    options = dict(values.get("options") or {})
    values = {**values, "given": "".join(f", {name}={value!r}" for name, value in options.items())}
    values["more_yaml"] = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in options.items())
    plain = {
        key: yaml.safe_dump(value).split("\n")[0] if isinstance(value, str) else value
        for key, value in values.items()
    }
    plain |= {"more_yaml": values["more_yaml"], "by": values["by"]}
    end, drops = values.get("answer_end", "mark"), list(values.get("allow_dropped") or ())
    values["may_drop"] = f", allow_dropped={drops!r}" if drops else ""
    lines = _ENDS.format(end=end) * (end != "mark") + _DROPS.format(kinds=", ".join(drops)) * bool(drops)
    plain["template_yaml"] = f"template:\n{lines}" if lines else ""
    plain["own"] = yaml.safe_dump(str(Path(values["out"]).with_name("packtrain"))).split("\n")[0]
    made = {folder / "packtrain.yaml": _YAML.format(**plain)}
    if host == "swift":
        quoted = {
            key: shlex.quote(value) if isinstance(value, str) and key != "by" else value
            for key, value in values.items()
        }
        root = options.get("media_root")
        quoted["root_line"] = f"export ROOT_IMAGE_DIR={shlex.quote(root)}\n" if root else ""
        named = quoted.get("template")
        quoted["template_line"] = f"\n  --template {named} \\" if named else ""
        return {**made, folder / "train.sh": _SWIFT.format(**quoted), folder / "packtrain_plugin.py": _PLUGIN}
    sees = values["kinds"] != "text" and values.get("sees", True)
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    parts = {name: text.replace("{auto}", auto) for name, text in (_HF if host == "hf" else _TRL).items()}
    return {**made, folder / "train.py": _SCRIPT.format(**values, **parts, script="train.py")}
