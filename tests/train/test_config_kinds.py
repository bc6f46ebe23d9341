"""Kinds of data: every name of other layouts says what ours does; explicit values, warnings, conflicts."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packtrain.errors import ConfigError
from packtrain.train.config import load_config
from packtrain.train.config.aliases import ALIASES, IGNORED, MOVED, Alias, alias_of
from packtrain.train.config.data import KINDS, Planned
from pages import script

REPOSITORY = Path(__file__).resolve().parents[2]

#: The least a file of each kind says.
LEAST: dict[str, dict[str, Any]] = {
    "planned": {"data": {"kind": "planned"}},
    "exported": {"data": {"kind": "exported", "path": "packs"}},
    "growing": {"data": {"kind": "growing", "path": "packed"}},
    "stream": {"data": {"kind": "stream"}, "training": {"max_steps": 5}},
    "token_budget": {"data": {"kind": "token_budget"}, "training": {"max_steps": 5}},
}

#: Key of `data` -> a value that is not its default.
VALUES: dict[str, Any] = {
    "path": "a.jsonl", "mixture": "mix.yaml", "val": "v.jsonl", "source": "jsonl", "media_root": "m",
    "columns": {"prompt": "q", "response": "a"}, "shape": "messages", "placeholders": ["<img>"],
    "media_without_placeholder": "prepend", "media_prefix": "/x", "source_options": {"split": "train"},
    "trust_hints": True, "allow_outside": True, "allow_remote": True,
    "ignore_keys": ["id"], "frame_rate": 2.0, "long_audio": "cut",
    "text_options": {"bos": True}, "packing": False, "packer": "bfd", "long_samples": "single",
    "compile": True,
    "drop_under_filled": True, "min_fill_ratio": 0.5, "eval_packing": False, "wait_timeout_s": 5.0,
    "persist_every": 7, "measure_workers": 2, "cache": {"root_dir": "c"}, "samples_per_step": 8,
    "skip_samples": "ids.txt", "replan": "epoch", "encode_cache": "e", "encode_cache_workers": 2,
    "balance": "window", "repeat_loss": "zero", "max_drop_fraction": 0.1, "shuffle": False, "drop_last": True,
    "timeout_s": 3.0, "poll_s": 0.5, "start": "beginning", "window": 9, "buffer_size": 11,
    "shuffle_buffer": 12, "encode_workers": 2, "micro_batch_size": 3, "dyn_bsz": True,
    "count_mode": "effective", "overflow_ratio": 2.0, "warmup_ratio": 0.1, "warmup_tokens": 100,
    "pad_packed_input": True, "pad_to_length": 99, "global_batch_size": 6, "on_error": "zero",
    "samples_per_row": 4, "packer_options": {"max_items": 4}, "limits": {"images": 4}, "max_samples": 9,
    "name_or_path": "tiny:qwen3",
}  # fmt: skip
NEEDS = {
    ("token_budget", "warmup_tokens"): {"warmup_ratio": 0.5},
    ("planned", "samples_per_row"): {"packing": False},
    ("planned", "global_batch_size"): {"packing": False},
}


def value_of(row: Alias, kind: str) -> tuple[Any, Any]:
    """What the other layout says, and what ours then holds."""
    if row.values:
        theirs, ours = next((a, b) for a, b in row.values.items() if a is not True or len(row.values) == 1)
        return theirs, ours
    key = row.new.partition(".")[2]
    value = "skip" if key == "on_error" and kind != "planned" else VALUES.get(key, 64)
    return value, value


def with_key(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    section, _, key = dotted.partition(".")
    return {**values, section: {**values.get(section, {}), key: value}}


PAIRS = [(row, kind) for row in ALIASES for kind in KINDS if row.holds(kind) and row.new != "data.kind"]


@pytest.mark.spec(
    "001",
    "every name of the field says what ours does (`packing_strategy: binpack`, `attn_impl: flash_attn` …)",
    key="all keys, all names",
    api="`load_config`",
)
@pytest.mark.parametrize(("row", "kind"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.old)
def test_every_name_says_what_ours_does(row: Alias, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both spellings load to the same run, without a word; two that differ are refused."""
    base = LEAST[kind]
    if row.new == "data.path":
        base = with_key({**base, "data": {"kind": kind}}, "training.seed", 1)
    for key, value in NEEDS.get((kind, row.new.partition(".")[2]), {}).items():
        base = with_key(base, f"data.{key}", value)
    theirs, ours = value_of(row, kind)
    with caplog.at_level(logging.WARNING):
        one = load_config(with_key(base, row.old, theirs))
        assert one == load_config(with_key(base, row.new, ours))
    told = [r.getMessage() for r in caplog.records]
    idle = (f"{row.old}: ", f"{row.new}: ")  # where another key leaves it without effect
    assert all("without custom.val_jsonl" in line or line.startswith(idle) for line in told), told
    key = row.new.partition(".")[2]
    if row.new.startswith("data."):
        assert key in one.data.model_fields_set
        if row.old.startswith("training.") and key not in ("packing", "dyn_bsz", "shuffle"):
            name = row.old.partition(".")[2]
            seen = getattr(one.training, name) if hasattr(one.training, name) else theirs
            assert seen in (theirs, ours) or key == "cache"


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_default_is_a_value(kind: str) -> None:
    """It stands in `model_fields_set`, and against another name for the same key."""
    for key, held in KINDS[kind].model_fields.items():
        if held.is_required() or key == "kind":
            continue
        default = load_config(LEAST[kind]).to_dict()["data"][key]
        config = load_config(with_key(LEAST[kind], f"data.{key}", default))
        if default is not None:
            assert key in config.data.model_fields_set, key
        others = [
            row for row in ALIASES if row.new == f"data.{key}" and row.holds(kind) and row.old != row.new
        ]
        for row in others if default is not None and not isinstance(default, dict | list) else []:
            other = VALUES.get(key) if not row.values else next(iter(row.values))
            if row.here(other) == default:
                other = list(row.values)[-1] if row.values else None
            if other is None or row.here(other) == default:
                continue
            both = with_key(with_key(LEAST[kind], f"data.{key}", default), row.old, other)
            with pytest.raises(ConfigError, match=f"both say data.{key}"):
                load_config(both)


