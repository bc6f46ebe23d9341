"""Every leak of `leaks.py` in the real `swift sft`: refused before the first step, by function and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kinds import CAP
from leaks import LEAKS
from swift_env import PREAMBLE, swift_python
from swift_sft import SWITCHES
from venvs import run

pytestmark = pytest.mark.hosts

SCRIPT = (
    PREAMBLE
    + """
import json, sys
from contextlib import ExitStack
from pathlib import Path
sys.path += json.loads(sys.argv[1])
from kinds import open_kind
from leaks import LEAKS
from transformers import Trainer
from packtrain.hosts.ms_swift import install
folder, words = Path(sys.argv[2]), json.loads(sys.argv[3])
install(source=lambda: open_kind("planned", folder), balance=None)
from swift.pipelines import sft_main

train, found = Trainer.train, {}
for leak in (None, *(leak for leak, _, _ in LEAKS)):
    steps = []
    with ExitStack() as stack:
        def leaking(self, *args, **kwargs):
            if leak is not None:
                leak(self.model, stack)
            step = self.training_step
            self.training_step = lambda *a, **k: (steps.append(1), step(*a, **k))[1]
            return train(self, *args, **kwargs)
        Trainer.train = leaking
        try:
            sft_main(words)
            told = "accepted"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    found["clean" if leak is None else leak.__name__] = (told, len(steps))
print(json.dumps(found))
"""
)


def test_leaks_are_refused_by_name_before_the_first_step_and_the_clean_model_trains(
    network: Path, folders: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    switches = {
        **SWITCHES, "model": network, "model_type": "qwen3", "template": "qwen3", "packing": "true",
        "dataset": folders / "rows.jsonl", "packing_length": CAP, "per_device_train_batch_size": 1,
        "max_steps": 2, "gradient_accumulation_steps": 1, "output_dir": tmp_path / "out",
        "remove_unused_columns": "false",
    }  # fmt: skip
    words = [word for key, value in switches.items() for word in (f"--{key}", str(value))]
    tests = Path(__file__).resolve().parents[1]
    paths = json.dumps([str(tests / "integrations"), str(tests / "train")])
    told = run(swift_python(), SCRIPT, paths, folders, json.dumps(words), ours=True)
    found = json.loads(told.splitlines()[-1])
    assert found.pop("clean") == ["accepted", 2]
    for leak, where, what in LEAKS:
        line, steps = found[leak.__name__]
        assert what in line and "leaks.py:" in line and "\n" not in line and steps == 0, (leak, line)
        if leak.__name__ == "hooked":  # seen before the proof, which every step's check stands behind
            assert "samples would read each other: the model is given an attention_mask" in line
        else:
            assert "packed samples read each other in qwen3" in line and where in line, (leak, line)
    told = "packed samples read each other"
    record_property("refused", ("attention that reads across samples", told, f"{told} in qwen3"))
