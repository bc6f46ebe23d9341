"""The examples of `--help`: options that the verb has, and those that take no network and no model run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

import packtrain
from packtrain.cli._app import _VERBS, app, main
from packtrain.cli._options import recipe_of
from packtrain.train.config import load_config

#: Begun by these words: what they need can be made here in a second.
RUN = (
    "measure train.jsonl -p ./qwen -o lengths --shard 0/2",
    "measure train.jsonl -p ./qwen -o lengths --shard 1/2",
    "merge lengths",
    "measure",
    "plan lengths -n",
    "plan lengths --pack-length",
    "forecast lengths --pack-lengths",
    "diff",
    "verify runs/demo/plan",
    "show runs/demo/plan",
    "show lengths",
    "which plan",
    "produce raw/ packed_",
    "produce rows/",
)
#: Options of train that are keys.
KEYS = ("dataset", "max_steps", "packing", "sharded_lazy", "sharded_lazy_pre_packed")
NOT = ("--model", "$", "s3://", "Qwen/Qwen2-Audio")


def examples() -> list[str]:
    found = []
    for verb in _VERBS:
        command = app.get_command(click.Context(app), verb)
        assert command is not None
        text = re.sub(r"\n\s+--", " --", str(command.help).partition("Example:")[2])
        found += [line.strip() for line in text.splitlines() if line.strip()]
    return found


@pytest.mark.parametrize("line", examples())
def test_an_example_is_read(line: str) -> None:
    for part in line.split("&&"):
        words = shlex.split(part)
        words = words[words.index("packtrain") + 1 :]
        command = app.get_command(click.Context(app), words[0])
        assert command is not None, part
        try:
            context = command.make_context(words[0], words[1:])
        except click.BadParameter as fault:
            assert "does not exist" in str(fault)  # a file of the example
            continue
        if words[0] in ("run", "train"):
            given = {name: value for name, value in context.params.items() if name in KEYS}
            load_config({"global_max_length": 64}, recipe_of(given, context.args))


def test_examples_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {i}.", "response": "a word " * (100 + 37 * i % 900)} for i in range(160)]
    for folder in ("raw", "rows", "runs/a", "runs/b", "runs/demo"):
        Path(folder).mkdir(parents=True)
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy("train.jsonl", "raw/part.jsonl")
    qa = [{"question": row["prompt"], "answer": row["response"]} for row in rows[:9]]
    Path("qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in qa))
    ids = {"input_ids": list(range(9)), "labels": list(range(9))}
    Path("rows/part.jsonl").write_text(json.dumps(ids) + "\n")
    packtrain.Lengths(list(range(1, 400))).save("counts")
    for run in ("a", "b", "demo"):
        packtrain.plan(packtrain.Lengths.load("counts"), 8192).save(
            f"runs/{run}/plan", origin={"lengths": str(tmp_path / "counts")}
        )
    done = set()
    for start in RUN:
        for line in examples():
            if not line.startswith(f"packtrain {start}") or any(word in line for word in NOT) or line in done:
                continue
            words = [
                str(tokenizer_folder)
                if word in ("./qwen", "./tokenizer") or word.startswith("Qwen/")
                else word
                for word in shlex.split(line)[1:]
            ]
            with pytest.raises(SystemExit) as end:
                main([*words, *(["--overwrite"] if words[0] == "plan" else [])])
            assert not end.value.code, (line, capsys.readouterr().err)
            done.add(line)
    assert len(done) >= 18, done
