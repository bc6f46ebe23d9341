"""Run in Automodel's environment: `python automodel_run.py SPEC.json`; what its loaders give of packs.

spec: config (a YAML file of a recipe), examples (their folder), stop (batches of each of two ranks before
their states), report.

Its own reading of the YAML, data loaders, states and loss; the model is transformers' own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402

torch.set_num_threads(1)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.path.append(spec["examples"])
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.components.datasets.loader import (
        DataloaderConfig,
        make_collate_fn,
        make_dataset_config,
    )
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from transformers import AutoModelForCausalLM

    config = load_yaml_config(spec["config"])
    target, kwargs = config.dataset._target_, config.dataset.to_dict()
    kwargs.pop("_target_")
    loader_config = DataloaderConfig(
        dataset_config=make_dataset_config(target, kwargs),
        batch_size=config.dataloader.batch_size,
        collate_fn=make_collate_fn(config.dataloader.collate_fn),
    )

    def build(rank: int, ranks: int) -> Any:
        def noted(base: Any) -> Any:
            return lambda packs: {**base(packs), "ids": [int(n) for pack in packs for n in pack.ids]}

        return loader_config.build(dp_rank=rank, dp_world_size=ranks, collate_wrapper=noted)

    model, loss = AutoModelForCausalLM.from_pretrained(kwargs["model"]).eval(), MaskedCrossEntropy()
    seen: dict[str, Any] = {"ranks": [], "losses": [], "first": [], "rest": [], "epoch": []}
    states = []
    for rank in range(2):
        loader, ids = build(rank, 2), []
        for number, batch in enumerate(loader):
            ids.append(batch.pop("ids"))
            if number < 3:
                labels = batch.pop("labels")
                with torch.no_grad():
                    logits = model(**batch, use_cache=False).logits
                count = int((labels != -100).sum())
                seen["losses"].append([float(loss(logits, labels)), count])
            if number + 1 == spec["stop"]:
                states.append(loader.state_dict())
        seen["ranks"].append(ids)
        seen["epoch"].append([batch["ids"] for batch in loader])
    for rank in range(2):
        loader = build(rank, 2)
        loader.load_state_dict(states[rank])
        seen["rest"].append([batch["ids"] for batch in loader])
    Path(f"{spec['report']}.0").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
