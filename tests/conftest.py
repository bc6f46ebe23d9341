"""Shared fixtures: where the real data lie, and how many tests used them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("PACKTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data folder; tests that ask for it are counted as real-data tests."""
    if not DATA.is_dir():
        pytest.skip(f"real data are not there: {DATA} (set PACKTRAIN_TEST_DATA)")
    return DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.realdata)


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    ran = sum(1 for report in terminalreporter.stats.get("passed", []) if "realdata" in report.keywords)
    skipped = sum(1 for report in terminalreporter.stats.get("skipped", []) if "realdata" in report.keywords)
    terminalreporter.write_line(f"real-data tests: {ran} ran, {skipped} skipped ({DATA})")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A real-data test that skips although the data are there is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not DATA.is_dir():
        return
    if any("realdata" in report.keywords for report in reporter.stats.get("skipped", [])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
