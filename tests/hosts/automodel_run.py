"""Run in Automodel's environment: `python automodel_run.py SPEC.json`.

spec: config (a YAML file of a recipe), examples (their folder), report, and one of
    stop    batches of each of two ranks before their states: what its loaders give of packs, and its loss
    train   further words of its command line, by ranks of torchrun: what its recipe trained
leak: attention that forgets the boundaries.

A CPU: what its recipe asks of a card is answered here; all else is its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
CPU = torch.device("cpu")
SEEN: dict[str, list[Any]] = {"ids": [], "losses": [], "alone": [], "told": []}


class OnCpu:
    """torch, for a module that places its model on a card by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *named: Any) -> torch.device:
        return CPU


def on_a_processor() -> None:
    cuda: Any = torch.cuda
    for name in ("reset_peak_memory_stats", "empty_cache", "max_memory_allocated"):
        setattr(cuda, name, lambda *_: 0)
    cuda.current_device = lambda: CPU
    import nemo_automodel._transformers.auto_model as auto_model

    auto_model.torch = OnCpu()
    dist.init_process_group("gloo")  # its own beginning has a barrier of devices


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def watch() -> None:
    """Note samples and losses of every step, and its own losses of each sample alone."""
    import automodel_packs
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as Recipe

    base, step, body = automodel_packs.collate, Recipe._run_train_optim_step, Recipe._forward_backward_step

    def collate(packs: Any) -> Any:
        return {**base(packs), "samples": [one for pack in packs for one in pack]}

    def train_step(self: Any, batches: Any, *args: Any) -> Any:
        for notes in (SEEN["ids"], SEEN["losses"], SEEN["alone"]):
            notes.append([])
        made = step(self, batches, *args)
        SEEN["told"].append([made.metrics["loss"], made.metrics["num_label_tokens"]])
        return made

    def forward(self: Any, index: int, batch: Any, *, loss_buffer: list[Any], **kwargs: Any) -> None:
        samples = batch.pop("samples")
        SEEN["ids"][-1] += [int(one["sample_id"]) for one in samples]
        count = torch.tensor(len(samples))
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # sharded ranks pass together
        passes = (samples + samples[:1] * int(count))[: int(count)]
        SEEN["alone"][-1] += [alone(self, one) for one in passes][: len(samples)]
        body(self, index, batch, loss_buffer=loss_buffer, **kwargs)
        SEEN["losses"][-1].append(float(loss_buffer[-1]))

    automodel_packs.collate = collate
    Recipe._run_train_optim_step, Recipe._forward_backward_step = train_step, forward


def alone(recipe: Any, sample: Any) -> list[float]:
    ids, labels = (torch.as_tensor(sample[name])[None] for name in ("input_ids", "labels"))
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        logits = recipe.model_parts[0](input_ids=ids, use_cache=False).logits
    return [float(recipe.loss_fn(logits, targets)), int((targets != -100).sum())]


def train(spec: dict[str, Any]) -> None:
    on_a_processor()
    if spec.get("leak"):
        leak()
    watch()
    from nemo_automodel.cli.app import main as automodel

    sys.argv = ["automodel", spec["config"], *spec["train"]]
    automodel()
    Path(f"{spec['report']}.{os.environ['RANK']}").write_text(json.dumps(SEEN))


def loaders(spec: dict[str, Any]) -> None:
    """Its own reading of the YAML, data loaders, states and loss; the model is transformers' own."""
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
                    logits = model(**batch).logits
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


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.path.append(spec["examples"])
    train(spec) if "train" in spec else loaders(spec)


if __name__ == "__main__":
    main()
