"""The Ray executor on a real local Ray: order, bytes of a serial run, killed workers, error types."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_work as work
import pytest

from packtrain.errors import InputError, SampleError
from packtrain.execute.ray import RETRIES, map_shards
from packtrain.extend import lookup, names
from packtrain.pipeline.measure import measure
from packtrain.sources import open_source
from packtrain.sources.encoded import EncodedTemplate
from packtrain.testing import snapshot

ray = pytest.importorskip("ray", reason="needs the extra packtrain[ray]")

# Ray's own code on Python 3.12+ and at shutdown; nothing of ours can avoid them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RANGES = [(i, i + 10) for i in range(0, 100, 10)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray with two CPUs on this machine; its workers import `local_work` by name."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def test_it_is_a_plug_in_that_loads_without_ray() -> None:
    assert "ray" in names("execute") and lookup("execute", "ray").map_shards is map_shards


def test_order_and_values_are_those_of_a_serial_run() -> None:
    serial = [work.add(5, shard) for shard in RANGES]
    for workers in (None, 1, 2):
        assert list(map_shards(work.add, RANGES, workers=workers, context=5)) == serial
    assert list(map_shards(work.slow_first, RANGES)) == RANGES
    assert list(map_shards(work.add, [])) == []
    assert os.getpid() not in set(map_shards(work.process_id, range(10)))


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    assert list(map_shards(work.die_once, RANGES, context=str(tmp_path / "died"))) == RANGES
    assert (tmp_path / "died").read_text() == "20"


def test_a_shard_that_always_kills_its_worker_is_named() -> None:
    with pytest.raises(InputError, match=f"ids 20 to 29 failed {RETRIES + 1} times"):
        list(map_shards(work.die, RANGES, context="kill"))


def test_errors_keep_their_type_and_name_the_shard() -> None:
    with pytest.raises(SampleError, match="nothing here") as caught:
        list(map_shards(work.fail, RANGES))
    assert caught.value.reason == "empty" and "ids 20 to 29" in caught.value.__notes__[0]
    with pytest.raises(InputError, match="cannot be sent"):
        list(map_shards(work.add, RANGES, context=work.WithLock()))
    with pytest.raises(InputError, match="workers is 0"):
        list(map_shards(work.add, RANGES, workers=0))


def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    from packtrain.execute.ray import _connect

    class Unconnected:
        @staticmethod
        def is_initialized() -> bool:
            return False

    with pytest.raises(InputError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        _connect(Unconnected, "127.0.0.1:1")


def test_measuring_gives_the_bytes_of_a_serial_run(tmp_path: Path) -> None:
    rows: list[Any] = [{"input_ids": list(range(i % 9)), "labels": [1] * (i % 9)} for i in range(3000)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    source = open_source(path, kind="encoded")
    measure(source, EncodedTemplate(), tmp_path / "serial", workers=1)
    measure(source, EncodedTemplate(), tmp_path / "ray", executor="ray", persist_every=500)
    assert snapshot(tmp_path / "ray", ["origin.json"]) == snapshot(tmp_path / "serial", ["origin.json"])
