"""The real ms-swift beside packtrain: packs and time of its `PackingDataset`, and the start of `swift sft`.

`PACKTRAIN_SWIFT=/path/of/its/python python -m bench.hosts DATA` runs it (without the variable: left out).

Its own packing asks for flash attention when the arguments are read, and starts on no CPU:

    --attn_impl sdpa         refused by SftArguments._check_padding_free, before anything is loaded
    --attn_impl flash_attn   refused by transformers when the model is loaded: flash_attn is not installed

So the variant "ms-swift, its packing" runs with that one check replaced here, in the bench: the flags are set
as it sets them, sdpa is taken. Data, packing, collator, trainer and step are its own. The time to its first
step is its own too; its losses on a CPU are not what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["SWIFT", "VARIANTS", "packing", "start"]

#: The Python of ms-swift's environment.
SWIFT = os.environ.get("PACKTRAIN_SWIFT")
REPOSITORY = Path(__file__).resolve().parents[1]
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
    told = _run("packing", lengths)
    return {name: (int(packs), float(seconds)) for name, (packs, seconds) in told.items()}


def start(name: str, folder: Path, out: Path) -> tuple[int, float, float]:
    """Rows that the trainer holds; wall and processor seconds of its process to the first optimizer step."""
    started = time.time()
    told = _run("start", name, folder, out)
    return int(told["held"]), float(told["stepped"]) - started, float(told["cpu"])


def _run(*words: Any) -> Any:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    more = {"PYTHONPATH": str(REPOSITORY / "src"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(SWIFT), "-m", "bench.hosts_swift", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**kept, **more, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _packing(file: str) -> dict[str, tuple[int, float]]:
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


def _start(name: str, folder: Path, out: str) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    plugin, switches = VARIANTS[name]
    from swift.arguments import SftArguments
    from swift.pipelines.train.sft import SwiftSft

    if plugin:
        from packtrain.hosts.ms_swift import install

        install()
    else:

        def flags_only(self: Any) -> None:
            self.padding_free = bool(self.packing)

        SftArguments._check_padding_free = flags_only
    told: dict[str, Any] = {}

    class First(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            told.update({"stepped": time.time(), "cpu": time.process_time()})
            control.should_training_stop = True

    train = SwiftSft.train

    def watched(self: Any, trainer: Any) -> Any:
        told["held"] = len(trainer.train_dataset)
        trainer.add_callback(First())
        return train(self, trainer)

    SwiftSft.train = watched
    where = {"model": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": out}
    words = {**SWITCHES, **where, **switches}
    from swift.pipelines import sft_main

    sft_main([word for key, value in words.items() for word in (f"--{key}", str(value))])
    return told


def _child(words: list[str]) -> None:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    told = _packing(words[1]) if words[0] == "packing" else _start(words[1], Path(words[2]), words[3])
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1:])
