"""`skip_samples` on packs that nobody plans here: a directory that grows, an export, a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_sets import Set, Words, captions
from words_in import lengths_of, producer, put, row

from packtrain.data import LazyShardedDataset, StreamingPackedDataset, TokenBudgetDataset, open_packs
from packtrain.errors import DriftError, InputError, PlanError, SampleError
from packtrain.export import PackingProducer
from packtrain.pipeline.export import export
from packtrain.train.config import load_config
from packtrain.train.opened import opened
from packtrain.world import World

SKIPPED = {3, 4, 17, 39, 58}


def told(path: Path) -> list[int]:
    """Ids of the ledger, each once and as `skipped`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(set(one) == {"sample_id", "reason", "detail"} and one["reason"] == "skipped" for one in rows)
    return [one["sample_id"] for one in rows]


@pytest.mark.spec(
    "002",
    "`skip_samples` beside a growing directory: those samples leave their packs, into the ledger",
    key="`data.skip_samples` (`training.skip_samples`)",
    api="`LazyShardedDataset(skip=, ledger_file=)`",
)
@pytest.mark.parametrize("world", [1, 2])
def test_of_a_growing_directory(tmp_path: Path, world: int) -> None:
    """From YAML, on every rank; slots and steps stay as they are, and a state goes on behind any of them."""
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    producer(tmp_path / "in", tmp_path / "out").run()
    (tmp_path / "ids.txt").write_text("\n".join(map(str, sorted(SKIPPED))), encoding="utf-8")
    config = load_config(
        {
            "custom": {"dataset": str(tmp_path / "out")},
            "training": {
                "sharded_lazy": True,
                "skip_samples": str(tmp_path / "ids.txt"),
                "output_dir": str(tmp_path / "run"),
            },
        }
    )
    seen, steps = [], set()
    for rank in range(world):
        reader, _ = opened(config, None, None, World(rank, world))
        whole = LazyShardedDataset(tmp_path / "out", rank, world, start="beginning", run=tmp_path / "other")
        packs, others = list(reader), list(whole)
        assert [pack.slot for pack in packs] == [pack.slot for pack in others]
        for pack, other in zip(packs, others, strict=True):
            assert pack.ids == [one for one in other.ids if one not in SKIPPED]
            assert pack.is_filler == (not pack.ids)
        seen += [one for pack in packs for one in pack.ids]
        steps.add(len(packs))
        again, _ = opened(config, None, None, World(rank, world))
        again.load_state_dict(reader.state_dict(2))
        assert [pack.ids for pack in again] == [pack.ids for pack in packs[2:]]
    assert sorted(seen) == sorted(set(range(60)) - SKIPPED) and len(steps) == 1
    assert sorted(told(tmp_path / "run" / "left_out.jsonl")) == sorted(SKIPPED)


@pytest.mark.parametrize("kind", ["chunks", "webdataset"])
def test_of_an_export(made: Callable[..., Set], kind: str, tmp_path: Path) -> None:
    held = made(count=20)
    out = held.folder / "out"
    export(held.plan_folder, out, format=kind, source=held.source, template=held.template)
    encode = held.template.encode
    plain = open_packs(out, encode)
    alone = next(pack.ids for pack in map(plain.__getitem__, range(len(plain))))  # a pack without any other
    ids = {*alone, plain[1].ids[0]}
    file = tmp_path / "left_out.jsonl"
    packs = open_packs(out, encode, skip=ids, ledger_file=file)
    for number in range(len(plain)):
        assert packs[number].ids == [one for one in plain[number].ids if one not in ids]
    assert packs[0].is_filler and told(file) == [*alone, plain[1].ids[0]]
    with pytest.raises(PlanError, match="skip holds sample 20, but the plan is of 20 samples"):
        open_packs(out, encode, skip={20}, ledger_file=file)
    with pytest.raises(InputError, match="name a ledger_file"):
        open_packs(out, encode, skip={2})


