"""Copies of what lies in a bucket, through s3fs from moto's server (in the environment of `make test-s3`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import LazyShardedDataset
from packtrain.errors import SourceError
from packtrain.remote import copies, ranges
from packtrain.sources import open_source

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: make test-s3")
server = pytest.importorskip("moto.server", reason="moto's server is not installed: make test-s3")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROWS = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(3000)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": moto,
        "PACKTRAIN_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranges, "PAUSE", 0.001)
    monkeypatch.setattr(copies, "PIECE", 10_000)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("data")
    yield system
    system.rm("data", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_is_a_folder(bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in (9, 10):
        bucket.pipe(f"data/set/p-{number}.jsonl", TEXT)
        (tmp_path / "near").mkdir(exist_ok=True)
        (tmp_path / "near" / f"p-{number}.jsonl").write_bytes(TEXT)
    near = open_source(tmp_path / "near")
    for text in (
        "s3://data/set",
        "s3://data/set/",
        "s3://data/set/p-*.jsonl",
        "s3://data/set/p-{9..10}.jsonl",
    ):
        far = open_source(text)
        assert (far.fingerprint, far.where(3000), far[5999]) == (near.fingerprint, near.where(3000), ROWS[-1])
    asked: list[tuple[int, int]] = []
    read = ranges.Remote._range

    def counted(self: Any, offset: int, stop: int) -> bytes:
        asked.append((offset, stop))
        return read(self, offset, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges.Remote, "_range", counted)
        open_source("s3://data/set")
        assert not asked  # copies of what has not changed
        bucket.pipe("data/set/p-9.jsonl", TEXT.replace(b'"7"', b'"8"'))
        assert open_source("s3://data/set").fingerprint != near.fingerprint
        assert len(asked) == -(-len(TEXT) // 10_000)  # of one file, in ranges
    assert "the file changed: s3://data/set/p-9.jsonl" in caplog.text
    for absent in ("s3://data/none", "s3://data/none-*.jsonl", "s3://nobody/set"):
        with pytest.raises(SourceError):
            open_source(absent)


def test_a_growing_directory_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    from test_lazy_sharded import UNEVEN, Feed, ids

    Feed(tmp_path / "out", UNEVEN).all()
    bucket.put(str(tmp_path / "out"), "data/out", recursive=True)
    far = LazyShardedDataset("s3://data/out", 0, 1, run=tmp_path / "run")
    assert ids(far) == ids(LazyShardedDataset(tmp_path / "out", 0, 1))
    assert [json.loads(bucket.cat(name))["stream"] for name in bucket.find("data/out/readers")] == ["s1"]


def rows_and_plan(folder: Path) -> tuple[Any, Path]:
    from packtrain.pipeline.measure import measure
    from packtrain.pipeline.plan import plan_lengths
    from packtrain.sources.encoded import EncodedTemplate

    lines = [
        json.dumps({"input_ids": [*range(1, 3 + n % 30)], "labels": [*range(1, 3 + n % 30)]})
        for n in range(200)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    source = open_source(folder / "rows.jsonl", kind="encoded")
    lengths = measure(source, EncodedTemplate(), "s3://data/lengths")
    plan_lengths(lengths, "s3://data/plan", lengths_folder="s3://data/lengths", pack_length=64)
    return source, folder / "rows.jsonl"


def test_artefacts_are_written_to_a_bucket(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, plan, an export of two processes, a growing directory; read back from another machine."""
    from packtrain.data import open_packs
    from packtrain.export import PackingProducer
    from packtrain.pipeline.export import export
    from packtrain.pipeline.verify_export import verify_export
    from packtrain.sources.encoded import EncodedTemplate
    from packtrain.store import shards

    source, rows = rows_and_plan(tmp_path)
    given: dict[str, Any] = {
        "format": "chunks",
        "source": source,
        "template": EncodedTemplate(),
        "maxcount": 8,
    }
    export("s3://data/plan", tmp_path / "near", **given)
    figures = export("s3://data/plan", "s3://data/chunks", workers=2, **given)
    assert figures["out"] == "s3://data/chunks"
    near, far = tmp_path / "near", "data/chunks"
    held = {p.relative_to(near).as_posix(): p.read_bytes() for p in near.rglob("*") if p.is_file()}
    there = {name.removeprefix(f"{far}/"): bucket.cat(name) for name in bucket.find(far)}
    held.pop(".packtrain/origin.json"), there.pop(".packtrain/origin.json")
    assert there == held
    tags = {name: bucket.info(name)["LastModified"] for name in bucket.find(far)}
    export("s3://data/plan", "s3://data/chunks", workers=2, **given)
    bucket.invalidate_cache()
    assert {name: bucket.info(name)["LastModified"] for name in bucket.find(far)} == tags
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "another machine"))
    assert verify_export(shards.at("s3://data/chunks"), source=source, template=EncodedTemplate())
    assert [len(pack) for pack in open_packs("s3://data/chunks")] == [len(pack) for pack in open_packs(near)]
    for out in (tmp_path / "grown", "s3://data/grown"):
        PackingProducer(rows, out, EncodedTemplate(), pack_length=64, packs_per_chunk=7, kind="encoded").run()
    from test_lazy_sharded import ids

    far_reader = LazyShardedDataset("s3://data/grown", 0, 1, run=tmp_path / "run")
    assert ids(far_reader) == ids(LazyShardedDataset(tmp_path / "grown", 0, 1))


