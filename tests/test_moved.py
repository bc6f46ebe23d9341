"""Old import paths, names and keywords: what README, docs and examples of 97ca416 named still works."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import packtrain
import packtrain as pt
from packtrain import errors, moved
from packtrain.errors import InputError
from packtrain.extend import names

# Collected from README.md, docs/*.md and examples/ of commit 97ca416; frozen.
NAMED = (
    "packtrain.measure",
    "packtrain.plan",
    "packtrain.forecast",
    "packtrain.Lengths",
    "packtrain.PackPlan",
    "packtrain.PlanSpec",
    "packtrain.AlignedPlan",
    "packtrain.Ledger",
    "packtrain.PacktrainError",
    "packtrain.SampleError",
    "packtrain.__version__",
    "packtrain.collate.PaddingFreeCollator",
    "packtrain.collate.segment_multiple",
    "packtrain.data.EncodeCache",
    "packtrain.data.EqualSteps",
    "packtrain.data.LazyShardedDataset",
    "packtrain.data.PackLoader",
    "packtrain.data.PackSampler",
    "packtrain.data.PackedDataset",
    "packtrain.data.StreamingPackedDataset",
    "packtrain.data.TokenBudgetDataset",
    "packtrain.data.WeightedSources",
    "packtrain.data.ChunkedPacks",
    "packtrain.data.ShardedPacks",
    "packtrain.data.loader_position",
    "packtrain.data.open_packs",
    "packtrain.data.packed.PackedDataset",
    "packtrain.data.sampler.PackSampler",
    "packtrain.integrations.energon",
    "packtrain.integrations.ms_swift.install",
    "packtrain.integrations.transformers.pack",
    "packtrain.integrations.trl.pack",
    "packtrain.media.hints.header_of",
    "packtrain.planning.replan.replan",
    "packtrain.sources.open_source",
    "packtrain.sources.chat.ChatSource",
    "packtrain.store.chunks.ChunkReader",
    "packtrain.store.chunks.ChunkWriter",
    "packtrain.template.HFTemplate",
    "packtrain.template.load_processor",
    "packtrain.template.dummy_samples",
    "packtrain.template.ensure_torchvision",
    "packtrain.testing.PackerLaws",
    "packtrain.testing.crash_points",
    "packtrain.train.tiny_model",
    "packtrain.train.tiny.TINY_MODELS",
    "packtrain.train.tiny.tiny_model",
    "packtrain.train.prove_isolation",
    "packtrain.train.run_controls",
    "packtrain.train.register_varlen_attention",
    "packtrain.train.load_config",
    "packtrain.train.loss.packed_loss",
    "packtrain.train.reduction.loss_normaliser",
    "packtrain.train.weights",
    "packtrain.train.positions",
    "packtrain.train.trainer.PackTrainer",
    "packtrain.demo.make_demo",
    "packtrain.demo.resolve.resolve_demo",
    "packtrain.demo.processor.save_processor",
)
ERRORS = (
    "PacktrainError",
    "InputError",
    "ConfigError",
    "UnknownNameError",
    "LengthError",
    "SourceError",
    "PlanError",
    "FormatError",
    "ForeignArtefactError",
    "IsolationError",
    "MissingExtraError",
    "WaitTimeoutError",
    "SampleError",
    "LawError",
    "DriftError",
    "ChecksumError",
)
PACKERS = ["auto", "bfd", "diverse", "ffd", "optimal", "random_fit", "refine", "sequential"]


@pytest.fixture()
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing old was imported or told yet; what a test imports is forgotten behind it."""
    monkeypatch.setattr(moved, "_told", set())
    for name in [name for name in sys.modules if moved.new_path(name) is not None]:
        monkeypatch.delitem(sys.modules, name)


