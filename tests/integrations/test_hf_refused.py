"""What packs cannot keep in the real transformers Trainer: one line each, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_hf_trainer import files, script  # noqa: F401

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
        ({"auto_find_batch_size": True}, "a plan has its row length", None),
    ],
)
def test_settings_that_packs_cannot_keep_are_refused_in_one_line(
    settings: Any,
    told: str,
    feature: str | None,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from packtrain.integrations.transformers import pack

    where = str(saved_model("tiny:qwen3")), files["few_text"]
    trainer = script("hf_trainer_text", packed=False).main(
        *where, str(tmp_path), **{"per_device_train_batch_size": 1, **settings}
    )
    with pytest.raises(ConfigError, match=told) as caught:
        pack(trainer, 1024)
    line = str(caught.value)
    assert "\n" not in line
    if feature:
        record_property("refused", (feature, told, line))


def test_other_refusals(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from torch.utils.data import IterableDataset

    from packtrain.integrations.transformers import pack

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
    trainer.train_dataset = rows
    trainer.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(IsolationError, match="carry a state"):
        pack(trainer, 1024)
    trainer.model.config.layer_types = ["full_attention"] * 2
    trainer.model.config.model_type = "nobody_knows"  # no family lists it: the proof decides, and it holds
    assert pack(trainer, 1024).packs.plan.stats()["samples"] == 24
