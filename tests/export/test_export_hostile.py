"""What befalls an export while it is made: foreign files, changed media, full disks, torn records, odd names.

Every law holds for all four formats.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from export_sets import NAMES, Set, Words, captions
from PIL import Image
from verbs import call

from packtrain.data import open_packs
from packtrain.errors import ForeignArtefactError, FormatError, InputError, LawError, SourceError
from packtrain.media.image import open_image
from packtrain.media.location import media_refs
from packtrain.pipeline.export import export, finish_export
from packtrain.pipeline.verify_export import verify_export
from packtrain.store import shards
from packtrain.store.shards import PackFiles
from packtrain.testing import snapshot

FORMATS = ["raw", "webdataset", "energon", "chunks"]
pytestmark = pytest.mark.parametrize("fmt", FORMATS)


def write(held: Set, out: Path, fmt: str, **options: Any) -> dict[str, Any]:
    options = {"maxcount": 2, "source": held.source, "template": held.template, **options}
    return export(held.plan_folder, out, format=fmt, **options)


def bytes_of(out: Path) -> dict[str, str]:
    return snapshot(out, ("origin.json",))


def fresh(held: Set, fmt: str) -> dict[str, str]:
    write(held, held.folder / "fresh", fmt)
    return bytes_of(held.folder / "fresh")


def verify(held: Set, out: Path) -> dict[str, str]:
    return verify_export(out, source=held.source, template=held.template)


def test_files_that_readers_would_take_for_data(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=12)
    out = held.folder / "out"
    write(held, out, fmt)
    (out / ".cache").write_bytes(b"hidden files are nobody's data")
    verify(held, out)
    names = {"raw": ["cat.jpg", "ps_00009999.json"], "chunks": ["old.arrow", "chunk_00000099.json"]}
    for name in names.get(fmt, ["old.tar", "pack-000099-000.tar"]):
        (out / name).write_bytes(b"foreign")
        with pytest.raises(LawError, match=rf"holds {name}.*readers would take it"):
            verify(held, out)
        (out / ".packtrain" / "export.json").rename(held.folder / "export.json")  # not finished yet
        with pytest.raises(ForeignArtefactError, match=rf"holds {name}"):
            write(held, out, fmt)
        assert (out / name).read_bytes() == b"foreign" and not (out / ".packtrain" / "export.json").exists()
        (out / name).unlink()
        write(held, out, fmt)
        verify(held, out)


def test_media_that_change_while_they_are_exported(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=20, names=NAMES[:4])
    want, out, path = fresh(held, fmt), held.folder / "out", held.folder / NAMES[2]
    data = path.read_bytes()

    def change(done: int, total: int) -> None:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(ForeignArtefactError, match=r"changed while they were exported: a\.b\.c\.jpg"):
        write(held, out, fmt, progress=change)
    with pytest.raises(ForeignArtefactError, match=r"media changed since"):
        write(held, out, fmt)
    with pytest.raises(ForeignArtefactError, match=r"changed while"):
        path.write_bytes(data)
        write(held, out, fmt, progress=change, shard=(0, 2))
    path.write_bytes(data)
    write(held, out, fmt)
    assert bytes_of(out) == want, "nothing of the changed medium is left"


def test_a_source_that_changes_while_it_is_exported(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=20, names=NAMES[:4])
    want, out, text = fresh(held, fmt), held.folder / "out", held.path.read_text(encoding="utf-8")
    for changed in (text[: len(text) // 2], text.replace("w0 w1", "W0 W1")):
        held.source = held.open()

        def change(done: int, total: int, changed: str = changed) -> None:
            held.path.write_text(changed, encoding="utf-8")

        with pytest.raises(SourceError, match="changed after it was opened"):
            write(held, out, fmt, progress=change)
        held.path.write_text(text, encoding="utf-8")
    held.source = held.open()
    write(held, out, fmt)
    assert bytes_of(out) == want


class Opening(Words):
    """Opens images as a processor does; otherwise chunks of `Words` need none."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        for ref in media_refs(sample):
            open_image(ref)
        return super().encode(sample)


