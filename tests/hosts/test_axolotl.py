"""The real axolotl 0.19: its trainer packed by the plug-in, on 200 real samples, by its own YAML file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from axolotl_env import axolotl_python
from host_runs import ids_of, leak_of, losses_of, refused, same_losses, start

from packtrain.template import load_processor
from packtrain.testing.tiny import tiny_model

pytestmark = pytest.mark.hosts

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "axolotl_sft.yaml"
SCRIPT = "axolotl_run.py"
SETTINGS: dict[str, Any] = {
    "plugins": ["packtrain.hosts.axolotl.PacktrainPlugin"],
    "sample_packing": False,
    "sequence_len": 2048,
    "micro_batch_size": 40,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "lr_scheduler": "linear",
    "logging_steps": 1,
    "save_strategy": "no",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "val_set_size": 0,
}
PICTURES = {
    "processor_type": "AutoProcessor",
    "chat_template": "tokenizer_default",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
}


def parts(text: str, pictures: list[str]) -> list[dict[str, str]]:
    """The content of a message as axolotl wants it, its pictures by path."""
    made: list[dict[str, str]] = []
    for number, piece in enumerate(text.split("<image>")):
        made += [{"type": "image", "path": pictures.pop(0)}] if number else []
        made += [{"type": "text", "text": piece}] if piece else []
    return made


def chats(path: Path, out: Path) -> Path:
    with out.open("w", encoding="utf-8") as file:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            held = list(row["images"])
            talk = [{"role": m["role"], "content": parts(m["content"], held)} for m in row["messages"]]
            file.write(json.dumps({"messages": talk}) + "\n")
    return out


@pytest.fixture(scope="module")
def seeing(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL whose processor makes small pictures."""
    folder = tmp_path_factory.mktemp("axolotl") / "model"
    processor = load_processor(str(data / "processors" / "qwen2_5_vl"))
    processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 23520}
    tiny_model("tiny:qwen2_5_vl", processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write(folder: Path, model: Path, rows: Path, **settings: Any) -> Path:
    made = {
        **SETTINGS,
        "base_model": str(model),
        "datasets": [
            {"path": str(rows), "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
        ],
        "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"),
        **settings,
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    return path


@pytest.fixture
def texts(network: Path, data: Path, tmp_path: Path) -> Path:
    """A YAML file that trains 200 texts."""
    lines = (data / "text_sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    rows = tmp_path / "texts.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for held in map(json.loads, lines):
            talk = [("user", held["question"]), ("assistant", held["answer"])]
            file.write(json.dumps({"messages": [{"role": r, "content": t} for r, t in talk]}) + "\n")
    return write(tmp_path, network, rows)


def run(
    config: Path, name: str, *, ranks: int = 1, folder: Path | None = None, **overrides: Any
) -> list[Any]:
    given = {"config": str(config), "overrides": overrides}
    return start(axolotl_python(), SCRIPT, folder or config.parent, name, ranks=ranks, **given)


@pytest.mark.matrix(
    "text, losses as unpacked", "every sample once", "resume", "tokenised before, lengths taken"
)
def test_texts_train_as_unpacked_and_a_resume_goes_on(texts: Path) -> None:
    """200 samples, 5 steps of 40; the run resumed at step 2."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    seen = run(texts, "packed", **saved)
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert [len(step) for step in ids_of(seen)] == [40] * 5
    same_losses(seen)
    checkpoint = texts.parent / "out" / "checkpoint-2"
    again = run(texts, "resumed", **saved, resume_from_checkpoint=str(checkpoint))
    assert ids_of(again) == ids_of(seen)[2:]
    assert losses_of(again) == losses_of(seen)[2:]


@pytest.mark.matrix("pictures (Qwen-VL), losses as unpacked", "lengths without encoding")
def test_pictures_and_texts_train_as_unpacked(seeing: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """What axolotl itself refuses to pack; no row is encoded to be measured."""
    config = write(tmp_path, seeing, chats(files["all"], tmp_path / "all.jsonl"), **PICTURES)
    seen = run(config, "packed")
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert len(ids_of(seen)) == 5
    same_losses(seen)
    assert "encoded to be measured" not in seen[0]["stderr"]


def test_further_pictures_that_axolotl_would_not_read_stop_the_run(
    seeing: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """A list of pictures beside the messages: axolotl trains the first and warns."""
    rows = [json.loads(line) for line in files["few"].read_text(encoding="utf-8").splitlines()]
    path = tmp_path / "listed.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            talk = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in row["messages"]]
            file.write(json.dumps({"messages": talk, "images": row["images"] or None}) + "\n")
    told = refused(
        axolotl_python(), SCRIPT, tmp_path, "listed", config=str(write(tmp_path, seeing, path, **PICTURES))
    )
    assert "UnreadKeys" in told and "of which axolotl trains the first" in told, told[-2000:]


def test_attention_that_forgets_boundaries_is_refused(texts: Path, record_property: Any) -> None:
    told = refused(axolotl_python(), SCRIPT, texts.parent, "leak", config=str(texts), leak=True)
    record_property("refused", leak_of(told))


#: case -> its settings, the reason that is told, the row of the support table.
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "own": ({"sample_packing": True}, "the rows are packed already, by axolotl", "the host's own packing"),
    "batch": ({"packtrain": {"samples_per_step": None}}, "a row is one pack", "batch of several packs"),
    "group": ({"group_by_length": True}, "packs have equal lengths", "group by length"),
    "neftune": (
        {"neftune_noise_alpha": 5.0},
        "its noise is scaled by the length of a row",
        "noise on embeddings (NEFTune)",
    ),
    "found": ({"auto_find_batch_size": True}, "a plan has its row length", "batch size found by trying"),
}


def test_settings_that_packs_cannot_keep(texts: Path, record_property: Any) -> None:
    given = {name: overrides for name, (overrides, _, _) in CASES.items()}
    (told,) = start(axolotl_python(), SCRIPT, texts.parent, "refused", config=str(texts), cases=given)
    for name, (_, reason, feature) in CASES.items():
        assert reason in told[name], (name, told[name])
        record_property("refused", (feature, reason, told[name]))


def test_the_example_on_the_page_is_trained(seeing: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """axolotl's own file with at most four lines of ours; the page says how many."""
    text = EXAMPLE.read_text(encoding="utf-8")
    ours = re.findall(r".*# packtrain$", text, re.M)
    page = (REPOSITORY / "docs" / "hosts_yaml.md").read_text(encoding="utf-8")
    told = re.search(r"## axolotl\n(.*?)(?:\n## |\Z)", page, re.S)
    assert told is not None and f"({len(ours)} lines of" in told[1] and len(ours) <= 4
    rows = chats(files["few"], tmp_path / "train.jsonl")
    mine = {"base_model": str(seeing), "output_dir": str(tmp_path / "out"), "bf16": False, "max_steps": 1}
    mine |= {"sequence_len": 512, "micro_batch_size": 2}
    held = {**yaml.safe_load(text), **mine, "dataset_prepared_path": str(tmp_path / "prepared")}
    held["datasets"][0]["path"] = str(rows)
    config = tmp_path / "example.yaml"
    config.write_text(yaml.safe_dump(held), encoding="utf-8")
    (seen,) = run(config, "example")
    assert len(seen["losses"]) == 1
