"""Laws of an export: crash, determinism whoever writes, refusals, and contradictions of a reader."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import NAMES, Set, captions

from packtrain import extend
from packtrain.data import open_packs
from packtrain.errors import (
    ChecksumError,
    ConfigError,
    DriftError,
    ForeignArtefactError,
    InputError,
    MissingExtraError,
    UnknownNameError,
)
from packtrain.pipeline.export import export, finish_export
from packtrain.store import shards
from packtrain.testing import crash_points, snapshot

FORMATS = ["raw", "webdataset", "energon", "chunks"]

#: Format -> the module of its library.
LIBRARIES = {"mds": "streaming", "litdata": "litdata", "lance": "lance", "datasets": "datasets"}


def write(held: Set, out: Path, **options: Any) -> dict[str, Any]:
    options = {"maxcount": 2, "source": held.source, "template": held.template, **options}
    if options.get("format") == "chunks":
        options.setdefault("options", {"media": "tensor"})
    return export(held.plan_folder, out, **options)


@pytest.mark.parametrize("fmt", FORMATS)
def test_stopped_at_any_write(made: Callable[..., Set], tmp_path: Path, fmt: str) -> None:
    held = made(count=6, names=NAMES[:3])

    def absent_or_whole(out: Path) -> None:
        if shards.hidden(out, shards.EXPORT).is_file():
            packs = open_packs(out, held.template.encode)
            assert sum(len(packs[i]) for i in range(len(packs))) == 6

    steps = crash_points(
        lambda out: write(held, out, format=fmt),
        tmp_path / "crash",
        check=absent_or_whole,
        ignore=("origin.json",),
    )
    assert steps > 30, steps


def test_chunks_that_were_begun_with_another_default_go_on(made: Callable[..., Set], tmp_path: Path) -> None:
    """The media that the folder was begun with hold, unless others are asked for: those are refused."""
    held = made(count=9)
    write(held, tmp_path / "a", format="chunks", options={"media": "source"}, shard=(0, 2))
    write(held, tmp_path / "a", format="chunks", options={}, shard=(1, 2))
    finish_export(tmp_path / "a")
    kept = {json.loads(path.read_text())["media"] for path in (tmp_path / "a").glob("chunk_*.json")}
    assert kept == {"source"}
    write(held, tmp_path / "a", format="chunks", options={})
    with pytest.raises(ForeignArtefactError, match="another options"):
        write(held, tmp_path / "a", format="chunks", options={"media": "uint8"})


@pytest.mark.parametrize("fmt", ["webdataset", "energon", "chunks"])
def test_workers_and_shards_write_the_same(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    whole, split, many = (held.folder / name for name in ("whole", "split", "many"))
    write(held, whole, format=fmt)
    write(held, many, format=fmt, workers=2)
    for number in (2, 0, 1):
        write(held, split, format=fmt, shard=(number, 3))
        with pytest.raises(Exception, match="unfinished"):
            shards.export_of(split)
    finish_export(split)
    want = snapshot(whole, ("origin.json",))
    assert snapshot(many, ("origin.json",)) == want and snapshot(split, ("origin.json",)) == want


def test_a_missing_share_is_named(made: Callable[..., Set]) -> None:
    held = made(count=30)
    write(held, held.folder / "out", shard=(0, 2))
    with pytest.raises(InputError, match=r"lacks \d+ of \d+ parts"):
        finish_export(held.folder / "out")


def test_maxsize_opens_new_shards(made: Callable[..., Set]) -> None:
    held = made(count=30)
    write(held, held.folder / "out", maxcount=100, maxsize=1)
    assert len(list((held.folder / "out").glob("*.tar"))) == len(held.plan)
    assert len(open_packs(held.folder / "out", held.template.encode)[3]) == len(held.plan[3])


def test_a_lost_file_is_made_again(made: Callable[..., Set]) -> None:
    held = made(count=30)
    out = held.folder / "out"
    write(held, out)
    want = snapshot(out, ("origin.json",))
    (out / "pack-000001-000.tar").unlink()
    write(held, out)
    assert snapshot(out, ("origin.json",)) == want


def test_foreign_content_is_refused(made: Callable[..., Set]) -> None:
    held = made(count=10)
    out = held.folder / "out"
    out.mkdir()
    (out / "pretrain-000000.tar").write_bytes(b"other")
    with pytest.raises(ForeignArtefactError, match=r"pretrain-000000\.tar"):
        write(held, out)
    assert (out / "pretrain-000000.tar").read_bytes() == b"other"


def test_an_export_of_another_plan_is_refused_and_replaced(made: Callable[..., Set]) -> None:
    first, second = made(count=10), made(count=20)
    out = first.folder / "out"
    write(first, out)
    with pytest.raises(ForeignArtefactError, match=r"another plan"):
        write(second, out)
    write(second, out, overwrite=True, format="raw")
    write(second, second.folder / "fresh", format="raw")
    assert snapshot(out, ("origin.json",)) == snapshot(second.folder / "fresh", ("origin.json",))


def test_a_changed_source_is_refused(made: Callable[..., Set]) -> None:
    held = made(count=10)
    with open(held.path, "a", encoding="utf-8") as handle:
        handle.write('{"instruction": "new", "output": "row"}\n')
    held.source = held.open()
    with pytest.raises(ForeignArtefactError, match="source changed"):
        write(held, held.folder / "out")
    assert not (held.folder / "out").exists()


def test_changed_media_are_refused(made: Callable[..., Set]) -> None:
    held = made(count=10)
    shutil.copyfile(held.folder / NAMES[2], held.folder / NAMES[0])
    with pytest.raises(ForeignArtefactError, match="media changed"):
        write(held, held.folder / "out")


def test_an_image_that_vanishes_during_the_export(made: Callable[..., Set]) -> None:
    held = made(count=20)
    out = held.folder / "out"

    class Vanishing:
        """The source, one of whose images is gone when it is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(held.source, name)

        def __len__(self) -> int:
            return len(held.source)

        def __getitem__(self, index: int) -> Any:
            sample = held.source[index]
            for message in sample["messages"]:
                for part in message["content"]:
                    if index == 11 and part["type"] == "image":
                        part["image"] += ".gone"
            return sample

    with pytest.raises(InputError, match=r"cannot be exported: missing_media"):
        write(held, out, source=Vanishing())
    assert not shards.hidden(out, shards.EXPORT).exists()
    write(held, out)
    write(held, held.folder / "fresh")
    assert snapshot(out, ("origin.json",)) == snapshot(held.folder / "fresh", ("origin.json",))


