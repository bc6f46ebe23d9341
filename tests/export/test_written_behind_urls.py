"""Artefacts behind URLs have the bytes of those on a disk, wherever their writers stop and go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_sets import Set
from test_export_laws import FORMATS, write
from test_produce import Unclaimed
from words_in import lengths_of, producer, put

import packtrain as pt
from packtrain.cli import main
from packtrain.data import LazyShardedDataset, open_packs
from packtrain.errors import ConfigError, ForeignArtefactError, FormatError, InputError, SourceError
from packtrain.pipeline.export import export, finish_export
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.pipeline.shards import measure_shard, merge
from packtrain.pipeline.verify_export import verify_export
from packtrain.remote import copies
from packtrain.store import shards
from packtrain.testing.crash import Stopped, stopped_after
from packtrain.train.config import load_config
from remote_site import afresh, bucket

pytest.importorskip("fsspec")
AT = "gs://b/out"
CLAIMS = ("beat.json", "claim.")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    afresh(tmp_path, monkeypatch)


@pytest.fixture(params=["gs", "hf"])
def far(request: pytest.FixtureRequest) -> Iterator[Any]:
    with bucket(request.param) as system:
        yield system


def url(system: Any, name: str = "out") -> str:
    return f"{system.protocol}://datasets/org/{name}"


def there(system: Any, name: str = "out") -> dict[str, bytes]:
    """The files of a folder behind a URL, without what tells where and when."""
    start = f"/datasets/org/{name}/"
    found = {path.removeprefix(start): system.cat_file(path) for path in system.find(start)}
    return {name: data for name, data in found.items() if not _is_told(name)}


def here(folder: Path) -> dict[str, bytes]:
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    return {name: data for name, data in found.items() if not _is_told(name)}


def _is_told(name: str) -> bool:
    return (
        name.endswith(("origin.json", "media_stat.npy"))
        or "/_" in f"/{name}"
        or any(c in name for c in CLAIMS)
    )


@pytest.mark.parametrize("fmt", [*FORMATS, "megatron", "datasets", "mds", "litdata", "lance"])
@pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves
def test_an_export_has_the_bytes_of_one_on_a_disk(made: Callable[..., Set], tmp_path: Path, fmt: str) -> None:
    held = made(count=24)
    try:
        write(held, tmp_path / "near", format=fmt)
    except pt.errors.MissingExtraError as error:
        pytest.skip(error.message)
    with bucket("gs") as system:
        figures = write(held, Path(url(system)), format=fmt)
        assert figures["out"] == url(system)
        assert there(system) == here(tmp_path / "near")
        if fmt in FORMATS:
            assert [name for name in system.puts if "/claim/" not in name][-1].endswith("/export.json")
        told = len(system.puts)
        assert write(held, url(system), format=fmt) == figures  # nothing is done
        assert [name for name in system.puts[told:] if "claim" not in name] == []
        shutil.rmtree(tmp_path / "cache")
        checked = verify_export(shards.at(url(system)), source=held.source, template=held.template, encode=2)
        assert checked
        with pytest.raises(ForeignArtefactError, match="another maxcount"):
            write(held, url(system), format=fmt, maxcount=3)
        write(held, url(system), format=fmt, maxcount=9, overwrite=True)
        write(held, tmp_path / "near", format=fmt, maxcount=9, overwrite=True)
        assert there(system) == here(tmp_path / "near")


def test_lengths_plans_and_exports_all_behind_urls(
    made: Callable[..., Set], tmp_path: Path, far: Any
) -> None:
    held = made(count=12)
    lengths = measure(held.source, held.template, url(far, "lengths"), workers=1)
    assert lengths.digest == held.lengths.digest
    assert there(far, "lengths") == here(held.folder / "lengths")
    assert measure(held.source, held.template, url(far, "lengths")).digest == lengths.digest
    with pytest.raises(ForeignArtefactError, match=r"holds lengths\.json"):
        plan_lengths(lengths, url(far, "lengths"), lengths_folder=url(far, "lengths"), pack_length=64)
    cap = held.plan.spec.pack_length
    plan = plan_lengths(lengths, url(far, "plan"), lengths_folder=url(far, "lengths"), pack_length=cap)
    assert there(far, "plan") == here(held.plan_folder)
    assert pt.PackPlan.load(url(far, "plan")).checksum == plan.checksum == held.plan.checksum
    assert pt.Lengths.load(url(far, "lengths")).digest == lengths.digest
    shutil.rmtree(tmp_path / "cache")  # another machine
    options: dict[str, Any] = {
        "format": "chunks",
        "source": held.source,
        "template": held.template,
        "maxcount": 2,
    }
    for number in (1, 0):
        export(url(far, "plan"), url(far), shard=(number, 2), **options)
        with pytest.raises(FormatError, match="unfinished"):
            open_packs(url(far))
        shutil.rmtree(tmp_path / "cache")
    figures = finish_export(url(far))
    assert figures["out"] == url(far) and figures["packs"] == len(plan)
    export(held.plan_folder, tmp_path / "near", **options)
    assert there(far) == here(tmp_path / "near")
    near, packs = open_packs(tmp_path / "near"), open_packs(url(far))
    for number in range(len(near)):
        for one, other in zip(near[number], packs[number], strict=True):
            np.testing.assert_array_equal(one["input_ids"], other["input_ids"])
    commits = [name for name in far.puts if "claim" in name or "partial" in name]
    assert bool(commits) == (far.protocol == "gs")


def test_a_measurement_of_several_machines_is_merged(made: Callable[..., Set], tmp_path: Path) -> None:
    held = made(count=20)
    with bucket("gs") as system:
        for number in (2, 0, 1):
            measure_shard(held.source, held.template, url(system), (number, 3), workers=1)
            shutil.rmtree(tmp_path / "cache")
        assert merge(url(system)).digest == held.lengths.digest
        assert there(system) == here(held.folder / "lengths")


def test_a_grown_source_is_measured_on(made: Callable[..., Set], tmp_path: Path) -> None:
    held = made(count=10)
    with bucket("gs") as system:
        for at in (tmp_path / "near", url(system)):
            measure(held.source, held.template, at, workers=1)
        row = json.dumps({"messages": [{"role": r, "content": "a b"} for r in ("user", "assistant")]})
        held.path.write_text(held.path.read_text() + f"{row}\n")
        shutil.rmtree(tmp_path / "cache")
        for at in (tmp_path / "near", url(system)):
            assert len(measure(held.open(), held.template, at, workers=1, append=True)) == 11
        assert there(system) == here(tmp_path / "near")


def test_claims_and_packs_of_others_are_not_brought(made: Callable[..., Set], tmp_path: Path) -> None:
    """They come and go, or are large: no writer needs them here."""
    held = made(count=12)
    with bucket("gs") as system:
        for number in (0, 1):
            write(held, url(system), format="webdataset", shard=(number, 2))
        for name in (".packtrain/shard-1-of-2/claim/beat.json", "producer/beat.json"):
            system.pipe_file(f"/datasets/org/out/{name}", b"{}")
        shutil.rmtree(tmp_path / "cache")
        copies._listings.clear()
        asked: list[str] = []
        read = type(system).cat_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                type(system), "cat_file", lambda self, path, **o: asked.append(path) or read(self, path, **o)
            )
            with pytest.raises(SystemExit) as stop:
                main(["merge", url(system)])
        assert stop.value.code == 0
        assert asked and not [name for name in asked if name.endswith((".tar", "2/claim/beat.json"))]
        assert "shard-1" not in "".join(system.find("/datasets/org/out/.packtrain"))
        assert shards.export_of(shards.at(url(system)))["packs"] == len(held.plan)


@pytest.mark.parametrize("key", ["training.output_dir", "data.cache.root_dir"])
def test_a_run_writes_to_a_disk(key: str) -> None:
    section, *names = key.split(".")
    value: Any = "s3://bucket/run"
    for name in reversed(names):
        value = {name: value}
    with pytest.raises(ConfigError, match=rf"{key} .*a run writes to a disk"):
        load_config({"data": {"path": "a.jsonl"}, "template": {"max_length": 64}} | {section: value})


def test_an_upload_that_fails_midway_is_gone_on_with(made: Callable[..., Set], tmp_path: Path) -> None:
    """Nothing looks whole before the marker; shards that were finished are not sent again."""
    held = made(count=24)
    write(held, tmp_path / "near", format="webdataset")
    with bucket("gs") as system:
        lost = 0
        while True:
            system.quota[:] = [9]
            before = len(system.puts)
            try:
                write(held, url(system), format="webdataset")
                break
            except SourceError as error:
                lost += 1
                assert "could not be reached in 7 tries" in error.message or "cannot" in error.message
            finally:
                system.quota.clear()
            assert "export.json" not in "".join(there(system))
            with pytest.raises((FormatError, SourceError)):
                open_packs(url(system))
            assert len(system.puts) > before
            assert lost < 20
            if lost % 2:
                shutil.rmtree(tmp_path / "cache")  # the next one is of another machine
        assert lost > 1
        shards_sent = [name for name in system.puts if name.endswith(".tar")]
        parts_sent = [name for name in system.puts if "/part-" in name]
        assert len(parts_sent) == len(set(parts_sent))
        again = {name for name in shards_sent if shards_sent.count(name) > 1}
        assert len(again) < lost + 1  # at most the one at work
        assert there(system) == here(tmp_path / "near")


@pytest.mark.parametrize("fmt", ["webdataset", "chunks"])
def test_an_export_stopped_at_any_step(made: Callable[..., Set], tmp_path: Path, fmt: str) -> None:
    held = made(count=6)
    write(held, tmp_path / "near", format=fmt)
    whole, stop = here(tmp_path / "near"), 0
    while True:
        stop += 23  # of hundreds
        with bucket("gs") as system:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            copies._listings.clear()
            try:
                with stopped_after(stop):
                    write(held, url(system), format=fmt)
                break
            except Stopped:
                pass
            held_now = there(system)
            assert ".packtrain/export.json" not in held_now or held_now == whole
            if stop % 2:
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                copies._listings.clear()
            write(held, url(system), format=fmt)
            assert there(system) == whole
    assert stop > 100


def test_other_content_is_named(made: Callable[..., Set]) -> None:
    held = made(count=6)
    with bucket("gs") as system:
        system.pipe_file("/datasets/org/out/pack-000000-000.tar", b"somebody's")
        with pytest.raises(ForeignArtefactError, match=r"no export: pack-000000-000.tar"):
            write(held, url(system), format="webdataset")
        system.rm("/datasets/org/out", recursive=True)
        write(held, url(system), format="webdataset")
        system.pipe_file("/datasets/org/out/more.tar", b"somebody's")
        with pytest.raises(ForeignArtefactError, match=r"more.tar"):
            write(held, url(system), format="webdataset")
        with pytest.raises(InputError, match="takes no files"):
            write(held, Path("https://host/out"), format="webdataset")


# ------------------------------------------------------------------------------ growing directories
def feed(folder: Path, files: int) -> None:
    for number in range(files):
        put(folder, f"p{number}.jsonl", lengths_of(30, 30 * number), 30 * number)


def test_a_stream_has_the_bytes_of_one_on_a_disk(tmp_path: Path, far: Any) -> None:
    feed(tmp_path / "in", 1)
    for out in (tmp_path / "near", url(far)):
        producer(tmp_path / "in", out).run(end=False)
    assert there(far) == here(tmp_path / "near")
    reader = iter(LazyShardedDataset(url(far), 0, 1, run=tmp_path / "run", timeout_s=5))
    first = next(reader)["sample_ids"]
    feed(tmp_path / "in", 3)
    shutil.rmtree(tmp_path / "cache")  # the producer goes on elsewhere
    for out in (tmp_path / "near", url(far)):
        stats = producer(tmp_path / "in", out).run()
    assert stats.packed + sum(stats.dropped.values()) == 90
    read = {name: data for name, data in there(far).items() if not name.startswith("readers/")}
    assert read == here(tmp_path / "near")
    assert any(name.startswith("readers/") for name in there(far))
    ids = [*first, *(one for pack in reader for one in pack["sample_ids"])]
    assert ids == [one for pack in LazyShardedDataset(tmp_path / "near", 0, 1) for one in pack["sample_ids"]]
    assert producer(tmp_path / "in", url(far)).run().packs == stats.packs  # it has ended
    with pytest.raises(ForeignArtefactError, match="pack_length"):
        producer(tmp_path / "in", url(far), pack_length=90).run()


def test_a_producer_stopped_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    feed(tmp_path / "in", 2)
    producer(tmp_path / "in", tmp_path / "near", packs_per_chunk=9).run()
    whole, stop = here(tmp_path / "near"), 0
    while True:
        stop += 22
        with bucket("gs") as system:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            copies._listings.clear()
            try:
                with stopped_after(stop):
                    producer(tmp_path / "in", url(system), packs_per_chunk=9).run()
                break
            except (Stopped, RuntimeError):
                pass
            for name in there(system):
                if name.startswith("chunk_") and name.endswith(".json"):
                    told = json.loads(there(system)[name])
                    assert len(there(system)[told["file"]]) == told["bytes"]
            if stop % 2:
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                copies._listings.clear()
            producer(tmp_path / "in", url(system), packs_per_chunk=9).run()
            assert there(system) == whole
    assert stop > 60


def test_without_the_way_there_a_producer_ends_with_the_first_fault(
    made: Callable[..., Set], tmp_path: Path
) -> None:
    """It does not try to free its claim too; this machine knows that its owner is gone, another waits."""
    feed(tmp_path / "in", 1)
    held = made(count=6)
    verbs: list[Callable[[str], Any]] = [
        lambda at: producer(tmp_path / "in", at).run(),
        lambda at: write(held, at, format="webdataset"),
    ]
    for verb in verbs:
        with bucket("gs") as system:
            system.quota[:] = [6]
            with pytest.raises(SourceError, match="could not be reached in 7 tries"):
                verb(url(system))
            assert system.quota == [-7]  # one file, seven tries
            system.quota.clear()


def test_two_producers_of_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(tmp_path / "in", 1)
    with bucket("gs") as system:
        first = producer(tmp_path / "in", url(system))
        whole = first._commit

        def commit(*args: Any) -> None:
            monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "another machine"))
            with pytest.raises(InputError, match=f"{url(system)} is being written by another run"):
                producer(tmp_path / "in", url(system)).run()
            monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
            whole(*args)

        monkeypatch.setattr(first, "_commit", commit)
        first.run()
        assert "END" in there(system)


# ------------------------------------------------------------------------ others at work in the folder
@pytest.mark.parametrize("fmt", ["webdataset", "chunks", "megatron"])
def test_a_shard_that_is_deleted_before_the_marker(
    made: Callable[..., Set], tmp_path: Path, fmt: str
) -> None:
    held = made(count=8)
    with bucket("gs") as system:
        write(held, tmp_path / "whole", format=fmt)
        for out in (str(tmp_path / "near"), url(system)):

            def deleted(done: int, total: int, out: str = out) -> None:
                if done == total and out.startswith("gs"):
                    found = system.find("/datasets/org/out")
                    system.rm(next(name for name in found if "/.packtrain/" not in name))
                elif done == total:
                    next(path for path in Path(out).iterdir() if path.is_file()).unlink()

            with pytest.raises(InputError, match=r"files of part \d+ \(1 of \d+ parts\) were removed"):
                write(held, out, format=fmt, progress=deleted)
            with pytest.raises((FormatError, SourceError)):
                open_packs(out)
            write(held, out, format=fmt)
        assert there(system) == here(tmp_path / "near") == here(tmp_path / "whole")


def test_a_writer_that_came_a_moment_later_sees_what_the_first_one_made(
    made: Callable[..., Set], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one comes and goes between the look of the second and its claim: nothing of it is lost."""
    from packtrain.waiting.claim import Claim

    held, other = made(count=12), made(count=6)
    feed(tmp_path / "in", 1)
    cap = held.plan.spec.pack_length
    take = Claim.take_unless.__func__  # type: ignore[attr-defined]

    def planned(at: str, length: int) -> None:
        plan_lengths(held.lengths, at, lengths_folder=held.folder / "lengths", pack_length=length)

    def met(
        first: Callable[[str], Any],
        at: str,
        look: Callable[[], Any],
        came: list[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        if not came:
            came.append({})
            monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "another machine"))
            first(at)
            monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
            came[0] = look()
        return take(*args, **options)

    verbs: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
        "lengths": (
            lambda at: measure(held.source, held.template, at, workers=1),
            lambda at: measure(other.source, other.template, at, workers=1),
        ),
        "plan": (lambda at: planned(at, cap), lambda at: planned(at, 2 * cap)),
        "shards": (
            lambda at: write(held, at, format="webdataset"),
            lambda at: write(held, at, format="webdataset", maxcount=3),
        ),
        "stream": (
            lambda at: producer(tmp_path / "in", at).run(),
            lambda at: producer(tmp_path / "in", at, pack_length=90).run(),
        ),
    }
    for name, (first, second) in verbs.items():
        for scheme in ("gs", "disk"):
            with bucket("gs") as system:
                at = url(system, name) if scheme == "gs" else str(tmp_path / name)
                look = partial(there, system, name) if scheme == "gs" else partial(here, Path(at))
                came: list[dict[str, bytes]] = []
                with monkeypatch.context() as patch:
                    patch.setattr(Claim, "take_unless", classmethod(partial(met, first, at, look, came)))
                    with pytest.raises(ForeignArtefactError):
                        second(at)
                assert came[0] and look() == came[0]


def test_files_that_go_while_a_folder_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer removes its old states: whoever looks meanwhile looks again."""
    with bucket("gs") as system:
        for name in ("a", "b", "c"):
            system.pipe_file(f"/b/out/{name}", name.encode())
        find, looks = type(system).find, []

        def listed(self: Any, path: str, **options: Any) -> Any:
            found = find(self, path, **options)
            looks.append(path)
            if len(looks) == 1:
                system.rm("/b/out/b")
                system.pipe_file("/b/out/d", b"d")
            return found

        monkeypatch.setattr(type(system), "find", listed)
        place = Path(copies.bring(AT))
        assert sorted(path.name for path in place.iterdir()) == ["a", "c", "d"] and len(looks) == 2

        def gone(self: Any, path: str, **_: Any) -> bytes:
            raise FileNotFoundError(path)

        monkeypatch.setattr(type(system), "cat_file", gone)
        shutil.rmtree(place)
        with pytest.raises(SourceError, match="does not exist"):
            copies.bring(AT)
        assert len(looks) == 2 + copies.LOOKS
