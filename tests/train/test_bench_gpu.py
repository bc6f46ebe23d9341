"""The scripts of bench/gpu on a CPU: each can be read; baselines of the headline train what packs train."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from train_samples import image_sample, text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.testing.tiny import tiny_model
from packtrain.train.loss import token_loss_sum
from packtrain.train.varlen import use_varlen

FOLDER = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_each_script_can_be_read(name: str) -> None:
    assert callable(importlib.import_module(name).main)


@pytest.mark.parametrize("name", ["tiny:qwen3", "tiny:qwen2_5_vl", "tiny:qwen3_vl"])
def test_padded_rows_of_the_headline_have_the_losses_of_packed_ones(name: str) -> None:
    headline = importlib.import_module("headline")
    model = use_varlen(tiny_model(name).train())
    collate = PaddingFreeCollator(model)
    if name == "tiny:qwen3":
        samples = [text_sample(n, k) for k, n in enumerate((7, 19, 4))]
    else:
        samples = [image_sample(model, 1), image_sample(model, 2, ((1, 8, 4),), text=3)]
    rows = [headline.batch_of(mode, samples, collate) for mode in ("packed", "padded_8")]
    losses = [token_loss_sum(model, row).item() for row in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_groups_of_the_headline_hold_every_sample_once() -> None:
    headline = importlib.import_module("headline")
    lengths = np.random.default_rng(0).integers(2, 200, 2500).tolist()
    for mode in ("packed", *headline.BASES):
        groups = headline.groups_of(mode, lengths, 256)
        assert sorted(n for group in groups for n in group) == list(range(2500)), mode
        assert len(headline.chosen(groups, lengths)) == headline.STEPS


def test_flops_of_pictures_are_those_of_patches_too() -> None:
    flops_of = importlib.import_module("host_time").flops_of
    model = tiny_model("tiny:qwen2_5_vl")
    tower = model.config.vision_config
    sample = {"input_ids": range(20), "patches": 32}
    bare = flops_of(model, [np.array([0])], [{"input_ids": range(20)}])
    blocks = sum(p.numel() for name, p in model.named_parameters() if "blocks." in name)
    full = len(tower.fullatt_block_indexes)
    pairs = full * 32 * 32 + (tower.depth - full) * 32 * 32  # a window holds 64, the picture is smaller
    assert flops_of(model, [np.array([0])], [sample]) - bare == pytest.approx(
        6 * blocks * 32 + 12 * tower.hidden_size * pairs
    )
