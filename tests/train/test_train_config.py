"""The YAML of a run: what is accepted, filled, refused; refusals are one line and a hint."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import ConfigError
from packtrain.train.config import RunConfig, load_config
from packtrain.train.config.data import KINDS
from packtrain.train.config.sections import TemplateConfig, TrainingConfig
from packtrain.train.config.trainer_keys import trainer_fields

REPOSITORY = Path(__file__).resolve().parents[2]


def training(**keys: Any) -> Any:
    return load_config({"training": keys}).training


def refuse(values: dict[str, Any], *parts: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    text = str(caught.value)
    assert "\n" not in text and caught.value.hint
    for part in parts:
        assert part in text, text
    return caught.value


def test_defaults_are_those_of_the_design() -> None:
    config = load_config({})
    t = config.training
    assert (t.packing, t.packing_mode, t.eval_packing, t.packing_strategy) == (True, "static", True, "auto")
    assert (t.packing_allow_single_long, t.packing_drop_last, t.packing_min_fill_ratio) == (True, False, 0.65)
    assert (t.packing_wait_timeout_s, t.packing_length_cache_persist_every) == (7200, None)
    assert (t.packing_length_precompute_workers, t.per_device_train_batch_size) == (8, 1)
    assert (t.on_error, t.max_drop_fraction, t.proof, t.loss_reduction) == ("raise", None, True, "token")
    assert (config.model.attn, config.template.truncation, config.report.html) == ("auto", "error", True)


def test_global_max_length_fills_what_is_not_given() -> None:
    config = load_config({"global_max_length": 1024})
    assert (config.template.max_length, config.model.max_model_len, config.pack_length) == (1024, 1024, 1024)
    config = load_config({"global_max_length": 1024, "template": {"max_length": 512}})
    assert (config.template.max_length, config.model.max_model_len, config.pack_length) == (512, 1024, 512)
    assert load_config({"model": {"max_model_len": 99}}).pack_length == 99
    with pytest.raises(ConfigError, match="pack length is not set"):
        _ = load_config({}).pack_length


def test_the_example_file_loads() -> None:
    config = load_config(REPOSITORY / "examples" / "demo.yaml")
    assert config.processor == "demo:qwen2_5_vl" and config.training.packing_allow_single_long is False
    assert config.training.trainer["lr_scheduler_type"] == "cosine"
    again = load_config(config.to_dict())
    assert again == config


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"trainig": {}}, ("unknown key 'trainig'", "did you mean training?")),
        (
            {"training": {"packing_stategy": "bfd"}},
            ("training.packing_stategy", "training.packing_strategy?"),
        ),
        ({"model": {"max_length": 5}}, ("model.max_length", "did you mean template.max_length?")),
        (
            {"data": {"packing_mode": "streaming"}},
            ("data.packing_mode", "did you mean training.packing_mode?"),
        ),
        ({"training": {"gradient_checkpoint": True}}, ("training.gradient_checkpointing?",)),
        ({"model": {"attention": "sdpa"}}, ("unknown key 'model.attention'", "hint")),
        (
            {"custom": {"packing_length": 5}, "template": {"max_length": 6}},
            ("custom.packing_length", "both say template.max_length"),
        ),
        ({"training": {"packing_length": 5}}, ("training.packing_length", "template.max_length")),
        ({"training": {"packing_mode": "dynamic"}}, ("'dynamic'", "packing_mode: static")),
        ({"training": {"attn_impl": "sdpa"}, "model": {"attn": "eager"}}, ("keep model.attn",)),
        ({"model": {"attn": "flash"}}, ("model.attn is 'flash'",)),
        ({"training": {"packing_wait_timeout_s": -1}}, ("training.packing_wait_timeout_s is -1", "greater")),
        ({"training": {"packing_wait_timeout_s": float("nan")}}, ("packing_wait_timeout_s is nan", "finite")),
        ({"training": {"packing_wait_timeout_s": float("inf")}}, ("packing_wait_timeout_s is inf",)),
        ({"training": {"packing_length_cache_persist_every": 0}}, ("packing_length_cache_persist_every",)),
        ({"training": {"packing_length_precompute_workers": 0}}, ("packing_length_precompute_workers",)),
        ({"training": {"packing_min_fill_ratio": 1.5}}, ("packing_min_fill_ratio",)),
        ({"training": {"max_drop_fraction": -0.1}}, ("max_drop_fraction",)),
        ({"training": {"on_error": "drop"}}, ("training.on_error is 'drop'",)),
        ({"training": {"loss_reduction": "mean"}}, ("training.loss_reduction",)),
        ({"training": {"num_train_epochs": 0}}, ("num_train_epochs",)),
        ({"template": {"max_length": 0}}, ("template.max_length is 0",)),
        ({"template": {"max_length": "long"}}, ("template.max_length is 'long'",)),
        ({"training": {"label_smoothing_factor": 0.1}}, ("label_smoothing_factor",)),
        ({"training": {"weight_decay": "much"}}, ("training.weight_decay is 'much'",)),
    ],
)
def test_refusals_name_the_key_and_the_way_out(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    refuse(values, *parts)


def test_accepted_spellings() -> None:
    assert load_config({"training": {"attn_impl": "flash_attn"}}).model.attn == "flash_attention_2"
    assert load_config({"template": {"padding_free": True}}).template.max_length is None
    assert training(packing_wait_timeout_s=0).packing_wait_timeout_s == 0
    assert training(learning_rate="1e-4").learning_rate == 1e-4
    assert training(adam_epsilon="1e-7", remove_unused_columns=False).trainer == {"adam_epsilon": 1e-7}
    assert load_config({"custom": None, "training": None}) == RunConfig()


def test_effective_batch_in_packs() -> None:
    def accumulation(world_size: int, **keys: Any) -> int:
        return load_config({"training": keys}).accumulation(world_size)

    assert accumulation(2, effective_batch_size=32, per_device_train_batch_size=4) == 16
    assert accumulation(2, per_device_train_batch_size=4, gradient_accumulation_steps=3) == 12
    assert accumulation(2, effective_batch_size=8) == 4
    with pytest.raises(ConfigError, match=r"effective_batch_size 7 is not divisible .* 3 \(hint: use 6 or 9"):
        accumulation(3, effective_batch_size=7)


def test_malformed_and_missing_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training:\n  seed: 1\n  packing: [true\nmodel: {}\n")
    with pytest.raises(ConfigError, match=r"run.yaml, line 4"):
        load_config(path)
    path.write_text("training:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(ConfigError, match=r"run.yaml, line 3.*'seed' is given twice"):
        load_config(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_config(path)
    path.write_text("training: 5\n")
    with pytest.raises(ConfigError, match="training is 5"):
        load_config(path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    path.write_text("")
    assert load_config(path) == RunConfig()


def test_relative_paths_current_directory_first_then_the_yaml_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "work").mkdir()
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / "conf" / name).write_text("{}\n")
    (tmp_path / "work" / "train.jsonl").write_text("{}\n")
    path = tmp_path / "conf" / "run.yaml"
    path.write_text(
        "custom: {train_jsonl: train.jsonl, val_jsonl: val.jsonl}\nmodel: {name_or_path: Org/Name}\n"
    )
    monkeypatch.chdir(tmp_path / "work")
    config = load_config("../conf/run.yaml")
    assert config.custom.train_jsonl == "train.jsonl"
    assert Path(str(config.custom.val_jsonl)) == tmp_path / "conf" / "val.jsonl"
    assert config.model.name_or_path == "Org/Name"


def test_reading_a_plain_config_loads_no_torch() -> None:
    code = (
        "import sys; from packtrain.train.config import load_config;"
        "load_config({'training': {'packing': True}});"
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_keys_of_the_trainer_are_those_of_its_class_and_cost_no_import() -> None:
    """A misspelt key is told before torch is loaded."""
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert fields <= set(trainer_fields())
    assert trainer_fields()["learning_rate"] == "float" and trainer_fields()["max_steps"] == "int"
    code = (
        "import sys; from packtrain.cli import main\n"
        "try: main(['train', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "/dev/stdin"],
        input="training: {lerning_rate: 1}",
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0 and "did you mean training.learning_rate?" in done.stderr, done.stderr


def test_switches_of_the_trainer_are_read_as_switches() -> None:
    """Any text is true to Python: `false` in quotes, or `maybe`, would switch something on."""
    for key in ("bf16", "activation_checkpointing", "eval_on_start"):
        for given, meant in (("false", False), ("True", True), ("off", False), (0, False), (1, True)):
            assert training(**{key: given}).trainer[key] is meant
        for given in ("maybe", 2, [True], {}):
            refuse({"training": {key: given}}, f"training.{key} is {given!r}: expected true or false")
    for key in ("save_steps", "weight_decay", "save_total_limit"):
        for given in (True, [5], {"a": 1}, "many"):
            refuse({"training": {key: given}}, f"training.{key} is {given!r}: expected a number")
        assert training(**{key: 2}).trainer[key] == 2


def test_keys_of_other_releases_of_transformers_go_where_their_successors_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every key of theirs makes arguments, or is one line that it has no effect; none is lost."""
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    older = set(trainer_fields()) - fields
    given = {key: 0.1 if key == "warmup_ratio" else "no" if "strategy" in key else "x" for key in older}
    for key, value in given.items():
        caplog.clear()
        value = True if key in ("no_cuda", "gradient_checkpointing") else value
        made = training(**{key: value}).trainer
        assert set(made) <= fields and len(made) + len(caplog.records) == 1, (key, made)
        assert made or f"training.{key} 'x' has no effect" in caplog.text
        assert set(training(**{key: None}).trainer.values()) <= {None}
    caplog.clear()
    assert training(save_safetensors=True, fp16_backend="auto", use_cpu=True, no_cuda=True).trainer == {
        "use_cpu": True
    }
    assert not caplog.records
    refuse({"training": {"no_cuda": True, "use_cpu": False}}, "training.use_cpu is False, and training.")
    if "warmup_ratio" in older:
        assert training(warmup_ratio=0.1).trainer == {"warmup_steps": 0.1}
        assert training(warmup_ratio=0.1, warmup_steps=0).trainer == {"warmup_steps": 0.1}
        assert training(warmup_ratio=0.1, warmup_steps=7).trainer == {"warmup_steps": 7}
        assert "training.warmup_ratio 0.1 has no effect: training.warmup_steps is set" in caplog.text
        refuse({"training": {"warmup_ratio": 1}}, "training.warmup_ratio is 1, a share of all steps")