@pytest.mark.spec(
    "002",
    "keys of static plans beside a growing directory: one warning",
    key="all of `data`",
    api="`load_config`",
)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_other_kinds_are_one_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """All of them in one line, in the names of the file; the run is as without them."""
    other = {key for model in KINDS.values() for key in model.model_fields} - set(KINDS[kind].model_fields)
    refused = {"packing", "shuffle", "dyn_bsz"}
    if kind not in ("growing", "exported"):
        refused |= {"drop_under_filled", "samples_per_step", "samples_per_row"}
    refused |= {"micro_batch_size"} if kind == "planned" else set()
    values = LEAST[kind]
    for key in sorted(other - refused):
        values = with_key(values, f"data.{key}", VALUES.get(key, 1))
    with caplog.at_level(logging.WARNING):
        config = load_config(values)
    assert config.data == load_config(LEAST[kind]).data
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"no effect on data of kind {kind}: " in line
    assert all(f"data.{key}" in line for key in other - refused)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "planned"),
        ({"training": {"packing_mode": "static"}}, "planned"),
        ({"training": {"packing_mode": "streaming", "max_steps": 1}}, "stream"),
        ({"training": {"streaming": True, "max_steps": 1}}, "stream"),
        ({"training": {"packing_mode": "streaming", "dyn_bsz": True, "max_steps": 1}}, "token_budget"),
        ({"training": {"packing_mode": "streaming", "dyn_bsz": False, "max_steps": 1}}, "stream"),
        ({"training": {"dyn_bsz": False, "micro_batch_size": 2, "max_steps": 1}}, "token_budget"),
        ({"training": {"micro_batch_size": 2, "max_steps": 1}}, "token_budget"),
        ({"training": {"dyn_bsz": False, "micro_batch_size": 2}}, "planned"),
        ({"data": {"dyn_bsz": True, "max_seq_len": 8}, "training": {"max_steps": 1}}, "token_budget"),
        ({"custom": {"dataset": "x"}, "training": {"sharded_lazy": True}}, "growing"),
        ({"custom": {"dataset": "x"}}, "growing"),
        ({"custom": {"dataset": "x", "train_jsonl": "y"}}, "planned"),
        ({"data": {"kind": "exported"}, "custom": {"dataset": "x"}}, "exported"),
    ],
)
def test_the_kind_follows_from_the_keys(values: dict[str, Any], kind: str) -> None:
    assert load_config(values).data.kind == kind


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data": {"kind": "plan"}}, "did you mean planned"),
        ({"data": {"kind": ["planned"]}}, r"data.kind is \['planned'\]"),
        ({"data": {"kind": "exported"}}, "needs data.path"),
        ({"data": {"kind": "growing", "path": "x"}, "training": {"packing": True}}, "packs already"),
        ({"data": {"kind": "exported", "path": "x", "packing": True}}, "packs already"),
        ({"data": {"kind": "growing", "path": "x", "shuffle": True}}, "in the order in which they come"),
        ({"data": {"kind": "planned"}, "training": {"sharded_lazy": True}}, "say different kinds"),
        ({"data": {"kind": "growing", "path": "x"}, "training": {"sharded_lazy": False}}, "different kinds"),
        ({"data": {"kind": "planned"}, "training": {"packing_mode": "streaming"}}, "say different kinds"),
        ({"data": {"kind": "stream"}, "training": {"packing_mode": "static"}}, "say different kinds"),
        ({"data": {"kind": "stream"}, "training": {"dyn_bsz": True}}, "say different kinds"),
        ({"training": {"sharded_lazy": True, "packing_mode": "streaming"}}, "say different kinds"),
        ({"data": {"kind": "stream"}}, "needs training.max_steps"),
        (
            {"data": {"kind": "stream", "path": "x", "samples_per_step": 4}, "training": {"max_steps": 1}},
            "other samples, rows or steps would be trained",
        ),
        (
            {"data": {"kind": "stream", "path": "x", "samples_per_row": 4}, "training": {"max_steps": 1}},
            "other samples, rows or steps would be trained",
        ),
        ({"data": {"path": "a", "mixture": "b"}}, "data.path and data.mixture are both set"),
        (
            {"custom": {"train_jsonl": "a"}, "data": {"mixture": "b"}},
            "custom.train_jsonl and data.mixture are both set",
        ),
        ({"training": {"packing_strategy": "bdf"}}, "training.packing_strategy: unknown"),
        ({"data": {"packer": "bdf"}}, "data.packer: unknown"),
        ({"data": {"pad_to_length": 8}, "global_max_length": 16}, "a row may have 16 tokens"),
        ({"data": {"window": 9, "widnow": 9}}, "did you mean data.window"),
    ],
)
def test_what_cannot_be_is_told_at_load(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(values)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_keys_that_are_ignored_or_moved(caplog: pytest.LogCaptureFixture) -> None:
    for name in IGNORED:
        caplog.clear()
        idle = name != "template.padding_free"  # true is what packed rows are: not a word
        assert load_config(with_key({}, name, idle)) == load_config({})
        assert [r.getMessage().split(" has ")[0] for r in caplog.records] == [name]
    for name, hint in MOVED.items():
        with pytest.raises(ConfigError, match=re.escape(name)) as caught:
            load_config(with_key({}, name, 5))
        assert caught.value.hint == hint


def test_the_command_line_wins_under_any_name() -> None:
    file = {"data": {"kind": "planned", "path": "a"}, "training": {"packing": True}}
    recipe = {
        "custom": {"dataset": "d"},
        "training": {"sharded_lazy": True, "packing": False, "train_dataloader_shuffle": False},
    }
    config = load_config(file, recipe)
    assert (config.data.kind, config.data.path) == ("growing", "d")


@pytest.mark.parametrize("size", [4, "4", 4096, [2]])
def test_a_stream_with_a_size_of_rows_says_what_is_missing_whatever_the_size_is(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no effect without training\.dyn_bsz") as refused:
        load_config({"training": {"streaming": True, "micro_batch_size": size, "max_steps": 1}})
    assert f"rows of {size} * max_length" in (refused.value.hint or "")


@pytest.mark.spec(
    "004", "`global_batch_size` from YAML", key="`data.global_batch_size`", api="`RunConfig.accumulation`"
)
@given(
    st.fixed_dictionaries(
        {"micro_batch_size": st.integers(1, 4), "world": st.integers(1, 4), "accumulation": st.integers(1, 5)}
    )
)
def test_global_batch_size_counts_rows_times_micro_batch_size(numbers: dict[str, int]) -> None:
    size, ranks, steps = numbers["micro_batch_size"], numbers["world"], numbers["accumulation"]
    given = {"micro_batch_size": size, "dyn_bsz": True, "global_batch_size": size * ranks * steps}
    assert load_config({"training": {**given, "max_steps": 1}}).accumulation(ranks) == steps
    if size * ranks > 1:
        given["global_batch_size"] += 1
        with pytest.raises(ConfigError, match="global_batch_size"):
            load_config({"training": {**given, "max_steps": 1}}).accumulation(ranks)


def blocks() -> list[tuple[str, str]]:
    """Every YAML of a run in the repository: files, and blocks of the pages."""
    found = [
        (path.name, path.read_text(encoding="utf-8")) for path in sorted(REPOSITORY.glob("examples/*.yaml"))
    ]
    for page in sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]):
        for number, text in enumerate(
            re.findall(r"```ya?ml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
        ):
            found += [(f"{page.name}-{number}-{k}", part) for k, part in enumerate(text.split("\n# or"))]
    return found


def runs() -> list[tuple[str, dict[str, Any]]]:
    """Those of `blocks` that are YAML of a run; tests/test_blocks.py sees to the rest."""
    values = [
        (name, yaml.safe_load(text if not text.startswith(",") else "#" + text)) for name, text in blocks()
    ]
    keys = {"training", "data", "custom", "model"}
    mine = [(name, held) for name, held in values if isinstance(held, dict) and set(held) & keys]
    return [(name, held) for name, held in mine if "recipe" not in held]  # NeMo Automodel's own


@pytest.mark.parametrize("values", [held for _, held in runs()], ids=[name for name, _ in runs()])
def test_every_yaml_of_the_repository_loads(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(values)
    assert not [r.getMessage() for r in caplog.records]
    assert load_config(config.to_dict()) == config


def test_the_page_is_up_to_date() -> None:
    module = script("config_page")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python scripts/config_page.py"


# -- rows of a number of samples -------------------------------------------------------------
@pytest.mark.spec(
    "001",
    "`padding_free: true`, `packing: false`, a batch size: one key here",
    key="`data.samples_per_row`",
    api="`load_config`",
)
@pytest.mark.parametrize(
    "values",
    [
        {"data": {"packing": False, "samples_per_row": 4}},
        {
            "template": {"padding_free": True},
            "training": {"packing": False, "per_device_train_batch_size": 4},
        },
        {"train": {"dyn_bsz": False, "micro_batch_size": 4, "num_train_epochs": 2}},
        {"data": {"dyn_bsz": False, "micro_batch_size": 4}},
    ],
)
def test_rows_of_a_number_of_samples_in_epochs(values: dict[str, Any], caplog: Any) -> None:
    """ms-swift's padding_free without packing, VeOmni's dyn_bsz: false: the same key here."""
    data = {"path": "a.jsonl", **values.get("data", {})}
    config = load_config({"global_max_length": 64, **values, "data": data})
    assert isinstance(config.data, Planned) and not config.data.packing
    assert config.data.samples_per_row == 4 and config.accumulation(2) == 1
    assert not caplog.records
    step = load_config({"global_max_length": 64, **values, "data": {**data, "global_batch_size": 16}})
    assert step.accumulation(2) == 2
    with pytest.raises(ConfigError, match="times samples_per_row 4"):
        step.accumulation(3)


@pytest.mark.spec("004", "the same from YAML", key="all of `data`", api="`load_config`")
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"samples_per_row": 4}, "data.packing is true"),
        ({"global_batch_size": 4}, "data.packing is true"),
        ({"packing": False, "samples_per_row": 4, "samples_per_step": 8}, "rows count samples"),
        ({"packing": False, "samples_per_row": 4, "replan": "epoch"}, "rows count samples"),
        ({"packing": False, "samples_per_row": 4, "long_samples": "drop"}, "has no length to be longer than"),
        ({"packing": False, "samples_per_row": 4, "pad_to_length": 200}, "a row may have 256 tokens"),
        (
            {"kind": "token_budget", "pad_packed_input": True, "long_samples": "single"},
            "would not fit a row that is padded",
        ),
        (
            {"kind": "token_budget", "count_mode": "effective", "pad_to_length": 64},
            "a row may have 96 tokens",
        ),
        (
            {"kind": "token_budget", "warmup_ratio": 0.5, "bsz_warmup_init_mbtoken": 65},
            "the budget it grows to 64",
        ),
        (
            {"kind": "token_budget", "dyn_bsz": False, "micro_batch_size": 2},
            r"a token budget \(dyn_bsz\) needs training.max_steps",
        ),
    ],
)
def test_rows_that_cannot_be(data: dict[str, Any], said: str) -> None:
    training = {} if data.get("dyn_bsz") is False else {"max_steps": 3} if data.get("kind") else {}
    with pytest.raises(ConfigError, match=said):
        load_config({"global_max_length": 64, "data": {"path": "a.jsonl", **data}, "training": training})


