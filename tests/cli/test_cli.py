"""The command line: every verb explains itself, bad input is one line, a hint and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli import main
from packtrain.cli._app import _VERBS, app
from packtrain.store import lengths as lengths_store

REPOSITORY = Path(__file__).resolve().parents[2]


class Shell:
    """Runs verbs in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out, err = self.capsys.readouterr()
        return int(stop.value.code or 0), out, err

    def refused(self, *args: Any) -> str:
        """The error line of a call that must fail with exit code 2, one line and a hint."""
        code, out, err = self(*args)
        lines = err.splitlines()
        assert code == 2, (out, err)
        assert lines[0].startswith("packtrain: ") and lines[1].startswith("  hint: ") and len(lines) == 2, err
        assert "Traceback" not in err
        return err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.asarray([30, 30, 20, 60, 50, 10, 40, 30]))
    return tmp_path / "lengths.npy"


def pages() -> str:
    """The pages of the command line."""
    return "\n".join(
        page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("cli*.md"))
    )


@pytest.mark.parametrize("verb", _VERBS)
def test_every_verb_has_help_with_an_example_and_a_page(verb: str, shell: Shell) -> None:
    code, out, _ = shell(verb, "--help")
    assert code == 0 and "Example:" in out and f"packtrain {verb}" in out and "--json" in out
    assert f"## `packtrain {verb}" in pages()


@pytest.mark.parametrize("verb", _VERBS)
def test_the_page_names_every_option(verb: str) -> None:
    command = app.get_command(None, verb)  # type: ignore[arg-type, attr-defined]
    page = pages()
    section = page.split(f"## `packtrain {verb}")[1].split("\n## ")[0]
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("--") and option not in ("--help", "--json"):
                assert f"`{option}`" in section, f"{verb} {option} is in no docs/cli*.md"


