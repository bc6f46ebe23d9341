"""plan(): worked examples, ledger, policies, bad input."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import ConfigError, LawError, PlanError, UnknownNameError
from packtrain.planning.laws import check_laws
from packtrain.testing import check_plan, compiled_path


def contents(plan: pt.PackPlan) -> list[list[int]]:
    return [pack.tolist() for pack in plan]


def test_worked_examples() -> None:
    assert contents(pt.plan([80, 20, 20, 20, 20], 80)) == [[0], [1, 2, 3, 4]]
    assert contents(pt.plan([20] * 6, 60)) == [[0, 1, 2], [3, 4, 5]]
    assert contents(pt.plan([40] * 10, 80)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    stats = pt.plan([30, 30, 20, 60, 50, 10, 40, 30], 80).stats()
    assert stats["packs"] == 4 and stats["efficiency"] == 0.84375 and stats["optimal"] is True


def test_conservation_by_id() -> None:
    """20 samples: 15 of 60, 3 of 120, 1 of 0, 1 unreadable; cap 100, policy drop (case PB-25)."""
    tokens = [60] * 15 + [120] * 3 + [0] + [60]
    lengths = pt.Lengths(tokens, status=[0] * 19 + [2], reasons={19: "unreadable_media"})
    plan = pt.plan(lengths, 100, long_samples="drop")
    assert plan.ledger.counts() == {"empty": 1, "over_long": 3, "unreadable_media": 1}
    assert list(plan.ledger) == [
        (15, "over_long"), (16, "over_long"), (17, "over_long"), (18, "empty"), (19, "unreadable_media"),
    ]  # fmt: skip
    assert len(plan.indices) == 15 and plan.stats()["dropped"] == 5 and plan.stats()["read"] == 20
    check_plan(plan, lengths)
    check_laws(plan, lengths)


def test_every_status_has_its_reason() -> None:
    lengths = pt.Lengths([5, 5, 5, 5, 0], status=[0, 2, 3, 1, 0])
    assert list(pt.plan(lengths, 10).ledger) == [
        (1, "failed"), (2, "beyond_model"), (3, "empty"), (4, "empty"),
    ]  # fmt: skip


def test_a_cap_is_hard_for_every_strategy() -> None:
    for packer in ("bfd", "sequential", "auto"):
        assert len(pt.plan([7] * 8, 8, packer=packer)) == 8
        assert int(pt.plan([5, 5, 5, 1, 1, 1, 6], 6, packer=packer).pack_tokens.max()) <= 6


def test_long_samples() -> None:
    tokens = [9, 10, 11, 5]
    single = pt.plan(tokens, 10)
    assert contents(single) == [[0], [1], [2], [3]] and single.long_samples == 1
    assert single.slots == 41 and single.stats()["padding"] == 6
    at_cap = pt.plan(tokens, 10, long_samples="drop", long_rule=">=")
    assert at_cap.ledger.ids.tolist() == [1, 2]
    assert pt.plan(tokens, 10, long_samples="drop").ledger.ids.tolist() == [2]
    assert contents(pt.plan(tokens, 10, long_rule=">=")) == contents(single)
    with pytest.raises(PlanError, match=r"1 long sample .*2 \(11 tokens\)"):
        pt.plan(tokens, 10, long_samples="error")
    with pytest.raises(PlanError, match=r"1 \(10 tokens\), 2 \(11 tokens\)"):
        pt.plan(tokens, 10, long_samples={"tokens": "error"}, long_rule=">=")
    assert len(pt.plan([1, 2], 10, long_samples="error")) == 1


def test_a_failed_sample_is_not_long() -> None:
    lengths = pt.Lengths([50, 5], status=[2, 0])
    plan = pt.plan(lengths, 10, long_samples="error")
    assert list(plan.ledger) == [(0, "failed")]


def test_rounding_counts_as_cost() -> None:
    lengths = pt.Lengths([5, 3, 8, 9, 16, 15])
    plan = pt.plan(lengths, 16, multiple_of=8)
    check_plan(plan, lengths)
    assert contents(plan) == [[0, 1], [2], [3], [4], [5]]
    odd = pt.plan([15, 12, 3], 15, multiple_of=8)
    assert odd.long_samples == 2, "15 and 12 round to 16, which is more than 15"
    assert pt.plan([15, 12, 3], 15, multiple_of=8, long_samples="drop").ledger.ids.tolist() == [0, 1]
    assert len(pt.plan([(1 << 31) - 1], 8, multiple_of=64)) == 1


@pytest.mark.parametrize(
    ("tokens", "cap", "packs"),
    [([], 10, 0), ([1], 1, 1), ([1, 1, 1], 1, 3), ([7] * 9, 21, 3), ([50] * 4, 10, 4), ([0, 0], 5, 0)],
)
def test_edge_cases(tokens: list[int], cap: int, packs: int) -> None:
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, cap)
    assert len(plan) == packs and plan.stats()["packs"] == packs
    check_plan(plan, lengths)
    check_laws(plan, lengths)
    with compiled_path():
        assert pt.plan(lengths, cap) == plan


def test_sparse_capacities() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 1 << 31, 3000)
    lengths = pt.Lengths(tokens)
    plan = pt.plan(lengths, 1 << 31)
    check_plan(plan, lengths)
    assert plan.certificate.gap < 0.02
    small = pt.plan(tokens // 2**20, 2048)
    assert sorted(map(len, small)) != [], "the same shapes at a dense capacity"


def test_seed_shuffles_among_equal_costs_only() -> None:
    tokens = np.random.default_rng(0).integers(1, 50, 500)
    plans = {seed: pt.plan(tokens, 100, seed=seed) for seed in (None, 0, 1, 2**70)}
    assert len({plan.checksum for plan in plans.values()}) == 4
    assert len({len(plan) for plan in plans.values()}) == 1
    shapes = {str(sorted(sorted(tokens[pack].tolist()) for pack in plan)) for plan in plans.values()}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pack_length": 0}, PlanError, "pack_length is 0, expected >= 1"),
        ({"pack_length": -5}, PlanError, "pack_length is -5"),
        ({"pack_length": 8.5}, PlanError, "pack_length is 8.5"),
        ({"pack_length": True}, PlanError, "pack_length is True"),
        ({"pack_length": 1 << 32}, PlanError, "limit is 2"),
        ({}, ConfigError, "pack_length is missing"),
        ({"pack_lenght": 8}, UnknownNameError, "pack_lenght"),
        ({"pack_length": 8, "long_samples": "split"}, UnknownNameError, "split"),
        ({"pack_length": 8, "long_samples": {"tokenz": "drop"}}, UnknownNameError, "tokenz"),
        ({"pack_length": 8, "long_rule": "<"}, UnknownNameError, "long_rule"),
        ({"pack_length": 8, "multiple_of": 0}, PlanError, "multiple_of is 0"),
        ({"pack_length": 8, "seed": -1}, PlanError, "seed is -1"),
        ({"pack_length": 8, "packer": "bdf"}, UnknownNameError, "bdf"),
        ({"pack_length": 8, "limits": {"tokens": 4}}, PlanError, "use pack_length"),
        ({"pack_length": 8, "limits": {"images": -4}}, PlanError, "is -4"),
        ({"pack_length": 8, "limits": 7}, PlanError, "expected a mapping"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pt.plan([1, 2], **options)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, {"packs_multiple": 2}),
        ({}, {"packs_per_step": 4}),
        ({}, {"last_step": "drop"}),
        ({"samples_per_step": 2}, {"window": 9}),
        ({"samples_per_step": 2}, {"packer": "bfd"}),
    ],
)
def test_an_option_without_effect_is_told_once_and_leaves_the_plan_as_it_is(
    options: dict[str, object], idle: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    made = pt.plan([1, 2, 3, 4], 8, **options)
    assert not caplog.records
    assert pt.plan([1, 2, 3, 4], 8, **options, **idle).checksum == made.checksum
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{next(iter(idle))}=") and "has no effect with" in line


def test_spec_round_trip_and_numpy_integers() -> None:
    spec = pt.PlanSpec(pack_length=np.int64(80), seed=np.uint8(3), long_samples={"tokens": "drop"})
    assert pt.PlanSpec.from_dict(spec.to_dict()) == spec and type(spec.pack_length) is int
    assert pt.plan([40] * 4, spec=spec) == pt.plan([40] * 4, 80, seed=3, long_samples={"tokens": "drop"})


def test_what_is_an_index_is_an_integer() -> None:
    class Counted:
        def __index__(self) -> int:
            return 80

    assert pt.PlanSpec(pack_length=Counted()) == pt.PlanSpec(pack_length=80)  # type: ignore[arg-type]


def test_plan_is_immutable_and_its_parts_agree() -> None:
    lengths = pt.Lengths([3, 4, 5], costs={"images": [1, 2, 3]})
    plan = pt.plan(lengths, 8)
    for array in (plan.offsets, plan.indices, plan.pack_tokens, plan.pack_sq, plan.pack_costs["images"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert plan.offsets.dtype == np.int64 and plan.indices.dtype == np.uint32
    assert plan[0].dtype == np.int64 and plan[-1].tolist() == plan[len(plan) - 1].tolist()
    assert int(plan.pack_costs["images"].sum()) == 6 and int(plan.pack_sq.sum()) == 50
    with pytest.raises(IndexError):
        plan[len(plan)]
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_without_moves_packs_to_the_ledger() -> None:
    lengths = pt.Lengths([8, 8, 1, 30], costs={"images": [1, 1, 5, 0]})
    plan = pt.plan(lengths, 8)
    less = plan.without(plan.pack_tokens < 5, "under_filled")
    assert list(less.ledger) == [(2, "under_filled")] and contents(less) == [[0], [1], [3]]
    assert (
        less.stats()["slots"] == 46
        and less.long_samples == 1
        and less.pack_costs["images"].tolist() == [1, 1, 0]
    )
    check_laws(less, lengths)
    assert contents(plan.without([3], "x"))[-1] == [2] and plan.without([3], "x").long_samples == 0
    with pytest.raises(PlanError, match="outside"):
        plan.without([9], "x")
    with pytest.raises(PlanError, match="mask"):
        plan.without(np.array([True]), "x")
    assert plan.without([], "x").checksum == plan.checksum


def test_a_packer_that_breaks_a_law_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.packers import sequential

    for wrong in (lambda p: np.zeros(len(p.costs), dtype=np.int64), lambda p: np.zeros(1, dtype=np.int64)):
        monkeypatch.setattr(sequential, "pack", wrong)
        with pytest.raises(LawError, match="sequential"):
            pt.plan([5, 6, 7], 10, packer="sequential")
    monkeypatch.setattr(sequential, "pack", lambda p: np.array([0, -1, 1]))
    assert list(pt.plan([5, 6, 7], 10, packer="sequential").ledger) == [(1, "left_out")]


def test_summary_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="packtrain"):
        pt.plan([5, 0, 20], 10, long_samples="drop")
    assert "planned 1 of 3 samples into 1 pack of" in caplog.text and "'over_long': 1" in caplog.text


GOLDEN = {
    "bfd": "b9b1ea44547fa279ae1a2f8b621addd611e8aee47b4ba07143e0c72342e125e3",
    "bfd seed": "bfd6ea0f7cb73af5f41a27844c644e0d2b16a0f9b1358f5af9157f9d7658c92a",
    "sequential": "52ab0a7f463be429ebce1a025719f3ed27b636381b288e851844acafc837cf96",
    "refine": "2f449e45539504913d977ef33c2a33c8ea27e9745ad62a92590a73ba9df45bcb",
    "ffd": "7033a840534188fe6cc3057d26291abdad48f405bf64974b53a07d2db2456b63",
    "diverse": "3e3445e6e1269823c4ab574edee354172b744b34adb4efbc6e050bb603a9c0d1",
    "random_fit": "153fd1d5506b063430c39a985b48d6b07894e5717a51e9ffc15b4855ac019791",
    "window": "643876143bb641bf6dc059da31a86979f119e90a7c35c736435eca4cbd39c28d",
    "limits": "22caaddfbb594ca1100260592bc26b1a31521ef21b7f4de539eaa62b1a680443",
    "bfd large": "ca65ad4fe0f19b41dae6bf0184a0fc553fb024efa04b3099a1b1ea2a7abb2cb5",
    "auto large": "c45e98f1fa87d57c6266426ded7e9b298dd7f4e31f5ddf5ba50f4da91de99490",
}

PROGRAM = """
import numpy as np, packtrain as pt
x = np.arange(70000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
t = (x >> np.uint64(40)).astype(np.int64)
t = 1 + (t % 37) * (t % 251) % 9000
few = pt.Lengths(t[:5000], costs={"images": t[:5000] % 4})
for packer in ("bfd", "sequential", "refine", "ffd", "diverse"):
    print(packer, pt.plan(few, 8192, packer=packer).checksum)
print("bfd seed", pt.plan(few, 8192, packer="bfd", seed=7).checksum)
print("random_fit", pt.plan(few, 8192, packer="random_fit", seed=2).checksum)
print("window", pt.plan(few, 8192, window=500, seed=1).checksum)
print("limits", pt.plan(few, 8192, limits={"images": 9}, max_samples=20).checksum)
print("bfd large", pt.plan(t, 8192, packer="bfd").checksum)
print("auto large", pt.plan(t, 8192).checksum)
"""


@pytest.mark.parametrize(
    "environment",
    [{}, {"PYTHONHASHSEED": "123", "NPY_DISABLE_CPU_FEATURES": "{features}", "PACKTRAIN_JIT": "0"}],
    ids=["as is", "other cpu features and hash seed, no compiler"],
)
def test_golden_checksums(environment: dict[str, str], tmp_path: Path) -> None:
    """Plan bytes do not change between releases, machines, CPU features, hash seeds or paths."""
    features = np._core._multiarray_umath  # type: ignore[attr-defined]
    used = [f for f in features.__cpu_dispatch__ if features.__cpu_features__.get(f)]
    filled = {key: value.format(features=" ".join(used)) for key, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, **filled}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert dict(line.rsplit(" ", 1) for line in done.stdout.splitlines()) == GOLDEN
