"""NeMo Automodel 0.7.0: its SFT recipe, by its own command line on two ranks; its YAML names packs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from host_runs import REPOSITORY, ids_of, leak_of, refused, start
from venvs import build

import packtrain as pt
from packtrain.template import HFTemplate, load_processor

pytestmark = pytest.mark.hosts

EXAMPLE = REPOSITORY / "examples" / "automodel_packs.yaml"
OURS = ["pydantic", "pyyaml", "click", "rich", "pillow", "numba", "psutil", "accelerate", "jinja2"]
LIGHT = ["pyyaml", "tiktoken", "ninja", "sentencepiece", "einops", "peft", "wandb"]
NO_DEPS = [
    "nemo-automodel==0.7.0",
    "megatron-fsdp==0.5.0",
    "torchao==0.18.0",
    "flashoptim==0.1.4",
    "mistral-common==1.13.1",
]


def automodel_python() -> Path:
    pinned = ["transformers==5.18.0", "datasets==4.8.4", "torchdata==0.11.0"]
    return build("automodel", [*pinned, *LIGHT, *OURS], no_deps=NO_DEPS)


def alone(network: Path, talks: Path, ids: list[int]) -> tuple[float, int]:
    """Loss of samples, each by itself, and the tokens it is of."""
    from transformers import AutoModelForCausalLM

    template, source = HFTemplate(load_processor(str(network))), pt.open_chats(talks)
    model, total, tokens = AutoModelForCausalLM.from_pretrained(network).eval(), 0.0, 0
    for number in ids:
        sample = template.encode(source[number])
        row, labels = (torch.as_tensor(sample[name])[None] for name in ("input_ids", "labels"))
        count = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += (
                float(model(input_ids=row, labels=labels, use_cache=False).loss) * count if count else 0.0
            )
        tokens += count
    return total, tokens


@pytest.fixture
def recipe(network: Path, talks: Path, tmp_path: Path) -> dict[str, Any]:
    """The example on the page, over a plan of 200 samples in five steps."""
    template = HFTemplate(load_processor(str(network)))
    lengths = pt.measure(pt.open_chats(talks), template, tmp_path / "lengths")
    plan = pt.plan(lengths, pack_length=1280, samples_per_step=40, packs_multiple=2)
    plan.save(tmp_path / "plan")
    held = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    held["dataset"] |= {"model": str(network), "rows": str(talks), "plan": str(tmp_path / "plan")}
    held["model"] |= {"pretrained_model_name_or_path": str(network), "attn_implementation": "sdpa"}
    held["step_scheduler"] |= {"global_batch_size": len(plan) // 5, "ckpt_every_steps": 2}
    held["model"]["torch_dtype"], held["optimizer"]["lr"] = "float32", 1e-3
    held["checkpoint"] |= {"checkpoint_dir": str(tmp_path / "out"), "save_consolidated": False}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(held), encoding="utf-8")
    return {"config": str(path), "examples": str(EXAMPLE.parent), "train": []}


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
def test_its_recipe_trains_as_unpacked_and_a_resume_goes_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    """200 samples, 5 steps of 40 over two ranks; resumed behind step 2."""
    seen = start(automodel_python(), "automodel_run.py", tmp_path, "packed", ranks=2, **recipe)
    steps = ids_of(seen)
    assert sorted(n for step in steps for n in step) == list(range(200))
    assert [len(step) for step in steps] == [40] * 5
    for number, (loss, tokens) in enumerate(seen[0]["told"]):
        alone = [one for rank in seen for one in rank["alone"][number]]
        assert tokens == sum(count for _, count in alone)
        assert loss == pytest.approx(sum(total for total, _ in alone) / tokens, rel=1e-4)
    for number in (3, 4):  # it writes over no checkpoint
        shutil.rmtree(tmp_path / "out" / f"epoch_0_step_{number}")
    recipe["train"] = ["--checkpoint.restore_from", "epoch_0_step_1"]
    again = start(automodel_python(), "automodel_run.py", tmp_path, "resumed", ranks=2, **recipe)
    assert ids_of(again) == steps[2:]
    assert again[0]["told"] == [pytest.approx(told, rel=1e-6) for told in seen[0]["told"][2:]]


def test_attention_that_forgets_boundaries_is_refused(
    recipe: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    told = refused(automodel_python(), "automodel_run.py", tmp_path, "leak", ranks=2, leak=True, **recipe)
    record_property("refused", leak_of(told))


def test_its_loaders_give_the_packs_of_the_plan(network: Path, talks: Path, tmp_path: Path) -> None:
    """200 samples on two ranks, behind a state, and in another order in the next epoch."""
    template = HFTemplate(load_processor(str(network)))
    plan = pt.plan(pt.measure(pt.open_chats(talks), template, tmp_path / "lengths"), pack_length=1280)
    plan.save(tmp_path / "plan")
    held = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    held["dataset"] |= {"model": str(network), "rows": str(talks), "plan": str(tmp_path / "plan")}
    config = tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(held), encoding="utf-8")
    examples = str(REPOSITORY / "examples")
    spec = {"config": str(config), "stop": 5, "examples": examples}
    (seen,) = start(automodel_python(), "automodel_run.py", tmp_path, "loaders", **spec)
    for epoch in ("ranks", "epoch"):
        once = [n for rank in seen[epoch] for pack in rank for n in pack]
        assert sorted(set(once)) == list(range(200))
        assert len(seen[epoch][0]) == len(seen[epoch][1]) == -(-len(plan) // 2)
    assert seen["epoch"] != seen["ranks"]
    assert seen["rest"] == [rank[5:] for rank in seen["ranks"]]
    for rank, losses in enumerate((seen["losses"][:3], seen["losses"][3:])):
        for ids, (total, count) in zip(seen["ranks"][rank], losses, strict=False):
            wanted, tokens = alone(network, talks, ids)
            assert count == tokens and total == pytest.approx(wanted, rel=1e-4)


def test_the_page_counts_the_lines() -> None:
    ours = re.findall(r".*# packtrain$", EXAMPLE.read_text(encoding="utf-8"), re.M)
    page = (REPOSITORY / "docs" / "hosts_more.md").read_text(encoding="utf-8")
    assert f"({len(ours)} lines of `examples/automodel_packs.yaml`" in page and len(ours) <= 4
