"""Spec 000: the pack plan is countable, deterministic, aligned to the ranks, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.data import PackedDataset, PackSampler
from packtrain.errors import PlanError
from packtrain.planning.build import plan
from packtrain.template import HFTemplate
from packtrain.train.config import load_config
from packtrain.train.runtime import resolve_runtime


@pytest.mark.spec(
    "000",
    "a map-style dataset of packs with a stable length; sums within the cap",
    key="`data.kind: planned`",
    api="`PackedDataset`",
)
def test_static_packing_produces_a_fixed_length_pack_dataset_for_an_epoch(
    prepared: Callable[..., Any],
) -> None:
    made = prepared()
    aligned = made.plan.align(1)
    dataset = PackedDataset(aligned, made.source, made.template.encode, lengths=made.lengths)
    sampler = PackSampler(aligned, 0, seed=5)
    assert len(dataset) == len(sampler) == len(made.plan)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen: list[int] = []
        for position in sampler:
            pack = dataset[position]
            total = sum(len(sample["input_ids"]) for sample in pack)
            assert isinstance(pack, list) and (len(pack) == 1 or total <= made.plan.spec.pack_length)
            seen += [sample["sample_id"] for sample in pack]
        assert sorted(seen) == list(range(40))


@pytest.mark.spec(
    "000",
    "equal inputs, equal plans; ids ascend in packs, packs by their smallest id",
    key="`training.seed`",
    api="`plan`",
)
def test_identical_inputs_produce_identical_pack_plans(prepared: Callable[..., Any], tmp_path: Path) -> None:
    one = prepared(output_dir=tmp_path / "one").plan
    two = prepared(output_dir=tmp_path / "two", packing_length_precompute_workers=2).plan
    assert [pack.tolist() for pack in one] == [pack.tolist() for pack in two]
    assert one.checksum == two.checksum
    packs = [pack.tolist() for pack in one]
    assert all(pack == sorted(pack) for pack in packs) and packs == sorted(packs)
    for world_size in (1, 2, 3):
        for drop in (False, True):
            assert one.align(world_size, drop).checksum == two.align(world_size, drop).checksum
    assert len({one.align(w, d).checksum for w in (1, 2, 3) for d in (False, True)}) == 6


def told(plan_: Any, world_size: int, **training: Any) -> Any:
    return resolve_runtime(load_config({"global_max_length": 80, "training": training}), plan_, world_size)


@pytest.mark.spec(
    "000",
    "remainder repeated from the start of the plan",
    key="`data.drop_last: false`",
    api="`PackPlan.align`",
)
def test_ddp_drop_last_pads_repeats_deterministically_when_disabled() -> None:
    """[40]*10 at cap 80: 5 packs; on 4 ranks 3 repeats of packs 0, 1, 2."""
    raw = plan([40] * 10, pack_length=80)
    runtime = told(raw, 4)
    assert (runtime.n_raw_packs, runtime.n_aligned_packs, runtime.pad_needed) == (5, 8, 3)
    assert runtime.repeated == [0, 1, 2] and runtime.dropped_packs == 0
    aligned = raw.align(4)
    assert aligned.pack_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    for world_size in range(1, 12):
        ids = raw.align(world_size).pack_ids.tolist()
        assert len(ids) % world_size == 0 and len(ids) - 5 < world_size and set(ids) == set(range(5))


@pytest.mark.spec(
    "000", "remainder dropped from the end of the plan", key="`data.drop_last: true`", api="`PackPlan.align`"
)
def test_ddp_drop_last_drops_a_deterministic_remainder_subset_when_enabled() -> None:
    raw = plan([40] * 10, pack_length=80)
    runtime = told(raw, 4, dataloader_drop_last=True)
    assert (runtime.n_aligned_packs, runtime.pad_needed, runtime.repeated) == (4, 0, [])
    assert runtime.dropped_packs == 1
    aligned = raw.align(4, drop_last=True)
    for epoch in range(3):  # the same packs are left out of every epoch
        seen = []
        for rank in range(4):
            sampler = PackSampler(aligned, rank, seed=1)
            sampler.set_epoch(epoch)
            seen += [aligned.pack_id(position) for position in sampler]
        assert sorted(seen) == [0, 1, 2, 3]
    with pytest.raises(PlanError, match="leaves none"):
        told(raw, 8, dataloader_drop_last=True)


@pytest.mark.spec("000", "no packs fail fast", key="every key", api="`plan`, `PackPlan.align`")
def test_no_packs_at_all_fail_fast(prepared: Callable[..., Any]) -> None:
    with pytest.raises(PlanError, match="no packs"):
        plan([90, 90], pack_length=80, long_samples="drop").align(2)


def test_three_packs_on_eight_ranks_repeat_in_turn() -> None:
    runtime = told(plan([80] * 3, pack_length=80, long_rule=">="), 8)
    assert (runtime.n_aligned_packs, runtime.pad_needed) == (8, 5) and runtime.repeated == [0, 1, 2, 0, 1]
    assert any("3 packs on 8 ranks" in warning for warning in runtime.warnings)


@pytest.mark.spec(
    "000",
    "lengths of multimodal samples are those that the forward pass sees, cached",
    key="`template.*`",
    api="`measure`, `Lengths`",
)
def test_multimodal_samples_have_deterministic_planning_lengths(data: Path, processor: Any) -> None:
    """The planned length is what the forward pass consumes, image tokens included, at every measuring."""
    from packtrain.sources import open_source
    from packtrain.sources.chat import ChatSource

    source = ChatSource(open_source(data / "mllm_demo" / "mllm_demo.json"))
    template = HFTemplate(processor("qwen2_5_vl"))
    first = [int(template.measure(source[i])) for i in range(len(source))]
    again = [int(template.measure(source[i])) for i in reversed(range(len(source)))][::-1]
    assert first == again and first[:3] == [195, 140, 181]
    assert first == [len(template.encode(source[i])["input_ids"]) for i in range(len(source))]
    made = plan(first, pack_length=400)
    assert sorted(made.indices.tolist()) == list(range(len(source)))
    assert all(len(pack) == 1 or sum(first[i] for i in pack) <= 400 for pack in made)


@pytest.mark.spec(
    "000",
    "N_raw_packs, N_aligned_packs, world size, repeated packs and both checksums are logged",
    key="every key",
    api="`Runtime.log`",
)
def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    raw = plan([40] * 10, pack_length=80)
    with caplog.at_level(logging.INFO, logger="packtrain.train.runtime"):
        told(raw, 4).log()
    for part in (
        "N_raw_packs=5 N_aligned_packs=8 world_size=4 dataloader_drop_last=False",
        "pad_needed=3: packs [0, 1, 2] are repeated",
        f"raw_plan checksum {raw.checksum}",
        f"aligned_plan checksum {raw.align(4).checksum}",
        "fill 100.00% of 80 tokens a pack, 2.00 samples a pack; 10 of 10 samples packed, 0 long alone",
    ):
        assert part in caplog.text, part
    row = told(raw, 4).row()
    assert row["n_raw_packs"] == 5 and row["repeated"] == "[0, 1, 2]" and row["raw_checksum"] == raw.checksum
    assert all(isinstance(value, int | float | str) for value in row.values())
    many = told(plan(np.full(100, 80), pack_length=80), 64)
    assert many.pad_needed == 28 and many.row()["repeated"] == f"[{', '.join(map(str, range(15)))}, …, 27]"
