"""Hints speak the language of the caller and name options that the verb has; idle options say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import click
import pytest

import packtrain
from packtrain.cli._app import _VERBS, app, main, spoken

SOURCE = Path(packtrain.__file__).parent
#: Options of run and train that are keys of the YAML too.
_KEYS = {
    "max_steps": "training.max_steps",
    "output_dir": "training.output_dir",
}
COMMANDS = {verb: app.get_command(click.Context(app), verb) for verb in _VERBS}


def options_of(verb: str) -> set[str]:
    command = COMMANDS[verb]
    assert command is not None
    return {name for param in command.params for name in param.opts if name.startswith("--")}


def texts(path: Path) -> list[str]:
    """Hints and messages of a module: strings of errors, f-strings with {} for values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and re.search(r"(Error|fault)$", ast.unparse(node.func)):
            for part in (*node.args, *(word.value for word in node.keywords)):
                held = [n.value for n in ast.walk(part) if isinstance(n, ast.Constant)]
                found.append("".join(value for value in held if isinstance(value, str)))
    return found


def named(text: str) -> list[tuple[str | None, str]]:
    """(verb of the command that is quoted, option) of every option in a text."""
    verbs = [(found.start(), found[1]) for found in re.finditer(r"packtrain ([a-z]+)", text)]
    return [
        (next((verb for start, verb in reversed(verbs) if start < found.start()), None), found[0])
        for found in re.finditer(r"(?<![\w-])--[a-z][a-z-]+", text)
    ]


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.stem)
def test_hints_of_a_verb_name_only_options_that_it_has(path: Path) -> None:
    for text in texts(path):
        for verb, option in named(text):
            mine = {path.stem} if path.stem in _VERBS else set(_VERBS)
            assert any(option in options_of(one) for one in ({verb} if verb in _VERBS else mine)), text


def test_the_library_names_options_only_in_whole_commands() -> None:
    """Elsewhere it names arguments, which the command line translates. Hosts name options of their own."""
    packages = (
        "planning",
        "packers",
        "measuring",
        "pipeline",
        "media",
        "sources",
        "export",
        "store",
        "waiting",
    )
    for package in packages:
        for path in (SOURCE / package).rglob("*.py"):
            for text in texts(path):
                for verb, option in named(text):
                    assert verb in _VERBS and option in options_of(str(verb)), f"{path.name}: {text}"


@pytest.mark.parametrize("verb", _VERBS)
def test_arguments_are_spoken_as_options_of_the_verb(verb: str) -> None:
    command = COMMANDS[verb]
    assert command is not None
    for param in command.params:
        if isinstance(param, click.Option) and param.name and "_" in param.name:
            option = next(name for name in param.opts if name.startswith("--"))
            if verb in ("run", "train") and param.name in _KEYS:
                assert spoken(f"see {param.name}", command) == f"see {_KEYS[param.name]}"
                continue
            assert spoken(f"set {param.name}=7 here", command).startswith(
                f"set {option} here" if param.is_flag else f"set {option} 7 here"
            )
            assert spoken(f"see {param.name}", command) == f"see {option}"