def test_a_medium_that_vanishes_at_its_turn(made: Callable[..., Set], fmt: str) -> None:
    """Gone, a folder, or cut: named with its pack, nothing stands in, and the command goes on later."""
    held = made(count=20, names=NAMES[:4])
    want, out, path = fresh(held, fmt), held.folder / "out", held.folder / NAMES[3]
    data = path.read_bytes()
    held.template = Opening()

    def remove(done: int, total: int) -> None:
        path.unlink(missing_ok=True)

    with pytest.raises(InputError, match=r"pack \d+.* cannot be exported: missing_media: .*with space\.jpg"):
        write(held, out, fmt, progress=remove)
    assert not (out / ".packtrain" / "export.json").exists()
    path.write_bytes(data)
    write(held, out, fmt)
    assert bytes_of(out) == want


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=60k", "none", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(made: Callable[..., Set], small_disk: Path, fmt: str) -> None:
    workers = 2 if fmt == "webdataset" else 1
    held = made(count=40)
    want, out = fresh(held, fmt), small_disk / "out"
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            write(held, out, fmt, workers=workers)
        assert not (out / ".packtrain" / "export.json").exists()
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    write(held, out, fmt, workers=workers)
    assert bytes_of(out) == want


def test_records_of_ours_that_were_torn(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=12)
    out = held.folder / "out"
    write(held, out, fmt, shard=(0, 2))
    origin, key = out / ".packtrain" / "origin.json", out / ".packtrain" / "key.json"
    for damage in (
        origin.unlink,
        lambda: origin.write_text("{"),
        lambda: origin.write_text('{"plan": "/no"}'),
    ):
        damage()
        with pytest.raises(FormatError, match="does not say where its plan is") as caught:
            finish_export(out)
        assert "any --shard again" in str(caught.value.hint)
        write(held, out, fmt, shard=(0, 2))
    write(held, out, fmt, shard=(1, 2))
    finish_export(out)
    want, told = bytes_of(out), key.read_text()
    key.unlink()
    finish_export(out)  # it is finished: nothing else is asked
    key.write_text(told)
    key.write_text("{torn")
    with pytest.raises(FormatError) as torn:
        write(held, out, fmt)
    assert "overwrite=True" in str(torn.value.hint)
    write(held, out, fmt, overwrite=True)
    assert bytes_of(out) == want


def test_what_is_finished_may_be_finished_again(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=20)
    want, out = fresh(held, fmt), held.folder / "out"
    for number in (1, 0):
        write(held, out, fmt, shard=(number, 2))
    figures = finish_export(out)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert finish_export(out) == figures and json.loads(call("merge", str(out), "--json").stdout) == figures
    for share in ((0, 2), (2, 3), None):
        write(held, out, fmt, shard=share)
    assert bytes_of(out) == want
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == stamps
    data = next(path for path in sorted(out.iterdir()) if path.is_file())
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(InputError, match="lacks 1 of"):
        finish_export(out)
    write(held, out, fmt, shard=(0, 2))
    finish_export(out)
    assert bytes_of(out) == want


def test_odd_places(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=6)
    link, file = held.folder.parent / "link", held.folder.parent / "file"
    link.symlink_to("/nonexistent/folder")
    file.write_text("x")
    with pytest.raises(InputError, match="link to nowhere"):
        write(held, link, fmt)
    with pytest.raises(InputError, match="is a file"):
        write(held, file, fmt)
    for place in (held.folder, held.plan_folder):
        before = bytes_of(place)
        with pytest.raises(ForeignArtefactError, match="no export"):
            write(held, place, fmt)
        assert bytes_of(place) == before


def test_names_of_300_characters_and_twins(made: Callable[..., Set], tmp_path: Path, fmt: str) -> None:
    """Members of a tar may be called what no file system takes; their names come back to the letter."""
    inside = ["n" * 300 + ".jpg", "é" * 300 + ".jpg", "e\u0301" * 300 + ".jpg", "n" * 299 + "m.jpg"]
    inside += ["d/" * 150 + "0001.jpg", "0001.JPG", "0001.jpg", "0001_1.jpg", "a b.c.jpg"]
    with tarfile.open(tmp_path / "media.tar", "w") as tar:
        for number, name in enumerate(inside):
            Image.new("RGB", (9 + number, 9), (number * 9, 3, 4)).save(data := io.BytesIO(), "JPEG")
            info = tarfile.TarInfo(name)
            info.size = data.tell()
            data.seek(0)
            tar.addfile(info, data)
    names = [*NAMES, *(f"tar:{tmp_path}/media.tar!{name}" for name in inside)]
    held = made(rows=captions(names, 2 * len(names)), cap=2000)
    out = held.folder / "out"
    write(held, out, fmt)
    verify(held, out)
    packs = open_packs(out, held.template.encode)
    ids = [one["sample_id"] for number in range(len(packs)) for one in packs[number]]
    assert sorted(ids) == list(range(2 * len(names)))
    if fmt != "chunks":  # samples are told apart by their ids there; media names are not kept
        files = PackFiles(out)
        told = [files.record(number)["packtrain"] for number in range(len(files))]
        by_id = {
            i: one["name"]
            for pack in told
            for i, media in zip(pack["ids"], pack["media"], strict=True)
            for one in media
        }
        whole = [*NAMES, *(f"{tmp_path}/media.tar!{name}" for name in inside)]
        assert [by_id[i] for i in range(len(names))] == whole


