"""The start of NeMo Automodel's SFT recipe on one CPU rank: its own packing, ours (planned in it), unpacked.

What it asks of a card is answered as in its tests (`tests/hosts/automodel_run.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .host_child import REPOSITORY, one_rank, planned, stepped

__all__ = ["VARIANTS", "child"]

CAP = 2048
CHAT = "nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset"
#: name -> (packed by us, rows of a step, packing of its own)
VARIANTS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "Automodel, its packing (neat)": (
        False,
        1,
        {"packed_sequence": {"packed_sequence_size": CAP, "packing_strategy": "neat"}},
    ),
    "Automodel, packtrain": (True, 1, {}),
    "Automodel, unpacked": (False, 8, {}),
}


def child(name: str, folder: Path, out: Path) -> None:
    ours, rows, more = VARIANTS[name]
    one_rank()
    import automodel_run
    import yaml

    held = yaml.safe_load((REPOSITORY / "examples" / "automodel_packs.yaml").read_text(encoding="utf-8"))
    files = {"model": str(folder / "model"), "rows": str(folder / "rows.jsonl"), "plan": str(out / "plan")}
    held["dataset"] |= files
    if not ours:
        held["recipe"] = "nemo_automodel.recipes.llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction"
        held["dataset"] = {"_target_": CHAT, "path_or_dataset_id": files["rows"]}
        held["dataloader"] = {"batch_size": rows}
    held["model"] |= {"pretrained_model_name_or_path": files["model"], "attn_implementation": "sdpa"}
    held["model"]["torch_dtype"] = "float32"
    held["step_scheduler"] |= {"global_batch_size": rows, "local_batch_size": rows, "max_steps": 1}
    held["checkpoint"] |= {"checkpoint_dir": str(out), "enabled": False}
    path = folder / "automodel.yaml"
    path.write_text(json.dumps({**held, **more}), encoding="utf-8")
    if ours:
        planned(folder, out, CAP)
    automodel_run.on_a_processor()
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.components.launcher.interactive import resolve_recipe_cls

    recipe = resolve_recipe_cls(held["recipe"])(parse_args_and_load_config(str(path), argv=[]))
    recipe.setup()
    recipe.log_train_metrics = lambda told: stepped(len(recipe.dataloader.dataset))
    recipe.run_train_validation_loop()
