"""The plan folder: round trip, memory maps, torn and foreign folders, crash law."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import files
from packtrain.errors import ChecksumError, ForeignArtefactError, FormatError, InputError
from packtrain.planning.stats import plan_stats
from packtrain.store import plans
from packtrain.testing import crash_points, snapshot


def small(seed: int = 0, **options: object) -> pt.PackPlan:
    rng = np.random.default_rng(seed)
    lengths = pt.Lengths(
        rng.integers(0, 120, 300),
        costs={"images": rng.integers(0, 3, 300)},
        status=(rng.random(300) < 0.05) * 2,
    )
    return pt.plan(lengths, 100, **{"long_samples": "drop", **options})


def test_round_trip(tmp_path: Path) -> None:
    plan = small()
    plan.save(tmp_path / "plan", origin={"source": "train.jsonl"})
    loaded = pt.PackPlan.load(tmp_path / "plan")
    assert loaded == plan and loaded.stats() == plan.stats() and loaded.packer == plan.packer
    assert loaded.certificate == plan.certificate and list(loaded.ledger) == list(plan.ledger)
    for name in ("offsets", "indices", "pack_tokens", "pack_sq"):
        mine, theirs = getattr(plan, name), getattr(loaded, name)
        assert theirs.dtype == mine.dtype and np.array_equal(mine, theirs), name
    assert isinstance(loaded.indices, np.memmap)
    assert np.array_equal(loaded.pack_costs["images"], plan.pack_costs["images"])
    assert plans.verify(tmp_path / "plan") == plan
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == [
        "indices.npy", "ledger.npy", "offsets.npy", "origin.json", "pack_images.npy", "pack_sq.npy",
        "pack_tokens.npy", "plan.json",
    ]  # fmt: skip


def test_empty_plan_round_trip(tmp_path: Path) -> None:
    plan = pt.plan([], 10)
    plan.save(tmp_path)
    assert pt.PackPlan.load(tmp_path) == plan and len(pt.PackPlan.load(tmp_path)) == 0
    assert plans.verify(tmp_path) == plan


def test_a_loaded_plan_pickles_as_its_path(tmp_path: Path) -> None:
    small().save(tmp_path / "p")
    loaded = pt.PackPlan.load(tmp_path / "p")
    data = pickle.dumps(loaded)
    assert len(data) < 1000 and isinstance(pickle.loads(data).indices, np.memmap)
    small(1).save(tmp_path / "p", overwrite=True)
    with pytest.raises(ChecksumError, match="another plan"):
        pickle.loads(data)


def test_saving_twice_is_the_same_and_another_plan_is_refused(tmp_path: Path) -> None:
    small().save(tmp_path)
    before = snapshot(tmp_path)
    small().save(tmp_path)
    pt.PackPlan.load(tmp_path).save(tmp_path)
    assert snapshot(tmp_path) == before
    with pytest.raises(ForeignArtefactError, match="lengths_digest and checksum differ"):
        small(1).save(tmp_path)
    with pytest.raises(ForeignArtefactError, match="long_rule '>' there, '>=' here"):
        small(long_rule=">=").save(tmp_path)
    assert snapshot(tmp_path) == before
    small(1).save(tmp_path, overwrite=True)
    assert plans.verify(tmp_path) == small(1)


def test_torn_and_foreign_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    small().save(folder)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}

    def broken(name: str, data: bytes | None) -> None:
        for held, content in good.items():
            (folder / held).write_bytes(content)
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)

    other = tmp_path / "other"
    small(1).save(other)
    for name in ("offsets.npy", "indices.npy", "ledger.npy", "pack_sq.npy"):
        for data in (
            None,
            b"",
            good[name][:100],
            good[name][:-1],
            (tmp_path / "other" / "plan.json").read_bytes(),
        ):
            broken(name, data)
            with pytest.raises(FormatError, match=name.replace(".", r"\.")):
                pt.PackPlan.load(folder)
    for data in (
        None,
        b"",
        b"{",
        b"[]",
        b'{"schema": "packtrain.plan/9"}',
        b'{"schema": "packtrain.plan/1"}',
    ):
        broken("plan.json", data)
        with pytest.raises(FormatError, match=r"plan\.json"):
            pt.PackPlan.load(folder)
    broken("offsets.npy", (other / "offsets.npy").read_bytes())
    with pytest.raises(FormatError):
        pt.PackPlan.load(folder)
    with pytest.raises(FormatError, match="not a folder"):
        pt.PackPlan.load(tmp_path / "nowhere")


def test_an_array_that_is_gone_or_locked_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small().save(tmp_path)
    (tmp_path / "offsets.npy").rename(tmp_path / "away")
    with pytest.raises(FormatError, match=r"offsets\.npy is missing"):
        plans.load(tmp_path)
    (tmp_path / "away").rename(tmp_path / "offsets.npy")

    def locked(*_: Any, **__: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(np, "load", locked)
    with pytest.raises(InputError, match=r"no permission to read \S+\.npy"):
        plans.load(tmp_path)


@pytest.mark.parametrize("name", ["offsets.npy", "indices.npy", "pack_tokens.npy", "ledger.npy"])
def test_a_flipped_byte_is_found_by_verify(tmp_path: Path, name: str) -> None:
    small().save(tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[-11] ^= 1  # not the last offset: load checks that one
    (tmp_path / name).write_bytes(bytes(data))
    with pytest.raises(ChecksumError, match=name.replace(".", r"\.")):
        plans.verify(tmp_path)


def test_offsets_that_do_not_ascend_are_told_by_the_figures(tmp_path: Path) -> None:
    """Opening hashes nothing; a pack without a sample would divide by zero."""
    small().save(tmp_path)
    offsets = np.load(tmp_path / "offsets.npy")
    for wrong in (offsets[3], offsets[5] + 7, -1 << 40):
        edited = offsets.copy()
        edited[4] = wrong
        np.save(tmp_path / "offsets.npy", edited)
        with pytest.raises(FormatError, match="do not ascend"):
            plan_stats(pt.PackPlan.load(tmp_path))


def test_a_changed_checksum_is_found(tmp_path: Path) -> None:
    small().save(tmp_path)
    marker = json.loads((tmp_path / "plan.json").read_text())
    marker["checksum"] = "0" * 64
    (tmp_path / "plan.json").write_text(json.dumps(marker))
    with pytest.raises(ChecksumError):
        plans.verify(tmp_path)


def absent_or_whole(folder: Path) -> None:
    try:
        loaded = pt.PackPlan.load(folder)
    except FormatError:
        return
    assert plans.verify(folder) == loaded


def test_crash_law_on_a_fresh_folder(tmp_path: Path) -> None:
    assert crash_points(small().save, tmp_path, check=absent_or_whole) > 25


def test_crash_law_over_another_plan(tmp_path: Path) -> None:
    steps = crash_points(
        lambda folder: small().save(folder, overwrite=True),
        tmp_path,
        prepare=lambda folder: small(1).save(folder),
        check=absent_or_whole,
    )
    assert steps > 25


def test_crash_points_catches_a_writer_that_is_not_whole(tmp_path: Path) -> None:
    def appends(folder: Path) -> None:
        files.append_line(folder / "log", "x")
        files.append_line(folder / "log", "y")

    with pytest.raises(AssertionError, match="stopped after step 1"):
        crash_points(appends, tmp_path)


def test_killed_writer_leaves_nothing_that_is_taken_for_a_plan(tmp_path: Path) -> None:
    """A real kill -9 while the arrays are written, then the same verb again."""
    program = (
        "import os, signal, sys, packtrain as pt\n"
        "from packtrain import files\n"
        "seen = []\n"
        "def observe(kind, path):\n"
        "    seen.append(kind)\n"
        "    if len(seen) == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.observer = observe\n"
        "pt.plan([5] * 100, 20).save(sys.argv[1])\n"
    )
    whole = tmp_path / "whole"
    pt.plan([5] * 100, 20).save(whole)
    for stop in (2, 9, 21):
        folder = tmp_path / f"killed{stop}"
        done = subprocess.run([sys.executable, "-c", program, str(folder), str(stop)], check=False)
        assert done.returncode == -9
        absent_or_whole(folder)
        pt.plan([5] * 100, 20).save(folder)
        assert snapshot(folder) == snapshot(whole)


def test_a_plan_is_not_saved_among_files_of_others(tmp_path: Path) -> None:
    """As `packtrain plan` refuses it; what a stopped writer left is no other's."""
    made = pt.plan([3, 5, 2], 8)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ForeignArtefactError, match=r"holds files that are no plan: notes.txt"):
        made.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "offsets.npy").write_bytes(b"")
    made.save(tmp_path / "left")
    assert pt.PackPlan.load(tmp_path / "left").checksum == made.checksum
    with pytest.raises(ForeignArtefactError, match="max_samples not set there, 1 here"):
        pt.plan([3, 5, 2], 8, max_samples=1).save(tmp_path / "left")
