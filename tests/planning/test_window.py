"""Windowed planning with carry: every sample once, bounded delay, resumable, little loss."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
import packtrain.planning.window as window_module
from packtrain.errors import PlanError
from packtrain.planning.window import MAX_AGE, WindowPacker
from packtrain.testing import check_plan, compiled_path, plain_path
from packtrain.world import jit_allowed


@pytest.mark.parametrize("tokens", [[90] * 10, [1] * 10, [60, 60] * 5, [5, 6, 7], []], ids=str)
def test_streams_that_end_or_fill_badly(tokens: list[int]) -> None:
    """Window 4, cap 100 (case PB-71): all ids out once, no endless round."""
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, 100, window=4)
    check_plan(plan, lengths)
    packer = WindowPacker(pt.PlanSpec(pack_length=100, window=4))
    seen: list[int] = []
    for start in range(0, len(tokens), 4):
        part = np.arange(start, min(len(tokens), start + 4))
        seen += packer.push(part, pt.Lengths(lengths.tokens[part])).ids.tolist()
    seen += packer.flush().ids.tolist()
    assert sorted(seen) == list(range(len(tokens))) and len(packer.waiting) == 0


def stream(seed: int, windows: int = 30) -> list[tuple[np.ndarray, pt.Lengths]]:
    rng = np.random.default_rng(seed)
    out = []
    for w in range(windows):
        tokens = np.clip(rng.lognormal(5.5, 1.2, 100).astype(np.int64), 0, 9000)
        out.append(
            (np.arange(100 * w, 100 * w + 100), pt.Lengths(tokens, {"images": rng.integers(0, 3, 100)}))
        )
    return out


def spec(**options: object) -> pt.PlanSpec:
    return pt.PlanSpec.from_dict({"pack_length": 8192, "window": 100, "limits": {"images": 16}, **options})


def test_a_stream_resumes_from_its_state() -> None:
    parts = stream(0)
    whole = WindowPacker(spec(seed=3))
    expected = [whole.push(*part) for part in parts] + [whole.flush()]
    first = WindowPacker(spec(seed=3))
    got = [first.push(*part) for part in parts[:17]]
    state = json.loads(json.dumps(first.state_dict()))
    second = WindowPacker(spec(seed=3))
    second.load_state_dict(state)
    got += [second.push(*part) for part in parts[17:]] + [second.flush()]
    assert [g.ids.tolist() for g in got] == [e.ids.tolist() for e in expected]
    assert [g.offsets.tolist() for g in got] == [e.offsets.tolist() for e in expected]


def test_no_sample_waits_longer_than_the_age_limit() -> None:
    """One sample of 4097 in a stream of 4096: nothing ever fills its pack."""
    packer = WindowPacker(pt.PlanSpec(pack_length=8192, window=10))
    ids = np.arange(10)
    released = None
    for window in range(MAX_AGE + 3):
        tokens = [4097] + [8192] * 9 if window == 0 else [8192] * 10
        made = packer.push(ids + 10 * window, pt.Lengths(tokens))
        if 0 in made.ids.tolist():
            released = window
            break
    assert released == MAX_AGE


def test_the_spec_of_a_stream_needs_a_window_and_ids_ascend() -> None:
    with pytest.raises(PlanError, match="window"):
        WindowPacker(pt.PlanSpec(pack_length=10))
    packer = WindowPacker(pt.PlanSpec(pack_length=100, window=3))
    packer.push(np.array([5, 6, 7]), pt.Lengths([60, 60, 60]))
    assert len(packer.waiting)
    with pytest.raises(PlanError, match="does not follow"):
        packer.push(np.array([2]), pt.Lengths([1]))


def test_windows_of_1000_cost_at_most_a_thousandth(data: Path) -> None:
    for name in ("gsm8k_train", "t0_train_50k", "new_codealpaca", "gpteacher_codegen"):
        tokens = np.load(data / "lengths" / f"{name}.npy")
        for cap in (2048, 8192):
            plan = pt.plan(tokens, cap, window=1000)
            assert len(plan) <= max(plan.certificate.bound + 1, plan.certificate.bound * 1.001), (name, cap)


def test_windows_are_part_of_the_spec_and_equal_on_both_paths() -> None:
    tokens = np.concatenate([lengths.tokens for _, lengths in stream(2)])
    with plain_path():
        plain = {w: pt.plan(tokens, 8192, window=w, seed=1) for w in (50, 1000, 10**6)}
    with compiled_path():
        for w, plan in plain.items():
            assert pt.plan(tokens, 8192, window=w, seed=1) == plan
    assert len({plan.checksum for plan in plain.values()}) == 3
    check_plan(plain[50], pt.Lengths(tokens))


def test_a_long_stream_is_compiled_in_its_midst_and_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a million samples of a process are worth the compiler, whichever of its streams they are of."""
    from packtrain.packers import bfd

    compiled: list[bool] = []
    decide = bfd.use_jit
    monkeypatch.setattr(bfd, "use_jit", lambda n: compiled.append(decide(n)) or compiled[-1])

    def packs(seen: int) -> list[list[int]]:
        monkeypatch.setattr(WindowPacker, "seen", seen)
        packer = WindowPacker(pt.PlanSpec(pack_length=9000, window=100, packer="bfd"))
        made = [packer.push(ids, lengths) for ids, lengths in stream(3)]
        return [part.ids.tolist() for part in (*made, packer.flush())]

    plain = packs(0)
    assert compiled and not any(compiled)
    compiled.clear()
    assert packs(500_010 - 1500) == plain
    assert not compiled[0] and compiled[-1] and compiled == sorted(compiled)


