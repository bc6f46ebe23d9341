"""200 real samples as rows, a small real processor, tiny models on disk, and the steps they train in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from real_rows import Row, real_rows

from packtrain.template import ensure_torchvision

ensure_torchvision()  # scripts import transformers before packtrain; torchvision may lack its operators here


@pytest.fixture(scope="session")
def rows(data: Path) -> list[Row]:
    """200 real samples: mllm_demo, pictures with made chats, text."""
    return real_rows(data)


@pytest.fixture(scope="session")
def processor_folder(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Qwen2.5-VL processor with a tokenizer of 900 tokens trained on the samples; small pictures."""
    from packtrain.testing.demo.processor import save_processor, train_tokenizer

    folder = tmp_path_factory.mktemp("host") / "processor"
    texts = [message["content"] for row in rows for message in row["messages"]]
    save_processor(folder, train_tokenizer(texts, 900))
    path = folder / "preprocessor_config.json"
    names = [path, folder / "processor_config.json"]
    for name in names:
        if name.is_file():
            held = json.loads(name.read_text())
            inner = held.get("image_processor", held)
            inner.pop("size", None)
            inner["min_pixels"], inner["max_pixels"] = 56 * 56, 140 * 140
            name.write_text(json.dumps(held))
    return folder


@pytest.fixture(scope="session")
def saved_model(processor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved_model("tiny:qwen3")`: a tiny random model with tokenizer or processor, ready to be loaded."""
    from packtrain.template import load_processor
    from packtrain.testing.tiny import tiny_model

    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            processor = load_processor(str(processor_folder))
            model = tiny_model(name, processor)
            model.config.use_cache = True  # as published models have it
            model.config.get_text_config().use_cache = True
            model.save_pretrained(folder)
            keep = processor if "vl" in name else processor.tokenizer
            if keep is processor.tokenizer:
                keep.chat_template = keep.chat_template or processor.chat_template
            keep.save_pretrained(folder)
            if "vl" not in name:  # a tokenizer of its own, not a part of a processor
                path = folder / "tokenizer_config.json"
                held = json.loads(path.read_text(encoding="utf-8"))
                held.pop("processor_class", None)
                path.write_text(json.dumps(held), encoding="utf-8")
            made[name] = folder
        return made[name]

    return save


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
