"""Shared fixtures: where the real data lie, and how many tests used them."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matrix_recorder import MatrixRecorder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of one wait for the others
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
def processor(data: Path) -> Callable[[str], Any]:
    """Name -> the shipped processor, loaded once. Do not change it in a test: load a fresh one for that."""
    from packtrain.template import load_processor

    return functools.cache(lambda name: load_processor(data / "processors" / name))


@pytest.fixture(scope="session")
def small_processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Qwen2.5-VL processor around a tokenizer of 400 tokens, at most 64 for a picture.

    A tiny model of it has a small table of embeddings too: with a vocabulary as published, that table and
    its gradient are most of what a test computes.
    """
    from packtrain.testing.demo.processor import save_processor, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "processor"
    texts = [f"Count to {i}. {' '.join(map(str, range(i)))}" for i in range(24)]
    save_processor(folder, train_tokenizer(texts, 400))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(small_processor: Path) -> Path:
    """A small real tokenizer with a chat template, without images."""
    from packtrain.template import load_processor

    folder = small_processor.parent
    processor = load_processor(str(small_processor))
    processor.tokenizer.chat_template = processor.chat_template or processor.tokenizer.chat_template
    processor.tokenizer.save_pretrained(str(folder / "text"))
    return folder / "text"


@pytest.fixture
def text_run(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., dict[str, Any]]:
    """Makes the values of a small text run: `text_run(samples=40, output_dir=…, **training)`.

    Its page is drawn for `html=True` only: the charts take longer than the training.
    """

    def make(
        samples: int = 40,
        output_dir: Path | None = None,
        name: str = "train",
        cap: int = 128,
        html: bool = False,
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
            "report": {"html": html},
        }

    return make


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PACKTRAIN_MATRIX"):
        config.pluginmanager.register(MatrixRecorder(Path(os.environ["PACKTRAIN_MATRIX"]).resolve()))


#: Files that take longest, the longest first: a worker that begins one last is waited for by the others.
#: `make test` starts files in this order (--no-loadscope-reorder), then those that are not named.
LONGEST = (
    "tests/test_site.py",
    "tests/integrations/test_hf_trainer.py",
    "tests/train/test_compiled.py",
    "tests/packers/test_packer_laws.py",
    "tests/cli/test_cli_init.py",
    "tests/pipeline/test_torchrun.py",
    "tests/planning/test_bench_planner.py",
    "tests/integrations/test_trl.py",
    "tests/integrations/test_trl_training.py",
    "tests/train/test_start_up.py",
    "tests/train/test_train_resume.py",
    "tests/test_examples_order.py",
    "tests/template/test_template_labels.py",
    "tests/test_own_loop.py",
    "tests/train/test_train_reduction.py",
    "tests/integrations/test_kinds.py",
    "tests/test_blocks.py",
    "tests/integrations/test_entrances_proof.py",
    "tests/test_golden.py",
    "tests/cli/test_spec_lines.py",
    "tests/measuring/test_text_counters.py",
    "tests/template/test_template_truth.py",
    "tests/demo/test_demo_make.py",
    "tests/export/test_export_laws.py",
    "tests/cli/test_train_kinds.py",
    "tests/train/test_train_steps.py",
    "tests/export/test_produce.py",
    "tests/execute/test_local_executor.py",
    "tests/template/test_template_isolation.py",
    "tests/train/test_train_evaluates.py",
    "tests/packs/test_resume_streams.py",
    "tests/template/test_template_config.py",
    "tests/train/test_soak.py",
    "tests/pipeline/test_pipeline_append.py",
    "tests/cli/test_train_dry_run.py",
    "tests/pipeline/test_run.py",
    "tests/pipeline/test_start_processes.py",
    "tests/packs/test_equal_steps.py",
    "tests/packs/test_packed_dataset.py",
    "tests/test_workers.py",
    "tests/test_architecture.py",
)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {str(REPOSITORY / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))  # stable
    for item in items:
        if "data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.realdata)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file left alive is no garbage: else every collection looks at all of torch and transformers.

    Each Trainer asks for a whole collection when it starts, and there are many of them.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    ran = sum(
        1
        for report in terminalreporter.stats.get("passed", [])
        if "realdata" in getattr(report, "keywords", ())
    )
    skipped = sum(
        1
        for report in terminalreporter.stats.get("skipped", [])
        if "realdata" in getattr(report, "keywords", ())
    )
    terminalreporter.write_line(f"real-data tests: {ran} ran, {skipped} skipped ({DATA})")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A real-data test that skips although the data are there is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not DATA.is_dir():
        return
    if any("realdata" in getattr(report, "keywords", ()) for report in reporter.stats.get("skipped", [])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
