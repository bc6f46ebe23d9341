"""What packs cannot keep in the real `swift sft` and `swift rlhf`: the run ends with one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from swift_env import PREAMBLE, swift_python
from swift_sft import SWITCHES, refused
from venvs import run

pytestmark = pytest.mark.hosts

#: case -> the program, its flags, the reason that is told, the row of the support table.
CASES: dict[str, tuple[str, dict[str, str], str, str]] = {
    "group_by_length": ("sft", {"group_by_length": "true"}, "packs have equal lengths", "group by length"),
    "label_smoothing_factor": (
        "sft",
        {"label_smoothing_factor": "0.1"},
        "its loss is a mean over rows",
        "label smoothing",
    ),
    "auto_find_batch_size": (
        "sft",
        {"auto_find_batch_size": "true"},
        "a plan has its row length",
        "batch size found by trying",
    ),
    "neftune_noise_alpha": (
        "sft",
        {"neftune_noise_alpha": "5.0"},
        "its noise is scaled by the length of a row",
        "noise on embeddings (NEFTune)",
    ),
    "truncation_strategy": (
        "sft",
        {"truncation_strategy": "split"},
        "packs hold whole rows",
        "splitting long rows",
    ),
    "attn_impl": (
        "sft",
        {"attn_impl": "flex_attention"},
        "nobody has shown that it isolates",
        "attention not shown to isolate",
    ),
    "per_device_train_batch_size": (
        "sft",
        {"per_device_train_batch_size": "2"},
        "a row is one pack",
        "batch of several packs",
    ),
    "sequence_parallel_size": (
        "sft",
        {"sequence_parallel_size": "2"},
        "packs are not cut over ranks",
        "sequence parallel",
    ),
    "task_type": (
        "sft",
        {"task_type": "seq_cls", "num_labels": "2"},
        "packs are for causal language models",
        "other tasks than causal language modelling",
    ),
    "rlhf_type": (
        "rlhf",
        {"rlhf_type": "dpo"},
        "packs are for supervised training",
        "preference training",
    ),
}


@pytest.mark.spec(
    "001",
    "in ms-swift: what cannot keep its meaning ends the run in one line",
    key="ms-swift's flags",
    api="`install`",
)
def test_flags_that_cannot_keep_their_meaning_end_the_run_in_one_line(
    model: Path, files: dict[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    told = run(
        swift_python(),
        PREAMBLE
        + """
import json, sys
from packtrain.hosts.ms_swift import install
install()
from swift.pipelines import rlhf_main, sft_main
shared, cases = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for name, (program, flags) in cases.items():
    words = [word for key, text in {**shared, **flags}.items() for word in (f"--{key}", text)]
    try:
        (sft_main if program == "sft" else rlhf_main)(words)
        found[name] = "accepted"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
""",
        json.dumps(
            {
                **{key: str(value) for key, value in SWITCHES.items()},
                "model": str(model),
                "dataset": str(files["few"]),
                "output_dir": str(tmp_path / "out"),
                "packing": "true",
                "per_device_train_batch_size": "1",
            }
        ),
        json.dumps({name: (program, flags) for name, (program, flags, _, _) in CASES.items()}),
        ours=True,
    )
    found = json.loads(told.splitlines()[-1])
    for flag, (_, flags, why, feature) in CASES.items():
        line = found[flag].removeprefix("ConfigError: ")
        value = {"true": "True"}.get(flags[flag], flags[flag])
        assert line.startswith(f"--{flag} {value} with packing: {why}"), (flag, found[flag])
        assert "(hint: " in line and "\n" not in line
        record_property("refused", (feature, why, line))
    assert not list(tmp_path.rglob("plan.json"))


def test_two_processes_that_are_two_trainers_are_refused_by_each(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Without `--use_cpu true` each of two CPU processes would train on everything."""
    words = {
        "model": model,
        "dataset": files["few"],
        "packing": "true",
        "per_device_train_batch_size": 1,
        "use_cpu": "false",
    }
    said = refused(tmp_path, "alone", words, ranks=2, plugin=True)
    told = "2 processes were started but the trainer knows of 1 (hint: on CPUs set --use_cpu true)"
    assert f"ConfigError: {told}" in said


def test_ranks_that_average_for_themselves_are_refused(
    model: Path, files: dict[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    words = {
        "model": model,
        "dataset": files["few"],
        "packing": "true",
        "per_device_train_batch_size": 1,
        "average_tokens_across_devices": "false",
    }
    said = refused(tmp_path, "alone", words, ranks=2, plugin=True)
    start = "packtrain.errors.ConfigError: "
    told = {line.partition(start)[2] for line in said.splitlines() if start in line}
    why = "ranks hold different numbers of tokens"
    (line,) = told
    assert line.startswith(f"--average_tokens_across_devices False with packing: {why}")
    record_property("refused", ("loss averaged per rank", why, line))
