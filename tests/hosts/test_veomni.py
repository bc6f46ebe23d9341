"""The real VeOmni 0.1.12, two ranks: its trainers on our packs, of 200 real samples, by its own YAML file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_runs import ids_of, leak_of, losses_of, refused, same_losses, start
from veomni_env import veomni_python

from packtrain.template import load_processor
from packtrain.testing.tiny import tiny_model

pytestmark = pytest.mark.hosts

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "veomni_sft.py"
SCRIPT = "veomni_run.py"
#: VeOmni's own kernels need a GPU.
PLAIN = """moe cross_entropy_loss rms_norm swiglu_mlp rotary_pos_emb load_balancing_loss rms_norm_gated
causal_conv1d chunk_gated_delta_rule"""


def write(folder: Path, model: Path, rows: Path, **data: Any) -> Path:
    """A YAML file of VeOmni: steps of 40 samples over two ranks, in single precision."""
    kernels = {f"{name}_implementation": "eager" for name in PLAIN.split()}
    single = {"enable": True, "param_dtype": "float32", "reduce_dtype": "float32"}
    made = {
        "model": {
            "config_path": str(model),
            "model_path": str(model),
            "tokenizer_path": str(model),
            "ops_implementation": {"attn_implementation": "sdpa", **kernels},
        },
        "data": {
            "train_path": str(rows),
            "data_type": "conversation",
            "chat_template": "chatml",
            "datasets_type": "mapping",
            "max_seq_len": 512,
            "train_size": 40000,
            "dataloader": {"num_workers": 0, "pin_memory": False, "prefetch_factor": None},
            **data,
        },
        "train": {
            "micro_batch_size": 4,
            "global_batch_size": 40,
            "dyn_bsz": False,
            "init_device": "meta",
            "num_train_epochs": 1,
            "optimizer": {"lr": 1e-3},
            "gradient_checkpointing": {"enable": False},
            "accelerator": {"fsdp_config": {"fsdp_mode": "fsdp2", "mixed_precision": single}},
            "checkpoint": {"output_dir": str(folder / "out"), "save_steps": 2, "save_hf_weights": False},
        },
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    return path


@pytest.fixture
def texts(network: Path, talks: Path, tmp_path: Path) -> Path:
    """A YAML file that trains 200 texts."""
    return write(tmp_path, network, talks, chat_template="tokenizer")


@pytest.fixture(scope="module")
def seeing(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("veomni") / "model"
    processor = load_processor(str(data / "processors" / "qwen2_5_vl"))
    tiny_model("tiny:qwen2_5_vl", processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def run(config: Path, name: str, *overrides: str, **spec: Any) -> list[Any]:
    given = {"example": str(EXAMPLE), "config": str(config), "overrides": overrides, **spec}
    return start(veomni_python(), SCRIPT, config.parent, name, ranks=2, **given)


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
def test_texts_train_as_unpacked_and_a_resume_goes_on(texts: Path) -> None:
    """200 samples, 5 steps of 40 over two ranks, by the example on the page; resumed at step 2."""
    seen = run(texts, "packed")
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert [len(step) for step in ids_of(seen)] == [40] * 5
    same_losses(seen)
    checkpoint = texts.parent / "out" / "checkpoints" / "global_step_2"
    again = run(texts, "resumed", "--train.checkpoint.load_path", str(checkpoint))
    assert ids_of(again) == ids_of(seen)[2:]
    assert losses_of(again) == pytest.approx(losses_of(seen)[2:], abs=1e-6)


@pytest.mark.matrix("pictures (Qwen-VL), losses as unpacked")
def test_pictures_and_texts_train_as_unpacked(seeing: Path, files: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for held in map(json.loads, files["all"].read_text(encoding="utf-8").splitlines()):
            made = {"conversations": held["messages"], "images": held["images"], "source": "rows"}
            file.write(json.dumps(made) + "\n")
    small = {"image_max_pixels": 23520, "image_min_pixels": 3136, "scale_factor": 28}
    config = write(tmp_path, seeing, rows, chat_template="qwen2_5vl", mm_configs=small)
    seen = run(config, "packed", pictures=True)
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert len(ids_of(seen)) == 5
    same_losses(seen)


@pytest.mark.spec(
    "004",
    "inside VeOmni 0.1.12: token budgets instead of its dynamic batches, padded rows, equal losses",
    key="`train.dyn_bsz`, `train.pad_to_length`",
    api="`hosts.veomni.pack(trainer, source=TokenBudgetDataset(…))`",
)
def test_a_token_budget_in_the_place_of_its_dynamic_batches(texts: Path, network: Path) -> None:
    """Our source and template; every row is `pad_to_length` tokens, its tail one segment."""
    stream = {"file": str(texts.parent / "talks.jsonl"), "processor": str(network)}
    words = ["--train.dyn_bsz", "true", "--train.pad_to_length", "true", "--train.max_steps", "5"]
    seen = run(texts, "stream", *words, "--train.global_batch_size", "16", stream=stream)
    numbers = [number for step in ids_of(seen) for number in step]
    assert len(numbers) == len(set(numbers)) and len(ids_of(seen)) == 5
    same_losses(seen)
    for rank in seen:
        for widths, boundaries, ids in zip(rank["widths"], rank["boundaries"], rank["ids"], strict=True):
            assert widths == [2048] * 2 and all(row[-1] == 2048 for row in boundaries)
            assert sum(len(row) - 1 for row in boundaries) <= len(ids) + len(widths)


@pytest.mark.spec(
    "004",
    "batches of its `MainCollator`, key by key, under `pad_to_length` and Ulysses",
    key="`train.pad_to_length`, `accelerator.ulysses_size`",
    api="`hosts.veomni.pack`",
)
def test_batches_are_those_of_its_own_collator_under_sequence_parallelism(tmp_path: Path) -> None:
    """Two ranks share a row: slices, shifted labels, and the boundaries of the whole row."""
    made = start(veomni_python(), SCRIPT, tmp_path, "collate", ranks=2, collate=16)
    for rank in made:
        for case, total, ends in (("row", 14, [0, 5, 6, 13, 14]), ("padded", 16, [0, 5, 6, 13, 16])):
            ours = rank[case]["ours"]
            assert ours == rank[case]["theirs"]
            assert ours["cu_seq_lens_q"] == ends and len(ours["input_ids"][0]) == total // 2


def test_attention_that_forgets_boundaries_is_refused(texts: Path, record_property: Any) -> None:
    told = refused(
        veomni_python(), SCRIPT, texts.parent, "leak",
        ranks=2, config=str(texts), example=str(EXAMPLE), leak=True,
    )  # fmt: skip
    record_property("refused", leak_of(told))


#: case -> what is set, the reason that is told, the row of the support table.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "stream": ({"iterable": True}, "it cannot be planned", "streams"),
    "dpo": ({"data_type": "dpo"}, "packs are for supervised training", "preference training"),
    "classes": (
        {"data_type": "classification"},
        "packs are for supervised training",
        "other tasks than causal language modelling",
    ),
}


def test_settings_that_packs_cannot_keep(texts: Path, record_property: Any) -> None:
    given = {name: settings for name, (settings, _, _) in CASES.items()}
    told = run(texts, "refused", cases=given)[0]
    for name, (_, reason, feature) in CASES.items():
        assert reason in told[name], (name, told[name])
        record_property("refused", (feature, reason, told[name]))


def test_the_page_says_how_many_lines_are_ours() -> None:
    ours = re.findall(r".*# packtrain$", EXAMPLE.read_text(encoding="utf-8"), re.M)
    page = (REPOSITORY / "docs" / "hosts_yaml.md").read_text(encoding="utf-8")
    told = re.search(r"## VeOmni\n(.*?)(?:\n## |\Z)", page, re.S)
    assert told is not None and f"({len(ours)} lines of" in told[1] and len(ours) <= 4
