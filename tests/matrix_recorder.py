"""Records what the tests of the hosts showed, for the support table of docs/hosts.md.

`PACKTRAIN_MATRIX=docs/hosts_matrix.json python -m pytest …` enters the outcomes of that run: a cell *works*
when every case marked `matrix(feature)` passed, is *refused* when a passing test recorded the line that the
user reads (`record_property("refused", (feature, reason, line))`), and goes when one of its cases fails. A
file that tests several hosts says which: `record_property("kind", (host, kind))`, for the table of modes, or
a fourth entry of a refusal.
`python scripts/hosts_matrix.py` renders the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HOSTS", "KINDS", "LEAK", "MatrixRecorder"]

#: The file of tests -> its host.
HOSTS = {
    "tests/integrations/test_hf_trainer.py": "transformers Trainer",
    "tests/integrations/test_hf_refused.py": "transformers Trainer",
    "tests/integrations/test_trl.py": "TRL SFTTrainer",
    "tests/integrations/test_trl_training.py": "TRL SFTTrainer",
    "tests/hosts/test_swift.py": "ms-swift",
    "tests/hosts/test_swift_refused.py": "ms-swift",
    "tests/hosts/test_swift_proof.py": "ms-swift",
    "tests/hosts/test_swift_training.py": "ms-swift",
    "tests/hosts/test_llamafactory.py": "LLaMA-Factory",
    "tests/hosts/test_axolotl.py": "axolotl",
    "tests/hosts/test_veomni.py": "VeOmni",
    "tests/hosts/test_accelerate.py": "accelerate",
    "tests/hosts/test_ray_train.py": "Ray Train",
    "tests/hosts/test_lightning.py": "Lightning",
    "tests/hosts/test_unsloth.py": "unsloth",
    "tests/hosts/test_torchtitan.py": "torchtitan",
    "tests/hosts/test_automodel.py": "NeMo Automodel",
}
#: Files whose tests name the host of each cell.
KINDS = (
    "tests/integrations/test_kinds.py",
    "tests/integrations/test_host_proof.py",
    "tests/hosts/test_swift_kinds.py",
)

#: The row of a set-up that the isolation proof refuses, and the reason that is told.
LEAK = ("attention that reads across samples", "packed samples read each other")


class MatrixRecorder:
    """A pytest plug-in: collects cells, and enters them when the session ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown: dict[tuple[str | None, str], dict[str, Any]] = {}
        self.failed: set[tuple[str | None, str]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        file, _, name = item.nodeid.partition("::")
        host = HOSTS.get(file)
        if (
            (host is None and file not in KINDS)
            or report.skipped
            or (report.passed and report.when != "call")
        ):
            return report
        test = f"{file}::{name.partition('[')[0]}"
        for mark in item.iter_markers("matrix"):
            for feature in mark.args if host is not None else ():
                self._enter((host, feature), report.failed, {"outcome": "works", "test": test})
        for key, value in report.user_properties:
            if key == "kind":
                named, kind = value
                cell = {"outcome": "works", "test": test}
                self._enter((named, f"packs: {kind}"), report.failed, cell)
            if key == "refused":
                feature, reason, line, *named = value
                cell = {"outcome": "refused", "reason": reason, "line": line, "test": test}
                self._enter((named[0] if named else host, feature), report.failed, cell)
        return report

    def _enter(self, key: tuple[str | None, str], failed: bool, cell: dict[str, Any]) -> None:
        if failed:
            self.failed.add(key)
        else:
            self.shown[key] = cell

    def pytest_sessionfinish(self) -> None:
        held = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        for (host, feature), cell in self.shown.items():
            held.setdefault(host, {})[feature] = cell
        for host, feature in self.failed:
            held.get(host, {}).pop(feature, None)
        text = json.dumps(held, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        self.path.write_text(text, encoding="utf-8")
