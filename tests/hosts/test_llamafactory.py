"""The real LLaMA-Factory 0.9.5: its SFT workflow on packs, on 200 real samples, by its own YAML file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_runs import ids_of, leak_of, losses_of, refused, same_losses, start
from llamafactory_env import llamafactory_python

from packtrain.planning.packplan import PackPlan

pytestmark = pytest.mark.hosts

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "llamafactory_sft.yaml"
SCRIPT = "llamafactory_run.py"
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SETTINGS = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 40,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": "none",
    "overwrite_cache": True,
    "disable_gradient_checkpointing": True,
}


@pytest.fixture(scope="module")
def info(data: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dataset_info.json`: 200 texts as question and answer; pictures and texts as chats."""
    folder = tmp_path_factory.mktemp("info")
    lines = (data / "text_sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    columns = {"messages": "messages", "images": "images"}
    chats = {"formatting": "sharegpt", "columns": columns, "tags": TAGS}
    named: dict[str, Any] = {
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "all": {"file_name": str(files["all"]), **chats},
        "few": {"file_name": str(files["few"]), **chats},
    }
    (folder / "dataset_info.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


@pytest.fixture
def texts(network: Path, info: Path, tmp_path: Path) -> Path:
    """A YAML file that trains texts."""
    return write(tmp_path, info, network, dataset="texts", template="default")


def write(folder: Path, info: Path, model: Path, **settings: Any) -> Path:
    path = folder / "train.yaml"
    named = {"model_name_or_path": str(model), "dataset_dir": str(info), "output_dir": str(folder / "out")}
    path.write_text(yaml.safe_dump({**SETTINGS, **named, **settings}), encoding="utf-8")
    return path


def run(config: Path, name: str, *overrides: str, folder: Path | None = None, **spec: Any) -> list[Any]:
    given = {"config": str(config), "overrides": list(overrides), **spec}
    return start(llamafactory_python(), SCRIPT, folder or config.parent, name, **given)


@pytest.mark.matrix(
    "text, losses as unpacked", "every sample once", "resume", "tokenised before, lengths taken"
)
def test_texts_train_as_unpacked_and_a_resume_goes_on(texts: Path) -> None:
    """200 samples, 5 steps of 40, beside `packing: true`, which is ours; the run resumed at step 2."""
    saved = ("save_strategy=steps", "save_steps=2", "packing=true", "neat_packing=true")
    seen = run(texts, "packed", *saved)
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert [len(step) for step in ids_of(seen)] == [40] * 5
    same_losses(seen)
    checkpoint = texts.parent / "out" / "checkpoint-2"
    again = run(texts, "resumed", *saved, f"resume_from_checkpoint={checkpoint}")
    assert ids_of(again) == ids_of(seen)[2:]
    assert losses_of(again) == losses_of(seen)[2:]


@pytest.mark.matrix("pictures (Qwen-VL), losses as unpacked")
def test_pictures_and_texts_train_as_unpacked(model: Path, info: Path, tmp_path: Path) -> None:
    config = write(
        tmp_path,
        info,
        model,
        dataset="all",
        template="qwen2_vl",
        image_max_pixels=23520,
        freeze_vision_tower=False,
        freeze_multi_modal_projector=False,
    )
    seen = run(config, "packed")
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert len(ids_of(seen)) == 5
    same_losses(seen)


@pytest.mark.matrix("two ranks", "LoRA, gradient checkpointing on and off")
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_share_the_packs(texts: Path, lora: bool) -> None:
    """Each sample is in one pack of one rank."""
    more = ("finetuning_type=lora", "disable_gradient_checkpointing=false") if lora else ()
    seen = run(texts, "two", "per_device_train_batch_size=20", *more, ranks=2)
    assert sorted(number for step in ids_of(seen) for number in step) == list(range(200))
    assert [len(step) for step in ids_of(seen)] == [40] * 5
    same_losses(seen)


@pytest.mark.matrix("exact eval loss")
def test_eval_loss_is_the_token_mean(texts: Path) -> None:
    """The weights do not move: evaluating the set that is trained gives the mean over its tokens."""
    (seen,) = run(texts, "eval", "learning_rate=0.0", "do_eval=true", "eval_dataset=texts")
    alone = [one for step in seen["alone"] for one in step]
    wanted = sum(loss * count for loss, count in alone) / sum(count for _, count in alone)
    told = json.loads((texts.parent / "out" / "eval_results.json").read_text())["eval_loss"]
    assert told == pytest.approx(wanted, rel=1e-5)


def test_rows_cut_inside_of_a_picture_are_left_out_and_cut_texts_are_told(
    model: Path, info: Path, tmp_path: Path
) -> None:
    config = write(
        tmp_path,
        info,
        model,
        dataset="few",
        template="qwen2_vl",
        image_max_pixels=23520,
        cutoff_len=40,
        per_device_train_batch_size=4,
        max_steps=1,
    )
    (seen,) = run(config, "cut")
    plan = PackPlan.load(next((tmp_path / "out" / "packs" / "train").glob("plan-*")))
    assert plan.ledger.counts()["cut_media"] == len(plan.ledger) > 0
    assert "trained without all answers of the record" in seen["stderr"]
    assert len(plan.indices) + len(plan.ledger) == 23


def test_attention_that_forgets_boundaries_is_refused(texts: Path, record_property: Any) -> None:
    told = refused(llamafactory_python(), SCRIPT, texts.parent, "leak", config=str(texts), leak=True)
    record_property("refused", leak_of(told))


#: case -> its settings, the reason that is told, the row of the support table.
CASES: dict[str, tuple[list[str], str, str]] = {
    "stage": (["stage=dpo"], "packs are for supervised training", "preference training"),
    "asft": (["use_asft_loss=true"], "it has a trainer or loss of its own", ""),
    "batch": (["packtrain.samples_per_step=null"], "a row is one pack", "batch of several packs"),
    "group": (["train_sampling_strategy=group_by_length"], "packs have equal lengths", "group by length"),
    "smoothing": (["label_smoothing_factor=0.1"], "its loss is a mean over rows", "label smoothing"),
    "neftune": (
        ["neftune_noise_alpha=5.0"],
        "its noise is scaled by the length of a row",
        "noise on embeddings (NEFTune)",
    ),
    "found": (["auto_find_batch_size=true"], "a plan has its row length", "batch size found by trying"),
    "stream": (
        ["streaming=true", "max_steps=5", "dataloader_num_workers=1"],
        "it cannot be planned",
        "streams",
    ),
}


def test_settings_that_packs_cannot_keep(texts: Path, record_property: Any) -> None:
    given = {name: overrides for name, (overrides, _, _) in CASES.items()}
    (told,) = run(texts, "refused", cases=given)
    for name, (_, reason, feature) in CASES.items():
        assert reason in told[name], (name, told[name])
        if feature:
            record_property("refused", (feature, reason, told[name]))


def test_the_example_on_the_page_is_trained(model: Path, info: Path, tmp_path: Path) -> None:
    """Its own file with at most four lines of ours; the page says how many."""
    text = EXAMPLE.read_text(encoding="utf-8")
    ours = re.findall(r".*# packtrain$", text, re.M)
    page = (REPOSITORY / "docs" / "hosts_yaml.md").read_text(encoding="utf-8")
    told = re.search(r"## LLaMA-Factory\n(.*?)\n## ", page, re.S)
    assert told is not None and f"({len(ours)} lines of" in told[1] and len(ours) <= 4
    (seen,) = run(
        EXAMPLE,
        "example",
        f"model_name_or_path={model}",
        f"dataset_dir={info}",
        "dataset=few,texts",
        f"output_dir={tmp_path / 'out'}",
        "image_max_pixels=23520",
        "bf16=false",
        "use_cpu=true",
        "report_to=none",
        "max_steps=1",
        "per_device_train_batch_size=2",
        "cutoff_len=512",
        "packtrain.pack_length=512",
        folder=tmp_path,
    )
    assert len(seen["losses"]) == 1
