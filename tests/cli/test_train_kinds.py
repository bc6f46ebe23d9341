"""`packtrain train` on data of every kind, from YAML: exports train as the plan they were made from."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Trainer

from packtrain.cli import main
from packtrain.errors import IsolationError

Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """A verb on a configuration; its last line of JSON, and its exit code."""

    def run(verb: str, values: dict[str, Any], *options: str) -> dict[str, Any]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        with pytest.raises(SystemExit) as stop:
            main([verb, str(tmp_path / "run.yaml"), "--json", *options])
        told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return {**told, "code": int(stop.value.code or 0)}

    return run


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.spec("003", "training on exports", key="`data.kind: exported`", api="`open_packs`")
@pytest.mark.parametrize("form", ["raw", "chunks"])
def test_an_export_trains_as_its_plan(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, form: str
) -> None:
    """Same losses, with and without shuffle; `run` says what to use; a dry run shows the packs."""
    values = text_run()
    out = str(tmp_path / "packs")
    exported = {**values, "export": {"format": form, "out": out}}
    assert call("run", exported)["code"] == 0
    given = {key: held for key, held in values.items() if key != "custom"}

    def on(name: str, data: dict[str, Any], base: dict[str, Any]) -> list[float]:
        training = {**base["training"], "output_dir": str(tmp_path / name)}
        told = call("train", {**base, "training": training, "data": data})
        assert told["code"] == 0 and told["proof"] > 0
        return losses(tmp_path / name)

    for shuffle in (True, False):
        mine = on(f"p{shuffle}", {"shuffle": shuffle}, values)
        theirs = on(
            f"e{shuffle}", {"kind": "exported", "path": out, "shuffle": shuffle}, given_without(given)
        )
        assert theirs == pytest.approx(mine, abs=1e-6) and len(mine) > 3
    data = {"kind": "exported", "path": out}
    told = call("run", {**given_without(given), "data": data})
    assert told["code"] == 2 and "no plan" in told["error"]
    assert call("train", {**given_without(given), "data": data}, "--dry-run")["packs"] == len(mine)


def given_without(values: dict[str, Any]) -> dict[str, Any]:
    """The configuration without keys of measuring."""
    training = {k: v for k, v in values["training"].items() if k != "packing_length_precompute_workers"}
    return {**values, "training": training}


@pytest.mark.spec(
    "001",
    "`streaming`: samples are packed as they come, from YAML",
    key="`data.kind: stream`, `data.window` (`packing_interval`)",
    api="`StreamingPackedDataset`",
)
@pytest.mark.parametrize(
    ("data", "training"),
    [
        ({"kind": "stream", "window": 20}, {"max_steps": 3}),
        ({"kind": "token_budget", "micro_batch_size": 2, "pad_packed_input": True}, {"max_steps": 3}),
        ({"kind": "token_budget", "micro_batch_size": 3, "dyn_bsz": False}, {"max_steps": 3}),
        ({"micro_batch_size": 2, "max_seq_len": 64, "global_batch_size": 4}, {"max_steps": 3}),
        ({"kind": "token_budget", "micro_batch_size": 2, "warmup_ratio": 0.5}, {"max_steps": 3}),
        ({"kind": "planned", "packing": False, "shuffle": False}, {"max_steps": 3}),
        ({"kind": "planned", "pad_to_length": 160}, {"max_steps": 3}),
    ],
)
def test_samples_train_from_yaml(
    call: Call,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    data: dict[str, Any],
    training: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = text_run(**training)
    if "max_seq_len" in data:
        del values["global_max_length"]
    frozen: list[int] = []
    begun = Trainer.training_step

    def step(self: Any, *args: Any, **options: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        return begun(self, *args, **options)

    monkeypatch.setattr(Trainer, "training_step", step)
    told = call("train", {**values, "data": data})
    assert told["code"] == 0, told
    streamed = (
        data.get("kind") != "planned" and "micro_batch_size" not in data
    )  # token budgets may be planned
    assert not streamed or min(frozen) > 10_000  # torch and the model: collections leave them alone
    assert gc.get_freeze_count() == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "packs" in row and "loss" in row]
    assert len(steps) == 3
    if data.get("dyn_bsz") is False:
        assert all(row["samples_per_pack"] == 3 for row in steps)
    if data.get("packing") is False:
        assert all(row["samples_per_pack"] == 1 for row in steps)
    if "global_batch_size" in data:
        assert all(row["packs"] == 2 for row in steps)


def test_a_run_goes_on_where_it_was(
    call: Call,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the last whole checkpoint, a torn one is named; the losses are of one run, each step once."""
    keys = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    run = tmp_path / "run"
    assert call("train", text_run(max_steps=3, **keys))["code"] == 0
    for torn, lost in ((3, "model.safetensors"), (2, "config.json")):
        data = (run / f"checkpoint-{torn}" / lost).read_bytes()
        (run / f"checkpoint-{torn}" / lost).write_bytes(data[: len(data) // 2])
    with (run / "train_log.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    caplog.clear()
    told = call("train", text_run(max_steps=4, **keys))
    assert told.get("metrics", told).get("steps") == 4, told
    assert "another configuration than before: training.max_steps 3 -> 4" in caplog.text
    whole = text_run(output_dir=tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    at_once = call("train", whole)
    assert told["consumed"] == at_once["consumed"] and told["consumed"]["packs"] == 4
    assert losses(run) == losses(tmp_path / "whole")
    for name in ("train_log.jsonl", "sample_loss/rank-0.jsonl"):
        steps = [
            [row["step"] for row in map(json.loads, (folder / name).read_text().splitlines())]
            for folder in (run, tmp_path / "whole")
        ]
        assert steps[0] == steps[1] or name == "train_log.jsonl", name
        assert len(set(steps[0])) == len(set(steps[1])) == 4, name
    again = call("train", text_run(max_steps=2, **{**keys, "resume": None}))
    assert again.get("metrics", again).get("steps") == 2


@pytest.mark.parametrize("ends", [{"max_steps": 2}, {"num_train_epochs": 0.25}])
def test_a_finished_run_trains_no_further(
    call: Call,
    text_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ends: dict[str, Any],
) -> None:
    """Run again, it is told; steps, log and weights stay what they were, and no loss of 0 is made up."""
    values = text_run(html=True, save_strategy="steps", save_steps=1, **ends)
    first = call("train", values)
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    rows = losses(tmp_path / "run")
    again = call("train", values)
    assert again["code"] == 0 and again["metrics"]["steps"] == first["metrics"]["steps"] == len(rows)
    assert again["proof"] == first["proof"] > 0 and again["consumed"] == first["consumed"] is not None
    assert "proven before training" in (tmp_path / "run" / "report.html").read_text()
    assert "is the end of this run" in caplog.text and "train_loss" not in again["metrics"]
    assert "another configuration" not in caplog.text
    assert losses(tmp_path / "run") == rows
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == weights
    (tmp_path / "run" / f"checkpoint-{len(rows)}" / "trainer_state.json").write_text("[1]")
    given = {"resume_from_checkpoint": str(tmp_path / "run" / f"checkpoint-{len(rows)}")}
    torn = call("train", {**values, "training": {**values["training"], **given}})
    assert torn["code"] == 2 and "is not the state of a trainer" in torn["error"]


def test_a_finished_run_of_other_packs_is_no_finished_run(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = text_run(save_strategy="steps", save_steps=1, max_steps=2, log_sample_loss=True)
    assert call("train", values)["code"] == 0
    before = _files(tmp_path / "run")
    other = call("train", {**values, "training": {**values["training"], "seed": 7}})
    assert other["code"] == 2 and "seed" in other["error"]
    assert _files(tmp_path / "run") == before


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_the_proof_refuses_leaves_the_finished_one(
    again: bool, call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    """Record, configuration, log and losses of samples; also where it would go on from a checkpoint."""
    values = text_run(save_strategy="steps", save_steps=1, max_steps=3, log_sample_loss=True)
    assert call("train", values)["code"] == 0
    before = _files(tmp_path / "run")
    assert {"run.json", "run_config.json", "train_log.jsonl"} <= before.keys()
    assert any("sample_loss" in name for name in before)

    def leaks(*given: Any, **more: Any) -> None:
        raise IsolationError("packed samples read each other", hint="none")

    monkeypatch.setattr("packtrain.train.mixin.prove_before_training", leaks)
    given = {"learning_rate": 0.5, "resume": "auto" if again else None}
    given |= {"resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")} if again else {}
    told = call("train", {**values, "training": {**values["training"], **given}})
    assert told["code"] == 2 and "read each other" in told["error"], told
    assert _files(tmp_path / "run") == before


def _files(folder: Path) -> dict[str, bytes]:
    """What a run leaves beside its measurements and plan."""
    names = ("*.json", "*.jsonl", "sample_loss/*", "model/*", "checkpoint-*/trainer_state.json")
    found = [path for name in names for path in folder.glob(name)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.is_file()}


@pytest.mark.parametrize("kind", ["planned", "stream"])
def test_a_run_that_is_refused_for_its_validation_leaves_the_finished_one(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, kind: str, capsys: Any
) -> None:
    values = {**text_run(max_steps=2), "data": {"kind": kind}}
    for name, samples in (("val", 4), ("other", 5)):
        text_run(samples, name=name)
    values["custom"] = {**values["custom"], "val_jsonl": str(tmp_path / "val.jsonl")}
    assert call("train", values)["code"] == 0
    before = (tmp_path / "run" / "run.json").read_bytes()
    if kind == "planned":
        with pytest.raises(SystemExit) as checked:
            main(["verify", str(tmp_path / "run"), "--json"])
        laws = json.loads(capsys.readouterr().out)["checks"]
        assert checked.value.code in (0, None)
        assert laws["validation lengths digest"] == "equal over 4 samples" and "validation capacity" in laws
        named = json.loads(before)["result"]["validation_folders"]
        assert named == {"": {part: str(tmp_path / "run" / f"val_{part}") for part in ("lengths", "plan")}}
    values["custom"]["val_jsonl"] = str(tmp_path / "other.jsonl")
    told = call("train", values)
    assert told["code"] == 2 and "holds lengths of another" in told["error"]
    assert (tmp_path / "run" / "run.json").read_bytes() == before


KINDS_OF_PACKS = ("planned", "exported", "growing", "stream", "token_budget")


@pytest.mark.parametrize("kind", KINDS_OF_PACKS)
def test_every_kind_leaves_a_run_that_show_reads(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: Any, kind: str
) -> None:
    """`run.json` with configuration, figures and warnings; `show` tells them in words, `--json` all."""
    values = text_run(html=True, max_steps=2, dataloader_prefetch_factor=2)
    packs = tmp_path / "packs"
    if kind == "exported":
        assert call("run", {**values, "export": {"format": "chunks", "out": str(packs)}})["code"] == 0
    if kind == "growing":
        words = [values["custom"]["train_jsonl"], "-p", values["template"]["processor"], "-n", "512"]
        columns = ["--column", "prompt=question", "--column", "response=answer", "--once", "--json"]
        with pytest.raises(SystemExit) as stop:
            main(["produce", *words[:1], str(packs), *words[1:], *columns])
        assert stop.value.code in (0, None), capsys.readouterr()
    if kind in ("exported", "growing"):
        values = {key: held for key, held in given_without(values).items() if key != "custom"}
        if kind == "growing":
            del values["global_max_length"]
    data = {"kind": kind, **({"path": str(packs)} if packs.exists() else {})}
    data |= {"micro_batch_size": 2} if kind == "token_budget" else {}
    told = call("train", {**values, "data": data})
    assert told["code"] == 0, told
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["config"]["data"]["kind"] == kind and run["result"]["metrics"]["steps"] == 2
    assert any("dataloader_prefetch_factor: 2 has no effect" in line for line in run["result"]["warnings"])
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    consumed = run["result"]["consumed"]
    assert consumed["packs"] == sum(row["packs"] for row in rows)
    assert consumed["samples"] == pytest.approx(sum(row["packs"] * row["samples_per_pack"] for row in rows))
    assert f"{consumed['samples']:,} samples in {consumed['packs']:,} packs" in shown
    assert "efficiency" in shown and "samples per pack" in shown and "isolation" in shown
    assert "optimizer steps" in shown and "training loss" in shown and "has no effect" in shown
    assert not any(f" {name} " in shown for name in run["result"] if "_" in name)
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path / "run"), "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["run"] == run
    with pytest.raises(SystemExit) as stop:
        main(["show", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")])
    assert stop.value.code in (0, None)
    for page in (tmp_path / "run" / "report.html", tmp_path / "page.html"):
        told = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.S)[1])
        assert told == figures["report"] or (kind == "exported" and page.name == "report.html")
        if page.name == "page.html":
            assert told["consumed"] == consumed and told["proof"] == run["result"]["proof"]
        assert "stats" in told or f">{consumed['samples']:,}</div>" in page.read_text()
        assert len(told["curves"]["loss"]) == 2 and "Step time" in page.read_text()
        assert ("Plan checksum" in page.read_text()) == ("stats" in told)
        assert "stats" in told or told["metrics"] == run["result"]["metrics"]


@pytest.mark.parametrize("verb", ["run", "train"])
def test_without_what_draws_the_page_it_trains_and_says_so(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: Any, verb: str
) -> None:
    monkeypatch.setattr("packtrain.train.early.missing_of_page", lambda: "matplotlib")
    told = call(verb, text_run(html=True, max_steps=1))
    assert told["code"] == 0 and not (tmp_path / "run" / "report.html").exists()
    warned = json.loads((tmp_path / "run" / "run.json").read_text())["result"]["warnings"]
    assert "no report.html: it needs matplotlib (pip install 'packtrain[report]')" in warned


def test_the_page_of_a_stream_has_its_ledger(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """What is too long is left out, counted by reason and listed with its id."""
    values = text_run(html=True, max_steps=2, cap=64)
    told = call("train", {**values, "data": {"kind": "stream", "long_samples": "drop"}})
    assert told["code"] == 0, told
    rows = [json.loads(line) for line in (tmp_path / "run" / "left_out.jsonl").read_text().splitlines()]
    assert {row["reason"] for row in rows} == {"over_long"}
    page = (tmp_path / "run" / "report.html").read_text()
    found = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])
    assert found["ledger"] == {"over_long": len(rows)} and f"{len(rows):,} samples left out" in page
    assert all(f"<b>{row['sample_id']}</b>" in page for row in rows[:40])


@pytest.mark.parametrize("kind", ["stream", "token_budget"])
def test_a_dry_run_of_a_stream_reads_its_first_pack_and_writes_nothing(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """What a run refuses it refuses: a sample, a checkpoint of other packs."""
    data = {"kind": kind, **({"micro_batch_size": 2} if kind == "token_budget" else {})}
    values = {**text_run(max_steps=2, save_strategy="steps", save_steps=2), "data": data}
    told = call("train", values, "--dry-run", "--world-size", "2")
    assert told["code"] == 0 and told["world_size"] == 2 and told["steps"] == 2
    assert 0 < told["first_pack"]["tokens"] <= told["packing_length"] and told["first_pack"]["samples"] > 0
    assert not list((tmp_path / "run").glob("*"))
    assert call("train", values, "--world-size", "2")["code"] == 2
    assert call("train", values)["code"] == 0
    other = {**values, "training": {**values["training"], "seed": 9}}
    for word in ((), ("--dry-run",)):
        refused = call("train", other, *word)
        assert refused["code"] == 2 and "seed" in refused["error"], refused
    path = Path(values["custom"]["train_jsonl"])
    path.write_text("{" + path.read_text())
    assert (
        call("train", {**values, "training": {**values["training"], "resume": None}}, "--dry-run")["code"]
        == 2
    )


@pytest.mark.parametrize(("steps", "rows"), [(3, 3), (25, 13)])
def test_a_short_run_logs_about_ten_rows(
    text_run: Callable[..., dict[str, Any]], steps: int, rows: int
) -> None:
    from packtrain.train.arguments import training_arguments
    from packtrain.train.config import load_config

    values = text_run(max_steps=steps)
    explicit = training_arguments(load_config(values), 1, has_eval=False)
    assert explicit.logging_steps == 1
    del values["training"]["logging_steps"]
    every = training_arguments(load_config(values), 1, has_eval=False).logging_steps
    assert -(-steps // every) == rows
    values["training"]["max_steps"] = -1
    config = load_config(values)
    found = [training_arguments(config, 1, has_eval=False, steps=n).logging_steps for n in (7, 40, 100, 9000)]
    assert found == [1, 4, 10, 10]
    assert training_arguments(config, 1, has_eval=False).logging_steps == 10


@pytest.mark.parametrize("kind", ["planned", "stream", "token_budget"])
def test_a_long_sample_stops_every_kind_where_that_is_asked(
    call: Call, text_run: Callable[..., dict[str, Any]], kind: str
) -> None:
    values = text_run(max_steps=2, cap=64)
    told = call("train", {**values, "data": {"kind": kind, "long_samples": "error"}})
    assert told["code"] == 2 and "sample" in told["error"] and "'drop'" in told["hint"]
    assert "steps" not in told


@pytest.mark.parametrize("verb", ["run", "train", "stream", "measure", "produce"])
def test_a_key_that_changes_training_stops_every_verb(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: Any, verb: str
) -> None:
    """More than 1 % of the records with a key that is not read: exit 2 naming key, record and option."""
    values = text_run(max_steps=1, proof=False)
    path = Path(values["custom"]["train_jsonl"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "token_mask": [0, 1]}) + "\n" for row in rows))
    if verb in ("measure", "produce"):
        columns = ("--column", "prompt=question", "--column", "response=answer")
        out = [str(tmp_path / "out"), "-n", "512"] if verb == "produce" else ["-o", str(tmp_path / "out")]
        given = [verb, str(path), "-p", values["template"]["processor"], *out]
        with pytest.raises(SystemExit) as stop:
            main([*given, *columns, "--json"])
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert stop.value.code == 2
        with pytest.raises(SystemExit) as stop:
            main([*given, *columns, "--json", "--ignore-key", "token_mask"])
        assert stop.value.code in (0, None), capsys.readouterr()
    else:
        if verb == "stream":
            values["data"] = {"kind": "stream", "on_error": "skip"}
        said = call("run" if verb == "run" else "train", values)
        assert said["code"] == 2
    told = f"{said['error']} {said.get('hint')}"
    assert "token_mask" in told
    assert ("--ignore-key" if verb in ("measure", "produce") else "data.ignore_keys: [") in told
    if verb != "stream":
        assert "40 of 40 records" in told and "train.jsonl:1" in told


def test_raw_text_is_trained(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Documents as they are; one that holds a control token is in the ledger, or kept by its option."""
    values = text_run(max_steps=2)
    path = tmp_path / "docs.jsonl"
    texts = [f"Document {i}. " + "Words and more words. " * (i % 5 + 1) for i in range(40)]
    texts[7] += "<|im_end|>"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    values["custom"] = {"train_jsonl": str(path)}
    values["data"] = {"kind": "planned", "task": "text"}
    told = call("run", values)
    assert told["code"] == 0, told
    assert told["samples"] == 39, told
    values["data"]["text_options"] = {"control_tokens": "keep"}
    values["training"]["output_dir"] = str(tmp_path / "kept")
    assert call("run", values)["samples"] == 40