def test_what_is_not_there_is_told_at_once(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs says "not found" of a bucket, of a file, and of a file that went between list and read."""
    from packtrain.remote.outputs import output

    monkeypatch.setattr(ranges, "PAUSE", 60.0)  # nothing is tried again
    for url in ("s3://nobody/x", "s3://nobody/set/"):
        with pytest.raises(SourceError, match="bucket does not exist") as told:
            copies.bring(url)
        assert told.value.hint is not None and "make the bucket" in told.value.hint
    said = r"s3://nobody/out cannot be .*bucket does not exist"
    with pytest.raises(SourceError, match=said), output("s3://nobody/out"):
        pytest.fail("opened")
    bucket.pipe("data/set/a", b"a")
    listed = s3fs.S3FileSystem.find
    monkeypatch.setattr(copies, "LOOKS", 2)

    def find(self: Any, path: str, **options: Any) -> Any:
        found = listed(self, path, **options)
        bucket.rm("data/set/a")
        bucket.pipe("data/set/b", b"b")
        monkeypatch.setattr(s3fs.S3FileSystem, "find", listed)
        return found

    monkeypatch.setattr(s3fs.S3FileSystem, "find", find)
    assert [path.name for path in Path(copies.bring("s3://data/set")).iterdir()] == ["b"]


def test_a_server_that_stalls_has_a_limit(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not 25 stalls of botocore and s3fs for each of ours."""
    import socket
    import time

    monkeypatch.setattr(ranges, "STALL", 0.2)
    monkeypatch.setattr(ranges, "_told", set())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.perf_counter()
        with pytest.raises(SourceError, match="could not be reached in 7 tries"):
            copies.bring("s3://data/set")
        assert time.perf_counter() - start < 60  # 7 x 2 x 0.2 s, and the pauses of botocore
    assert caplog.text.count("was not reached at once") == 1


@pytest.mark.parametrize("answered", [False, True])
def test_every_eleventh_request_fails(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """Or its answer is lost: the bytes are those of a disk, no claim is left, nothing is there twice."""
    from packtrain.pipeline.export import export
    from packtrain.sources.encoded import EncodedTemplate

    call, count = s3fs.S3FileSystem._call_s3, [0]

    async def failing(self: Any, *args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] % 11:
            return await call(self, *args, **options)
        if answered:
            await call(self, *args, **options)
        raise OSError("the connection was reset")

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", failing)
        source, _ = rows_and_plan(tmp_path)
        given: dict[str, Any] = {"format": "chunks", "source": source, "template": EncodedTemplate()}
        export("s3://data/plan", "s3://data/chunks", maxcount=20, **given)
    bucket.invalidate_cache()
    assert count[0] > 100
    export("s3://data/plan", tmp_path / "near", maxcount=20, **given)
    near = tmp_path / "near"
    held = {p.relative_to(near).as_posix(): p.read_bytes() for p in near.rglob("*") if p.is_file()}
    there = {name.removeprefix("data/chunks/"): bucket.cat(name) for name in bucket.find("data/chunks")}
    held.pop(".packtrain/origin.json"), there.pop(".packtrain/origin.json")
    assert there == held
    assert not [name for name in bucket.find("data") if "claim" in name or "partial" in name]


def test_one_of_two_writers_makes_a_name(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 itself refuses the second one, whatever both had seen before."""
    from packtrain import files
    from packtrain.remote.outputs import output

    with output("s3://data/out") as folder:
        assert files.publish_new(folder / "claim.000001", "mine")
        bucket.pipe("data/out/claim.000002", b"theirs")
        looks: list[str] = []

        def exists(self: Any, path: str, *_: Any, **__: Any) -> bool:
            looks.append(path)
            return len(looks) > 1

        monkeypatch.setattr(s3fs.S3FileSystem, "exists", exists)
        assert not files.publish_new(folder / "claim.000002", "mine")
    assert bucket.cat("data/out/claim.000002") == b"theirs" and len(looks) == 2


def test_writers_that_are_killed_go_on(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at random moments of an export and of a producer, in a cache of its own or in an old one."""
    import os
    import random
    import signal
    import subprocess
    import sys
    import time

    _, rows = rows_and_plan(tmp_path)
    bucket.rm("data/lengths", recursive=True)
    chance = random.Random(int(os.environ.get("PACKTRAIN_SOAK_SEED", "0")))
    kills = int(os.environ.get("PACKTRAIN_SOAK_KILLS", "3"))
    export = ["export", "s3://data/plan", "OUT", "-f", "chunks", "--maxcount", "1"]
    produce = [
        "produce",
        str(rows),
        "OUT",
        "--kind",
        "encoded",
        "-n",
        "64",
        "--once",
        "--packs-per-chunk",
        "1",
    ]

    def start(words: list[str], out: str) -> subprocess.Popen[bytes]:
        words = [out if word == "OUT" else word for word in words]
        paths = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "packtrain", *words, "--json"],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.DEVNULL,
        )

    def held(folder: str) -> dict[str, bytes]:
        bucket.invalidate_cache()
        found = {}
        for name in bucket.find(folder):
            if not name.endswith("origin.json") and not {"producer", "claim"} & set(name.split("/")):
                found[name.removeprefix(f"{folder}/")] = bucket.cat(name)
        return found

    def count(folder: str) -> int:
        bucket.invalidate_cache()
        return len(bucket.find(folder))

    for words in (
        ["measure", str(rows), "--kind", "encoded", "--out", "OUT"],
        ["plan", "s3://data/lengths", "-n", "64", "--out", "s3://data/plan", "--overwrite"],
    ):
        assert start(words, "s3://data/lengths").wait(300) == 0
    met = 0
    for name, words in {"chunks": export, "grown": produce}.items():
        near = tmp_path / name
        assert start(words, str(near)).wait(300) == 0
        whole = {p.relative_to(near).as_posix(): p.read_bytes() for p in near.rglob("*") if p.is_file()}
        whole = {n: d for n, d in whole.items() if not n.endswith("origin.json") and "producer/" not in n}
        for _ in range(kills):
            monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / f"machine {chance.randrange(3)}"))
            before, process = count(f"data/{name}"), start(words, f"s3://data/{name}")
            while process.poll() is None and count(f"data/{name}") == before:
                time.sleep(0.02)
            time.sleep(chance.random() * 0.5)
            met += process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            now = held(f"data/{name}")
            assert all(whole[n] == d for n, d in now.items() if n.endswith((".arrow", "END", "export.json")))
        assert start(words, f"s3://data/{name}").wait(300) == 0
        assert held(f"data/{name}") == whole
    assert met
    print(f"{met} kills at work")  # noqa: T201
