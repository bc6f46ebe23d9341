"""Packed data of Megatron-Bridge: every sample once, its tokens and trained positions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_sets import Set, Words

from packtrain.data import open_packs
from packtrain.errors import ChecksumError, ConfigError, FormatError, InputError, LawError
from packtrain.export.megatron import packed_row, read_rows
from packtrain.pipeline.export import export, finish_export
from packtrain.pipeline.plan import plan_lengths
from packtrain.pipeline.verify_export import verify_export
from packtrain.planning.packplan import PackPlan
from packtrain.store import shards
from packtrain.testing import crash_points, snapshot

pytest.importorskip("pyarrow", reason="needs the extra packtrain[arrow]")


def write(held: Set, out: Path, **options: Any) -> dict[str, Any]:
    given = {"maxcount": 4, "source": held.source, "template": held.template, **options}
    return export(held.plan_folder, out, format="megatron", **given)


@pytest.fixture
def held(made: Callable[..., Set]) -> Set:
    """A template that makes nothing but tokens."""
    return made(count=40)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("pack-*")) for row in read_rows(path)]


@pytest.mark.parametrize("layout", ["parquet", "npy"])
def test_rows_are_the_packs(held: Set, layout: str) -> None:
    out = held.folder / "out"
    write(held, out, options={"layout": layout}, maxcount=100)
    rows = rows_of(out)
    assert len(rows) == len(held.plan)
    trained = 0
    for number, row in enumerate(rows):
        samples = [held.template.encode(held.source[one]) for one in held.plan[number].tolist()]
        ends = np.cumsum([0, *(len(one["input_ids"]) for one in samples)])
        assert row["seq_start_id"].tolist() == ends[:-1].tolist()
        assert row["input_ids"].tolist() == torch.cat([one["input_ids"] for one in samples]).tolist()
        for one, begin, end in zip(samples, ends, ends[1:], strict=False):
            mask = row["loss_mask"][begin:end]
            assert mask.tolist() == [*(one["labels"][1:] != -100).int().tolist(), 0]
            trained += int(mask.sum())
    assert trained == sum(int((held.template.encode(s)["labels"][1:] != -100).sum()) for s in held.source)
    done = verify_export(out, source=held.source, template=held.template)
    assert done["samples"] == "40 planned, rows of as many samples and tokens"
    assert done["encoding"] == f"{len(rows)} rows equal the source's, bit for bit"


def test_types_and_row_groups(held: Set) -> None:
    import pyarrow.parquet

    out = held.folder / "out"
    write(held, out, maxcount=100)
    (path,) = out.glob("*.idx.parquet")
    kinds = {field.name: str(field.type.value_type) for field in pyarrow.parquet.read_schema(path)}
    assert kinds == {"input_ids": "int32", "loss_mask": "int8", "seq_start_id": "int32"}
    assert write(held, held.folder / "small", maxcount=100, maxsize=1)["shards"] == len(held.plan)
    assert len(rows_of(held.folder / "small")) == len(held.plan)
    (told,) = json.loads((out / "packing.json").read_text())
    assert told["max_samples_per_bin"] == max(map(len, held.plan))
    assert told["min_packed_seqlen"] == held.plan.pack_tokens.min()
    assert told["dataset_max_seqlen"] == max(len(held.template.encode(s)["input_ids"]) for s in held.source)


def plan_padded(held: Set) -> None:
    plan_lengths(
        held.lengths,
        held.folder / "padded",
        lengths_folder=held.folder / "lengths",
        pack_length=64,
        multiple_of=4,
    )
    held.plan_folder, held.plan = held.folder / "padded", PackPlan.load(held.folder / "padded")


def test_samples_are_padded_for_context_parallelism(held: Set) -> None:
    """Two ranks: inputs of every sample divide by four, padding is not trained, no pack outgrows the cap."""
    out, given = held.folder / "out", {"context_parallel": 2, "pad_token_id": 7}
    with pytest.raises(ConfigError, match="longer than they were planned") as caught:
        write(held, out, options=given)
    assert "multiple_of 4" in str(caught.value.hint) and not list(out.glob("**/*"))
    plan_padded(held)
    with pytest.raises(ConfigError, match="this template does not tell"):
        write(held, out, options={"context_parallel": 2})
    write(held, out, options=given)
    rows = rows_of(out)
    assert len(rows) == len(held.plan)
    for number, row in enumerate(rows):
        ends = [*row["seq_start_id"].tolist(), len(row["input_ids"])]
        assert ends[-1] - len(held.plan[number]) <= 64
        for one, begin, end in zip(held.plan[number].tolist(), ends, ends[1:], strict=False):
            sample = held.template.encode(held.source[one])
            length = len(sample["input_ids"])
            assert 0 <= end - begin - length < 4 and (end - begin - 1) % 4 == 0
            more = [7] * (end - begin - length)
            assert row["input_ids"][begin:end].tolist() == [*sample["input_ids"].tolist(), *more]
            trained = [*(sample["labels"][1:] != -100).int().tolist(), 0]
            assert row["loss_mask"][begin:end].tolist() == [*trained, *([0] * len(more))]
    done = verify_export(out, source=held.source, template=held.template)
    assert done["encoding"] == f"{len(rows)} rows equal the source's, bit for bit"
    for one in ({"context_parallel": 0}, {"context_parallel": 2, "pad_token_id": -1}):
        with pytest.raises(InputError, match="expected an integer"):
            write(held, held.folder / "none", options=one)


def test_one_rank_pads_nothing(held: Set, caplog: pytest.LogCaptureFixture) -> None:
    """An export that was begun before samples could be padded goes on."""
    out = held.folder / "out"
    write(held, out)
    before = snapshot(out, ())
    write(held, out, options={"context_parallel": 1, "pad_token_id": 7})
    assert snapshot(out, ()) == before and "pad_token_id has no effect" in caplog.text
    assert shards.export_of(out)["key"]["options"] == {"layout": "parquet"}


def test_stopped_at_any_write_and_by_shares(made: Callable[..., Set], tmp_path: Path) -> None:
    held, skip = made(count=12), ("origin.json",)
    whole, split = held.folder / "whole", held.folder / "split"
    write(held, whole, maxcount=2)
    for number in (1, 0):
        write(held, split, shard=(number, 2), maxcount=2)
    finish_export(split)
    assert snapshot(whole, skip) == snapshot(split, skip)

    def run(out: Path) -> None:
        write(held, out, maxcount=2)
        if shards.hidden(out, shards.EXPORT).is_file():
            assert snapshot(out, skip) == snapshot(whole, skip)

    assert crash_points(run, tmp_path / "crash", ignore=skip, every=5) > 10


def test_what_a_row_cannot_say_is_refused() -> None:
    def told(**more: Any) -> str:
        sample = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "sample_id": 3, **more}
        with pytest.raises(InputError, match="a packed row of Megatron-Bridge cannot say that") as caught:
            packed_row([sample])
        return caught.value.message

    assert "sample 3 has pixel_values" in told(pixel_values=np.zeros((4, 8)))
    assert "has weight" in told(weight=0.5)
    assert "has loss_scale" in told(loss_scale=[1, 2, 1])
    assert "position_ids of its own" in told(position_ids=[0, 2, 3])
    assert "labels that are not its tokens" in told(labels=[-100, 6, 9])
    assert "has one token" in told(input_ids=[5], labels=[5])
    row = packed_row([{"input_ids": [5, 6], "labels": [5, 6], "weight": 1.0, "position_ids": [[0, 1]] * 3}])
    assert row["loss_mask"].tolist() == [1, 0]


def test_refusals(held: Set, made: Callable[..., Set]) -> None:
    out = held.folder / "out"
    with pytest.raises(ConfigError, match="layout npy is one file") as caught:
        write(held, out, options={"layout": "npy"}, maxcount=2)
    assert f"maxcount {len(held.plan)}" in str(caught.value.hint)
    with pytest.raises(InputError, match="layout"):
        write(held, out, options={"layout": "llava"})
    write(held, out)
    with pytest.raises(FormatError, match="rows for another reader"):
        open_packs(out, held.template.encode)
    path = sorted(out.glob("*.parquet"))[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=path.name):
        verify_export(out, source=held.source, template=held.template)


def test_another_template_is_noticed(held: Set) -> None:
    out = held.folder / "out"
    write(held, out)

    class Others(Words):
        def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
            held = super().encode(sample)
            return {**held, "labels": torch.full_like(held["labels"], -100)}

    with pytest.raises(LawError, match="loss_mask of row 0"):
        verify_export(out, source=held.source, template=Others())