def test_a_value_of_another_kind_is_told_with_its_key() -> None:
    """Of every key of every section: the key as a file has it, and no word of the library that reads it."""
    needed = {"exported": {"path": "p"}, "growing": {"path": "p"}}
    tried = 0
    for kind, held in KINDS.items():
        for section, fields in (("data", held), ("training", TrainingConfig), ("template", TemplateConfig)):
            for key in fields.model_fields:
                if key in ("kind", "trainer", "max_steps", "num_train_epochs"):
                    continue
                given: dict[str, Any] = {
                    "data": {"kind": kind, **needed.get(kind, {})},
                    "training": {"max_steps": 1},
                }
                given.setdefault(section, {})[key] = object()
                told = str(refuse(given))
                assert told.startswith(f"{section}.{key} is <object"), told
                assert "constrained" not in told and "[key]" not in told
                tried += 1
    assert tried > 200
    for sets in ({"b/c": "x"}, {3: "x"}, {"": "x"}):
        refuse({"data": {"val": sets}}, "data.val is {", "is no name of a set: letters and digits")
    assert "also wrong" not in str(
        refuse({"data": {"placeholders": {"image": 5}}}, "data.placeholders.image is 5")
    )
    for sets in ({}, {"a": 3}, ["a"], 3):
        refuse(
            {"data": {"val": sets}}, f"data.val is {sets!r}: expected a file, or several as {{name: file}}"
        )


