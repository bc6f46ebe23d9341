"""Every code block of the pages runs here, as it stands, or the line above it says why not.

A small scene stands in for the reader's files: the names of the pages (`train.jsonl`, `lengths`, `runs/demo`,
`raw/` …) hold real samples, models' names stand for small ones, and a launcher's line is asked for a dry run.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import packtrain as pt
from packtrain.cli import main

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
#: Languages of what is no code: drawings and messages.
SHOWN = ("text",)
#: Run as a whole by tests/test_site.py.
ELSEWHERE = ("tutorial.md",)
#: What a page names and a machine without network lacks -> what stands for it here.
STANDS_FOR = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "./qwen",
    "Qwen/Qwen2-Audio-7B-Instruct": "./qwen",
    "$SLURM_ARRAY_TASK_ID/64": "0/1",
    " --watch": " --once",  # what waits for ever
}
#: Verbs whose exit code says something of what was asked; the page says it too.
ANSWERS = {"doctor": (0, 1, 2), "diff": (0, 1)}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    body: str
    reason: str | None
    """Why it isn't run."""


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = re.finditer(r"(?:^<!-- not run: ([^\n]+) -->\n)?^ *```(\w*)\n(.*?)^ *```$", text, re.S | re.M)
        for match in found:
            reason, language, body = match.groups()
            yield Block(page.name, text.count("\n", 0, match.start(2)) + 1, language, body, reason)


BLOCKS = list(blocks())
RUN = [
    block
    for block in BLOCKS
    if block.reason is None
    and block.language not in SHOWN
    and block.page not in ELSEWHERE
    and ">>> " not in block.body
]


