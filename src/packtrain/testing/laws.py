"""Laws of plans and packers as properties (needs hypothesis).

A packer is tested by inheriting its laws:

    from packtrain.testing import PackerLaws

    class TestMine(PackerLaws):
        packer = "mine"

The checks here are plain loops that share no code with what they check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .. import extend
from ..packers import _jit
from ..planning.build import plan as make_plan
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan


# --------------------------------------------------------------------------------------------
# strategies
# --------------------------------------------------------------------------------------------
@st.composite
def token_lists(draw: st.DrawFn, capacity: int, max_size: int = 60) -> list[int]:
    """Lengths around a capacity: mostly inside, some 0, some at the cap, some above; often few distinct."""
    near = st.sampled_from(
        [0, 1, capacity // 3, capacity // 2, capacity // 2 + 1, capacity - 1, capacity, capacity + 1]
    )
    one = st.one_of(st.integers(1, max(1, capacity)), st.integers(0, 2 * capacity), near)
    few = draw(st.lists(one, min_size=1, max_size=4))
    pick = draw(st.sampled_from([one, st.sampled_from(few)]))
    return draw(st.lists(pick, max_size=max_size))


@st.composite
def lengths_and_options(draw: st.DrawFn, *, limits: bool = False) -> tuple[Lengths, dict[str, Any]]:
    """A Lengths and keyword arguments for `packtrain.plan` (without the packer)."""
    capacity = draw(st.sampled_from([1, 2, 7, 64, 100, 1000, 8192, 1 << 23]))
    tokens = draw(token_lists(capacity))
    n = len(tokens)
    status = draw(st.one_of(st.none(), st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=n, max_size=n)))
    options: dict[str, Any] = {
        "pack_length": capacity,
        "long_samples": draw(st.sampled_from(["single", "drop"])),
        "long_rule": draw(st.sampled_from([">", ">="])),
        "multiple_of": draw(st.sampled_from([1, 1, 2, 8])),
        "seed": draw(st.sampled_from([None, None, 0, 1 << 70])),
        "window": draw(st.sampled_from([None, None, None, 1, 7, 20])),
    }
    costs: dict[str, list[int]] = {}
    if limits and draw(st.booleans()):
        costs["images"] = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
        options["limits"] = {"images": draw(st.integers(1, 6))}
    if limits and draw(st.booleans()):
        options["max_samples"] = draw(st.integers(1, 5))
    return Lengths(tokens, costs, status), options


# --------------------------------------------------------------------------------------------
# laws
# --------------------------------------------------------------------------------------------
def check_plan(plan: PackPlan, lengths: Lengths) -> None:
    """Laws 1-3 and the sums of a plan, by plain loops. AssertionError names what broke."""
    spec = plan.spec
    packs = [pack.tolist() for pack in plan]
    packed = [i for pack in packs for i in pack]
    left = plan.ledger.ids.tolist()
    assert sorted(packed + left) == list(range(len(lengths))), "partition: every sample once"
    assert left == sorted(left), "ledger ids ascend"
    assert len(plan.ledger.reasons) == len(left), "one reason an entry"
    tokens = lengths.tokens.tolist()
    for p, pack in enumerate(packs):
        assert pack and pack == sorted(pack), "ids ascend inside a pack, none is empty"
        cost = sum(-(-tokens[i] // spec.multiple_of) * spec.multiple_of for i in pack)
        assert len(pack) == 1 or cost <= spec.pack_length, f"capacity: pack {p} holds {cost}"
        for name, limit in spec.limits.items():
            held = sum(int(lengths.costs[name][i]) for i in pack)
            assert len(pack) == 1 or held <= limit, f"limit {name}: pack {p} holds {held}"
        assert spec.max_samples is None or len(pack) <= spec.max_samples, "max_samples"
        assert int(plan.pack_tokens[p]) == sum(tokens[i] for i in pack), "pack_tokens"
        assert int(plan.pack_sq[p]) == sum(tokens[i] ** 2 for i in pack), "pack_sq"
    per_step = min(spec.packs_per_step or len(packs), spec.samples_per_step or len(packs)) or 1
    for start in range(0, len(packs), per_step):
        firsts = [pack[0] for pack in packs[start : start + per_step]]
        assert firsts == sorted(firsts), "packs ascend by smallest id, in each step"
        if spec.samples_per_step is not None and start + per_step < len(packs):
            held = sum(map(len, packs[start : start + per_step]))
            assert held == spec.samples_per_step, f"step {start // per_step} holds {held} samples"
    for i, reason in plan.ledger:
        _check_reason(plan, lengths, i, reason)
    for i in packed:
        assert lengths.status[i] == 0 and tokens[i] > 0, "only usable samples are packed"
    assert plan.certificate.bound <= len(packs), "the bound is a lower bound"
    assert plan.certificate.optimal == (plan.certificate.bound == len(packs)), "optimal only when proven"


def _check_reason(plan: PackPlan, lengths: Lengths, index: int, reason: str) -> None:
    if lengths.status[index] != 0:
        assert reason == lengths.reason(index), "the ledger carries the reason of the lengths"
        return
    cap, m = plan.spec.pack_length, plan.spec.multiple_of
    cost = -(-int(lengths.tokens[index]) // m) * m
    long = cost > cap or (plan.spec.long_rule == ">=" and cost == cap)
    over = any(int(lengths.costs[name][index]) > limit for name, limit in plan.spec.limits.items())
    assert reason.startswith("over_") and (long or over), f"sample {index} was dropped as {reason}"


_LAWS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class PackerLaws:
    """Laws 1-4 and 12 for the packer named by the class attribute `packer`.

    Limits are tried when the module says `LIMITS = True`; one that says `SEEDED = True` may answer another
    shape for another seed.
    """

    packer: str

    def _says(self, flag: str) -> bool:
        return bool(getattr(extend.lookup("packers", self.packer), flag, False))

    @_LAWS
    @given(case=st.data())
    def test_partition_capacity_order(self, case: st.DataObject) -> None:
        lengths, options = case.draw(lengths_and_options(limits=self._says("LIMITS")))
        check_plan(make_plan(lengths, packer=self.packer, **options), lengths)

    @_LAWS
    @given(case=st.data())
    def test_plan_depends_on_values_only(self, case: st.DataObject) -> None:
        lengths, options = case.draw(lengths_and_options(limits=self._says("LIMITS")))
        costs = {name: array.astype(np.int16) for name, array in lengths.costs.items()}
        wide = lengths.tokens.astype(np.uint64)
        other = Lengths(
            np.concatenate([wide, wide])[: len(wide)], costs, lengths.status.tolist(), lengths.reasons
        )
        before = lengths.tokens.tobytes()
        first = make_plan(lengths, packer=self.packer, **options)
        again = make_plan(other, packer=self.packer, **options)
        assert first == again and first.checksum == again.checksum
        assert lengths.tokens.tobytes() == before, "inputs are not changed"

    @_LAWS
    @given(case=st.data())
    def test_compiled_equals_plain(self, case: st.DataObject) -> None:
        lengths, options = case.draw(lengths_and_options(limits=self._says("LIMITS")))
        with plain_path():
            plain = make_plan(lengths, packer=self.packer, **options)
            plain_sums = plain.pack_sq.tolist()
        with compiled_path():
            fast = make_plan(lengths, packer=self.packer, **options)
            assert fast.pack_sq.tolist() == plain_sums
        assert fast == plain and fast.packer == plain.packer and fast.certificate == plain.certificate

    @_LAWS
    @given(case=st.data())
    def test_threads_do_not_matter(self, case: st.DataObject) -> None:
        lengths, options = case.draw(lengths_and_options(limits=self._says("LIMITS")))
        made = []
        for count in (1, 2, 3):
            with on_threads(count):
                made.append(make_plan(lengths, packer=self.packer, **options))
                assert made[-1].pack_sq.tolist() == made[0].pack_sq.tolist()
        assert made[0] == made[1] == made[2] and made[0].certificate == made[2].certificate

    def test_larger_instance(self) -> None:
        rng = np.random.default_rng(5)
        lengths = Lengths(np.clip(rng.lognormal(5.5, 1.2, 5000).astype(np.int64), 1, 9000))
        plan = make_plan(lengths, pack_length=8192, packer=self.packer)
        check_plan(plan, lengths)
        assert plan == make_plan(lengths, pack_length=8192, packer=self.packer)

    def test_seed_only_moves_samples_of_equal_cost(self) -> None:
        rng = np.random.default_rng(6)
        lengths = Lengths(rng.integers(1, 30, 400))
        plans = [make_plan(lengths, pack_length=64, packer=self.packer, seed=seed) for seed in (None, 1, 2)]
        for plan in plans:
            check_plan(plan, lengths)
        if not self._says("SEEDED"):
            shapes = [sorted(sorted(lengths.tokens[pack].tolist()) for pack in plan) for plan in plans]
            assert shapes[0] == shapes[1] == shapes[2]


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Use the compiled kernels on so many threads for any number of samples."""
    with mock.patch.multiple(_jit, THREAD_LIMIT=0, THREADS=count), compiled_path():
        yield


def compiled_path() -> contextlib.AbstractContextManager[Any]:
    """Use the compiled kernels for any number of samples (where `PACKTRAIN_JIT` allows them)."""
    return mock.patch.object(_jit, "PLAIN_LIMIT", -1)


def plain_path() -> contextlib.AbstractContextManager[Any]:
    """Use no compiled kernel for any number of samples."""
    return mock.patch.object(_jit, "PLAIN_LIMIT", 1 << 62)
