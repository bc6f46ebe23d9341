"""`doctor --calibrate`: what packs cost is fitted from real rows, and told where it is off."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli._app import main
from packtrain.errors import InputError
from packtrain.planning.costs import L_STAR, DeviceProfile
from packtrain.planning.lengths import Lengths
from packtrain.sources.encoded import EncodedTemplate
from packtrain.testing.tiny import tiny_model
from packtrain.train import calibrate as module
from packtrain.train.calibrate import calibrate, fit_seconds
from packtrain.train.config import load_config
from packtrain.train.runtime import resolve_runtime


def _sums(rows: int = 12) -> Any:
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(1000, 8192, rows).astype(float)
    return np.stack([tokens, tokens * drawn.integers(100, 8000, rows), drawn.integers(0, 9000, rows)], axis=1)


@pytest.mark.parametrize("micro", [1, 2])
def test_costs_that_made_the_times_are_found_again(micro: int) -> None:
    sums = _sums()
    seconds = micro * 0.02 + 2e-5 * (sums[:, 0] + sums[:, 1] / 6000 + sums[:, 2] * 0.4)
    found = fit_seconds(sums, seconds, micro)
    assert found["fixed_seconds"] == pytest.approx(0.02) and found["seconds_per_token"] == pytest.approx(2e-5)
    assert found["l_star"] == pytest.approx(6000) and found["patch"] == pytest.approx(400)


def test_what_the_rows_do_not_show_keeps_its_default_and_nothing_is_negative() -> None:
    sums = _sums()
    text = sums * [1, 1, 0]
    found = fit_seconds(text, 0.01 + 1e-5 * (text[:, 0] + text[:, 1] / L_STAR))
    assert found["l_star"] == pytest.approx(L_STAR, rel=0.01) and "patch" not in found
    assert found["seconds_per_token"] == pytest.approx(1e-5, rel=0.01)
    downwards = fit_seconds(text, 1.0 - 1e-5 * text[:, 0])  # longer rows are quicker: the host decides
    assert all(value >= 0 for value in downwards.values())
    DeviceProfile(**downwards)


def test_a_profile_predicts_memory_from_tokens_and_patches(tmp_path: Path) -> None:
    lengths = Lengths(np.array([100, 60, 40]), {"patches": np.array([0, 500, 100])})
    plan = pt.plan(lengths, 100)
    given = {"seconds_per_token": 1e-5, "base_bytes": 1000.0, "bytes_per_token": 10.0, "bytes_per_patch": 2.0}
    profile = DeviceProfile(**given, memory_bytes=3000.0, step_seconds=0.5)
    assert profile.peak_bytes(plan) == 1000 + 10 * 100 + 2 * 600
    assert profile.fits(plan) is False
    assert DeviceProfile(**given, memory_bytes=3200.0).fits(plan) is True
    assert DeviceProfile(seconds_per_token=1.0).fits(plan) is None
    assert profile.seconds(1000, 4, steps=2) == pytest.approx(0.01 + 1.0)
    path = tmp_path / "device.json"
    path.write_text(json.dumps(profile.to_dict()))
    assert DeviceProfile.load(path) == profile
    config = {"global_max_length": 100, "training": {"output_dir": "x", "device_profile": str(path)}}
    (told,) = [w for w in resolve_runtime(load_config(config), plan, 1).warnings if "GiB" in w]
    assert "the heaviest pack needs about" in told and "long_samples: drop" in told


@pytest.mark.parametrize(("each", "steps"), [(0.1, 24), (0.5, 8), (8.0, 6), (30.0, 6)])
def test_passes_are_as_many_as_their_time_allows(
    each: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows; the first pass takes twice as long, which never counts for a row that came again."""
    clock, now, control = module._Clock(4), [0.0], SimpleNamespace(should_training_stop=False)
    monkeypatch.setattr(module, "_now", lambda: now[0])
    monkeypatch.setattr(module, "_SECONDS", 7.0)
    done = 0
    while not control.should_training_stop and done < 4 * module._PASSES:
        clock.on_step_begin()
        now[0] += each * (2 if done < 4 else 1)
        clock.on_pre_optimizer_step()
        clock.on_step_end(None, None, control)
        done += 1
    assert done == steps
    again = min(done - 4, 4)
    assert clock.seconds() == pytest.approx([each] * again + [2 * each] * (4 - again))
    assert len(clock.latest_peaks()) == 4