@pytest.mark.parametrize(
    ("verb", "text", "said"),
    [
        ("measure", "measure again with overwrite=True", "measure again with --overwrite"),
        (
            "measure",
            "ignore_keys=['KEY'], columns={'images': 'KEY'}",
            "--ignore-key KEY, --column images=KEY",
        ),
        ("plan", "use samples_per_step, or last_step='keep'", "use --samples-per-step, or --last-step keep"),
        ("run", "use drop_last=False", "use data.drop_last: false"),
        ("run", "raise max_aspect_ratio", "raise template.max_aspect_ratio"),
        ("run", "ignore_keys=['KEY']", "data.ignore_keys: [KEY]"),
        ("plan", "see /a/max_samples/x and a.max_samples", "see /a/max_samples/x and a.max_samples"),
        ("plan", "/a/max_samples: No such file", "/a/max_samples: No such file"),
        ("plan", "raise data.max_samples", "raise --max-samples"),
        ("run", "raise data.max_samples", "raise data.max_samples"),
        ("measure", "leave them out: ignore_keys: [a, b]", "leave them out: --ignore-key a --ignore-key b"),
        ("run", "leave them out: ignore_keys: [a]", "leave them out: data.ignore_keys: [a]"),
        ("measure", "template.allow_dropped: [tools] trains", "--allow-dropped tools trains"),
        ("verify", "set model.name_or_path", "set --model"),
        ("plan", "limits names the cost 'a'", "--limit names the cost 'a'"),
        ("run", "limits names the cost 'a'", "data.limits names the cost 'a'"),
        ("measure", "data.kind: exported reads them", "data.kind: exported reads them"),
        ("run", "raise pack_length", "raise template.max_length"),
        ("measure", "seed is empty: see it", "seed is empty: see it"),
        ("plan", "another folder (training.output_dir)", "another folder"),
        ("run", "another folder (training.output_dir)", "another folder (training.output_dir)"),
        ("show", "align with drop_last=False", "align with drop_last=False"),
        ("run", "data.columns is 'prompt=a max_age'", "data.columns is 'prompt=a max_age'"),
        ("run", "seed=3.jsonl does not exist", "seed=3.jsonl does not exist"),
        ("run", "no file (a/source=web/x y), seed=3", "no file (a/source=web/x y), training.seed: 3"),
    ],
)
def test_what_is_said(verb: str, text: str, said: str) -> None:
    assert spoken(text, COMMANDS[verb]) == said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["show", "PLAN", "-n", "8"], "--pack-length: no effect without --distribution"),
        (["show", "PLAN", "--interval", "3"], "--interval: no effect without --follow"),
        (["show", "PLAN", "--follow"], "--follow: no effect on a plan folder, which is whole"),
        (
            ["verify", "PLAN", "--samples", "4", "--dtype", "auto"],
            "--samples, --dtype: no effect without a proof",
        ),
        (["verify", "PLAN", "--encode", "4"], "--encode: no effect on a plan folder"),
        (["which", "PLAN", "--sample", "0", "--rank", "0"], "--rank: no effect with --sample"),
        (
            ["plan", "l.json", "-n", "8", "-o", "other", "--window", "2", "--samples-per-step", "2"],
            "window=2 has no",
        ),
    ],
)
def test_an_option_without_effect_is_one_line_and_the_verb_goes_on(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.json").write_text("[1, 2, 3, 4]")
    packtrain.plan([1, 2, 3, 4], 8).save("PLAN")
    with pytest.raises(SystemExit) as done:
        main(words)
    said = capsys.readouterr().err.splitlines() + [record.getMessage() for record in caplog.records]
    assert not done.value.code and sum(line in one for one in set(said)) == 1


@pytest.mark.parametrize(
    ("verb", "option", "names"),
    [
        ("plan", "--packer", {"ffd", "refine"}),
        ("produce", "--packer", {"ffd", "refine"}),
        ("measure", "--kind", {"jsonl", "parquet"}),
        ("doctor", "--model", {"tiny:qwen2_5_vl", "tiny:internvl3"}),
    ],
)
def test_names_of_plug_ins_are_completed(verb: str, option: str, names: set[str]) -> None:
    command = COMMANDS[verb]
    assert command is not None
    param = next(param for param in command.params if option in param.opts)
    context = click.Context(command)
    assert names <= {item.value for item in param.shell_complete(context, "")}
    wanted = min(names)
    assert wanted in [item.value for item in param.shell_complete(context, wanted[:-1])]


def test_commands_that_are_told_can_be_typed() -> None:
    """A folder in a command is quoted for a shell where it has to be."""
    told = re.compile(rf"packtrain (?:{'|'.join(_VERBS)}) \{{(?!folder\.name)(typed\()?")
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "src").rglob("*.py")]
    found = [made[1] for text in texts for made in told.finditer(text)]
    assert len(found) > 4 and all(found), found
