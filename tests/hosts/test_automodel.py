"""NeMo Automodel 0.7.0: its YAML names packs; its loaders, states and loss, on a CPU.

Its training recipes need a GPU: the model that its loss is asked of is transformers' own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from host_runs import REPOSITORY, start
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


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
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
