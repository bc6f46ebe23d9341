"""Shared fixtures: where the real data lie, and how many tests used them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matrix_recorder import MatrixRecorder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

pytest_plugins = ["pytester"]
REPOSITORY = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("PACKTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The real data folder; tests that ask for it are counted as real-data tests."""
    if not DATA.is_dir():
        pytest.skip(f"real data are not there: {DATA} (set PACKTRAIN_TEST_DATA)")
    return DATA


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small real tokenizer with a chat template, without images."""
    from packtrain.template import load_processor
    from packtrain.testing.demo.processor import save_processor, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"Count to {i}. {' '.join(map(str, range(i)))}" for i in range(24)]
    save_processor(folder / "processor", train_tokenizer(texts, 400))
    processor = load_processor(str(folder / "processor"))
    processor.tokenizer.chat_template = processor.chat_template or processor.tokenizer.chat_template
    processor.tokenizer.save_pretrained(str(folder / "text"))
    return folder / "text"


@pytest.fixture
def text_run(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., dict[str, Any]]:
    """Makes the values of a small text run: `text_run(samples=40, output_dir=…, **training)`."""

    def make(
        samples: int = 40,
        output_dir: Path | None = None,
        name: str = "train",
        cap: int = 128,
        **training: Any,
    ) -> dict[str, Any]:
        path = tmp_path / f"{name}.jsonl"
        if not path.exists():
            rows = [
                {"question": f"Count to {i % 23}.", "answer": " ".join(str(j) for j in range(i * 7 % 23 + 1))}
                for i in range(samples)
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return {
            "global_max_length": cap,
            "model": {"name_or_path": "tiny:qwen3"},
            "template": {"processor": str(tokenizer_folder)},
            "custom": {"train_jsonl": str(path), "columns": {"prompt": "question", "response": "answer"}},
            "training": {
                "output_dir": str(output_dir or tmp_path / "run"),
                "packing_length_precompute_workers": 1,
                "save_strategy": "no",
                "logging_steps": 1,
                **training,
            },
        }

    return make


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PACKTRAIN_MATRIX"):
        config.pluginmanager.register(MatrixRecorder(Path(os.environ["PACKTRAIN_MATRIX"]).resolve()))


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
