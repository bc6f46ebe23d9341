"""What packs cannot keep in the real transformers Trainer: one line each, before anything is planned."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_hf_trainer import EXAMPLES, files, script  # noqa: F401

import warm
from packtrain.errors import ConfigError, IsolationError

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@pytest.mark.parametrize(
    ("settings", "told", "feature"),
    [
        ({"per_device_train_batch_size": 2}, "a row is one pack", "batch of several packs"),
        ({"label_smoothing_factor": 0.1}, "its loss is a mean over rows", "label smoothing"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "packs have equal lengths",
            "group by length",
        ),
        (
            {"neftune_noise_alpha": 5},
            "its noise is scaled by the length of a row",
            "noise on embeddings (NEFTune)",
        ),
        (
            {"auto_find_batch_size": True},
            "a plan has its row length",
            "batch size found by trying",
        ),
    ],
)
def test_settings_that_packs_cannot_keep_are_refused_in_one_line(
    settings: Any,
    told: str,
    feature: str,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from packtrain.hosts.transformers import pack

    where = str(saved_model("tiny:qwen3")), files["few_text"]
    trainer = script("hf_trainer_text", packed=False).main(
        *where, str(tmp_path), **{"per_device_train_batch_size": 1, **settings}
    )
    with pytest.raises(ConfigError, match=told) as caught:
        pack(trainer, 1024)
    line = str(caught.value)
    assert "\n" not in line
    record_property("refused", (feature, told, line))


def test_other_refusals(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from torch.utils.data import IterableDataset

    from packtrain.hosts.transformers import pack

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(())

    where = str(saved_model("tiny:qwen3")), files["few_text"], str(tmp_path)
    plain = script("hf_trainer_text", packed=False)
    trainer = plain.main(*where, per_device_train_batch_size=1)
    with pytest.raises(ConfigError, match="neither pack_length nor plan"):
        pack(trainer)
    rows, trainer.train_dataset = trainer.train_dataset, Stream()
    with pytest.raises(ConfigError, match="without length or index") as caught:
        pack(trainer, 1024)
    record_property("refused", ("streams", "it cannot be planned", str(caught.value)))

    class Counted(Stream):
        def __len__(self) -> int:
            return 3

    for data in (Counted(), {"input_ids": [[1, 2]]}):  # a length alone is no index
        trainer.train_dataset = data
        with pytest.raises(ConfigError) as caught:
            pack(trainer, 1024)
        assert "\n" not in str(caught.value)
    trainer.train_dataset = rows
    trainer.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(IsolationError, match="carry a state") as stopped:
        pack(trainer, 1024)
    record_property("refused", ("layers that carry a state", "carry a state", str(stopped.value)))
    trainer.model.config.layer_types = ["full_attention"] * 2
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match="n_gpu=2 cannot be kept") as caught:
        pack(trainer, 1024)
    told = "one process would split packs over GPUs"
    record_property("refused", ("several GPUs in one process", told, str(caught.value)))


@pytest.mark.matrix("model of no listed family")
def test_a_model_that_no_family_lists_is_proven_first(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from packtrain.hosts.transformers import pack

    where = str(saved_model("tiny:qwen3")), files["few_text"], str(tmp_path)
    plain = script("hf_trainer_text", packed=False)
    trainer = plain.main(*where, per_device_train_batch_size=1)
    trainer.model.config.model_type = "nobody_knows"
    assert pack(trainer, 1024).packs.plan.stats()["samples"] == 24
    trainer.train()
    leaking = plain.main(*where, per_device_train_batch_size=1)
    leaking.model.config.model_type = "nobody_knows"
    forward = leaking.model.forward

    @functools.wraps(forward)
    def plain_positions(*args: Any, **kwargs: Any) -> Any:
        """Every sample of a row reads those before it."""
        return forward(*args, **{**kwargs, "position_ids": None})

    leaking.model.forward = plain_positions
    with pytest.raises(IsolationError, match="read each other in nobody_knows, first in") as caught:
        pack(leaking, 1024)
    assert "\n" not in str(caught.value)


@pytest.mark.matrix("metrics of the user over rows")
def test_metrics_of_the_user_get_the_rows_they_expect(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from packtrain.hosts.transformers import pack

    where = str(saved_model("tiny:qwen3")), files["few_text"], str(tmp_path), files["few_text"]
    trainer = script("hf_trainer_text", packed=False).main(*where, per_device_train_batch_size=4)
    trainer.compute_metrics = lambda found: {"rows": len(found.label_ids)}
    before = trainer.evaluate()
    pack(trainer, 1024, samples_per_step="same")
    after = trainer.evaluate()
    assert before["eval_rows"] == after["eval_rows"] == 24
    assert after["eval_loss"] == before["eval_loss"]  # Trainer's own mean, as before


def test_the_line_is_the_last_that_a_script_prints(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """A user's whole script in a process of its own."""
    code = (EXAMPLES / "hf_trainer_text.py").read_text(encoding="utf-8")
    path = tmp_path / "script.py"
    path.write_text(code.replace(', samples_per_step="same"', ""), encoding="utf-8")
    words = [warm.python(), str(path), str(saved_model("tiny:qwen3")), files["few_text"], str(tmp_path)]
    kept = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=kept)
    assert done.returncode == 1
    told = "per_device_train_batch_size is 2: a row is one pack (hint: set it to 1, or pass samples_per_step"
    assert done.stderr.splitlines()[-1].startswith(f"packtrain.errors.ConfigError: {told}")
