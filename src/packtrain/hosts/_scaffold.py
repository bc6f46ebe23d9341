"""What `packtrain init` writes: a commented YAML and the host's launch script."""

from __future__ import annotations

import importlib.resources
import json
import shlex
from pathlib import Path
from typing import Any

import yaml

_ENDS = "  answer_end: {end}                      # ms-swift trains the line break behind an answer, too\n"
_DROPS = "  allow_dropped: [{kinds}]         # what the chat template leaves out\n"

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


def _text(name: str) -> str:
    """A template of the folder `scaffold`."""
    return (importlib.resources.files(__package__) / "scaffold" / name).read_text(encoding="utf-8")


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
    made = {folder / "packtrain.yaml": _text("packtrain.yaml").format(**plain)}
    if host == "swift":
        quoted = {
            key: shlex.quote(value) if isinstance(value, str) and key != "by" else value
            for key, value in values.items()
        }
        root = options.get("media_root")
        quoted["root_line"] = f"export ROOT_IMAGE_DIR={shlex.quote(root)}\n" if root else ""
        named = quoted.get("template")
        quoted["template_line"] = f"\n  --template {named} \\" if named else ""
        made[folder / "train.sh"] = _text("train.sh").format(**quoted)
        made[folder / "packtrain_plugin.py"] = _text("packtrain_plugin.py.txt")
        return made
    sees = values["kinds"] != "text" and values.get("sees", True)
    auto = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    parts = {name: text.replace("{auto}", auto) for name, text in (_HF if host == "hf" else _TRL).items()}
    return {**made, folder / "train.py": _text("train.py.txt").format(**values, **parts, script="train.py")}
