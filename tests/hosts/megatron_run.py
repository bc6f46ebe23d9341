"""Run in Megatron's environment: `python megatron_run.py SPEC.json`; what its reader makes of packed data.

spec: file (`.npy`, or a folder of Parquet), eos, report, and one of
    multiple    of every sample (`pad_seq_to_mult`), with cap
    params      of `.npy`: keywords of `PackedSeqParams`, with labels of their row
    packing     of Parquet: its metadata, with cap

Megatron-Bridge imports all of its models with its first module, and they need kernels of a GPU: the packages
above its reader are entered without their `__init__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import typing_extensions

PARTS = ("bridge", "bridge.data", "bridge.data.datasets", "bridge.training", "bridge.training.tokenizers")
#: Of the releases that read Parquet.
NEWER = ("bridge.data.packing", "bridge.utils")
#: As `create_sft_dataset` calls it.
FIELDS = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}


def reader(file: str) -> Any:
    found = importlib.util.find_spec("megatron.core")
    root = Path(str(found.origin)).parents[1]
    npy = file.endswith(".npy")
    for part in PARTS if npy else (*PARTS, *NEWER):
        module = types.ModuleType(f"megatron.{part}")
        module.__path__ = [str(root / part.replace(".", "/"))]
        sys.modules[module.__name__] = module
    if npy:
        return importlib.import_module("megatron.bridge.data.datasets.sft").GPTSFTPackedDataset
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    return importlib.import_module("megatron.bridge.data.packing.parquet").GPTSFTPackedParquetDataset


class Tokenizer:
    """What the reader asks of a tokenizer."""

    def __init__(self, eos: int) -> None:
        self.eos_id = self.eod = self.bos_id = self.pad_id = eos
        self.space_sensitive = True

    def text_to_ids(self, text: str) -> list[int]:
        return [0] * len(text)


def rows_of(packed: Any) -> list[dict[str, Any]]:
    """What each pack becomes, alone in its batch."""
    names = ("tokens", "labels", "loss_mask", "position_ids")
    rows = []
    for index in range(len(packed)):
        batch = packed.collate_fn([packed[index]])
        boundaries = batch["cu_seqlens_q"] if "cu_seqlens_q" in batch else batch["cu_seqlens"]
        rows.append({**{n: batch[n][0].tolist() for n in names}, "boundaries": boundaries[0].tolist()})
    return rows


def padded_rows_of(packed: Any) -> list[dict[str, Any]]:
    """The same of samples with padding: where they end with it, and how many tokens are in front of it."""
    rows = rows_of(packed)
    for index, row in enumerate(rows):
        batch = packed.collate_fn([packed[index]])
        old = "cu_seqlens_unpadded" in batch  # 0.3.1; newer ones have the names of PackedSeqParams
        names = ("cu_seqlens", "cu_seqlens_unpadded") if old else ("cu_seqlens_q_padded", "cu_seqlens_q")
        row["padded"], row["real"] = ([n for n in batch[name][0].tolist() if n >= 0] for name in names)
    return rows


def rolled(spec: dict[str, Any]) -> list[list[int]]:
    """Labels of two depths of multi-token prediction, by megatron-core."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    held = {
        k: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for k, v in spec["params"].items()
    }
    params, labels, found = PackedSeqParams(**held), torch.tensor([spec["labels"]]), []
    for _ in range(2):
        labels, _ = roll_tensor(labels, shifts=-1, dims=-1, packed_seq_params=params)
        found.append(labels[0].tolist())
    return found


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    kind, tokenizer = reader(spec["file"]), Tokenizer(spec["eos"])
    sizes = {"max_seq_length": 4096, "pad_seq_length_to_mult": 1, "answer_only_loss": True}
    if "multiple" in spec:
        sizes |= {
            "max_seq_length": spec["cap"],
            "pad_to_max_length": True,
            "pad_seq_to_mult": spec["multiple"],
        }
        seen: Any = {"rows": padded_rows_of(kind(spec["file"], tokenizer, **FIELDS, **sizes))}
    elif spec["file"].endswith(".npy"):
        seen = {"rows": rows_of(kind(spec["file"], tokenizer, **FIELDS, **sizes)), "rolled": rolled(spec)}
    else:
        static = {"pad_cu_seqlens": True, "pad_to_max_length": True, "max_seq_length": spec["cap"]}
        static["pack_metadata_file_path"] = spec["packing"]
        seen = {"rows": rows_of(kind(spec["file"], tokenizer, **FIELDS, **sizes))}
        padded = kind(spec["file"], tokenizer, **FIELDS, **{**sizes, **static})
        seen["static"] = [row["boundaries"] for row in rows_of(padded)]
    Path(f"{spec['report']}.0").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
