"""`training.packing_mode: streaming`: real steps, exact resume, clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_samples import text_sample

from packtrain.errors import ConfigError, ForeignArtefactError, InputError, SampleError
from packtrain.extend import Measured
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.opened import Checked, opened
from packtrain.train.resume import checkpoint_of, load_position
from packtrain.train.sft import train
from packtrain.world import World

SAMPLES = [{**text_sample(3 + i % 5, i), "sample_id": i} for i in range(30)]


class Recorder:
    """A template for encoded samples that notes which are read."""

    config: dict[str, Any] = {}  # noqa: RUF012 - as a template has it

    def __init__(self) -> None:
        self.read: list[int] = []

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.read.append(sample["sample_id"])
        return dict(sample)


def run(folder: Path, **training: Any) -> tuple[Any, Recorder]:
    options = {
        "output_dir": str(folder), "packing_mode": "streaming", "logging_steps": 1, "learning_rate": 5e-3,
        "save_strategy": "no", "proof": False, "max_steps": 12, "stream_window": 8,
        "stream_shuffle_buffer": 4, "gradient_accumulation_steps": 2, **training,
    }  # fmt: skip
    template = Recorder()
    config = load_config({"global_max_length": 16, "training": options})
    return train(config, SAMPLES, template, model=tiny_model("tiny:qwen3", seed=2)), template


@pytest.mark.parametrize("mode", [{}, {"dyn_bsz": True, "micro_batch_size": 2}])
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, mode: dict[str, Any]) -> None:
    whole, _ = run(tmp_path / "a", save_strategy="steps", save_steps=5, **mode)
    assert whole.metrics["steps"] == 12 and len(whole.losses) == 12
    checkpoint = tmp_path / "a" / "checkpoint-5"
    state = json.loads((checkpoint / "stream.0.json").read_text())
    assert state["reader"] == [1, 0, 1, 0] and state["held"][0]["run"] is not None
    again, _ = run(tmp_path / "b", resume_from_checkpoint=str(checkpoint), **mode)
    assert [loss for step, loss in again.losses if step > 5] == [
        loss for step, loss in whole.losses if step > 5
    ]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ForeignArtefactError, match="has settings"):
        run(tmp_path / "c", resume_from_checkpoint=str(checkpoint), stream_window=9, **mode)


@pytest.mark.parametrize("mode", [{}, {"dyn_bsz": True, "micro_batch_size": 2}])
def test_other_ranks_go_on_with_the_packs_of_the_run(tmp_path: Path, mode: dict[str, Any]) -> None:
    """One rank, then two (streams in lockstep), then one: the losses of the run that nobody stopped."""
    options: dict[str, Any] = {"stream_splits": 4, **mode}
    whole, _ = run(tmp_path / "a", save_strategy="steps", save_steps=1, **options)
    state = json.loads((tmp_path / "a" / "checkpoint-4" / "stream.0.json").read_text())
    assert (state["splits"], len(state["held"])) == (4, 4)
    values = {"output_dir": str(tmp_path / "b"), "packing_mode": "streaming", "max_steps": 12, **options}
    values |= {"stream_window": 8, "stream_shuffle_buffer": 4, "learning_rate": 5e-3}
    config = load_config({"global_max_length": 16, "training": values})
    checkpoint = tmp_path / "a" / "checkpoint-7"
    ranks = []
    for rank in range(2):
        stream, _ = opened(config, SAMPLES, Recorder(), World(rank, 2))
        checkpoint_4 = checkpoint_of(stream, str(tmp_path / "a" / "checkpoint-4"), "")
        assert load_position(stream, checkpoint_4)
        packs = iter(stream)
        ranks.append([next(packs) for _ in range(3)])  # steps 5 to 7: a pack of each rank
        told = json.dumps(stream.state_dict())
        (checkpoint / f"stream.{rank}.json").write_text(told)
        assert len(json.loads(told)["held"]) == 2
    options |= {"resume_from_checkpoint": str(checkpoint)}
    again, _ = run(tmp_path / "c", **options)
    assert [loss for step, loss in again.losses if step > 7] == [
        loss for step, loss in whole.losses if step > 7
    ]
    (tmp_path / "a" / "checkpoint-12" / "stream.0.json").unlink()
    for step in (8, 9, 10, 11):  # saved by two ranks, of which one was cut off
        shutil.copy(checkpoint / "stream.0.json", tmp_path / "a" / f"checkpoint-{step}" / "stream.0.json")
    whole_one = checkpoint_of(stream, True, str(tmp_path / "a"))
    assert whole_one == str(checkpoint)
    with pytest.raises(ConfigError, match=r"saved by 2 ranks and lacks stream\.1\.json"):
        run(tmp_path / "d", **{**options, "resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-9")})
    with pytest.raises(InputError, match="has 4 splits, which 3 ranks"):
        opened(config, SAMPLES, Recorder(), World(0, 3))


def test_an_unfinished_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """What a kill, or a full disk, in the middle of a checkpoint leaves is no place to go on from."""
    whole, _ = run(tmp_path / "a", save_strategy="steps", save_steps=4)
    (tmp_path / "a" / "checkpoint-12" / "stream.0.json").unlink()
    (tmp_path / "a" / "checkpoint-8" / "trainer_state.json").unlink()
    again, template = run(tmp_path / "a", resume_from_checkpoint=True)
    assert template.read and again.losses == whole.losses  # from checkpoint-4


def test_a_checkpoint_that_lacks_a_part_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a"
    run(folder, save_strategy="steps", save_steps=6)
    values = {"output_dir": str(folder), "packing_mode": "streaming", "max_steps": 12}
    stream, _ = opened(
        load_config({"global_max_length": 16, "training": values}), SAMPLES, Recorder(), World(0, 1)
    )
    last, before = folder / "checkpoint-12", folder / "checkpoint-6"
    assert checkpoint_of(stream, True, str(folder)) == str(last)
    (folder / "checkpoint-²").mkdir()
    (folder / "checkpoint-18").write_bytes(b"")  # no folder
    (folder / "checkpoint-24").symlink_to(folder / "gone")
    for name, bytes_ in (
        ("model.safetensors", None), ("optimizer.pt", None), ("optimizer.pt", bytes(900)),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2.safetensors"}}'),
    ):  # fmt: skip
        kept = (last / name).read_bytes() if (last / name).exists() else None
        (last / name).unlink(missing_ok=True)
        if bytes_ is not None:
            (last / name).write_bytes(bytes_)
        assert checkpoint_of(stream, True, str(folder)) == str(before), name
        assert "has no whole" in caplog.text
        (last / name).unlink(missing_ok=True)
        if kept is not None:
            (last / name).write_bytes(kept)
        assert checkpoint_of(stream, "auto", str(folder)) == str(last)
    for one in (last, before):
        (one / "stream.0.json").unlink()
    assert checkpoint_of(stream, "auto", str(folder)) is None  # `training.resume: auto`
    assert "holds no whole checkpoint: the run begins anew" in caplog.text
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        checkpoint_of(stream, True, str(folder))


def test_the_proof_runs_and_does_not_move_the_stream(tmp_path: Path) -> None:
    proven, _ = run(tmp_path / "a", proof=True, max_steps=3)
    assert proven.proof is not None and proven.proof.ok
    assert proven.losses == run(tmp_path / "b", max_steps=3)[0].losses


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_steps": -1}, r"needs training\.max_steps"),
        ({"samples_per_step": 4}, r"training\.samples_per_step needs a plan"),
        ({"micro_batch_size": 2}, r"no effect without training\.dyn_bsz"),
        ({"packing_mode": "dynamic"}, "is not supported"),
        (
            {"packing_mode": "static", "dyn_bsz": True},
            r"dyn_bsz: true and training\.packing_mode: static say different kinds",
        ),
        ({"resume_from_checkpoint": True}, "holds no checkpoint"),
        ({"save_strategy": "epoch"}, "save_strategy epoch has no meaning"),
        ({"logging_strategy": "epoch"}, "logging_strategy epoch has no meaning"),
        ({"load_best_model_at_end": True}, "no effect without validation samples"),
        ({"packing": False}, "packing is false, and data of kind stream"),
        ({"train_dataloader_shuffle": False}, r"stream_shuffle_buffer 4 would mix the samples"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=match):
        run(tmp_path / "out", **change)


def test_what_has_no_effect_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run is the same: keys of plans, epochs beside max_steps, workers that are named otherwise."""
    plain, _ = run(tmp_path / "a", max_steps=2)
    keys = {"replan": "epoch", "repeat_loss": "zero", "balance": "step", "max_drop_fraction": 0.5}
    with caplog.at_level("WARNING"):
        told, _ = run(tmp_path / "b", max_steps=2, num_train_epochs=2, **keys)
    assert told.losses == plain.losses
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("packtrain.train.config")]
    assert len(lines) == 2 and lines[0].startswith("training.replan, training.repeat_loss, training.balance,")
    assert "have no effect on data of kind stream" in lines[0] and "num_train_epochs 2" in lines[1]
    values = {"packing_mode": "streaming", "max_steps": 2, "dataloader_num_workers": 3}
    assert load_config({"training": values}).data.encode_workers == 3  # type: ignore[union-attr]


