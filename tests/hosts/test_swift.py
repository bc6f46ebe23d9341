"""The real ms-swift 4.6: `swift sft` with and without our plugin, on 200 real samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swift_env import PREAMBLE, swift_python
from swift_sft import losses, sft
from venvs import run

pytestmark = pytest.mark.hosts


@pytest.mark.matrix("lengths without encoding")
def test_its_template_measures_what_it_encodes(data: Path, model: Path, files: dict[str, Path]) -> None:
    told = run(
        swift_python(),
        PREAMBLE
        + """
import json, sys
from swift.model import get_processor
from swift.template import get_template
from packtrain.hosts._swift_template import SwiftTemplate
own = get_template(get_processor(sys.argv[1], model_type="qwen2_5_vl"), template_type="qwen2_5_vl")
own.set_mode("train")
template = SwiftTemplate(own)
rows = [json.loads(line) for line in open(sys.argv[2])][:40]
print(json.dumps([[int(template.measure(row)), len(template.encode(row)["input_ids"])] for row in rows]))
""",
        model,
        files["all"],
        ours=True,
    )
    pairs = json.loads(told.splitlines()[-1])
    assert [measured for measured, _ in pairs[:3]] == [195, 140, 181]
    assert all(measured == encoded for measured, encoded in pairs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_that_its_truncation_takes_are_told(side: str, data: Path, model: Path) -> None:
    told = run(
        swift_python(),
        PREAMBLE
        + """
import json, sys
from packtrain.errors import SampleError
from swift.model import get_processor
from swift.template import get_template
from packtrain.hosts._swift_template import SwiftTemplate
own = get_template(get_processor(sys.argv[1], model_type="qwen2_5_vl"), template_type="qwen2_5_vl",
    max_length=40, truncation_strategy=sys.argv[2])
own.set_mode("train")
template = SwiftTemplate(own)
def row(turns, text="q"):
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "one two three"}]
    return {"messages": talk * turns}
def said(sample):
    try:
        found = template.measure(sample)
        return [int(found), len(template.encode(sample)["input_ids"]), found.note]
    except SampleError as error:
        return [error.reason]
print(json.dumps([said(row(1)), said(row(4)), said(row(1, "q " * 50))]))
""",
        model,
        side,
        ours=True,
    )
    short, long, question = json.loads(told.splitlines()[-1])
    assert short[2] == "" and short[0] == short[1] < 40
    assert long[:2] == [40, 40]
    assert long[2].startswith("removed: answer 1" if side == "left" else "removed: answer 3, 4 of 4"), long
    assert question == ["unsupervised"] if side == "right" else question[2] == "", question


@pytest.mark.spec(
    "001", "in ms-swift: its own losses, packed; resume", key="`hosts.ms_swift.install`", api="`install`"
)
@pytest.mark.matrix(
    "text, losses as unpacked", "pictures (Qwen-VL), losses as unpacked", "every sample once", "resume"
)
def test_losses_equal_the_unpacked_host_and_resume_goes_on(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """200 samples, 5 steps of 40; `lazy_tokenize` with packing; the run resumed at step 2."""
    shared = {"model": model, "dataset": files["all"]}
    packs = {
        **shared,
        "packing": "true",
        "lazy_tokenize": "true",
        "per_device_train_batch_size": 40,
        "gradient_accumulation_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    settings = {"plugin": True, "install": {"samples_per_step": "same"}}
    (packed,) = sft(tmp_path, "packed", packs, **settings)
    assert sorted(packed["ids"]) == list(range(200))
    assert len(packed["losses"]) == 5
    alone = {**shared, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 40}
    (plain,) = sft(tmp_path, "plain", alone, order=packed["ids"])
    assert losses(packed) == pytest.approx(losses(plain), rel=1e-4)
    again = {**packs, "resume_from_checkpoint": tmp_path / "packed" / "checkpoint-2"}
    (resumed,) = sft(tmp_path, "packed", again, **settings)
    assert losses(resumed) == losses(packed)[2:]
    assert resumed["ids"] == packed["ids"][80:]


@pytest.mark.spec("001", "in ms-swift on two ranks", key="`hosts.ms_swift.install`", api="`install`")
@pytest.mark.matrix("two ranks")
def test_two_ranks_lose_no_pack_and_a_failing_row_is_never_replaced(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    packs = {
        "model": model,
        "dataset": files["few"],
        "packing": "true",
        "packing_length": 400,
        "per_device_train_batch_size": 1,
    }
    ranks = sft(tmp_path, "two", packs, ranks=2, plugin=True, break_at=7)
    seen = [number for rank in ranks for number in rank["ids"]]
    assert set(seen) == set(range(23))  # N mod W packs too
    plan = json.loads(next((tmp_path / "two" / "packs" / "train").glob("plan-*/plan.json")).read_text())
    assert plan["stats"]["packs"] % 2 == 1, "the last pack must be the one that the host would lose"
    failed = (tmp_path / "two" / "packs" / "failed-train.jsonl").read_text().splitlines()
    assert {json.loads(line)["sample_id"] for line in failed} == {7}
    assert all(loss == loss for rank in ranks for loss in losses(rank))


@pytest.mark.spec(
    "001", "in ms-swift: `cached_dataset` is packed by its lengths", key="`--cached_dataset`", api="`install`"
)
@pytest.mark.matrix("tokenised before, lengths taken")
def test_a_cached_dataset_packs_by_its_lengths(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    run(
        swift_python(),
        PREAMBLE
        + """
