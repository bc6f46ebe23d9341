"""torchtitan 0.3.0: its own Trainer on packs of a plan, and on with another data-parallel degree.

Model, masks, loss and checkpoints are torchtitan's; on a CPU its FlexAttention, whose kernel has no backward
there, is read as the dense attention of the mask that it was given.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from host_runs import REPOSITORY, leak_of, refused, start
from venvs import build

import packtrain as pt
from packtrain.template import HFTemplate, load_processor

pytestmark = pytest.mark.hosts

EXAMPLE = REPOSITORY / "examples" / "torchtitan_config.py"
SCRIPT = "torchtitan_run.py"
OURS = ["pydantic", "pyyaml", "click", "rich", "pillow", "numba", "psutil", "accelerate", "jinja2"]
LIGHT = ["tokenizers", "safetensors", "tyro", "tensorboard", "einops"]
NO_DEPS = ["torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing==0.1.1", "triton==3.9.0"]
STEPS = 5


def torchtitan_python() -> Path:
    pinned = ["transformers==5.17.0", "datasets==4.7.0", "torchdata==0.11.0"]
    return build("torchtitan", [*pinned, *LIGHT, *OURS], no_deps=NO_DEPS)


@pytest.fixture
def given(network: Path, talks: Path, tmp_path: Path) -> dict[str, Any]:
    """A plan of 200 samples in five steps, and where its parts are."""
    template, source = HFTemplate(load_processor(str(network))), pt.open_chats(talks)
    lengths = pt.measure(source, template, tmp_path / "lengths")
    plan = pt.plan(lengths, pack_length=1280, samples_per_step=200 // STEPS, packs_multiple=2)
    plan.save(tmp_path / "plan")
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(network / name, assets)
    named = {"MODEL": str(network), "ROWS": str(talks), "PLAN": str(tmp_path / "plan")}
    told = {
        "environment": named,
        "assets": str(assets),
        "packs": len(plan) // STEPS,
        "out": str(tmp_path / "out"),
    }
    return {"example": str(EXAMPLE), "steps": STEPS, "interval": 2, **told}


def steps_of(seen: list[Any]) -> list[list[int]]:
    """Samples of every step over all ranks."""
    places = zip(seen[0]["steps"], [*seen[0]["steps"][1:], None], strict=True)
    return [
        sorted(n for rank in seen for pack in rank["ids"][begin:end] for n in pack) for begin, end in places
    ]


def losses_of(seen: list[Any], of: str = "losses") -> list[float]:
    """Of every step: each micro step's sum over the tokens of the whole step."""
    return [
        sum(value for rank in seen for value in rank[of][begin:end])
        for begin, end in zip(seen[0]["steps"], [*seen[0]["steps"][1:], None], strict=True)
    ]


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
def test_it_trains_as_unpacked_and_goes_on_with_two_ranks(given: dict[str, Any], tmp_path: Path) -> None:
    """Trained by one rank; its checkpoint of step 2 goes on with two."""
    seen = start(torchtitan_python(), SCRIPT, tmp_path, "one", alone=True, **given)
    steps = steps_of(seen)
    assert sorted(n for step in steps for n in step) == list(range(200))
    assert [len(step) for step in steps] == [40] * STEPS
    assert (
        len(seen[0]["ids"]) - len({tuple(ids) for ids in seen[0]["ids"]}) < given["packs"]
    )  # padding repeats
    assert losses_of(seen) == pytest.approx(losses_of(seen, "alone"), rel=1e-4)
    for number in (4, 5):
        shutil.rmtree(tmp_path / "out" / "checkpoint" / f"step-{number}", ignore_errors=True)
    again = start(torchtitan_python(), SCRIPT, tmp_path, "two", ranks=2, **given)
    assert steps_of(again) == steps[2:]
    assert losses_of(again) == pytest.approx(losses_of(seen)[2:], rel=1e-4)


def test_attention_that_reads_no_boundaries_is_refused(
    given: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    told = refused(torchtitan_python(), SCRIPT, tmp_path, "leak", leak=True, **given)
    record_property("refused", leak_of(told))


def test_the_page_counts_the_lines() -> None:
    ours = re.findall(r".*# packtrain$", EXAMPLE.read_text(encoding="utf-8"), re.M)
    page = (REPOSITORY / "docs" / "hosts_more.md").read_text(encoding="utf-8")
    assert f"({len(ours)} lines of `examples/torchtitan_config.py`" in page and len(ours) <= 4
