"""What stands in the place of a source or template is told as what it is, at every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.data import (
    LazyShardedDataset,
    PackedDataset,
    StreamingPackedDataset,
    TokenBudgetDataset,
    open_packs,
    pack_of_row,
)
from packtrain.errors import ConfigError, SourceError
from packtrain.pipeline.export import export
from packtrain.sources.chat import ChatSource
from packtrain.template import HFTemplate, load_processor

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"Yes, {n}."}]}
    for n in range(6)
]


@pytest.fixture(scope="module")
def template(data: Path) -> Any:
    return HFTemplate(load_processor(data / "processors" / "qwen2_5_vl"))


@pytest.fixture(scope="module")
def made(template: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of six chats, exported as shards and chunks."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "a.json").write_text(json.dumps(ROWS))
    source = pt.open_chats(folder / "a.json")
    lengths = pt.measure(source, template, folder / "l")
    pt.plan(lengths, pack_length=64).save(folder / "p", origin={"lengths": str(folder / "l")})
    return folder


DOORS: dict[str, Any] = {
    "stream": lambda source, template: StreamingPackedDataset(source, template, pack_length=64),
    "token budget": lambda source, template: TokenBudgetDataset(source, template, max_seq_len=64),
    "packs of a plan": lambda source, template: PackedDataset(pt.plan([20] * 6, 64), source, template),
    "packs without a plan": lambda source, template: PackedDataset(source, template, pack_length=64),
    "growing": lambda source, template: LazyShardedDataset("nowhere", encode=template),
    "a row": lambda source, template: pack_of_row({"key": "k"}, template),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_template_is_told_before_anything_is_read(door: str, template: Any) -> None:
    source = ChatSource(ROWS)
    for wrong, what in (
        ("processors/qwen2_5_vl", "a str"),
        (template.processor, f"a {type(template.processor).__name__}"),
        (template.tokenizer, f"a {type(template.tokenizer).__name__}"),
        (HFTemplate, "the class HFTemplate"),
        (5, "a int"),
    ):
        with pytest.raises(ConfigError, match=f"{what} is no template") as refused:
            DOORS[door](source, wrong)
        assert "HFTemplate" in str(refused.value.hint)


def test_a_template_opens_what_its_encode_opens(template: Any, made: Path) -> None:
    source = pt.open_chats(made / "a.json")
    plan = pt.PackPlan.load(made / "p")
    assert [len(p) for p in PackedDataset(plan, source, template)] == [len(pack) for pack in plan]
    export(made / "p", made / "shards", format="webdataset", source=source, template=template)
    by_template, by_encode = (open_packs(made / "shards", one) for one in (template, template.encode))
    for one, other in zip(by_template, by_encode, strict=True):
        assert [s["input_ids"].tolist() for s in one] == [s["input_ids"].tolist() for s in other]


def test_measure_tells_what_is_no_source_and_what_makes_one(
    template: Any, made: Path, tmp_path: Path
) -> None:
    source = pt.open_chats(made / "a.json")
    for wrong, what, hint in (
        (str(made / "a.json"), "the str ", "open_chats"),
        (made / "a.json", "the PosixPath ", "open_chats"),
        (ROWS, "a list is no source", "ChatSource"),
        (template, "HFTemplate is no source", "measure(source, template, out)"),
        (iter(ROWS), "must be indexable", "JSONL"),
    ):
        with pytest.raises(SourceError, match=what) as refused:
            pt.measure(wrong, template, tmp_path / "l")
        assert hint in str(refused.value.hint)
    for no in (template.processor, str(made), HFTemplate, template.encode):
        with pytest.raises(ConfigError, match="is no template"):
            pt.measure(source, no, tmp_path / "l")
    assert not (tmp_path / "l").exists()
    assert len(pt.measure(ChatSource(ROWS), template, tmp_path / "l")) == 6  # what the hint says works


def test_what_is_no_trainer_of_a_host_is_told_before_anything_of_it_is_read(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from packtrain.hosts import transformers, trl
    from packtrain.testing import tiny_model

    model = tiny_model("tiny:qwen3")
    for pack in (transformers.pack, trl.pack):
        for wrong in (model, 5, "trainer"):
            with pytest.raises(ConfigError, match=f"a {type(wrong).__name__} is no trainer") as told:
                pack(wrong, 64)
            assert "pack(trainer, …)" in str(told.value.hint)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(model=model, args=args, train_dataset=[])
    held = dict(vars(trainer))
    with pytest.raises(ConfigError, match="no trainer of TRL: its arguments have no max_length") as told:
        trl.pack(trainer)
    assert "packtrain.hosts.transformers.pack" in str(told.value.hint) and dict(vars(trainer)) == held
    args.max_length = 64  # as SFTConfig has; eight rows a device are no pack
    with pytest.raises(ConfigError, match="a row is one pack"):
        trl.pack(trainer)
    assert dict(vars(trainer)) == held