def of_kind(kind: str, rng: np.random.Generator, cap: int, count: int) -> np.ndarray:
    if kind == "few sizes":
        return rng.choice([1, cap // 2, cap // 4 + 1, cap // 3 + 1], count)
    if kind == "lognormal":
        return np.clip(rng.lognormal(np.log(cap / 20 + 1), 1.0, count), 0, cap + 1).astype(np.int64)
    return rng.integers(1, {"any": cap, "small": max(1, cap // 10), "large": cap}[kind] + 1, count)


@pytest.mark.parametrize("kind", ["lognormal", "any", "small", "few sizes"])
@pytest.mark.parametrize("rule", [">", ">="])
def test_a_small_window_in_one_kernel_is_that_of_many_steps(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs, carry, ages and packer, window by window; also where samples are long, empty or all alike."""
    rng, at_once = np.random.default_rng(len(kind)), []
    small = WindowPacker._small

    def noted(self: WindowPacker, *told: Any) -> Any:
        made = small(self, *told)
        at_once.append(made is not None)
        return made

    def windows(tokens: np.ndarray, spec: pt.PlanSpec, age: int) -> list[Any]:
        packer, told = WindowPacker(spec, max_age=age), []
        for low in range(0, len(tokens), spec.window or 1):
            ids = np.arange(low, min(low + (spec.window or 1), len(tokens)))
            made = packer.push(ids + 5, pt.Lengths(tokens[ids]), last=ids[-1] == len(tokens) - 1)
            told.append((made.offsets.tolist(), made.ids.tolist(), made.left_out, made.packer))
            told.append(packer.state_dict())
        return told

    monkeypatch.setattr(WindowPacker, "_small", noted)
    with compiled_path():
        for cap, window, age in itertools.product((8, 100, 8192), (1, 7, 64, 400), (0, 2, 16)):
            tokens = of_kind(kind, rng, cap, 5 * window + int(rng.integers(0, window + 1)))
            spec = pt.PlanSpec(pack_length=cap, window=window, long_rule=rule)
            told = windows(tokens, spec, age)
            with monkeypatch.context() as patch:
                patch.setattr(window_module, "SMALL", 0)
                assert told == windows(tokens, spec, age), (cap, window, age)
    assert any(at_once) == jit_allowed()