@pytest.mark.parametrize("fault", [InputError("refused"), IndexError("record 499 of 300")])
@pytest.mark.parametrize("fmt", [*FORMATS, *LIBRARIES, "megatron"])
def test_an_export_that_wrote_no_part_leaves_nothing(
    made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch, fmt: str, fault: Exception
) -> None:
    """Of what it made: folders that were there stay."""
    held = made(count=10)

    def refused(*_: Any) -> Any:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(extend.lookup("export", fmt), "write_part", refused)
        (held.folder / "mine").mkdir()
        for place in ("out", "fresh/er/out", "mine"):
            with pytest.raises((type(fault), MissingExtraError)):
                write(held, held.folder / place, format=fmt)
    assert not (held.folder / "out").exists() and not (held.folder / "fresh").exists()
    assert not list((held.folder / "mine").iterdir())
    write(held, held.folder / "mine", format="raw")


@pytest.mark.parametrize("shard", [None, (0, 2)])
def test_a_library_that_is_not_there_is_told_before_the_other_export_goes(
    made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch, shard: tuple[int, int] | None
) -> None:
    held = made(count=10)
    write(held, held.folder / "out", format="raw")
    before = snapshot(held.folder)
    for fmt, module in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, module, None)
        for place, overwrite in (("out", True), ("new", False)):
            with pytest.raises(MissingExtraError):
                write(held, held.folder / place, format=fmt, overwrite=overwrite, shard=shard)
    assert snapshot(held.folder) == before