def test_few_records_left_out_for_a_key_are_told_with_it(
    shell: Shell, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """At most 1 %: no stop, and key and count stand in the table, in --json, and in `show` of both kinds."""
    rows: list[dict[str, Any]] = [{"prompt": f"q {n}", "response": "a"} for n in range(200)]
    rows[3]["objects"], rows[4]["hue"] = [1], "x"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["measure", tmp_path / "a.jsonl", "-p", tokenizer_folder, "-o"]
    keys = {"hue": 1, "objects -> ledger": 1}
    told = [shell(*given, tmp_path / "l", "--json")[1], shell("show", tmp_path / "l", "--json")[1]]
    for figures in map(json.loads, told):
        assert figures["keys"] == keys and figures["unusable"] == {"unread_key": 1}
        assert figures["usable"] == figures["samples"] - 1
        length = figures["length"]
        assert length["p50"] <= length["p95"] <= length["max"] <= figures["tokens"]
        assert length["mean"] == pytest.approx(figures["tokens"] / figures["usable"])
    for table in (shell(*given, tmp_path / "m")[1], shell("show", tmp_path / "l")[1]):
        assert "hue (1)" in table and "left out for: objects (1)" in table.replace("\n", " ")


def test_plan_show_verify(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    code, out, _ = shell("plan", lengths, "-n", 80, "-o", tmp_path / "plan", "--json")
    made = json.loads(out)
    assert code == 0 and (made["packs"], made["bound"], made["optimal"]) == (4, 4, True)
    code, out, _ = shell("show", tmp_path / "plan", "--pack", 0, "--json")
    assert code == 0 and json.loads(out)["tokens"] == 80
    code, out, _ = shell("show", tmp_path / "plan")
    assert code == 0 and "proven optimal" in out
    code, out, _ = shell("verify", tmp_path / "plan", "--json")
    checks = json.loads(out)["checks"]
    assert code == 0 and checks["capacity"] == "holds for every pack"


def test_steps_without_a_seed_hold_neighbours(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    words = ["plan", lengths, "-n", 256, "--samples-per-step", 8]
    assert "--seed 0 draws" in shell(*words, "-o", tmp_path / "a")[2]
    assert "--seed 0 draws" not in shell(*words, "--seed", 0, "-o", tmp_path / "b")[2]


def test_a_changed_byte_is_exit_code_1(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    shell("plan", lengths, "-n", 80, "-o", tmp_path / "plan")
    raw = bytearray((tmp_path / "plan" / "indices.npy").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "plan" / "indices.npy").write_bytes(raw)
    code, _, err = shell("verify", tmp_path / "plan")
    assert code == 1 and "indices" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pack_length": 80', '"pack_length": 20'),
        ('"pack_length": 80', '"pack_length": 200'),
        ('"bound": 4', '"bound": 1'),
        ('"efficiency": ', '"efficiency": 7'),
        ('"packs": 4', '"packs": "x"'),
        ('"long_samples": 0', '"long_samples": "x"'),
        ('"blocks": {', '"blocks": 5, "other": {'),
        ('"stats": {', '"stats": 5, "other": {'),
    ],
)
def test_an_edited_marker_never_passes(
    shell: Shell, lengths: Path, tmp_path: Path, old: str, new: str
) -> None:
    shell("plan", lengths, "-n", 80, "-o", tmp_path / "plan")
    marker = tmp_path / "plan" / "plan.json"
    text = marker.read_text()
    assert old in text
    marker.write_text(text.replace(old, new, 1))
    code, _, err = shell("verify", tmp_path / "plan")
    assert code in (1, 2) and "Traceback" not in err and "unexpected" not in err
    _, _, err = shell("show", tmp_path / "plan")
    assert "Traceback" not in err and "unexpected" not in err


def test_bytes_behind_an_array_are_found(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    shell("plan", lengths, "-n", 80, "-o", tmp_path / "plan")
    with open(tmp_path / "plan" / "indices.npy", "ab") as handle:
        handle.write(b"x" * 100)
    assert "bytes behind its array" in shell.refused("verify", tmp_path / "plan")


def test_a_plan_never_lands_in_another_artefact(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    from packtrain.planning.lengths import Lengths

    Lengths([1, 2, 3]).save(tmp_path / "l")
    before = {path.name: path.read_bytes() for path in (tmp_path / "l").iterdir()}
    assert "another artefact" in shell.refused("plan", tmp_path / "l", "-n", 8, "-o", tmp_path / "l")
    assert {path.name: path.read_bytes() for path in (tmp_path / "l").iterdir()} == before


def test_the_same_plan_again_is_no_error_and_another_is(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert shell("plan", lengths, "-n", 80, "-o", tmp_path / "plan")[0] == 0
    assert "another plan" in shell.refused("plan", lengths, "-n", 90, "-o", tmp_path / "plan")
    assert shell("plan", lengths, "-n", 90, "-o", tmp_path / "plan", "--overwrite")[0] == 0


def bad_calls(tmp: Path) -> list[tuple[list[Any], str]]:
    files = {
        "empty.jsonl": "",
        "list.json": "{}",
        "text.npy": "not an array",
        "minus.json": "[1, -2]",
        "half.json": "[1, 2.5]",
        "key.yaml": "training: {lerning_rate: 1}",
        "broken.yaml": "training: {seed: 1",
        "list.yaml": "- 1",
        "map.yaml": "? [a]\n: 1",
        "date.yaml": "training: 2020-99-99",
        "deep.yaml": "a: " + "[" * 5000,
        "attn.yaml": "model: {attn: []}",
        "deep.json": "[" * 100_000,
        "deep.jsonl": "",
        "moved.yaml": "training: {packing_length: 10}",
        "dynamic.yaml": "training: {packing_mode: dynamic}",
        "nofile.yaml": "model: {name_or_path: 'tiny:qwen3', max_model_len: 9}\n"
        "custom: {train_jsonl: none.jsonl}",
    }
    for name, text in files.items():
        (tmp / name).write_text(text)
    np.save(tmp / "l.npy", np.asarray([1, 2, 3]))
    plan = ["plan", tmp / "l.npy", "-o", tmp / "p"]
    return [
        (["nonsense"], "no such verb"),
        (["--nonsense"], "No such option"),
        (["plan", tmp / "l.npy"], "Missing option"),
        ([*plan, "-n", "x"], "not a valid integer"),
        ([*plan, "-n", "0"], "--pack-length is 0"),
        ([*plan, "-n", "-5"], "--pack-length is -5"),
        ([*plan, "-n", "8", "--packer", "bdf"], "unknown packer 'bdf'"),
        ([*plan, "-n", "8", "--long-samples", "cut"], "unknown --long-samples policy 'cut'"),
        ([*plan, "-n", "8", "--limit", "images"], "is not NAME=NUMBER"),
        ([*plan, "-n", "2", "--long-samples", "error"], "3 tokens"),
        (["plan", tmp / "none.npy", "-n", "8", "-o", tmp / "p"], "does not exist"),
        (["plan", tmp / "text.npy", "-n", "8", "-o", tmp / "p"], "is not an array"),
        (["plan", tmp / "minus.json", "-n", "8", "-o", tmp / "p"], "tokens[1] is -2"),
        (["plan", tmp / "half.json", "-n", "8", "-o", tmp / "p"], "expected an integer"),
        ([*plan, "-n", "8", "--limit", "images=²"], "is not NAME=NUMBER"),
        ([*plan, "-n", "8", "--max-samples", "9" * 30], "--max-samples is 9"),
        ([*plan, "-n", "8", "--max-drop-fraction", "nan"], "--max-drop-fraction is nan"),
        (["plan", tmp / "deep.json", "-n", "8", "-o", tmp / "p"], "nested"),
        (["run", tmp / "map.yaml"], "map.yaml"),
        (["run", tmp / "date.yaml"], "date"),
        (["run", tmp / "deep.yaml"], "deep.yaml"),
        (["run", tmp / "attn.yaml"], "attn"),
        (["measure", tmp / "key.yaml", "-p", tmp / "key.yaml", "-o", tmp / "o"], "key.yaml"),
        (["plan", tmp / "list.json", "-n", "8", "-o", tmp / "p"], "expected"),
        (["plan", tmp, "-n", "8", "-o", tmp / "p"], "holds no lengths"),
        (["show", tmp], "holds no lengths, plan or run"),
        (["verify", tmp / "none"], "does not exist"),
        (["run", tmp / "none.yaml"], "does not exist"),
        (["run", tmp / "key.yaml"], "lerning_rate"),
        (["run", tmp / "broken.yaml"], "line"),
        (["run", tmp / "list.yaml"], "list.yaml"),
        (["run", tmp / "moved.yaml"], "packing_length"),
        (["run", tmp / "dynamic.yaml"], "static"),
        (["run", tmp / "nofile.yaml"], "none.jsonl"),
        (["measure", tmp / "none.jsonl", "-p", tmp, "-o", tmp / "o"], "none.jsonl"),
        (["measure", tmp / "empty.jsonl", "-p", tmp, "-o", tmp / "o"], "empty"),
        (["measure", tmp / "l.npy", "-p", tmp, "-o", tmp / "o"], "l.npy"),
        (["measure", tmp / "empty.jsonl", "-p", tmp, "-o", tmp / "o", "--column", "x"], "is not NAME=FIELD"),
    ]


def test_bad_input_is_one_line_a_hint_and_nothing_written(shell: Shell, tmp_path: Path) -> None:
    calls = bad_calls(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    for args, said in calls:
        assert said in shell.refused(*args), args
    kept = [name for name in (p.name for p in tmp_path.iterdir()) if not name.startswith(".")]
    assert sorted(kept) == before


def test_errors_are_json_for_machines(shell: Shell, tmp_path: Path) -> None:
    code, out, _ = shell("plan", tmp_path / "none.npy", "-n", 8, "-o", tmp_path / "p", "--json")
    told = json.loads(out)
    assert code == told["exit_code"] == 2 and "does not exist" in told["error"] and told["hint"]


def test_planning_loads_neither_torch_nor_numba(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.random.default_rng(0).integers(1, 8000, 10_000))
    code = (
        "import sys\nfrom packtrain.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as stop: assert not stop.code, stop.code\n"
        "print(sorted({'torch', 'numba', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    args = ["plan", str(tmp_path / "l.npy"), "-n", "8192", "-o", str(tmp_path / "p")]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    again = subprocess.run(
        [sys.executable, "-m", "packtrain", "verify", str(tmp_path / "p")], capture_output=True, text=True
    )
    assert again.returncode == 0 and re.search(r"equal over [\d,]+ packs", again.stdout)


def test_shards_append_and_audit_of_encoded_rows(shell: Shell, tmp_path: Path) -> None:
    rows = [json.dumps({"input_ids": list(range(i % 9 + 1)), "labels": [1] * (i % 9 + 1)}) for i in range(60)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{row}\n" for row in rows[:40]))
    measure = ["measure", data, "--kind", "encoded", "-o", tmp_path / "l", "--json"]
    for shard in ("0/2", "1/2"):
        code, out, _ = shell(*measure, "--shard", shard, "--audit", "50%")
        assert code == 0 and (json.loads(out)["samples"], json.loads(out)["audited"]) == (20, 10)
        if shard == "0/2":
            assert "missing: 1/2" in shell.refused("merge", tmp_path / "l")
            assert "not merged" in shell.refused("show", tmp_path / "l")
    code, out, _ = shell("merge", tmp_path / "l", "--json")
    assert code == 0 and json.loads(out)["samples"] == 40
    assert json.loads(shell(*measure, "--shard", "1/2")[1])["samples"] == 40  # merged already
    data.write_text("".join(f"{row}\n" for row in rows))
    code, out, err = shell(*measure)
    assert code == 2 and "--append" in err
    code, out, _ = shell(*measure, "--append", "--audit", "10%")
    assert code == 0 and (json.loads(out)["samples"], json.loads(out)["audited"]) == (60, 6)
    held, marker = lengths_store.read(tmp_path / "l")
    del marker["seal"]
    tokens = np.array(held.tokens)
    tokens[[7, 50]] += 1
    wrong = pt.Lengths(tokens, {name: np.array(values) for name, values in held.costs.items()})
    lengths_store.save(
        wrong, tmp_path / "l", fields=marker, fingerprint=marker["fingerprint"],
        template=marker["template"], overwrite=True,
    )  # fmt: skip
    code, _, err = shell(*measure, "--audit", "100%")
    assert (
        code == 1 and "2 of 60 audited" in err and "id 7 (rows.jsonl:8) tokens: measured 9, encoded 8" in err
    )
    for option, value, said in [
        ("--audit", "x", "no count or percentage"),
        ("--audit", "101%", "no count or percentage"),
        ("--audit", "-1", "no count or percentage"),
        ("--shard", "2/2", "shard 2/2 does not exist"),
        ("--shard", "1", "is not I/N"),
        ("--executor", "rey", "unknown"),
    ]:
        assert said in shell.refused(*measure[:-1], option, value, "--overwrite"), option


def test_real_conversations_measure_as_the_processor_does(shell: Shell, data: Path, tmp_path: Path) -> None:
    """195, 140 and 181 tokens: the figures of ms-swift's own template on the same three conversations."""
    demo, processor = data / "mllm_demo" / "mllm_demo.json", data / "processors" / "qwen2_5_vl"
    code, out, _ = shell("measure", demo, "-p", processor, "-o", tmp_path / "l", "--json")
    assert code == 0 and json.loads(out)["audited"] == 6
    assert np.load(tmp_path / "l" / "tokens.npy").tolist()[:3] == [195, 140, 181]
    assert shell("plan", tmp_path / "l", "-n", 512, "-o", tmp_path / "p")[0] == 0
    code, out, _ = shell("verify", tmp_path / "p", "--json")
    assert code == 0 and json.loads(out)["checks"]["capacity"] == "holds for every pack"
    code, out, _ = shell("show", tmp_path / "p", "--html", tmp_path / "p.html")
    assert code == 0 and (tmp_path / "p.html").stat().st_size > 5000
    code, out, _ = shell("measure", demo, "-p", processor, "-o", tmp_path / "l", "--system", "Be brief.")
    assert code == 2


def test_a_real_model_is_proven_from_the_artefact_alone(
    shell: Shell, data: Path, small_processor: Path, tmp_path: Path
) -> None:
    demo = data / "mllm_demo" / "mllm_demo.json"
    shell("measure", demo, "-p", small_processor, "-o", tmp_path / "l")
    shell("plan", tmp_path / "l", "-n", 512, "-o", tmp_path / "p")
    code, out, err = shell(
        "verify", tmp_path / "p", "--model", "tiny:qwen2_5_vl", "--samples", 2, "--attn", "sdpa", "--json"
    )
    assert code == 0, err
    checks = json.loads(out)["checks"]
    assert checks["isolation (sdpa)"] == "holds for 2 samples"
    assert checks["tamper (sdpa)"] == "differ by at most 0 (limit 0)"
    for name in ("mask of ones", "cache", "one segment"):
        assert (
            checks[f"control {name} (sdpa)"].startswith("caught: ")
            and "layers.0" in checks[f"control {name} (sdpa)"]
        )
    assert "lengths folder" in shell.refused("verify", tmp_path / "l", "--model", "tiny:qwen2_5_vl")


def test_diff_names_what_differs(shell: Shell, lengths: Path, tmp_path: Path) -> None:
    for name, options in (("a", ()), ("b", ()), ("c", ("--packer", "sequential"))):
        assert shell("plan", lengths, "-n", 80, "-o", tmp_path / name, *options)[0] == 0
    code, out, _ = shell("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0 and json.loads(out)["equal"] is True
    code, out, _ = shell("diff", tmp_path / "a", tmp_path / "c", "--json", "--ids", 2)
    found = json.loads(out)
    assert (
        code == 1 and found["spec"] == {"packer": ["auto", "sequential"]} and found["lengths_digest"] is None
    )
    assert len(found["moved"]["first"]) == 2 < found["moved"]["count"]
    code, out, _ = shell("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and "packed with other samples" in out and "'auto' -> 'sequential'" in out
    assert "no/such" in shell.refused("diff", tmp_path / "a", "no/such")