def test_every_block_has_a_language_that_is_run_and_no_fence_is_left_open() -> None:
    """YAML of runs: tests/train/test_config_kinds.py; the profile of docs/steps.md: `forecast --profile`."""
    assert [(b.page, b.line) for b in BLOCKS if not b.language] == []
    assert {b.language for b in RUN} == {"sh", "python", "yaml", "json"}
    assert [b.page for b in RUN if b.language == "json"] == ["steps.md"]
    runs = {"training", "data", "custom", "model"}
    assert [b[:2] for b in RUN if b.language == "yaml" and not runs & set(yaml.safe_load(b.body))] == []
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```") == 2 * sum(b.page == page.name for b in BLOCKS)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.reason is not None], ids=lambda b: f"{b.page}:{b.line}"
)
def test_a_reason_names_what_is_missing_or_the_test_that_runs_the_block(block: Block) -> None:
    assert block.reason is not None and len(block.reason.split()) >= 3
    for name in re.findall(r"(?:tests|examples|scripts)/[\w/]+\.(?:py|yaml)", block.reason):
        assert (REPOSITORY / name).exists(), name


def rows(count: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for i in range(count):
        ask = {"role": "user", "content": f"Count to {i % 23}."}
        answer = {"role": "assistant", "content": " ".join(map(str, range(i * 7 % 23 + 1)))}
        row: dict[str, Any] = {"messages": [ask, answer]}
        if i % 4 == 0:
            ask["content"] = "<image>" + str(ask["content"])
            row["images"] = [f"images/{i % 12}.png"]
        out.append(row)
    return out


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: data, a processor, a tokenizer."""
    from PIL import Image

    from packtrain.template import load_processor
    from packtrain.testing.demo.processor import save_processor, train_tokenizer

    folder = tmp_path_factory.mktemp("scene")
    (folder / "images").mkdir()
    for i in range(0, 12, 4):
        Image.effect_noise((56 + 28 * i, 84), 30).convert("RGB").save(folder / "images" / f"{i}.png")
    texts = [turn["content"] for row in rows(24) for turn in row["messages"]]
    save_processor(folder / "qwen", train_tokenizer(texts, 400))
    load_processor(str(folder / "qwen")).tokenizer.save_pretrained(str(folder / "tokenizer"))
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    write(folder / "train.jsonl", rows(60))
    write(folder / "val.jsonl", rows(12))
    shutil.copytree(folder / "images", folder / "raw" / "images")
    for number in range(2):
        write(folder / "raw" / f"{number}.jsonl", rows(40)[20 * number : 20 * number + 20])
    asked = [{"question": f"Is {i} odd?", "answer": "yes" if i % 2 else "no"} for i in range(20)]
    write(folder / "qa.jsonl", asked)
    talks = [
        [{"from": "human", "value": f"<image>\nIs {i} odd?"}, {"from": "gpt", "value": "no"}]
        for i in range(9)
    ]
    vqa = [{"image": f"images/{i % 3 * 4}.png", "conversations": talk} for i, talk in enumerate(talks)]
    write(folder / "vqa.jsonl", vqa)
    return folder


def call(words: list[str]) -> int:
    """The exit code of `packtrain words`."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["torchrun"]:
        ranks = words[words.index("--nproc-per-node") + 1]
        words = [*words[words.index("-m") + 1 :], "--dry-run", "--world-size", ranks]
    elif (
        words[:2] == ["packtrain", "train"] and words[2].startswith("examples/") and "--dry-run" not in words
    ):
        words += ["--dry-run"]
    assert words[0] == "packtrain", line
    code = call(words[1:])
    assert code in ANSWERS.get(words[1], (0,)), (line, capsys.readouterr().err[-2000:])


def here(text: str) -> str:
    for name, other in STANDS_FOR.items():
        text = text.replace(name, other)
    return text


@pytest.fixture(scope="module")
def trained(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scene, with what a run leaves: lengths, a plan, three run folders."""
    folder = tmp_path_factory.mktemp("trained") / "here"
    shutil.copytree(scene, folder)
    with contextlib.chdir(folder):
        values = {
            "global_max_length": 256,
            "model": {"name_or_path": "tiny:qwen2_5_vl"},
            "template": {"processor": "./qwen"},
            "data": {"kind": "planned", "path": "train.jsonl", "val": "val.jsonl"},
            "training": {"output_dir": "runs/demo", "max_steps": 101, "seed": 42},
        }
        (folder / "done.yaml").write_text(yaml.safe_dump(values))
        values["training"] = {"output_dir": "runs/mine", "max_steps": 2}
        (folder / "run.yaml").write_text(yaml.safe_dump(values))
        for line in (
            "train done.yaml",
            "measure train.jsonl -p ./qwen -o lengths",
            "plan lengths --pack-length 256 --out plan",
            "export plan shards --format energon",
            "produce raw/ packed/ -p ./qwen -n 256 --end",
        ):
            assert call(line.split()) == 0, line
    profile = next(b.body for b in BLOCKS if b.page == "steps.md" and b.language == "json")
    (folder / "h100.json").write_text(profile)
    encoded = [{"input_ids": [5] * (9 + i), "labels": [5] * (9 + i)} for i in range(30)]
    write(folder / "rows" / "0.jsonl", encoded)
    table = pa.table({"length": pt.Lengths.load(folder / "lengths").tokens, "images": [1] * 60})
    pq.write_table(table, folder / "lengths.parquet")
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "demo", folder / "runs" / name)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test stands."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("block", [b for b in RUN if b.language == "sh"], ids=lambda b: f"{b.page}:{b.line}")
def test_commands(block: Block, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = here(block.body).replace("\\\n", " ").replace(" && ", "\n").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if "examples/demo.yaml" in block.body:
        shutil.rmtree(folder / "runs" / "demo")
    for line in lines:  # what the block makes is not there before
        for name in re.findall(r"(?:(?:--out|-o) |packtrain (?:export|produce|pairs) \S+ )(\S+)", line):
            shutil.rmtree(folder / name, ignore_errors=True)
    for line in lines:
        run(line, capsys)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "block", [b for b in RUN if b.language == "python"], ids=lambda b: f"{b.page}:{b.line}"
)
def test_python(block: Block, folder: Path) -> None:
    """A block starts with the names that its page speaks of; what it imports and makes is its own."""
    from packtrain.collate import PaddingFreeCollator
    from packtrain.data import PackedDataset
    from packtrain.template import HFTemplate, load_processor
    from packtrain.testing.tiny import tiny_model

    if '"lengths"' in block.body:  # the block measures into it
        shutil.rmtree(folder / "lengths")
    source, processor = pt.open_chats("train.jsonl"), load_processor("./qwen")
    template, plan = HFTemplate(processor), pt.PackPlan.load(folder / "plan")
    view = plan.align(1)
    model = tiny_model("tiny:qwen2_5_vl", processor)
    dataset = PackedDataset(view, source, template.encode)
    names: dict[str, Any] = {
        "source": source,
        "template": template,
        "plan": plan,
        "view": view,
        "dataset": dataset,
        "model": model,
        "loader": pt.loader(dataset, model=model),
        "collate": PaddingFreeCollator(),
        "rank": 0,
        "world_size": 1,
        "train_on": len,
        "time_to_save": lambda: True,
        "save": lambda model, state: json.dumps(state),
    }
    exec(compile(here(block.body), f"{block.page}:{block.line}", "exec"), names)