def test_a_full_disk(made: Callable[..., Set]) -> None:
    held = made(count=20)
    out = held.folder / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
        with pytest.raises(OSError, match="large"):
            write(held, out, maxcount=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(out.glob("*.tar")) and not list(out.glob(".*.tmp.*"))
    write(held, out, maxcount=100)
    assert len(open_packs(out, held.template.encode)) == len(held.plan)


# ------------------------------------------------------------------------------------------ reading
def test_a_pack_that_grew_fails_loudly(made: Callable[..., Set]) -> None:
    held = made(count=10)
    write(held, held.folder / "out")

    def longer(sample: Any) -> Any:
        encoded = held.template.encode(sample)
        encoded["input_ids"] = encoded["input_ids"].repeat(2)
        return encoded

    with pytest.raises(DriftError, match=r"sample 0 .*ps_00000000.*was planned with"):
        open_packs(held.folder / "out", longer)[0]


def test_a_cut_or_edited_shard_names_shard_and_key(made: Callable[..., Set]) -> None:
    held = made(count=30)
    out = held.folder / "out"
    write(held, out)
    path = out / "pack-000001-000.tar"
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    packs = open_packs(out, held.template.encode)
    packs[0]
    with pytest.raises(ChecksumError, match=r"ps_00000002 in .*pack-000001-000\.tar"):
        packs[2]
    os.truncate(path, len(data) // 3)
    with pytest.raises(ChecksumError, match=r"pack-000001-000\.tar"):
        packs[3]


def test_a_chunk_is_hashed_before_its_first_pack(made: Callable[..., Set]) -> None:
    held = made(count=30)
    out = held.folder / "out"
    write(held, out, format="chunks", maxcount=2)
    path = out / "chunk_00000001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    packs = open_packs(out, held.template.encode)
    packs[0]
    for _ in range(2):
        with pytest.raises(ChecksumError, match=r"chunk_00000001\.arrow differs"):
            packs[2]


@pytest.mark.spec(
    "003",
    "`OFFLINE_PACKED_DATA` and its kin cannot switch isolation off",
    key="none: the shards say it",
    api="`open_packs`",
)
@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, False),
        ({"OFFLINE_PACKED_DATA": "1"}, False),
        ({"OFFLINE_PACKED_DATA": "1", "OFFLINE_PACKING_VQA": "1"}, False),
        ({"OFFLINE_PACKED_DATA": "0"}, True),
        ({"OFFLINE_PACKED_DATA": "0", "OFFLINE_PACKING_VQA": "1"}, True),
        ({"OFFLINE_PACKING_VQA": "1", "OFFLINE_PACKING_BMR": "1"}, True),
        ({"OFFLINE_PACKED_DATA": "1", "OFFLINE_PACKING_BMR": "1"}, True),
        ({"OFFLINE_PACKED_DATA": "yes"}, True),
    ],
)
def test_the_environment_of_other_trainers_decides_nothing(
    made: Callable[..., Set],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    told: bool,
) -> None:
    held = made(rows=captions(NAMES[:1], 6, "\nwhat?"), names=NAMES[:1])
    write(held, held.folder / "out")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("packtrain.packs.exported._told", [])
    for _ in range(2):
        assert open_packs(held.folder / "out", held.template.encode).task == "vqa"
    assert caplog.text.count("has no effect here") == told


def test_bad_options(made: Callable[..., Set]) -> None:
    held = made(count=10)
    with pytest.raises(UnknownNameError, match="webdatset"):
        write(held, held.folder / "out", format="webdatset")
    with pytest.raises(ConfigError, match=r"webdataset takes no media='tensor' \(hint: it takes prompts=…"):
        write(held, held.folder / "out", options={"media": "tensor"})
    with pytest.raises(InputError, match=r"not the one of captions"):
        write(held, held.folder / "out", task="captions")
    write(held, held.folder / "out")  # the corrected command needs no overwrite
