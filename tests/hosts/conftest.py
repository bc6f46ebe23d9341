"""Tiny random models and samples on disk, for the hosts that are run as programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("integrations", "train")]

from kinds import write_folders
from real_rows import real_rows


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL with the real processor, as published: its cache is on."""
    from packtrain.template import load_processor
    from packtrain.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("swift") / "model"
    processor = load_processor(str(data / "processors" / "qwen2_5_vl"))
    made = tiny_model("tiny:qwen2_5_vl", processor)
    made.config.use_cache = made.config.get_text_config().use_cache = True
    made.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def files(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    rows = real_rows(data)
    made = {}
    for name, chosen in {"all": rows, "few": [*rows[:12], *rows[-11:]]}.items():
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return made


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    write_folders(root)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = (json.dumps({"messages": talk}) + "\n") * 4  # ms-swift wants some; they are not read
    (root / "rows.jsonl").write_text(rows, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 on disk, with a tokenizer of a few hundred tokens."""
    from packtrain.template import load_processor
    from packtrain.testing.demo.processor import save_processor, train_tokenizer
    from packtrain.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("network")
    save_processor(folder / "processor", train_tokenizer([f"word {number}" for number in range(999)], 900))
    processor = load_processor(str(folder / "processor"))
    made = tiny_model("tiny:qwen3", processor)
    made.config.use_cache = True
    made.save_pretrained(folder / "model")
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    tokenizer.save_pretrained(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    held.pop("processor_class", None)
    path.write_text(json.dumps(held), encoding="utf-8")
    return folder / "model"


@pytest.fixture
def talks(data: Path, tmp_path: Path) -> Path:
    """200 real chats, without pictures."""
    lines = (data / "text_sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    rows = tmp_path / "talks.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for held in map(json.loads, lines):
            talk = [("user", held["question"]), ("assistant", held["answer"])]
            file.write(json.dumps({"messages": [{"role": r, "content": t} for r, t in talk]}) + "\n")
    return rows