@pytest.mark.spec(
    "004",
    "the length of padded rows in every mode, from YAML",
    key="`data.pad_to_length`, `data.pad_packed_input`",
    api="`RunConfig.row_length`",
)
@pytest.mark.parametrize(
    ("data", "length"),
    [
        ({"pad_packed_input": True, "micro_batch_size": 2}, 128),
        ({"pad_to_length": True, "count_mode": "effective"}, 96),
        ({"pad_to_length": True, "dyn_bsz": False, "micro_batch_size": 2}, 128),
        ({"pad_packed_to_length": 99, "dyn_bsz": False, "micro_batch_size": 2}, 99),
        ({"pad_packed_to_length": 200}, 200),
    ],
)
def test_the_length_that_rows_are_padded_to(data: dict[str, Any], length: int) -> None:
    """effective + padding: the hard cap; dyn_bsz off: micro_batch_size * max_seq_len, or what is said."""
    config = load_config(
        {
            "data": {"kind": "token_budget", "path": "a", "max_seq_len": 64, **data},
            "training": {"max_steps": 3},
        }
    )
    assert config.row_length == length and getattr(config.data, "long_samples", "") == "error"


@pytest.mark.spec(
    "002",
    "fixed pack sizes: rows of chunks are padded",
    key="`data.pad_to_length`",
    api="`RunConfig.row_length`",
)
def test_chunks_are_padded_too(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"data": {"kind": "growing", "path": "d", "pad_to_length": 64}})
    assert config.row_length == 64 and not caplog.records


