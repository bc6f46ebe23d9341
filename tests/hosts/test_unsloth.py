"""The real unsloth on its CPU backend: its trainer packed, on 200 real samples, by the example as it stands.

Its patched models need a GPU: `bench/gpu/unsloth_lora.py` is the same there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from host_runs import REPOSITORY, ids_of, leak_of, losses_of, refused, same_losses, start
from venvs import build

pytestmark = pytest.mark.hosts

EXAMPLE = REPOSITORY / "examples" / "unsloth_sft.py"
SCRIPT = "unsloth_run.py"
LIGHT = """
psutil tyro protobuf sentencepiece huggingface_hub hf_transfer pydantic pyyaml json5 nest-asyncio structlog
typer click rich certifi requests filelock regex msgspec pillow einops packaging wheel tqdm numba
"""
REQUIREMENTS = [
    *("transformers==5.17.0", "trl==1.15.0", "datasets==4.8.4", "peft==0.20.0", "accelerate==1.15.0"),
    *LIGHT.split(),
]
NO_DEPS = ["unsloth==2026.10.9", "unsloth_zoo==2026.10.9", "cut_cross_entropy==25.1.1", "torchvision==0.28.0"]
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 5,
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "save_strategy": "no",
}


def unsloth_python() -> Path:
    return build("unsloth", REQUIREMENTS, no_deps=NO_DEPS)


def given(network: Path, talks: Path, out: Path, **options: Any) -> dict[str, Any]:
    return {
        "example": str(EXAMPLE),
        "words": [str(network), str(talks), str(out)],
        "options": {**OPTIONS, **options},
    }


@pytest.mark.matrix(
    "text, losses as unpacked", "every sample once", "resume", "tokenised before, lengths taken"
)
def test_it_trains_as_unpacked_and_a_resume_goes_on(network: Path, talks: Path, tmp_path: Path) -> None:
    """200 samples, 5 steps of 40; the run resumed at step 2."""
    saved = given(network, talks, tmp_path / "out", save_strategy="steps", save_steps=2)
    seen = start(unsloth_python(), SCRIPT, tmp_path, "packed", **saved)
    assert seen[0]["model"].startswith("Peft")
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert [len(step) for step in ids_of(seen)] == [40] * 5
    same_losses(seen)
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    again = start(unsloth_python(), SCRIPT, tmp_path, "resumed", **saved, resume=checkpoint)
    assert ids_of(again) == ids_of(seen)[2:]
    assert losses_of(again) == losses_of(seen)[2:]


def test_attention_that_forgets_boundaries_is_refused(
    network: Path, talks: Path, tmp_path: Path, record_property: Any
) -> None:
    spec = given(network, talks, tmp_path / "out")
    told = refused(unsloth_python(), SCRIPT, tmp_path, "leak", leak=True, **spec)
    record_property("refused", leak_of(told))


def test_group_by_length_is_refused(network: Path, talks: Path, tmp_path: Path, record_property: Any) -> None:
    feature, reason = "group by length", "packs have equal lengths"
    cases = {"group": {"train_sampling_strategy": "group_by_length"}}
    spec = given(network, talks, tmp_path / "out")
    (told,) = start(unsloth_python(), SCRIPT, tmp_path, "refused", cases=cases, **spec)
    assert reason in told["group"], told
    record_property("refused", (feature, reason, told["group"]))


def test_the_page_counts_the_lines() -> None:
    ours = re.findall(r".*# packtrain(?:  # isort: skip)?$", EXAMPLE.read_text(encoding="utf-8"), re.M)
    page = (REPOSITORY / "docs" / "hosts_more.md").read_text(encoding="utf-8")
    assert f"({len(ours)} lines of" in page and len(ours) <= 4
