"""Run in Megatron's environment: `python megatron_run.py SPEC.json`; what its reader makes of a file.

spec: file (`training.npy`), eos, params (keywords of `PackedSeqParams`), labels (of their row), report.

Megatron-Bridge imports all of its models with its first module, and they need kernels of a GPU: the packages
above its reader are entered without their `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch


def reader() -> Any:
    found = importlib.util.find_spec("megatron.core")
    root = Path(str(found.origin)).parents[1]
    parts = ("bridge", "bridge.data", "bridge.data.datasets", "bridge.training", "bridge.training.tokenizers")
    for part in parts:
        module = types.ModuleType(f"megatron.{part}")
        module.__path__ = [str(root / part.replace(".", "/"))]
        sys.modules[module.__name__] = module
    return importlib.import_module("megatron.bridge.data.datasets.sft").GPTSFTPackedDataset


class Tokenizer:
    """What the reader asks of a tokenizer."""

    def __init__(self, eos: int) -> None:
        self.eos_id = self.eod = self.bos_id = self.pad_id = eos
        self.space_sensitive = True

    def text_to_ids(self, text: str) -> list[int]:
        return [0] * len(text)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    # as `create_sft_dataset` calls it
    fields = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}
    sizes = {"max_seq_length": 4096, "pad_seq_length_to_mult": 1, "answer_only_loss": True}
    packed = reader()(spec["file"], Tokenizer(spec["eos"]), **fields, **sizes)
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    batches = [packed.collate_fn([packed[index]]) for index in range(len(packed))]
    rows = [{name: batch[name][0].tolist() for name in names} for batch in batches]

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    held = {
        k: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for k, v in spec["params"].items()
    }
    params, labels, rolled = PackedSeqParams(**held), torch.tensor([spec["labels"]]), []
    for _ in range(2):
        labels, _ = roll_tensor(labels, shifts=-1, dims=-1, packed_seq_params=params)
        rolled.append(labels[0].tolist())
    Path(f"{spec['report']}.0").write_text(json.dumps({"rows": rows, "rolled": rolled}))


if __name__ == "__main__":
    main()
