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