def resolve(path: str) -> Any:
    """The object of a dotted path: the longest importable module, then attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


@pytest.mark.parametrize("path", NAMED)
def test_what_the_documents_named_is_still_there(path: str) -> None:
    if "energon" in path or "trl" in path:
        pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert resolve(path) is not None


def test_errors_and_packers_keep_their_names() -> None:
    for name in ERRORS:
        assert issubclass(getattr(errors, name), errors.PacktrainError), name
    assert set(PACKERS) <= set(names("packers"))


@pytest.mark.usefixtures("afresh")
def test_an_old_path_is_the_new_module_and_is_told_once() -> None:
    import packtrain.testing.demo.resolve as new

    with pytest.warns(DeprecationWarning) as told:
        import packtrain.demo
        import packtrain.demo.resolve
        from packtrain.demo.resolve import resolve_demo
    assert [str(line.message) for line in told] == ["packtrain.demo is packtrain.testing.demo now"]
    assert told[0].filename == __file__
    assert packtrain.demo.resolve is new and resolve_demo is new.resolve_demo
    assert sys.modules["packtrain.demo.resolve"] is new and new.__name__ == "packtrain.testing.demo.resolve"
    assert new.__spec__ is not None and new.__spec__.name == new.__name__


@pytest.mark.usefixtures("afresh")
def test_pickles_of_old_paths_open() -> None:
    from packtrain.testing.demo import DemoSet

    old = pickle.dumps(DemoSet, protocol=0).replace(b"packtrain.testing.demo", b"packtrain.demo")
    with pytest.warns(DeprecationWarning, match=r"packtrain\.testing\.demo"):
        assert pickle.loads(old) is DemoSet


@pytest.mark.usefixtures("afresh")
def test_a_name_that_never_was_is_no_module() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(ModuleNotFoundError, match=r"packtrain\.demo\.none"):
        importlib.import_module("packtrain.demo.none")
    with pytest.raises(AttributeError, match="no attribute 'none'"):
        moved.attribute("packtrain.planning", "none")


def test_rows_of_the_table_lead_somewhere_and_hide_nothing() -> None:
    source = Path(packtrain.__file__).parent
    for old, new in moved.MODULES.items():
        assert importlib.util.find_spec(new) is not None, f"{old}: there is no {new}"
        place = source.joinpath(*old.split(".")[1:])
        assert not place.with_suffix(".py").exists() and not (place / "__init__.py").exists(), old
    for row in moved.NAMES.values():
        home, _, name = row.partition(":")
        assert hasattr(importlib.import_module(home), name), row


@pytest.mark.usefixtures("afresh")
def test_a_name_that_moved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moved.NAMES, "packtrain.version:fit", "packtrain.errors:fit_one_line")
    monkeypatch.setattr(errors, "fit_one_line", len, raising=False)
    with pytest.warns(DeprecationWarning, match="packtrain.version.fit is packtrain.errors.fit_one_line now"):
        assert moved.attribute("packtrain.version", "fit") is len


@pytest.mark.usefixtures("afresh")
def test_old_keywords_are_taken_once_told(monkeypatch: pytest.MonkeyPatch) -> None:
    @moved.renamed("max_wait_time", "poll_interval")
    def wait(*, timeout_s: float = 0, poll_s: float = 1) -> tuple[float, float]:
        return timeout_s, poll_s

    with pytest.warns(DeprecationWarning, match="keyword max_wait_time is timeout_s now") as told:
        assert wait(max_wait_time=3, poll_s=2) == (3, 2)
        assert wait(max_wait_time=4) == (4, 1)
    assert len(told) == 1 and told[0].filename == __file__
    for both in ({"max_wait_time": 1, "timeout_s": 1}, {"timeout_s": 1, "max_wait_time": 1}):
        with pytest.raises(InputError, match="one option"):
            wait(**both)
    assert wait(timeout_s=5) == (5, 1)


def test_the_parts_of_testing_load_alone() -> None:
    """The wheel's tiny models and demo set need no hypothesis, and the demo set no torch."""
    code = (
        "import sys, packtrain.testing, packtrain.testing.demo\n"
        "assert packtrain.testing.demo.demo_config().startswith('#')\n"
        "assert not {'hypothesis', 'torch', 'transformers'} & set(sys.modules)\n"
        "import packtrain.testing.tiny\n"
        "assert 'hypothesis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.spec(
    "001",
    "the arguments of its datasets in Python: `packing_length`, `packing_interval`, `num_proc`, `strict`",
    key="`pack_length`, `window`, `encode_workers`, `on_error`",
    api="`StreamingPackedDataset`, `plan`",
)
def test_names_of_other_systems_are_keywords_too(tmp_path: Path) -> None:
    from packtrain.collate import PaddingFreeCollator
    from packtrain.data import LazyShardedDataset, StreamingPackedDataset

    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (5, 3, 9, 2)]
    ledger = tmp_path / "left.jsonl"
    made = StreamingPackedDataset(
        rows, packing_length=16, packing_interval=4, num_proc=0, strict=False, ledger_file=ledger
    )
    assert (made.pack_length, made.spec.window, made.encode_workers, made.on_error) == (16, 4, 0, "skip")
    assert StreamingPackedDataset(rows, packing_length=16, strict=True).on_error == "raise"
    with pytest.raises(InputError, match="packing_length and pack_length are one keyword"):
        StreamingPackedDataset(rows, packing_length=16, pack_length=16)
    ours = pt.plan([5, 3, 9], 9)
    assert pt.plan([5, 3, 9], packing_length=9, packing_strategy="binpack") == ours
    assert ours.align(2, dataloader_drop_last=True).checksum == ours.align(2, drop_last=True).checksum
    reader = LazyShardedDataset(tmp_path / "none", dp_rank=1, dp_world_size=2)
    assert (reader.rank, reader.world_size) == (1, 2)
    row = PaddingFreeCollator(pad_packed_to_length=8)([rows[1:2]])
    assert row["input_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
