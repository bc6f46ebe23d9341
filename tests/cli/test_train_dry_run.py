"""`packtrain train --dry-run`: the resolved runtime as one JSON object, before any model is built."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm
from packtrain.cli import main
from packtrain.planning.lengths import Lengths
from packtrain.planning.packplan import PackPlan
from packtrain.planning.replan import replan

KEYS = {
    *("packing_length", "world_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("packs_per_step_requested", "packs_per_step_realised", "samples_per_step", "n_raw_packs"),
    *("n_aligned_packs", "pad_needed", "repeated", "steps_per_epoch", "raw_checksum", "aligned_checksum"),
    *("warnings", "eval"),
}


@pytest.fixture
def dry(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*args: Any, change: Callable[[dict[str, Any]], Any] | None = None, **training: Any) -> Any:
        values = text_run(**training)
        if change is not None:
            change(values)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(SystemExit) as stop:
            main(["train", str(tmp_path / "run.yaml"), *map(str, args)])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def test_training_without_the_proof_is_said_loudly(
    dry: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, out, _ = dry("--no-proof", "--max_steps", 1, "--json", save_strategy="no")
    assert code == 0
    assert any(r.levelname == "WARNING" and "proof is OFF" in r.message for r in caplog.records)
    assert json.loads(out.splitlines()[-1])["proof"] is None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["training"]["proof"] is False


def test_the_object_has_exactly_its_keys_and_describes_the_stored_plan(
    dry: Callable[..., Any], tmp_path: Path
) -> None:
    options = {"effective_batch_size": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 5}
    code, out, _ = dry("--dry-run", "--world-size", 3, "--json", **options)
    told = json.loads(out)
    plan = PackPlan.load(tmp_path / "run" / "plan")
    assert code == 0 and set(told) == KEYS and told["eval"] is None
    assert (told["packing_length"], told["world_size"], told["per_device_train_batch_size"]) == (128, 3, 1)
    assert (told["gradient_accumulation_steps"], told["packs_per_step_realised"]) == (2, 6)
    assert told["raw_checksum"] == plan.checksum and told["aligned_checksum"] == plan.align(3).checksum
    assert (told["n_raw_packs"], told["n_aligned_packs"]) == (len(plan), len(plan.align(3)))
    assert told["repeated"] == list(range(told["pad_needed"]))
    assert told["samples_per_step"] == pytest.approx(6 * 40 / len(plan))
    assert not (tmp_path / "run" / "run.json").exists() and not (tmp_path / "run" / "model").exists()
    again = json.loads(dry("--dry-run", "--world-size", 6, "--json", **options)[1])
    assert again["raw_checksum"] == told["raw_checksum"] and again["world_size"] == 6
    assert again["aligned_checksum"] != told["aligned_checksum"]


def test_no_model_is_needed_or_built(
    dry: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from packtrain.train import model

    monkeypatch.setattr(model, "load_model", lambda *_, **__: pytest.fail("a model was built"))

    def change(values: dict[str, Any]) -> None:
        values["model"]["name_or_path"] = None
        values["custom"]["val_jsonl"] = values["custom"]["train_jsonl"]

    code, out, _ = dry("--dry-run", "--json", change=change)
    told = json.loads(out)
    assert code == 0 and told["world_size"] == 1
    assert (
        told["eval"]["raw_checksum"] == told["raw_checksum"] and told["eval"]["dataloader_drop_last"] is False
    )
    caplog.clear()
    code, out, _ = dry("--dry-run", change=change)
    assert code == 0 and "n raw packs" in out and "N_raw_packs=" in caplog.text


@pytest.mark.parametrize(
    ("training", "args", "key"),
    [
        ({"packing_mode": "dynamic"}, (), "training.packing_mode"),
        ({"packing_length": 64}, (), "training.packing_length"),
        ({"packing_wait_timeout_s": -1}, (), "training.packing_wait_timeout_s"),
        ({"packing_wait_timeout_s": float("nan")}, (), "training.packing_wait_timeout_s"),
        ({"packing_length_precompute_workers": 0}, (), "training.packing_length_precompute_workers"),
        ({"packing_length_cache_persist_every": 0}, (), "training.packing_length_cache_persist_every"),
        ({"effective_batch_size": 7}, ("--world-size", 3), "training.effective_batch_size"),
        ({"packing": True, "sharded_lazy": True}, (), "training.packing"),
        ({"samples_per_step": 4, "effective_batch_size": 4}, (), "training.samples_per_step"),
        ({"samples_per_step": 4, "balance": "global"}, (), "training.balance"),
        ({"replan": "epoch", "samples_per_step": 4}, (), "training.replan"),
        ({"replan": "epoch", "packing_strategy": "random_fit"}, (), "training.replan"),
        ({"repeat_loss": "half"}, (), "training.repeat_loss"),
        ({}, ("--world-size", 0), "--world-size"),
    ],
)
def test_refusals_exit_2_naming_the_key_and_write_nothing(
    dry: Callable[..., Any], tmp_path: Path, training: dict[str, Any], args: tuple[Any, ...], key: str
) -> None:
    code, out, err = dry("--dry-run", "--json", *args, **training)
    assert code == 2 and key in json.loads(out)["error"] and "Traceback" not in err
    assert not (tmp_path / "run" / "lengths").exists()


def test_steps_of_samples_are_resolved_for_the_asked_ranks(dry: Callable[..., Any]) -> None:
    code, out, _ = dry("--dry-run", "--world-size", 2, "--json", samples_per_step=8)
    told = json.loads(out)
    assert code == 0 and told["samples_per_step"] == 8 and told["steps_per_epoch"] == 5
    assert told["packs_per_step_realised"] == 2 * told["gradient_accumulation_steps"]
    assert told["n_aligned_packs"] == 5 * told["packs_per_step_realised"] and told["warnings"] == []


def test_a_new_plan_every_epoch_is_told_with_its_checksums(dry: Callable[..., Any], tmp_path: Path) -> None:
    code, out, _ = dry("--dry-run", "--json", replan="epoch", num_train_epochs=3)
    told = json.loads(out)
    base, lengths = PackPlan.load(tmp_path / "run" / "plan"), Lengths.load(tmp_path / "run" / "lengths")
    assert code == 0 and set(told) == {*KEYS, "replan", "epoch_checksums"} and told["replan"] == "epoch"
    assert told["epoch_checksums"] == [replan(base, lengths, epoch).checksum for epoch in range(3)]
    assert told["raw_checksum"] == told["epoch_checksums"][0] and len(set(told["epoch_checksums"])) == 3


def test_world_size_without_dry_run_is_refused(dry: Callable[..., Any]) -> None:
    code, _, err = dry("--world-size", 2)
    assert code == 2 and "--world-size needs --dry-run" in err


def test_world_size_comes_from_the_launcher_unless_it_is_given(
    dry: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert json.loads(dry("--dry-run", "--json")[1])["world_size"] == 4
    assert json.loads(dry("--dry-run", "--json", "--world-size", 2)[1])["world_size"] == 2
    monkeypatch.setenv("RANK", "1")
    assert dry("--dry-run", "--json")[:2] == (0, "")


def test_a_killed_start_goes_on_to_the_same_checksum(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    values = text_run(40)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    command = [warm.python(), "-m", "packtrain", "train", str(tmp_path / "run.yaml"), "--dry-run", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("run/startup/claim.*")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -9
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    values["training"]["output_dir"] = str(tmp_path / "undisturbed")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    clean = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(clean.stdout)
