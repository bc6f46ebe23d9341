"""What is exported comes back: through tarfile, webdataset, Hugging Face datasets, and our own readers."""

from __future__ import annotations

import glob
import json
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_sets import NAMES, Set, captions

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, open_packs
from packtrain.media.location import media_refs, read_bytes
from packtrain.pipeline.export import export
from packtrain.store.shards import PackFiles


def exported(made: Set, name: str, **options: Any) -> Path:
    out = made.folder / name
    options.setdefault("maxcount", 4)
    export(made.plan_folder, out, source=made.source, template=made.template, **options)
    return out


def planned(made: Set) -> dict[int, Any]:
    """Sample id -> (messages with the media's bytes, names of the media)."""
    out = {}
    for i in range(len(made.source)):
        sample = made.source[i]
        data = [read_bytes(ref) for ref in media_refs(sample)]
        names = [str(Path(ref).relative_to(made.folder)) for ref in media_refs(sample)]
        out[i] = (_plain(sample), data, names)
    return out


def _plain(sample: dict[str, Any]) -> list[Any]:
    """Roles and contents, without what stands for media."""
    return [
        (m["role"], [p["text"] if p["type"] == "text" else p["type"] for p in m["content"]])
        for m in sample["messages"]
    ]


@pytest.mark.parametrize("fmt", ["raw", "webdataset", "energon"])
def test_every_sample_comes_back_once(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=60)
    out = exported(held, fmt, format=fmt)
    packs, want = PackFiles(out), planned(held)
    seen = {}
    for number in range(len(packs)):
        told = packs.record(number)["packtrain"]
        assert told["ids"] == held.plan[number].tolist()
        for place, sample in enumerate(packs.samples(number)):
            names = [one["name"] for one in told["media"][place]]
            seen[sample["sample_id"]] = (_plain(sample), media_refs(sample), names)
    assert seen == want


def test_clashing_names_stay_apart_and_come_back(made: Callable[..., Set]) -> None:
    rows = captions(NAMES, len(NAMES))
    held = made(rows=rows, cap=20 * len(NAMES))
    assert len(held.plan) == 1, "all in one pack"
    out = exported(held, "shards")
    with tarfile.open(next(out.glob("*.tar"))) as tar:
        members = tar.getnames()
    assert len({unicodedata.normalize("NFC", name).casefold() for name in members}) == len(NAMES) + 1
    told = PackFiles(out).record(0)["packtrain"]
    assert [one["name"] for media in told["media"] for one in media] == NAMES
    assert told["task"] == "captions"


@pytest.mark.spec("003", "WebDataset tar shards", key="`export.format: webdataset`", api="`export`")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_tarfile_and_webdataset_read_the_same(made: Callable[..., Set]) -> None:
    import webdataset

    held = made(count=60)
    out = exported(held, "shards")
    tars = sorted(str(path) for path in out.glob("*.tar"))
    by_tarfile: dict[str, dict[str, bytes]] = {}
    order: list[str] = []
    for path in tars:
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, name = info.name.partition(".")
                assert key.replace("_", "").isalnum() and "." not in key
                if not order or order[-1] != key:
                    order.append(key)
                by_tarfile.setdefault(key, {})[name] = tar.extractfile(info).read()  # type: ignore[union-attr]
    assert len(order) == len(set(order)) == len(held.plan), "members of a key are adjacent, keys unique"
    by_webdataset = {}
    for sample in webdataset.WebDataset(tars, shardshuffle=False, empty_check=False):
        fields = {name: value for name, value in sample.items() if not name.startswith("__")}
        by_webdataset[sample["__key__"]] = fields
    assert by_webdataset == by_tarfile
    packs = PackFiles(out)
    assert {f"ps_{n:08d}": members for n, members in packs.stream()} == by_tarfile


@pytest.mark.filterwarnings("ignore")  # of the library, about its own loading
def test_hugging_face_datasets_reads_them(made: Callable[..., Set], tmp_path: Path) -> None:
    import datasets

    held = made(count=30)
    out = exported(held, "shards")
    packs = PackFiles(out)
    names = sorted({name for _, members in packs.stream() for name in members} - {"json"})
    features = datasets.Features(
        {
            "__key__": datasets.Value("string"),
            "__url__": datasets.Value("string"),
            "json": datasets.Json(),
            **{name: datasets.Image(decode=False) for name in names},
        }
    )
    read = datasets.load_dataset(
        "webdataset",
        data_files=sorted(glob.glob(str(out / "*.tar"))),
        split="train",
        features=features,
        cache_dir=str(tmp_path / "hf"),
    )
    assert len(read) == len(packs)
    for number, row in enumerate(read):
        want = packs.members(number)
        record = row["json"] if isinstance(row["json"], dict) else json.loads(row["json"])
        assert record == json.loads(want["json"])
        assert {n: row[n]["bytes"] for n in names if row[n] is not None} == {
            n: data for n, data in want.items() if n != "json"
        }


@pytest.mark.parametrize("fmt", ["raw", "webdataset", "energon", "chunks"])
def test_the_same_rows_as_without_shards(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=60)
    options = {"options": {"media": "tensor"}} if fmt == "chunks" else {}
    packs = open_packs(exported(held, fmt, format=fmt, **options), held.template.encode)
    direct = PackedDataset(held.plan, held.source, held.template.encode)
    collate = PaddingFreeCollator()
    assert len(packs) == len(direct) == len(held.plan)
    for number in range(len(packs)):
        ours, want = collate([packs[number]]), collate([direct[number]])
        assert ours.keys() == want.keys() and ours.sample_ids == want.sample_ids
        for name, value in want.items():
            assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value


@pytest.mark.spec(
    "003",
    "the post-packing format, flat and nested",
    key="`export.task`, `export.prompts`",
    api="`export(task=)`",
)
@pytest.mark.parametrize(
    ("rows", "task"),
    [
        (captions(NAMES[:1], 6), "captions"),
        (captions(NAMES[:1], 6, "\ndescribe"), "vqa"),
        ([*captions(NAMES[:1], 5), {"instruction": "a", "output": "b"}], "multi_turn"),
    ],
)
def test_plain_fields_follow_the_task(made: Callable[..., Set], rows: list[Any], task: str) -> None:
    held = made(rows=rows, names=NAMES[:1], cap=200)
    out = exported(held, "raw", format="raw")
    record = json.loads((out / "ps_00000000.json").read_text(encoding="utf-8"))
    assert record["packtrain"]["task"] == task
    flat = task != "multi_turn"
    for name in ("images", "prompt", "captions"):
        assert all(isinstance(value, str if flat else list) for value in record[name]), name
    if task == "multi_turn":
        place = record["packtrain"]["ids"].index(5) if 5 in record["packtrain"]["ids"] else None
        assert place is not None and record["images"][place] == [] and record["prompt"][place] == ["a"]
    assert record["captions"][0] == ("a picture of 0" if flat else ["a picture of 0"])
