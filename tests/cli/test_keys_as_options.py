"""Every key of the YAML on the command line: `--section.key VALUE`."""

from __future__ import annotations

import click
import pytest

from packtrain.cli._options import recipe_of
from packtrain.cli.run import command as run
from packtrain.cli.train import command as train
from packtrain.train.config import load_config
from packtrain.train.config.aliases import ALIASES
from packtrain.train.config.data import KINDS
from packtrain.train.config.sections import TemplateConfig


def test_values_are_read_as_in_yaml() -> None:
    words = ["--template.max_pixels", "602112", "--data.packing=false", "--train.bsz_warmup_ratio", "0.5"]
    words += ["--data.columns", "{prompt: q, response: a}", "--training.resume=auto"]
    assert recipe_of({"max_steps": 3, "dataset": None}, words) == {
        "custom": {},
        "training": {"max_steps": 3, "bsz_warmup_ratio": 0.5, "resume": "auto"},
        "template": {"max_pixels": 602112},
        "data": {"packing": False, "columns": {"prompt": "q", "response": "a"}},
    }


@pytest.mark.parametrize("word", ["--max_pixels", "extra", "--templates.max_pixels", "-x", "--data."])
def test_what_is_no_key_is_refused(word: str) -> None:
    with pytest.raises(click.UsageError, match="no such option or argument"):
        recipe_of({}, [word, "3"])
    with pytest.raises(click.UsageError, match="needs a value"):
        recipe_of({}, ["--data.path"])


@pytest.mark.spec(
    "004",
    "every key of every document is an option",
    key="`--section.key VALUE`",
    api="`packtrain run`, `packtrain train`",
)
def test_every_key_under_every_name_is_an_option() -> None:
    assert all(verb.context_settings["ignore_unknown_options"] for verb in (run, train))
    names = {row.old for row in ALIASES} | {f"template.{key}" for key in TemplateConfig.model_fields}
    names |= {f"data.{key}" for kind in KINDS.values() for key in kind.model_fields}
    for name in names:
        section, _, key = name.partition(".")
        assert recipe_of({}, [f"--{name}", "3"])[section] == {key: 3}
        assert recipe_of({}, [f"--{name.replace('_', '-')}=3"])[section] == {key: 3}
    assert recipe_of({}, ["--output-dir", "o", "--warmup-ratio=0.1"])["training"] == {
        "output_dir": "o", "warmup_ratio": 0.1,
    }  # fmt: skip


@pytest.mark.spec(
    "004",
    "keys on the command line, as `--train.micro_batch_size 2`",
    key="`--section.key VALUE`",
    api="`packtrain train`",
)
def test_the_command_line_wins() -> None:
    values = {"data": {"path": "a.jsonl", "max_seq_len": 64}, "training": {"max_steps": 3}}
    words = [
        "--train.micro_batch_size",
        "2",
        "--data.dyn_bsz_count_mode",
        "effective",
        "--data.max_seq_len=32",
    ]
    config = load_config(values, recipe_of({}, words))
    assert config.data.kind == "token_budget" and config.pack_length == 32
    assert (config.data.micro_batch_size, config.data.count_mode) == (2, "effective")


def test_keys_of_training_need_no_section() -> None:
    """Ours, those of other systems, and fields of transformers' TrainingArguments; others are no option."""
    words = [
        "--effective_batch_size",
        "8",
        "--streaming=true",
        "--learning_rate",
        "0.1",
        "--padding_free",
        "true",
    ]
    assert recipe_of({}, words)["training"] == {
        "effective_batch_size": 8, "streaming": True, "learning_rate": 0.1, "padding_free": True,
    }  # fmt: skip
    for word in ("--max_pixel", "--trainer", "streaming"):
        with pytest.raises(click.UsageError, match="no such option or argument"):
            recipe_of({}, [word, "3"])
