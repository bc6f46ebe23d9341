"""Folders that are written behind a URL: there first, whole, in order, once; two writers never mix."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import packtrain
from packtrain import files
from packtrain.errors import InputError, SourceError, WaitTimeoutError
from packtrain.pipeline.plan import plan_lengths
from packtrain.remote import copies
from packtrain.remote.outputs import output, sending
from packtrain.remote.places import kept, spelled, url_of
from packtrain.sources.encoded import EncodedTemplate, open_source
from packtrain.testing.crash import Stopped, stopped_after
from packtrain.waiting import claim as claims
from packtrain.waiting.claim import Claim
from remote_site import afresh, bucket

pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    afresh(tmp_path, monkeypatch)


@pytest.fixture
def far() -> Iterator[Any]:
    with bucket("gs") as system:
        yield system


def below(system: Any) -> dict[str, bytes]:
    """What is in the bucket's folder `out`."""
    return {name.removeprefix("/b/out/"): system.cat_file(name) for name in system.find("/b/out")}


def write(texts: dict[str, str]) -> Path:
    with output("gs://b/out") as folder:
        for name, text in texts.items():
            files.publish_text(folder / name, text)
    return folder


def test_a_file_is_there_before_it_is_here(far: Any) -> None:
    seen = []
    before = files.observer
    files.observer = lambda kind, path: seen.append((kind, path.name, below(far).get(path.name)))
    try:
        folder = write({"one": "1", "deep/two": "2"})
        with output(folder) as again:  # a place of copies is as good as the URL
            files.remove(again / "one")
            files.move(again / "deep" / "two", again / "three")
    finally:
        files.observer = before
    assert far.puts == ["/b/out/one", "/b/out/deep/two", "/b/out/three"]
    assert below(far) == {"three": b"2"}
    assert (folder / "three").read_text() == "2" and not (folder / "one").exists()
    kinds = [kind for kind, name, _ in seen if name == "one" and kind != "fsync_folder"]
    assert kinds == ["write", "fsync", "send", "rename", "unsend", "unlink"]
    assert [held for kind, name, held in seen if name == "one"][2:4] == [b"1", b"1"]
    files.publish_text(folder / "later", "nothing goes there outside")
    assert "later" not in below(far)
    assert spelled(f"{folder}/x holds") == "gs://b/out/x holds" and kept(folder) == "gs://b/out"
    with output(folder.parent.parent / "plain") as plain:
        assert plain == folder.parent.parent / "plain"


@pytest.mark.parametrize(
    "name", ["a b", "ü" * 99, "x%20y", "h#1", "tail//", "~", "claim", ".notes", "o'k", "a\nb"]
)
def test_a_name_that_is_written_is_read_again(
    name: str, far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in ("one", "two"):
        monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / machine))
        with output(f"gs://b/{name}") as folder:
            if machine == "one":
                files.publish_text(folder / "file", name)
            assert (folder / "file").read_text() == name
            assert url_of(folder / "file") == f"gs://b/{name.rstrip('/')}/file"
    assert far.find("/b") == [f"/b/{name.rstrip('/')}/file"]


@pytest.mark.parametrize("md5", [False, True])
@pytest.mark.parametrize("fault", ["lost", "cut", "short", "flip"])
def test_what_came_otherwise_is_sent_again(far: Any, fault: str, md5: bool) -> None:
    far.md5[:] = [True] * md5
    far.odd[:] = [fault, fault]
    write({"one": "the text"})
    assert below(far) == {"one": b"the text"} and not far.odd
    far.odd[:] = [fault] * 50
    with pytest.raises(SourceError, match=r"gs://b/out/two could not be reached in 7 tries"):
        write({"two": "the text", "three": ""})
    folder = Path(copies.place_of("gs://b/out"))
    assert not (folder / "two").exists() and not (folder / "three").exists()
    assert "three" not in below(far)
    far.odd.clear()
    write({"one": "the text", "two": "the text", "three": ""})
    assert below(far) == {"one": b"the text", "two": b"the text", "three": b""}