def test_names_of_a_token_budget_are_those_of_python() -> None:
    from packtrain.moved import THEIRS

    names = {
        name: ours for name, ours in THEIRS["TokenBudgetDataset"].items() if "bsz" in name or "pad" in name
    }
    assert len(names) == 7
    for theirs, ours in names.items():
        row = alias_of(f"training.{theirs}", "token_budget")
        assert row is not None and row.new == f"data.{ours}"


@pytest.mark.spec(
    "004", "its sections `train` and `data`; `max_seq_len`", key="`template.max_length`", api="`load_config`"
)
def test_a_section_of_veomni_is_the_training_section() -> None:
    both = {"train": {"micro_batch_size": 2}, "training": {"max_steps": 4}}
    config = load_config({"data": {"path": "a.jsonl", "max_seq_len": 64}, **both})
    assert config.data.kind == "token_budget" and config.training.max_steps == 4
    with pytest.raises(ConfigError, match="are one key"):
        load_config({"train": {"max_steps": 2}, "training": {"max_steps": 4}})


@pytest.mark.spec(
    "001",
    "the YAML of the guide: `custom.packing`, `custom.packing_length`, `padding_free`, `flash_attn`",
    key="`data.packing`, `template.max_length`, `model.attn`",
    api="`load_config`",
)
def test_the_yaml_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    """Word for word, without a warning."""
    text = """
custom:
  packing: true
  packing_length: 8192  # or null to use max_length
template:
  padding_free: true
training:
  attn_impl: flash_attn  # Required for padding-free attention
  per_device_train_batch_size: 1  # Each "batch" is one packed sequence
  gradient_accumulation_steps: 16  # Adjust for effective batch size
"""
    config = load_config(yaml.safe_load(text))
    assert (config.pack_length, config.model.attn, config.data.kind) == (8192, "flash_attention_2", "planned")
    assert config.accumulation(1) == 16 and config.data.packing is True  # type: ignore[union-attr]
    null = yaml.safe_load(text.replace("8192  # or null", "null  #"))
    null["template"]["max_length"] = 4096
    assert load_config(null).pack_length == 4096
    assert not caplog.records


@pytest.mark.spec(
    "001",
    "the arguments of its datasets: `strict`, `packing_interval`, `num_proc`, `cyclic`",
    key="`data.on_error`, `data.window`, `data.measure_workers`, `training.max_steps`",
    api="`load_config`",
)
def test_arguments_of_the_datasets_of_the_guide(caplog: pytest.LogCaptureFixture) -> None:
    plan = load_config({"training": {"packing": True, "num_proc": 3, "strict": False}}).data
    assert (plan.measure_workers, plan.on_error) == (3, "zero")  # type: ignore[union-attr]
    given = {"streaming": True, "packing_interval": 128, "strict": False, "max_steps": 1}
    stream = load_config({"training": given}).data
    assert (stream.window, stream.on_error) == (128, "skip")  # type: ignore[union-attr]
    assert load_config({"training": {**given, "strict": True}}).data.on_error == "raise"  # type: ignore[union-attr]
    assert not caplog.records
    load_config({"training": {**given, "cyclic": True, "packing_num_proc": 4}})
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "training.cyclic has no effect",
        "training.packing_num_proc has no effect",
    ]