@pytest.mark.parametrize("shuffle_buffer", [0, 16])
@pytest.mark.parametrize("budget", [False, True])
def test_of_a_stream(tmp_path: Path, shuffle_buffer: int, budget: bool) -> None:
    rows = [row(length) for length in lengths_of(60)]
    file = tmp_path / "left_out.jsonl"

    def stream() -> Any:
        options: dict[str, Any] = {"skip": SKIPPED, "ledger_file": file, "shuffle_buffer": shuffle_buffer}
        if budget:
            return TokenBudgetDataset(rows, max_seq_len=100, **options)
        return StreamingPackedDataset(rows, pack_length=100, window=8, **options)

    made, packs = stream(), []
    for pack in made:
        packs.append(pack.ids)
        if len(packs) == 5:
            state = made.state_dict()
    assert sorted(one for ids in packs for one in ids) == sorted(set(range(60)) - SKIPPED)
    assert made.left_out == {"skipped": len(SKIPPED)} and set(told(file)) == SKIPPED
    again = stream()
    again.load_state_dict(state)
    assert [pack.ids for pack in again] == packs[5:]


def test_of_a_planned_budget(tmp_path: Path) -> None:
    lengths = lengths_of(60)
    data = TokenBudgetDataset(
        [row(length) for length in lengths],
        max_seq_len=100, lengths=lengths, skip=SKIPPED, ledger_file=tmp_path / "left_out.jsonl",
    )  # fmt: skip
    assert sorted(one for pack in data for one in pack.ids) == sorted(set(range(60)) - SKIPPED)
    assert set(told(tmp_path / "left_out.jsonl")) == SKIPPED