def test_null_is_what_a_key_is_without_a_value() -> None:
    """Of every list and mapping of every kind of data, and of what Trainer has a default for."""
    needed = {"exported": {"path": "p"}, "growing": {"path": "p"}}
    steps = {"max_steps": 1}
    tried = 0
    for kind, held in KINDS.items():
        bare = load_config({"data": {"kind": kind, **needed.get(kind, {})}, "training": steps})
        for section, fields in (("data", held), ("training", TrainingConfig), ("template", TemplateConfig)):
            for key, field in fields.model_fields.items():
                if field.default_factory is None or key == "trainer":
                    continue
                given: dict[str, Any] = {
                    "data": {"kind": kind, **needed.get(kind, {})},
                    "training": {**steps},
                }
                given.setdefault(section, {})[key] = None
                assert load_config(given).to_dict() == bare.to_dict(), (kind, section, key)
                tried += 1
    assert tried > 20
    assert training(weight_decay=None, bf16=None).trainer == training().trainer


def test_a_path_that_no_file_can_have_is_refused_with_its_key() -> None:
    refuse({"training": {"output_dir": "a\0b"}}, "training.output_dir", "no path holds a NUL byte")
    refuse({"data": {"cache": {"root_dir": "\0"}}}, "data.cache", "no path holds a NUL byte")
