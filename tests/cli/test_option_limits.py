"""Numbers outside of what an option takes are refused where options are read, with the limits of the YAML."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli import main
from packtrain.cli._options import _OPTIONS, inputs_of, reading_options
from packtrain.errors import InputError
from packtrain.train.config import load_config

#: Option -> key of the YAML.
KEYS = {
    "fps": "template.fps",
    "max_frames": "template.max_frames",
    "max_aspect_ratio": "template.max_aspect_ratio",
    "min_pixels": "template.min_pixels",
    "max_pixels": "template.max_pixels",
    "frame_rate": "data.frame_rate",
    "model_limit": "model.max_model_len",
}
VALUES = (-3, -1, 0, 0.5, 1, 2, 2**31, 2**31 + 1, float("inf"), float("nan"))
WHOLE = ("max_frames", "min_pixels", "max_pixels", "model_limit")


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0), capsys.readouterr().err


def defaults() -> dict[str, object]:
    import click

    @reading_options
    def command(**options: object) -> None: ...

    made = click.command()(command)
    given = made.make_context("x", []).params
    return {**given, "processor": "", "model_limit": None}


def takes_option(name: str, value: float) -> bool:
    try:
        inputs_of("x.jsonl", {**defaults(), name: value})
    except InputError as error:
        assert error.message.startswith(f"--{name.replace('_', '-')} is ")
        return False
    return True


def takes_key(key: str, value: float) -> bool:
    section, _, name = key.partition(".")
    run: dict[str, dict[str, object]] = {"model": {"name_or_path": "x"}, "template": {"max_length": 8}}
    run["data"] = {"path": "x.jsonl"}
    run[section][name] = value
    try:
        load_config(run)
    except InputError as error:
        assert key in error.message
        return False
    return True


@pytest.mark.parametrize("name", sorted(KEYS))
def test_an_option_takes_what_the_yaml_takes(name: str) -> None:
    tried = [value for value in VALUES if name not in WHOLE or isinstance(value, int)]
    taken = [takes_option(name, value) for value in tried]
    assert taken == [takes_key(KEYS[name], value) for value in tried]
    assert True in taken and False in taken


def test_every_number_that_is_read_has_its_limits() -> None:
    import click

    @reading_options
    def command(**options: object) -> None: ...

    made = click.command()(command)
    assert len(made.params) == len(_OPTIONS)
    numbers = {param.name for param in made.params if param.type in (click.INT, click.FLOAT)}
    assert numbers <= set(KEYS), numbers - set(KEYS)


@pytest.mark.parametrize("words", [("--fps", "-1"), ("--max-frames", "0"), ("--max-aspect-ratio", "-1")])
@pytest.mark.parametrize("verb", ["measure", "produce"])
def test_nothing_is_made_of_a_value_that_cannot_be(
    words: tuple[str, str], verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "x.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    rest = [data, "-p", "nowhere", "-o", out] if verb == "measure" else [data, out, "-p", "nowhere", "-n", 8]
    code, said = told(capsys, verb, *rest, *words)
    assert code == 2 and f"{words[0]} is " in said, said
    assert not out.exists()


@pytest.mark.parametrize("option", ["--world-size", "--grad-accum"])
@pytest.mark.parametrize("value", [0, -1])
def test_which_takes_no_ranks_and_no_micro_steps_for_one(
    option: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pt.plan(np.array([3, 4, 5]), pack_length=8).save(tmp_path / "plan")
    code, said = told(capsys, "which", tmp_path / "plan", "--step", 0, option, value)
    assert code == 2 and f"{option} is {value}, expected an integer" in said, said