def test_another_source_is_found(made: Callable[..., Set], fmt: str) -> None:
    """The same ids and lengths, one word or one medium of another: verify compares contents."""
    held = made(count=12, cap=200)
    out = held.folder / "out"
    write(held, out, fmt)
    checks = verify(held, out)
    assert "12 samples" in checks["encoding" if fmt == "chunks" else "tokens"]

    class Other:
        fingerprint = held.source.fingerprint

        def __getitem__(self, index: int) -> Any:
            sample = held.source[index]
            if index == 7:
                sample["messages"][-1]["content"][0]["text"] = (
                    "q" + sample["messages"][-1]["content"][0]["text"]
                )
            return sample

    with pytest.raises(LawError, match="sample 7"):
        verify_export(out, source=Other(), template=held.template)
    assert shards.strays(out, fmt) == []


@pytest.mark.parametrize("shard", [None, (0, 2)])
def test_settings_that_cannot_be_leave_nothing_behind(
    made: Callable[..., Set], fmt: str, shard: tuple[int, int] | None
) -> None:
    held = made(count=12)
    out = held.folder / "out"
    wrong: list[dict[str, Any]] = [{"executor": "slurm"}, {"workers": 0}]
    if fmt == "energon":
        wrong += [{"options": {"layout": "x"}}, {"options": {"layout": "llava", "prompts": "prompt"}}]
    if fmt == "chunks":
        wrong += [{"options": {"media": "jpeg"}}]
    for options in wrong:
        with pytest.raises(InputError):
            write(held, out, fmt, shard=shard, **options)
        assert not out.exists()


def test_drift_leaves_no_key_behind(made: Callable[..., Set], fmt: str) -> None:
    """Only chunks encode: the refused command can be followed by one of another format."""
    held = made(count=12)
    out = held.folder / "out"

    class Longer(Words):
        def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
            return {name: value.repeat(2) for name, value in super().encode(sample).items()}

    if fmt == "chunks":
        with pytest.raises(LawError):
            write(held, out, fmt, template=Longer())
        write(held, out, "webdataset")
    else:
        write(held, out, fmt, template=Longer())


@pytest.mark.parametrize("fields", [("VQA",), ("BMR",), ()])
def test_chunks_are_encoded_so_no_task_contradicts_them(
    made: Callable[..., Set], fmt: str, fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = made(rows=captions(["a.jpg"], 6, "what?"), names=["a.jpg"])
    out = held.folder / "out"
    write(held, out, fmt)
    for name in ("VQA", "BMR"):
        monkeypatch.setenv(f"OFFLINE_PACKING_{name}", str(int(name in fields)))
    assert len(open_packs(out, held.template.encode))
    with pytest.raises(InputError, match="task"):
        open_packs(out, held.template.encode, task="no task")


def test_an_edited_text_is_met_when_its_pack_is_read(made: Callable[..., Set], fmt: str) -> None:
    """Same length, same tokens, still JSON: only a digest tells. Chunks have theirs for `verify` alone."""
    if fmt == "chunks":
        return
    held = made(rows=captions(["a.jpg"], 6, "what?"), names=["a.jpg"])
    out = held.folder / "out"
    write(held, out, fmt)
    for path in out.glob("[!.]*"):
        data = path.read_bytes()
        if b"a picture of 0" in data:
            path.write_bytes(data.replace(b"a picture of 0", b"a picture of 9"))
    with pytest.raises(LawError, match="ps_00000000"):
        packs = open_packs(out, held.template.encode)
        assert [packs[number] for number in range(len(packs))]
