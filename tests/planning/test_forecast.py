"""forecast: the figures are those of the real plan and its real steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import InputError, UnknownNameError
from packtrain.planning.costs import DeviceProfile

PROFILE = {
    "seconds_per_token": 2e-5,
    "l_star": 24_000,
    "fixed_seconds": 0.01,
    "memory_bytes": 40e9,
    "base_bytes": 10e9,
    "bytes_per_token": 2e6,
}


def sft(n: int, cap: int = 8192) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(357), 1.2, n)
    return np.clip(drawn.astype(np.int64), 16, cap)


def test_figures_of_a_plan_by_packs() -> None:
    tokens = sft(20_000)
    rows = pt.forecast(tokens, [4096, 8192], world_size=4, grad_accum=4)
    assert [row["pack_length"] for row in rows] == [4096, 8192]
    assert sum(row["recommended"] for row in rows) == 1 and all(row["why"] for row in rows)
    row = rows[1]
    plan = pt.plan(tokens, 8192)
    view = plan.align(4)
    assert row["packs"] == len(plan) and row["micro_steps"] == view.steps
    assert row["optimizer_steps"] == -(-view.steps // 4) and row["repeated"] == len(view.repeated)
    assert row["partial_windows"] == (view.steps % 4 > 0) and row["fillers"] == 0
    assert row["optimizer_steps_unpacked"] == -(-20_000 // 16)
    b = view.balance(4, seed=0)
    full = len(b) // 16 * 16
    sizes = np.diff(plan.offsets)[b.pack_ids[:full]].reshape(-1, 16).sum(axis=1)
    tokens_of = plan.pack_tokens[b.pack_ids[:full]].reshape(-1, 16).sum(axis=1)
    assert row["samples_per_step_mean"] == pytest.approx(sizes.mean())
    assert row["samples_per_step_sd"] == pytest.approx(sizes.std())
    assert row["tokens_per_step_mean"] == pytest.approx(tokens_of.mean())
    cost = (plan.pack_tokens + plan.pack_sq / 24_000)[b.pack_ids[:full]].reshape(-1, 4)
    assert row["max_over_mean_balanced"] == pytest.approx(cost.max(1).sum() / cost.mean(1).sum())
    assert row["max_over_mean"] > row["max_over_mean_balanced"] > 1
    assert rows[0]["long_samples"] > 0 == row["long_samples"]
    assert row["saved_padded"] == pytest.approx(1 - tokens.sum() / (8192 * 20_000))
    assert 0 < row["saved_bucketed"] < row["saved_batched"] < row["saved_padded"]


def test_figures_of_a_plan_by_steps_of_samples() -> None:
    (row,) = pt.forecast(sft(20_000), [8192], world_size=8, samples_per_step=250)
    assert row["optimizer_steps"] == 80 == row["optimizer_steps_unpacked"]
    assert row["samples_per_step_mean"] == 250 and row["samples_per_step_sd"] == 0
    assert row["micro_steps"] == 80 * row["grad_accum"] and row["partial_windows"] == 0
    assert row["max_over_mean_step"] < 1.02
    (partial,) = pt.forecast(sft(100), [8192], world_size=8, samples_per_step=64)
    assert partial["optimizer_steps"] == 2
    (small,) = pt.forecast([5, 5, 5], [8], world_size=2, grad_accum=4)
    assert small["optimizer_steps"] == 1 and small["partial_windows"] == 1


def test_device_profile_and_auto(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps({"schema": "packtrain.device/1", "name": "x", **PROFILE}))
    rows = pt.forecast(sft(20_000), "auto", world_size=4, grad_accum=2, profile=path)
    assert [row["pack_length"] for row in rows] == [2048, 4096, 8192]
    row = rows[-1]
    assert row["peak_bytes"] == 10e9 + 2e6 * 8192 and row["fits"]
    assert row["step_seconds"] == pytest.approx(2e-5 * row["step_token_equivalents"] + 0.02)
    assert row["epoch_hours"] == pytest.approx(row["step_seconds"] * row["micro_steps"] / 2 / 3600)
    narrow = {**PROFILE, "memory_bytes": 22e9}
    rows = pt.forecast(sft(20_000), [4096, 16384], profile=narrow, long_samples="drop")
    assert [row["fits"] for row in rows] == [True, False] and rows[0]["recommended"]
    assert "does not fit" in rows[1]["why"]
    assert DeviceProfile.load(path).longest_row() == 15_000


def test_refusals(tmp_path: Path) -> None:
    for arguments, match in (
        (([], [8]), "no sample"),
        (([5], []), "empty"),
        (([5], "some"), "'some'"),
        (([5], [8], 0), "world_size"),
    ):
        with pytest.raises(InputError, match=match):
            pt.forecast(*arguments)
    for values, kind, match in (
        ({**PROFILE, "l_star": 0}, InputError, "l_star is 0"),
        ({**PROFILE, "lstar": 1}, UnknownNameError, "lstar"),
        ({"l_star": 5}, InputError, "lacks"),
    ):
        with pytest.raises(kind, match=match):
            pt.forecast([5], [8], profile=values)
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(InputError, match="no device profile"):
        pt.forecast([5], [8], profile=tmp_path / "p.json")
