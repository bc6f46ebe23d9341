"""Every class, function, keyword, key and flag that the five documents write in code, under its name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.cli._options import recipe_of
from packtrain.collate import PaddingFreeCollator
from packtrain.data import LazyShardedDataset, PackedDataset, StreamingPackedDataset, TokenBudgetDataset
from packtrain.errors import ConfigError, PacktrainError
from packtrain.export import PackingProducer
from packtrain.moved import THEIRS
from packtrain.sources.encoded import EncodedTemplate
from packtrain.sources.mixture import mix
from packtrain.train.config import RunConfig, load_config

ROWS = [{"input_ids": [1] * n, "labels": [1] * n} for n in (5, 3, 9, 2)]
WRAPPED: dict[str, Callable[..., Any]] = {
    "plan": pt.plan,
    "align": pt.plan([3], 4).align,
    "measure": pt.measure,
    "PackedDataset": PackedDataset,
    "StreamingPackedDataset": StreamingPackedDataset,
    "TokenBudgetDataset": TokenBudgetDataset,
    "PaddingFreeCollator": PaddingFreeCollator,
    "LazyShardedDataset": LazyShardedDataset,
    "PackingProducer": PackingProducer,
    "mix": mix,
}


class Words(EncodedTemplate):
    max_length = 16


def calls(folder: Path) -> list[tuple[str, dict[str, Any], Callable[[Any], bool]]]:
    """(name, the call of a document, what then holds)."""
    ledger = folder / "left_out.jsonl"
    return [
        # 000
        ("plan", {"lengths": [5, 3, 9], "packing_length": 9, "packing_allow_single_long": False,
                  "packing_strategy": "binpack"}, lambda made: made.spec.long_samples == "drop"),
        ("align", {"world_size": 2, "dataloader_drop_last": False}, lambda made: len(made) == 2),
        # 001
        ("PackedDataset", {"dataset": ROWS, "template": None, "packing_length": 9, "num_proc": 1,
                           "strict": True}, lambda made: made.packed_length == [8, 9, 2]),
        ("PackedDataset", {"dataset": ROWS, "template": Words(), "packing_length": None},
         lambda made: made.plan.spec.pack_length == 16),
        ("StreamingPackedDataset", {"dataset": ROWS, "template": None, "packing_length": 16,
                                    "packing_interval": 128, "strict": False, "cyclic": False,
                                    "ledger_file": ledger},
         lambda made: (made.spec.window, made.on_error, made.cyclic) == (128, "skip", False)),
        ("mix", {"datasets": [ROWS, ROWS], "weights": None, "seed": 42}, lambda made: len(made) == 8),
        ("PaddingFreeCollator", {"padding_to": 8}, lambda made: made.pad_to_length == 8),
        # 002
        ("LazyShardedDataset", {"data_dir": folder / "packed", "dp_rank": 1, "dp_world_size": 2},
         lambda made: (made.rank, made.world_size, made.directory.name) == (1, 2, "packed")),
        ("LazyShardedDataset", {"dataset": folder / "packed"}, lambda made: made.directory.name == "packed"),
        ("PackingProducer", {"input_dir": folder, "output_dir": folder.with_name("out"),
                             "template": EncodedTemplate(),
                             "packing_length": 64, "num_proc": 1, "packing_strategy": "ffd"},
         lambda made: made is not None),
        # 003
        ("plan", {"lengths": [5, 3, 8], "box_capacity": 8, "packer": "diverse"}, lambda made: len(made) == 2),
        ("plan", {"lengths": [5, 3, 8], "max_len": 8}, lambda made: made.spec.pack_length == 8),
        # 004
        ("TokenBudgetDataset", {"source": ROWS, "micro_batch_size": 2, "max_seq_len": 9, "dyn_bsz": True,
                                "pad_packed_input": True, "pad_packed_to_length": 18},
         lambda made: made.pad_to_length == 18),
        ("TokenBudgetDataset", {"source": ROWS, "micro_batch_size": 2, "max_seq_len": 9, "dyn_bsz": False,
                                "pad_to_length": True}, lambda made: made.pad_to_length == 18),
        ("TokenBudgetDataset", {"source": ROWS, "max_seq_len": 9, "dyn_bsz_buffer_size": 20,
                                "dyn_bsz_count_mode": "effective", "dyn_bsz_overflow_ratio": 2.0},
         lambda made: (made.buffer_size, made.count_mode) == (20, "effective")),
        ("PaddingFreeCollator", {"pad_packed_to_length": 8}, lambda made: made.pad_to_length == 8),
    ]  # fmt: skip


@pytest.mark.spec(
    "001",
    "every class, function and keyword of the five documents' code is called under its name",
    key="the table `packtrain.moved.THEIRS`",
    api="`PackedDataset`, `StreamingPackedDataset`, `LazyShardedDataset`, `PackingProducer`, `plan` …",
)
def test_every_call_of_the_documents(tmp_path: Path) -> None:
    made = calls(tmp_path)
    for name, words, holds in made:
        assert holds(WRAPPED[name](**words)), (name, words)
    named = {name: {word for one, words, _ in made if one == name for word in words} for name in WRAPPED}
    assert set(THEIRS) == set(WRAPPED)
    left = {"measure": {*THEIRS["measure"]}, "PackingProducer": {"max_len", "box_capacity"},
            "StreamingPackedDataset": {"num_proc"}}  # fmt: skip
    left["TokenBudgetDataset"] = {"dataset", "num_proc", "strict", "bsz_warmup_ratio"} | {
        "bsz_warmup_init_mbtoken",
        "dyn_bsz_physical_overflow_ratio",
    }
    for name, words in THEIRS.items():
        assert set(words) <= named[name] | left.get(name, set()), name


def test_classes_of_the_documents() -> None:
    home = importlib.import_module("packtrain.data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert home.PackingDataset is PackedDataset and home.SimpleFusionDataset is mix
        assert home.IterablePackedDataset is home.IterablePackingDataset is StreamingPackedDataset
    with pytest.raises(AttributeError):
        home.PackedDatasets  # noqa: B018


@pytest.mark.parametrize("name", sorted(WRAPPED))
def test_a_keyword_that_nobody_has_is_one_line_with_the_nearest(name: str) -> None:
    """For every row of the table: a slip in each name that it knows."""
    first = {"plan": {"lengths": [3]}, "align": {"world_size": 2}}.get(name, {})
    for word in THEIRS[name]:
        with pytest.raises(PacktrainError, match=r"did you mean|known: ") as told:
            WRAPPED[name](**first, **{word + "x": 1})
        assert "\n" not in str(told.value)


def test_both_names_and_missing_arguments_are_one_line() -> None:
    with pytest.raises(ConfigError, match="data_dir and directory are one keyword"):
        LazyShardedDataset(directory="a", data_dir="b")
    with pytest.raises(ConfigError, match="LazyShardedDataset: missing a required argument: 'directory'"):
        LazyShardedDataset()
    with pytest.raises(ConfigError, match=r"TokenBudgetDataset has no keyword max_seqlen .*max_seq_len"):
        TokenBudgetDataset(ROWS, max_seqlen=9)
    with pytest.raises(ConfigError, match="set pack_length, or the template's max_length"):
        StreamingPackedDataset(ROWS)


def _on(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


#: Key of a document, its value there, the key here, the value here.
KEYS: list[tuple[str, Any, str, Any]] = [
    # 000
    ("global_max_length", 128, "template.max_length", 128),
    ("global_max_length", 128, "model.max_model_len", 128),
    ("template.max_length", 256, "pack_length", 256),
    ("model.max_model_len", 256, "model.max_model_len", 256),
    ("training.max_model_len", 256, "model.max_model_len", 256),
    ("training.packing", True, "data.packing", True),
    ("training.packing_mode", "static", "data.kind", "planned"),
    ("training.eval_packing", False, "data.eval_packing", False),
    ("training.packing_drop_last", True, "data.drop_under_filled", True),
    ("training.dataloader_drop_last", True, "data.drop_last", True),
    ("training.packing_allow_single_long", False, "data.long_samples", "drop"),
    ("training.packing_wait_timeout_s", 0, "data.wait_timeout_s", 0),
    ("training.packing_length_cache_persist_every", 7, "data.persist_every", 7),
    ("training.packing_length_precompute_workers", 1, "data.measure_workers", 1),
    ("training.effective_batch_size", 8, "training.effective_batch_size", 8),
    ("training.per_device_train_batch_size", 4, "training.per_device_train_batch_size", 4),
    ("training.gradient_accumulation_steps", 16, "training.gradient_accumulation_steps", 16),
    ("training.output_dir", "out", "training.output_dir", "out"),
    ("custom.train_jsonl", "a.jsonl", "data.path", "a.jsonl"),
    ("custom.fusion_config", "m.yaml", "data.mixture", "m.yaml"),
    # 001
    ("custom.packing", True, "data.packing", True),
    ("custom.packing_length", 8192, "pack_length", 8192),
    ("template.padding_free", True, "data.packing", True),
    ("training.padding_free", True, "data.packing", True),
    ("training.attn_impl", "flash_attn", "model.attn", "flash_attention_2"),
    ("training.attn_impl", "flash_attention_2", "model.attn", "flash_attention_2"),
    ("training.attn_impl", "flash_attention_3", "model.attn", "flash_attention_3"),
    ("training.num_proc", 3, "data.measure_workers", 3),
    ("training.strict", True, "data.on_error", "raise"),
    ("training.packing_interval", 128, "data.window", 128),
    ("training.cyclic", True, "data.kind", "planned"),
    ("training.acc_strategy", "token", "data.kind", "planned"),
    ("training.lazy_tokenize", True, "data.kind", "planned"),
    ("training.streaming", True, "data.kind", "stream"),
    # 002
    ("custom.dataset", "packed", "data.path", "packed"),
    ("training.sharded_lazy", True, "data.kind", "growing"),
    ("training.sharded_lazy_pre_packed", True, "data.kind", "growing"),
    ("training.packing", False, "data.packing", False),
    ("training.train_dataloader_shuffle", False, "data.shuffle", False),
    # 003
    ("template.max_len", 8192, "pack_length", 8192),
    ("template.min_pixels", 3136, "template.min_pixels", 3136),
    ("template.max_pixels", 4014080, "template.max_pixels", 4014080),
    ("template.max_aspect_ratio", 200, "template.max_aspect_ratio", 200),
    ("export.task_type", "pretrain", "export.task", "auto"),
    ("export.task_type", "sft", "export.task", "multi_turn"),
    # 004
    ("train.dyn_bsz", True, "data.dyn_bsz", True),
    ("train.dyn_bsz", False, "data.packing", False),
    ("train.micro_batch_size", 2, "data.micro_batch_size", 2),
    ("data.max_seq_len", 64, "pack_length", 64),
    ("train.pad_packed_input", True, "data.pad_packed_input", True),
    ("train.pad_to_length", True, "data.pad_packed_input", True),
    ("train.pad_packed_to_length", 200, "data.pad_to_length", 200),
]
_BESIDE: dict[str, dict[str, Any]] = {
    "training.sharded_lazy": {"custom.dataset": "packed"},
    "training.sharded_lazy_pre_packed": {"custom.dataset": "packed", "training.sharded_lazy": True},
    "custom.dataset": {"training.sharded_lazy": True},
    "training.streaming": {"training.max_steps": 1},
    "training.packing_interval": {"training.streaming": True, "training.max_steps": 1},
}
_BUDGET = {"train.dyn_bsz": True, "training.max_steps": 1}


@pytest.mark.spec(
    "000",
    "every key and flag that the five documents write, from YAML and from the command line",
    key="all",
    api="`load_config`",
)
@pytest.mark.parametrize(("name", "value", "ours", "wanted"), KEYS, ids=[f"{k[0]}={k[1]}" for k in KEYS])
def test_every_key_of_the_documents(name: str, value: Any, ours: str, wanted: Any) -> None:
    beside = _BESIDE.get(name, {})
    if name.startswith("train.") and (name, value) != ("train.dyn_bsz", False):
        beside = _BUDGET
    rows = {**beside, name: value}
    if not any(key.endswith(("max_length", "max_len", "packing_length", "max_seq_len")) for key in rows):
        rows["template.max_length"] = 64
    values: dict[str, Any] = {}
    for dotted, held in rows.items():
        section, dot, key = dotted.partition(".")
        values = {**values, section: {**values.get(section, {}), key: held} if dot else held}
    assert _on(load_config(values), ours) == wanted
    section, dot, key = name.partition(".")
    if dot:
        word = str(value).lower() if isinstance(value, bool) else str(value)
        rest = {
            one: {k: v for k, v in held.items() if f"{one}.{k}" != name} if isinstance(held, dict) else held
            for one, held in values.items()
        }
        assert _on(load_config(rest, recipe_of({}, [f"--{name}", word])), ours) == wanted


def test_flags_of_other_systems_need_no_section() -> None:
    """`--streaming true --packing_interval 16`, as ms-swift and the launch line of 002 write them."""
    line = "--sharded_lazy true --packing false --train_dataloader_shuffle false"
    config = load_config({}, recipe_of({"dataset": "packed", "sharded_lazy_pre_packed": True}, line.split()))
    assert (config.data.kind, config.data.path) == ("growing", "packed")
    line = "--streaming true --packing_interval 16 --attn_impl flash_attn --max_length 64"
    words = recipe_of({}, line.split())
    words["training"]["max_steps"] = 1
    made = load_config({}, words)
    assert (made.data.kind, made.pack_length) == ("stream", 64) and made.data.window == 16  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="files are read as they come"):
        load_config({}, recipe_of({}, ["--streaming", "true", "--rescan_files", "true"]))
    with pytest.raises(ConfigError, match=r"set template\.max_length"):
        load_config({}, recipe_of({}, ["--packing_length", "64"]))