import os, sys
os.environ["IMAGE_MAX_TOKEN_NUM"] = "30"  # as the run that reads the lengths: other limits would be refused
from swift.pipelines import export_main
export_main(["--model", sys.argv[1], "--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--dataset",
    sys.argv[2], "--split_dataset_ratio", "0", "--dataset_shuffle", "false", "--to_cached_dataset", "true",
    "--output_dir", sys.argv[3], "--use_hf", "true", "--torch_dtype", "float32"])
""",
        model,
        files["few"],
        tmp_path / "cached",
        ours=True,
    )
    held = {"model": model, "cached_dataset": tmp_path / "cached" / "train", "packing": "true"}
    (packed,) = sft(tmp_path, "run", {**held, "per_device_train_batch_size": 1}, plugin=True)
    assert sorted(packed["ids"]) == list(range(23))
    workers = {**held, "per_device_train_batch_size": 1, "dataloader_num_workers": 1}
    (again,) = sft(tmp_path, "workers", workers, plugin=True)
    assert losses(again) == losses(packed)


@pytest.mark.spec(
    "001",
    "in ms-swift: `--streaming true` packs rows as they come; `--packing_num_proc` is one line",
    key="`--streaming`, `--max_steps`",
    api="`install`",
)
@pytest.mark.matrix("streams")
def test_a_stream_has_the_packs_and_losses_of_a_plan(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Packed in order of arrival both give the same packs; a pass ends, the next begins; a resume goes on."""
    switches = {
        "model": model,
        "dataset": files["few"],
        "packing": "true",
        "packing_strategy": "sequential",
        "packing_num_proc": 4,
        "packing_length": 400,
        "max_length": 250,
        "truncation_strategy": "delete",
        "per_device_train_batch_size": 1,
        "train_dataloader_shuffle": "false",
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "gradient_accumulation_steps": 1,
    }
    (planned,) = sft(tmp_path, "planned", switches, plugin=True)
    plan = json.loads(next((tmp_path / "planned" / "packs" / "train").glob("plan-*/plan.json")).read_text())
    packs, samples = plan["stats"]["packs"], plan["stats"]["samples"]
    steps = packs + 2
    streamed = {
        **switches,
        "streaming": "true",
        "max_steps": steps,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    (seen,) = sft(tmp_path, "streamed", streamed, plugin=True)
    assert losses(seen)[:packs] == pytest.approx(losses(planned), rel=1e-5) and len(losses(seen)) == steps
    assert (
        seen["ids"][:samples] == planned["ids"]
        and seen["ids"][samples:] == planned["ids"][: len(seen["ids"]) - samples]
    )
    assert samples < 23
    left = (tmp_path / "streamed" / "packs" / "left_out-train.0.jsonl").read_text().splitlines()
    told = {json.loads(line)["sample_id"] for line in left}
    assert len(told) == 23 - samples and told.isdisjoint(seen["ids"])
    again = {**streamed, "resume_from_checkpoint": tmp_path / "streamed" / "checkpoint-3"}
    (resumed,) = sft(tmp_path, "streamed", again, plugin=True)
    assert losses(resumed) == losses(seen)[3:]
    ranks = sft(tmp_path, "two", {**streamed, "max_steps": 4}, ranks=2, plugin=True)
    assert [len(losses(rank)) for rank in ranks] == [4, 4]
    first = [set(rank["ids"]) for rank in ranks]
    assert first[0].isdisjoint(first[1]) and first[0] and first[1]