def test_a_checkpoint_without_this_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(ConfigError, match="holds no state of a stream"):
        run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from packtrain import files

    publish, seen = files.publish_json, []

    def full(path: Any, value: Any) -> None:
        if str(path).endswith("stream.0.json"):
            seen.append(path)
            if len(seen) == 2:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        publish(path, value)

    monkeypatch.setattr("packtrain.train.resume.files.publish_json", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, save_strategy="steps", save_steps=4)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="holds no state of a stream"):
        run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    again, _ = run(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.losses[-4:] == run(tmp_path / "c")[0].losses[-4:]


class Ears:
    """A template that cuts the clips whose name says so, and that may truncate."""

    def __init__(self, long_audio: str = "error", truncation: str = "error") -> None:
        self.long_audio, self.truncation = long_audio, truncation
        self.measured = 0

    def measure(self, sample: Any) -> Any:
        self.measured += 1
        (part,) = sample["messages"][0]["content"]
        return Measured(3, audio_cut=int("long" in part["audio"]))

    def encode(self, sample: Any) -> dict[str, Any]:
        return {"input_ids": [1, 2, 3], "labels": sample.get("labels", [-100, 2, 3])}


@pytest.mark.parametrize("policy", ["error", "cut", "drop"])
def test_a_stream_asks_what_becomes_of_clips_that_are_cut(policy: str) -> None:
    template = Ears(policy)
    checked = Checked(template)
    short, long = (
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": f"/m/{name}.wav"}]}]}
        for name in ("short", "long")
    )
    assert checked.encode(short)["input_ids"] == [1, 2, 3]
    if policy == "cut":
        assert checked.encode(long)["input_ids"] == [1, 2, 3] and template.measured == 0
        return
    with pytest.raises(InputError if policy == "error" else SampleError, match="clip") as error:
        checked.encode(long)
    assert policy == "drop" or "/m/long.wav" in str(error.value)
    checked.encode({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]})
    assert template.measured == 2


def test_a_stream_leaves_out_what_truncation_left_nothing_of() -> None:
    sample = {"messages": [], "labels": [-100, -100, -100]}
    assert Checked(Ears()).encode(sample)["labels"] == sample["labels"]
    with pytest.raises(SampleError, match="truncation"):
        Checked(Ears(truncation="right")).encode(sample)