def _rows(count: int = 80) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(1)
    sizes = drawn.integers(4, 20, count)
    made = [drawn.integers(1, 90, int(n)) for n in sizes]
    return [{"input_ids": ids, "labels": np.concatenate([[-100], ids[1:]])} for ids in made]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_of_a_plan_are_trained_and_the_run_is_left_alone(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PASSES", 2)
    samples = _rows()
    lengths = Lengths(np.array([len(s["input_ids"]) for s in samples]))
    plan = pt.plan(lengths, 32)
    config = load_config(
        {
            "global_max_length": 32,
            "training": {
                "output_dir": str(tmp_path / "run"), "gradient_accumulation_steps": accumulation,
                "save_steps": 1, "learning_rate": 1e-3,
            },
        }
    )  # fmt: skip
    model = tiny_model("tiny:qwen3")
    made = calibrate(config, plan, samples, EncodedTemplate(), lengths, model=model)
    micro = min(2, accumulation)
    full = [row["tokens"] for row in made.rows if not row["fitted"]]
    assert len(full) >= 3 and all(24 * micro <= tokens <= 32 * micro for tokens in full)
    halves = [row["tokens"] for row in made.rows if row["fitted"] and row["tokens"] < 24 * micro]
    assert len(halves) >= 2
    assert all(row["seconds"] > 0 and row["predicted_seconds"] > 0 for row in made.rows)
    assert made.time_error is not None and made.memory_error is None  # no card, no memory
    assert made.profile.base_bytes is None and made.profile.step_seconds > 0
    assert not (tmp_path / "run").exists()


def test_a_small_plan_is_refused(tmp_path: Path) -> None:
    samples = _rows(3)
    lengths = Lengths(np.array([len(s["input_ids"]) for s in samples]))
    config = load_config({"global_max_length": 32, "training": {"output_dir": str(tmp_path)}})
    with pytest.raises(InputError, match="8 are needed"):
        calibrate(config, pt.plan(lengths, 32), samples, EncodedTemplate(), lengths)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--calibrate", "x.json", "--model", "tiny:qwen3"], "no CONFIG is given"),
        ([], "give CONFIG or --model"),
    ],
)
def test_doctor_says_what_it_needs(arguments: list[str], told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    assert stop.value.code == 2 and told in capsys.readouterr().err


def test_a_run_with_a_profile_that_is_none_stops_early(tmp_path: Path) -> None:
    from packtrain.train.early import check_early

    given = {"output_dir": str(tmp_path / "run"), "device_profile": str(tmp_path / "no.json")}
    model = {"name_or_path": "tiny:qwen3"}
    config = load_config({"global_max_length": 64, "model": model, "training": given})
    with pytest.raises(InputError, match=r"device profile .*no.json cannot be read"):
        check_early(config)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("", "--calibrate is empty, expected a path"),
        ("https://x.y/d.json", "is no file"),
        ("folder", "is a folder"),
        ("run.yaml", "is there and holds no device profile"),
    ],
)
def test_where_a_profile_cannot_go_is_told_before_anything_is_trained(
    target: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "run.yaml").write_text("model: {name_or_path: tiny:qwen3}\nglobal_max_length: 64\n")
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "run.yaml", "--calibrate", target])
    assert stop.value.code == 2 and told in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run.yaml"]


@pytest.mark.parametrize("name", ["seconds_per_token", "l_star", "patch", "fixed_seconds", "step_seconds"])
@pytest.mark.parametrize("value", [None, -1, float("nan"), float("inf"), 10**400, 1e300, True, "1", 0.3])
def test_figures_of_a_profile_are_numbers_that_can_be_computed_with(name: str, value: Any) -> None:
    given = {"seconds_per_token": 1e-5, name: value}
    if value == 0.3 and name != "l_star":
        assert DeviceProfile.of(given).seconds(1000, 2) > 0
        return
    with pytest.raises(InputError, match=name):
        DeviceProfile.of(given)
