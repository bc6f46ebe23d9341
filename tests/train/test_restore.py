"""A checkpoint comes back into the model, also where transformers saves under other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resume_script
import torch
from safetensors.torch import load_file

from packtrain.errors import ConfigError, FormatError
from packtrain.testing.tiny import TINY_MODELS, tiny_model
from packtrain.train.weights import restore_weights


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
@pytest.mark.parametrize("shard", ["5GB", "30KB"])
def test_weights_saved_under_other_names_are_all_restored(name: str, shard: str, tmp_path: Path) -> None:
    saved, fresh = tiny_model(name, seed=1), tiny_model(name, seed=2)
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").is_file() == (shard == "5GB")
    if not restore_weights(fresh, tmp_path):  # the names agree: what Trainer does then loads all
        names = {key for path in tmp_path.glob("*.safetensors") for key in load_file(path)}
        assert names <= set(fresh.state_dict())
        return
    found = fresh.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in saved.state_dict().items())


def test_number_types_stay_and_other_models_are_refused(tmp_path: Path) -> None:
    saved = tiny_model("tiny:qwen2_5_vl", seed=1).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "a")
    fresh = tiny_model("tiny:qwen2_5_vl", seed=2).to(torch.bfloat16)
    assert restore_weights(fresh, tmp_path / "a")
    assert {value.dtype for value in fresh.parameters()} == {torch.bfloat16}
    assert torch.equal(fresh.lm_head.weight, saved.lm_head.weight)
    plain = tiny_model("tiny:qwen3")
    plain.save_pretrained(tmp_path / "b")
    assert not restore_weights(plain, tmp_path / "b"), "the names agree: Trainer loads it"
    with pytest.raises(FormatError, match=r"lacks|do not fit"):
        restore_weights(fresh, tmp_path / "b")


def test_a_vision_language_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: Any) -> None:
    """Trainer alone loads nothing here: it would go on from the weights that the run began with."""
    monkeypatch.setattr(
        resume_script, "tiny_model", lambda name, seed: tiny_model("tiny:qwen2_5_vl", seed=seed)
    )
    options = {"max_steps": 4, "save_steps": 2, "eval_strategy": "no"}
    whole = resume_script.run(tmp_path / "a", **options).model.state_dict()
    again = resume_script.run(tmp_path / "b", 0, str(tmp_path / "a" / "checkpoint-2"), **options).model
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in whole.items())


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    """Trainer alone loads none of its weights, and the run ends with the last ones."""
    monkeypatch.setattr(
        resume_script, "tiny_model", lambda name, seed: tiny_model("tiny:qwen2_5_vl", seed=seed)
    )
    worst = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {"max_steps": 3, "save_steps": 1, "eval_steps": 1, "save_total_limit": None}
    model = resume_script.run(tmp_path / "a", **options, **worst).model
    held = json.loads((tmp_path / "a" / "checkpoint-3" / "trainer_state.json").read_text())
    assert held["best_global_step"] == 1, "the first evaluation has the highest loss"
    best = tiny_model("tiny:qwen2_5_vl", seed=9)
    assert restore_weights(best, tmp_path / "a" / "checkpoint-1")
    found = model.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in best.state_dict().items())


@pytest.mark.parametrize("given", [True, "nowhere"])
def test_no_checkpoint_is_one_line(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint") as caught:
        resume_script.run(tmp_path, 0, given if given is True else str(tmp_path / given))
    assert caught.value.hint


def test_a_position_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "packs.json").write_text("[1]")
    with pytest.raises(FormatError, match="holds a list"):
        resume_script.run(tmp_path / "run", 0, str(tmp_path / "checkpoint-2"))
