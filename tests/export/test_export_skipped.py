"""`skip_samples` on packs that nobody plans here: a directory that grows, an export, a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import Set
from words_in import lengths_of, producer, put, row

from packtrain.data import LazyShardedDataset, StreamingPackedDataset, TokenBudgetDataset, open_packs
from packtrain.errors import InputError, PlanError
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
