"""Every packer in the folder inherits the laws; bfd equals an item-by-item oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import extend
from packtrain.errors import UnknownNameError
from packtrain.testing import PackerLaws, compiled_path, plain_path

PACKERS = extend.names("packers")

for _name in PACKERS:
    globals()[f"TestLaws_{_name}"] = type(
        f"TestLaws_{_name}", (PackerLaws,), {"packer": _name, "limits": False}
    )


def best_fit_decreasing(costs: list[int], capacity: int) -> int:
    """Packs of best fit decreasing, item by item: the fullest pack that still takes the item."""
    rooms: list[int] = []
    packs = 0
    for cost in sorted(costs, reverse=True):
        place = bisect_left(rooms, cost)
        if place == len(rooms):
            packs += 1
            room = capacity
        else:
            room = rooms.pop(place)
        insort(rooms, room - cost)
    return packs


def random_case(seed: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([10, 64, 100, 1000, 8192, 131072]))
    n = int(rng.integers(1, 600))
    kind = seed % 4
    if kind == 0:
        costs = rng.integers(1, capacity + 1, n)
    elif kind == 1:
        costs = rng.lognormal(np.log(capacity / 20 + 1), 1.2, n).astype(np.int64)
    elif kind == 2:
        costs = rng.choice(rng.integers(1, capacity + 1, 5), n)
    else:
        costs = rng.integers(capacity // 4, capacity // 2 + 1, n)
    return np.clip(costs, 1, capacity), capacity


def test_the_packers_of_the_folder_are_found() -> None:
    assert {"auto", "bfd", "sequential"} <= set(PACKERS)


@pytest.mark.parametrize("compiled", [False, True])
def test_bfd_counts_equal_the_oracle(compiled: bool) -> None:
    with compiled_path() if compiled else plain_path():
        for seed in range(200):
            costs, capacity = random_case(seed)
            plan = pt.plan(costs, capacity, packer="bfd")
            assert len(plan) == best_fit_decreasing(costs.tolist(), capacity), seed


def test_sequential_is_next_fit() -> None:
    plan = pt.plan([5, 5, 1, 9, 2, 8, 11, 3], 10, packer="sequential")
    assert [pack.tolist() for pack in plan] == [[0, 1], [2, 3], [4, 5], [6], [7]]


def test_unknown_packer_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="sequental") as caught:
        pt.plan([1], 10, packer="sequental")
    assert "sequential" in str(caught.value.hint)


def test_an_unusable_numba_cache_only_costs_time(tmp_path: Path) -> None:
    """A cache folder that is a file, and one whose index files are torn: the same plan, no error."""
    program = (
        "import numpy as np, packtrain as pt\n"
        "t = np.random.default_rng(0).integers(1, 4000, 60000)\n"
        "print(pt.plan(t, 8192, packer='sequential').checksum)\n"
    )

    def run(cache: Path, jit: str = "1") -> str:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PACKTRAIN_JIT": jit}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout

    plain = run(tmp_path / "unused", jit="0")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(blocked) == plain
    torn = tmp_path / "torn"
    assert run(torn) == plain
    held = sorted(torn.rglob("*.nb*"))
    assert held, "the cache was written"
    for path in held:
        path.write_bytes(b"\x80")
    assert run(torn) == plain
