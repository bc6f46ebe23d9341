"""Edited markers of what is made here: exports and their indexes, shards, encode caches, runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edits import edited_files
from limits import SECONDS
from markers import REPOSITORY, Files, called

import packtrain as pt
from packtrain.data import EncodeCache, PackedDataset, open_packs
from packtrain.errors import FormatError
from packtrain.pipeline.export import export
from packtrain.pipeline.inputs import lengths_of_plan
from packtrain.pipeline.length_files import lengths_of
from packtrain.pipeline.page import Report
from packtrain.pipeline.run import run
from packtrain.pipeline.shards import measure_shard, merge
from packtrain.pipeline.verify_export import verify_export
from packtrain.store import lengths as lengths_store
from packtrain.store import shards
from packtrain.train.config import load_config

sys.path.append(str(REPOSITORY / "tests" / "export"))

from export_sets import Set, Words, captions

MEDIA = (".jpg", ".png", ".arrow", ".tar")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def made(tmp_path: Path) -> Set:
    return Set(tmp_path / "set", captions(["0001.jpg"], 12), 64, ["0001.jpg"])


@pytest.mark.parametrize("kind", ["raw", "webdataset", "energon", "chunks"])
def test_edited_exports(kind: str, made: Set, tmp_path: Path) -> None:
    """What reads, verifies, shows and goes on with an export, with any of its files edited but the media."""

    def write(out: Path) -> None:
        export(made.plan_folder, out, format=kind, source=made.source, template=made.template, maxcount=2)

    def read(out: Path) -> None:
        packs = open_packs(out, made.template.encode)
        for number in range(len(packs)):
            packs[number]

    def checked(out: Path) -> None:
        verify_export(out, encode=0)

    def shown(out: Path) -> None:
        called("show", out)

    def again(out: Path) -> None:
        write(out)

    write(tmp_path / "out")
    held = Files(tmp_path / "out", tmp_path / "held")
    ran = edited_files(held, [read, checked, shown, again], SECONDS, of=lambda path: path.suffix not in MEDIA)
    assert ran >= 40


@pytest.mark.parametrize("name", ["a" * 5000, "b/" + "a" * 300, "\0", "~nobody/x"])
def test_names_that_no_file_can_have(name: str, made: Set, tmp_path: Path) -> None:
    """Wherever a marker or a YAML names a path: nothing is there, in the words for that."""
    plan, out = Path(made.plan_folder), tmp_path / "out"
    export(plan, out, format="raw", source=made.source, template=made.template)
    for origin in (plan / "origin.json", shards.hidden(out, "origin.json")):
        held = json.loads(origin.read_text())
        origin.write_text(
            json.dumps({key: name if isinstance(value, str) else value for key, value in held.items()})
        )
    for ask in (lengths_of, lengths_of_plan):
        with pytest.raises(FormatError, match="are gone"):
            ask(plan)
    with pytest.raises(FormatError, match="is not a folder"):
        lengths_store.read(Path(name))
    export(plan, out, format="raw", source=made.source, template=made.template)  # it goes on
    called("show", plan)
    called("show", out)
    run_yaml = tmp_path / "run.yaml"
    values = {"data": {"path": name, "task": "chat"}, "model": {"name_or_path": name}}
    run_yaml.write_text(json.dumps({**values, "global_max_length": 8, "training": {"output_dir": "runs/x"}}))
    assert load_config(run_yaml).data.path == name


def test_edited_shards_of_an_array_job(made: Set, tmp_path: Path) -> None:
    """Parts and markers of every task; a task that is run again, and the merge."""
    for number in range(2):
        measure_shard(made.source, made.template, tmp_path / "out", (number, 2), workers=1, persist_every=4)
    held = Files(tmp_path / "out", tmp_path / "held")

    def again(folder: Path) -> None:
        measure_shard(made.source, made.template, folder, (1, 2), workers=1)

    def joined(folder: Path) -> None:
        assert len(merge(folder)) == 12

    def shown(folder: Path) -> None:
        called("merge", folder)

    assert edited_files(held, [again, joined, shown], SECONDS) >= 40


def test_edited_encode_caches(made: Set, tmp_path: Path) -> None:
    key: dict[str, Any] = made.template.config()

    def opened(folder: Path) -> EncodeCache:
        return EncodeCache(folder, made.plan, key=key, packs_per_chunk=2)

    plain = PackedDataset(made.plan, made.source, made.template.encode, lengths=made.lengths)
    opened(tmp_path / "encoded").fill(plain)
    held = Files(tmp_path / "encoded", tmp_path / "held")

    def read(folder: Path) -> None:
        cache = opened(folder)
        data = PackedDataset(made.plan, made.source, Words().encode, lengths=made.lengths, cache=cache)
        for number in range(len(data)):
            assert [one["sample_id"] for one in data[number]] == made.plan[number].tolist()

    def filled(folder: Path) -> None:
        opened(folder).fill(plain)

    assert edited_files(held, [read, filled], SECONDS) >= 40


def test_edited_runs(text_run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """run.json, its configuration and its logs, under all verbs that read a run."""
    run(load_config(text_run(samples=12, max_steps=2)), html=False, compare=False)
    for name in ("model", "startup"):
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    held = Files(tmp_path / "run", tmp_path / "held")

    def verb(*words: str) -> Callable[[Path], None]:
        return lambda folder: called(words[0], folder, *words[1:])

    def page(folder: Path) -> None:
        plan = pt.PackPlan.load(folder / "plan")
        Report.of(folder, folder / "plan", plan).figures()

    readers = [verb("show"), verb("show", "--json"), verb("which", "--step", "1", "--losses"), page]
    own = ("run.json", "run_config.json", "train_log.jsonl", "origin.json", "rank-0.jsonl")
    assert edited_files(held, readers, 2 * SECONDS, of=lambda path: path.name in own) >= 40