@pytest.mark.spec(
    "002",
    "`samples_per_step`, `samples_per_row` beside a growing directory: one warning",
    key="`data.samples_per_step`, `data.samples_per_row`",
    api="`load_config`",
)
@pytest.mark.parametrize("key", ["samples_per_step", "samples_per_row"])
@pytest.mark.parametrize("kind", ["growing", "exported"])
def test_what_packs_that_were_made_cannot_keep(kind: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Packs are never cut and a step is of packs: one line. What says so anyway is no news."""
    plain = load_config({"data": {"kind": kind, "path": "d"}})
    caplog.clear()
    assert load_config({"data": {"kind": kind, "path": "d", key: 4}}) == plain
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"data.{key} has no effect on data of kind {kind}: their packs were made before" in line
    caplog.clear()
    same = 1 if key == "samples_per_row" else None
    assert load_config({"data": {"kind": kind, "path": "d", key: same}}) == plain and not caplog.records


class Pictures(Words):
    """With a tensor for the pictures of a sample; fails on the answers that it is told."""

    def __init__(self, bad: dict[str, Exception] | None = None) -> None:
        self.bad = bad or {}

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        said = sample["messages"][-1]["content"][0]["text"]
        if said in self.bad:
            raise self.bad[said]
        return {**super().encode(sample), "pixel_values": torch.zeros(1, 3)}


@pytest.fixture
def packs_of(
    made: Callable[..., Set], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, dict[str, int]]]:
    """Packs of a kind over 20 captions that `encode` reads, and the id of each answer."""
    held = made(rows=captions(["0001.jpg"], 20), names=["0001.jpg"])
    held.template = Pictures()

    def build(kind: str, encode: Any, **options: Any) -> Any:
        out = tmp_path / kind
        if kind == "growing":
            if not out.exists():
                rows = [json.loads(line) for line in held.path.read_text().splitlines()]
                (tmp_path / "in").mkdir()
                for one in rows:
                    one["images"] = [str(held.folder / "0001.jpg")]
                lines = "".join(json.dumps(one) + "\n" for one in rows)
                (tmp_path / "in" / "a.jsonl").write_text(lines)
                PackingProducer(
                    tmp_path / "in", out, Pictures(), pack_length=64, packs_per_chunk=2, media="source"
                ).run()
            return LazyShardedDataset(out, 0, 1, start="beginning", encode=encode, **options)
        if not out.exists():
            form = {"options": {"media": "source"}} if kind == "chunks" else {}
            export(held.plan_folder, out, format=kind, source=held.source, template=held.template, **form)
        return open_packs(out, encode, **options)

    return build


BAD = {3: SampleError("truncated_media", "cut off"), 7: OSError("disk")}


@pytest.mark.parametrize("policy", ["raise", "skip", "zero"])
@pytest.mark.parametrize("kind", ["webdataset", "raw", "chunks", "growing"])
def test_one_policy_for_samples_that_cannot_be_encoded(
    packs_of: Any, tmp_path: Path, kind: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in packs of a plan: all others keep their packs and tokens; each is told once, with its reason."""
    plain = [list(pack) for pack in packs_of(kind, Pictures().encode)]
    encode = Pictures({f"a picture of {number}": error for number, error in BAD.items()}).encode
    file = tmp_path / "left_out.jsonl"
    if policy == "raise":
        with pytest.raises(SampleError, match=r"sample (3|7)\b.*(cut off|OSError: disk)"):
            list(packs_of(kind, encode))
        return
    with pytest.raises(InputError, match="ledger_file"):
        packs_of(kind, encode, on_error=policy)
    packs = packs_of(kind, encode, on_error=policy, ledger_file=file)
    for _ in range(2):
        found = list(packs) if kind == "growing" else [packs[number] for number in range(len(packs))]
        assert len(found) == len(plain)
        for pack, whole in zip(found, plain, strict=True):
            ids = [one["sample_id"] for one in whole]
            kept = [one for one in ids if one not in BAD or policy == "zero"]
            assert pack.ids == (kept or ids[:1])
            for one in pack:
                twin = next(other for other in whole if other["sample_id"] == one["sample_id"])
                assert len(one["input_ids"]) == len(twin["input_ids"])
                assert bool(one.get("stand_in")) == (one["sample_id"] in BAD)
                if one.get("stand_in"):
                    assert set(np.asarray(one["labels"]).tolist()) == {-100}
        if kind == "growing":
            packs = packs_of(kind, encode, on_error=policy, ledger_file=file)
    rows = {one["sample_id"]: one for one in map(json.loads, file.read_text().splitlines())}
    assert {key: one["reason"] for key, one in rows.items()} == {3: "truncated_media", 7: "encode_failed"}
    assert re.fullmatch(r"\S.*: cannot be encoded: OSError: disk", rows[7]["detail"])
    assert len(file.read_text().splitlines()) == 2
    assert any("sample 3" in line and "truncated_media" in line for line in caplog.messages)
    with pytest.raises(InputError, match="more than max_skip_fraction"):
        limit = 0.015 if kind == "growing" else 0.09
        list(packs_of(kind, encode, on_error=policy, ledger_file=file, max_skip_fraction=limit))
    list(packs_of(kind, encode, on_error=policy, ledger_file=file, max_skip_fraction=0.11))


@pytest.mark.parametrize("kind", ["webdataset", "chunks", "growing"])
def test_a_sample_that_a_run_names_need_not_be_encoded(packs_of: Any, tmp_path: Path, kind: str) -> None:
    encode = Pictures({f"a picture of {number}": error for number, error in BAD.items()}).encode
    packs = packs_of(kind, encode, skip=set(BAD), ledger_file=tmp_path / "left_out.jsonl")
    seen = [one for pack in packs for one in pack.ids]
    assert sorted(seen) == sorted(set(range(20)) - set(BAD))
    assert set(told(tmp_path / "left_out.jsonl")) == set(BAD)


def test_drift_and_damage_are_no_fault_of_a_sample(packs_of: Any, tmp_path: Path) -> None:
    class Other(Pictures):
        def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
            found = super().encode(sample)
            return {**found, "input_ids": found["input_ids"] + 1}

    for kind in ("chunks", "growing"):
        with pytest.raises(DriftError, match="other token ids"):
            list(packs_of(kind, Other().encode, on_error="zero", ledger_file=tmp_path / "l.jsonl"))


@pytest.mark.parametrize("kind", ["exported", "growing"])
def test_the_words_are_the_same_in_yaml(kind: str) -> None:
    data = {"kind": kind, "path": "d", "on_error": "skip", "max_skip_fraction": 0.1}
    config = load_config({"data": data})
    assert (config.data.on_error, config.data.max_skip_fraction) == ("skip", 0.1)
    lenient = load_config({"data": {"kind": kind, "path": "d"}, "training": {"strict": False}})
    assert lenient.data.on_error == "zero"
