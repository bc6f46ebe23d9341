"""Ten faults put into a copy of the tree, one at a time: the tests named beside each must fail on it.

    python scripts/seeded_faults.py [WORD …]     # only the faults whose name holds a word

A fault is a text of one source file and what stands there instead. The text is looked for in all of `src`, so
that it may move; it must stand there exactly once. Exit 1: a fault was not caught, or its text is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """One wrong line, and the test files that must see it."""

    name: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(
        "the last sample of a pack is dropped",
        "[self._fetch(sample_id) for sample_id in self.packs[position].tolist()]",
        "[self._fetch(sample_id) for sample_id in self.packs[position].tolist()[:-1]]",
        ("test_packed_dataset.py",),
    ),
    Fault(
        "a sort is not stable",
        'order = np.argsort(first, kind="stable")',
        "order = np.argsort(first)",
        ("test_architecture.py",),
    ),
    Fault(
        "boundaries are off by one",
        "np.array([0, *lengths]).cumsum()",
        "np.array([1, *lengths]).cumsum()",
        ("test_collate_row.py",),
    ),
    Fault(
        "positions do not restart",
        "np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)",
        "np.arange(ends[-1])",
        ("test_collate_row.py",),
    ),
    Fault(
        "the ledger loses one entry",
        "return Ledger(merged[order], codes[order], table)",
        "return Ledger(merged[order][1:], codes[order][1:], table)",
        ("test_plan.py",),
    ),
    Fault(
        "a rank takes another rank's slot",
        "np.arange(start, max(start, stop), dtype=np.int64) * ranks + rank, epoch",
        "np.arange(start, max(start, stop), dtype=np.int64) * ranks + max(rank, 1) - 1, epoch",
        ("test_pack_sampler.py",),
    ),
    Fault(
        "resume is off by one",
        "self.epoch, self.micro_step = self.order.resume(state)\n        self._start = self.micro_step",
        "self.epoch, self.micro_step = self.order.resume(state)\n        self._start = self.micro_step + 1",
        ("test_pack_sampler.py",),
    ),
    Fault(
        "the loss is normalised by micro step",
        "normaliser = weight if num_items_in_batch is None else num_items_in_batch",
        "normaliser = weight",
        ("test_train_reduction.py", "test_train_loss.py"),
    ),
    Fault(
        "a truncated medium is accepted",
        "ParsedAudio(length // block, rate, channels, length <= held)",
        "ParsedAudio(length // block, rate, channels, True)",
        ("test_media_audio.py",),
    ),
    Fault(
        "a file is renamed before it is synced",
        """            os.fsync(handle.fileno())
            step("fsync", path)
        os.replace(temporary, path)
        step("rename", path)
""",
        """            os.replace(temporary, path)
            step("rename", path)
            os.fsync(handle.fileno())
            step("fsync", path)
""",
        ("test_files.py",),
    ),
]


def copy_of_the_tree(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def caught_by(fault: Fault, tree: Path) -> str:
    """The first failed test, or what is wrong with the fault itself (begins with "!")."""
    places = [path for path in (tree / "src").rglob("*.py") if fault.right in path.read_text("utf-8")]
    if len(places) != 1 or places[0].read_text("utf-8").count(fault.right) != 1:
        return f"! its text stands in {len(places)} files: {', '.join(path.name for path in places)}"
    tests = [str(path) for name in fault.tests for path in sorted((tree / "tests").rglob(name))]
    if not tests:
        return f"! no test file is named {' or '.join(fault.tests)}"
    whole = places[0].read_text("utf-8")
    places[0].write_text(whole.replace(fault.right, fault.wrong), "utf-8")
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                "-m",
                "not hosts and not versions and not install",
                *tests,
            ],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        places[0].write_text(whole, "utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode == 1 and failed:
        return failed[0].removeprefix("FAILED ").partition(" - ")[0]
    return "! not caught" if done.returncode == 0 else f"! pytest ended with {done.returncode}"


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = copy_of_the_tree(Path(scratch))
        for fault in chosen:
            told = caught_by(fault, tree)
            missed += told.startswith("!")
            print(f"{fault.name:<42} {told}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
