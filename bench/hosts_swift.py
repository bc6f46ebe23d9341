"""The real ms-swift beside packtrain: packs and time of its `PackingDataset`, and the start of `swift sft`.

Its own packing asks for flash attention when the arguments are read, and starts on no CPU:

    --attn_impl sdpa         refused by SftArguments._check_padding_free, before anything is loaded
    --attn_impl flash_attn   refused by transformers when the model is loaded: flash_attn is not installed

So the variant "ms-swift, its packing" runs with that one check replaced here, in the bench: the flags are set
as it sets them, sdpa is taken. Data, packing, collator, trainer and step are its own. The time to its first
step is its own too; its losses on a CPU are not what is measured.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .host_child import at_first_step, run

__all__ = ["VARIANTS", "child", "packing"]

CAP = 2048
#: name -> (plugin, switches)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "ms-swift, its packing (binpack)": (False, {"packing": "true", "packing_length": CAP}),
    "ms-swift, packtrain": (True, {"packing": "true", "packing_length": CAP}),
    "ms-swift, unpacked": (False, {"per_device_train_batch_size": 8}),
}
SWITCHES = {
    "model_type": "qwen3",
    "template": "qwen2_5",
    "tuner_type": "full",
    "attn_impl": "sdpa",
    "torch_dtype": "float32",
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "split_dataset_ratio": 0,
    "add_version": "false",
    "report_to": "none",
    "use_hf": "true",
    "check_model": "false",
    "max_length": CAP,
    "gradient_checkpointing": "false",
    "load_from_cache_file": "false",
    "dataloader_num_workers": 0,
    "use_cpu": "true",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}


def packing(lengths: Path) -> dict[str, tuple[int, float]]:
    """name -> (packs, seconds) of both planners on the same lengths, in one process of ms-swift's Python."""
    told = run("swift", "packing", lengths)
    return {name: (int(packs), float(seconds)) for name, (packs, seconds) in told.items()}


def _packing(file: Path) -> dict[str, tuple[int, float]]:
    from types import SimpleNamespace

    import numpy as np
    from swift.dataset import PackingDataset

    import packtrain as pt

    lengths = np.load(file)
    template = SimpleNamespace(max_length=CAP)

    class Held(dict):  # type: ignore[type-arg]
        """What its packing asks of a dataset: a column of lengths, and how many rows there are."""

        def __len__(self) -> int:
            return len(self["lengths"])

    def theirs(found: Any) -> int:
        return len(PackingDataset(template, Held(lengths=found.tolist())))

    def ours(found: Any) -> int:
        return len(pt.plan(pt.Lengths(found), pack_length=CAP))

    told = {}
    for name, plan in (("packtrain", ours), ("ms-swift", theirs)):
        plan(lengths[:2000])  # imports and compilation are not what is compared
        times = []
        for _ in range(3):
            began = time.perf_counter()
            packs = plan(lengths)
            times.append(time.perf_counter() - began)
        told[name] = (packs, min(times))
    return told


def child(name: str, folder: Path, out: Path | None = None) -> None:
    if name == "packing":
        print("\n" + json.dumps(_packing(folder)), flush=True)
        return
    plugin, switches = VARIANTS[name]
    from swift.arguments import SftArguments

    if plugin:
        from packtrain.hosts.ms_swift import install

        install()
    else:

        def flags_only(self: Any) -> None:
            self.padding_free = bool(self.packing)

        SftArguments._check_padding_free = flags_only
    at_first_step(lambda trainer: len(trainer.train_dataset))
    where = {"model": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": out}
    words = {**SWITCHES, **where, **switches}
    from swift.pipelines import sft_main

    sft_main([word for key, value in words.items() for word in (f"--{key}", str(value))])