def test_what_came_is_not_sent_again_where_the_look_at_it_fails(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, faults = far.info, [OSError("the way is broken")] * 3

    def info(path: str, **options: Any) -> Any:
        if faults and path.endswith("one") and far.puts:
            raise faults.pop()
        return look(path, **options)

    monkeypatch.setattr(far, "info", info)
    write({"one": "the text"})
    assert not faults and far.puts == ["/b/out/one"] and below(far) == {"one": b"the text"}


def test_work_that_may_not_remove_ends_and_names_what_it_left(
    far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Credentials to list, read and write; a removal that the work needs stays an error."""

    def forbidden(path: str) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(far, "rm_file", forbidden)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n' * 3, encoding="utf-8")
    for attempt in range(2):  # the second finds what was left
        caplog.clear()
        made = packtrain.measure(open_source(rows), EncodedTemplate(), "gs://b/out")
        told = [line for line in caplog.messages if "may not be removed" in line]
        assert made.tokens.tolist() == [2, 2, 2] and len(told) == 1, attempt
        assert ("gs://b/out/claim/beat.json" in told[0]) is (attempt == 0)  # then nothing is written
        assert "gs://b/out/partial/key.json" in told[0]
    caplog.clear()
    plan_lengths(made, "gs://b/plan", pack_length=8)
    (line,) = [line for line in caplog.messages if "may not be removed" in line]
    assert "gs://b/plan/claim/beat.json" in line and far.exists("/b/plan/plan.json")
    with pytest.raises(SourceError, match="may not be removed"):
        packtrain.measure(open_source(rows), EncodedTemplate(), "gs://b/out", overwrite=True)


@pytest.mark.parametrize("md5", [False, True])
def test_what_is_there_is_not_sent_again(
    far: Any, md5: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.md5[:] = [True] * md5
    write({"one": "1", "two": "2"})
    write({"one": "1", "two": "3"})
    assert far.puts == ["/b/out/one", "/b/out/two", "/b/out/two"]
    far.pipe_file("/b/out/one", b"x")  # somebody else's
    write({"one": "1"})
    assert below(far) == {"one": b"1", "two": b"3"} and len(far.puts) == 4
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "another machine"))
    folder = write({"one": "1"})
    assert (folder / "two").read_text() == "3"  # what is there was brought
    assert len(far.puts) == 4


def test_a_writer_that_is_stopped_anywhere_goes_on(far: Any, tmp_path: Path) -> None:
    """What is here is there, whatever happens; the marker never before the rest."""

    def verb() -> None:
        with output("gs://b/out") as folder:
            files.remove(folder / "marker")
            for number in range(3):
                files.publish_text(folder / f"part-{number}", str(number))
            files.remove_tree(folder / "old")
            files.publish_text(folder / "marker", "all")

    whole = {"part-0": b"0", "part-1": b"1", "part-2": b"2", "marker": b"all"}
    for stop in range(1, 60):
        far.store.clear()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        far.pipe_file("/b/out/old/a", b"a")
        try:
            with stopped_after(stop):
                verb()
        except Stopped:
            pass
        else:
            break
        there, folder = below(far), Path(copies.place_of("gs://b/out"))
        assert "marker" not in there or there == whole
        for path in folder.rglob("*"):
            if path.is_file() and not files.is_leftover(path.name):
                name = path.relative_to(folder).as_posix()
                assert there.get(name) == path.read_bytes() or name in ("marker", "old/a"), (stop, name)
        verb()
        assert below(far) == whole
    else:
        pytest.fail("it never came to its end")
    assert stop > 15


def test_what_cannot_be_written_is_refused_up_front(far: Any) -> None:
    far.pipe_file("/b/file", b"x")
    for url, said in (
        ("https://host/out", "takes no files"),
        ("gs://b/file", "is a file"),
        ("gs://", "no file"),
        ("gs://b/" + "ü" * 200, "names no file"),
        ("gs://b/a/../out", "names no file"),
        ("gs://b/run[1]", "a pattern of names"),
        ("gs://b/out?v=1", "a pattern of names"),
        ("gs://b/{a,b}/out", "a pattern of names"),
        ("gs://b/*/out", "a pattern of names"),
        ("gs://b//out", "its files would be behind gs://b/out"),
        ("gs://user:key@b/out", "gs://b/out cannot be written: its files would be behind gs://b/out"),
    ):
        with pytest.raises(InputError, match=said), output(url):
            pytest.fail("opened")


def test_one_of_several_makes_a_new_file(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with output("gs://b/out") as folder:
        assert files.publish_new(folder / "key", "mine")
        far.pipe_file("/b/out/other", b"theirs")
        assert not files.publish_new(folder / "other", "mine")
        with monkeypatch.context() as patch:  # it was made between the look and the write
            patch.setattr(
                type(far), "exists", lambda self, path, looks=[]: bool(looks) or looks.append(1) or False
            )
            far.pipe_file("/b/out/late", b"theirs")
            assert not files.publish_new(folder / "late", "mine")
        assert files.publish_new(folder / "key", "mine")  # an answer was lost: it is this writer's
    assert below(far) == {"key": b"mine", "other": b"theirs", "late": b"theirs"}


def test_a_claim_holds_for_other_machines(far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(claims.Owner, "here", lambda: claims.Owner("f" * 16, "node7", "another", 4, 5))
        with output("gs://b/out") as folder:
            theirs = Claim.take(folder / "claim", threaded=False)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "another machine"))
    with output("gs://b/out") as there:
        assert there != folder
        with pytest.raises(WaitTimeoutError, match="node7"):
            Claim.take(there / "claim", threaded=False, timeout_s=0.05)
        mine = Claim.take(
            there / "claim", threaded=False, stale_s=0.01, timeout_s=5
        )  # it gave no sign of life
        assert mine.number == 2
        with pytest.raises(InputError, match="took over"):
            theirs.confirm()
        mine.confirm()
        mine.release(tidy=True)
    assert below(far) == {}


def test_where_a_write_is_a_commit_claims_stay_here() -> None:
    with bucket("hf") as system:
        with output("hf://datasets/org/claim/out") as folder:
            with Claim.take(folder / "producer", threaded=False):
                files.publish_text(folder / "partial" / "x", "x")
                files.publish_text(folder / "one", "1")
            assert url_of(folder / "one") == "hf://datasets/org/claim/out/one"
            files.remove_tree(folder / "partial")
        assert [name.rpartition("/")[2] for name in system.find("/datasets")] == ["one"]
        assert url_of(folder / "producer") is not None


def test_large_files_that_were_sent_make_room_first(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_REMOTE_GB", "6e-3")
    far.pipe_file("/b/data", bytes(2_000_000))
    read = copies.bring("gs://b/data")
    with output("gs://b/out") as folder:
        for number in range(6):
            with files.publish(folder / f"pack-{number:06d}-000.tar") as handle:
                handle.write(bytes([number]) * 1_500_000)
        files.publish_text(folder / "key.json", "{}")
        sizes = [copies.size_of(folder / f"pack-{number:06d}-000.tar") for number in range(6)]
        there = [path.name for path in folder.iterdir()]
    assert sizes == [1_500_000] * 6 and os.path.isfile(read) and "key.json" in there
    assert 1 <= len(there) <= 3
    with output("gs://b/out") as folder:  # what was let go does not come back for the writer
        assert len(list(folder.iterdir())) <= 3


def test_sending_alone_asks_for_nothing(far: Any) -> None:
    folder = Path(copies.place_of("gs://b/out"))
    with sending(folder):
        files.publish_text(folder / "one", "1")
    assert below(far) == {"one": b"1"}


def test_places_in_texts_are_spelled_as_urls_in_linear_time() -> None:
    place = copies.place_of("gs://b/out")
    assert (
        spelled(f"'{place}/a' and {place} (in {place}/b)")
        == "'gs://b/out/a' and gs://b/out (in gs://b/out/b)"
    )
    for plain in ("", "/packtrain-remote/", "a/packtrain-remote/gs", "x/packtrain-remote/.notes/1"):
        assert spelled(plain) == plain
    for long in ("a" * (1 << 22), "/packtrain-remote" * (1 << 18), f"{'a' * (1 << 22)}{place}"):
        spelled(long)  # would take minutes
