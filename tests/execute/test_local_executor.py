"""The local executor: order, equality with serial, deaths, exceptions, and no hang (PB-35, PB-86)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import local_work as work
import pytest

from packtrain.errors import InputError, SampleError
from packtrain.execute.local import available_cpus, map_shards
from packtrain.extend import lookup, names

RANGES = [(i, i + 10) for i in range(0, 100, 10)]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers import `local_work` by name."""
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def test_it_is_a_plug_in() -> None:
    assert "local" in names("execute") and lookup("execute", "local").map_shards is map_shards


def test_one_worker_is_this_process() -> None:
    assert list(map_shards(work.process_id, [0, 1], workers=1)) == [os.getpid()] * 2
    assert list(map_shards(lambda c, s: c + s, [1, 2], workers=1, context=1)) == [2, 3]  # nothing is pickled
    assert list(map_shards(work.process_id, [0], workers=8)) == [os.getpid()]  # one shard needs no pool
    assert list(map_shards(work.add, [], workers=4)) == []


def test_parallel_equals_serial_in_order() -> None:
    serial = list(map_shards(work.add, RANGES, workers=1, context=5))
    assert list(map_shards(work.add, RANGES, workers=3, context=5)) == serial
    assert list(map_shards(work.slow_first, RANGES, workers=2)) == RANGES
    pids = set(map_shards(work.process_id, range(40), workers=2))
    assert os.getpid() not in pids and 1 <= len(pids) <= 2


def test_bad_worker_count() -> None:
    assert available_cpus() >= 1
    for count in (0, -2):
        with pytest.raises(InputError, match="workers"):
            map_shards(work.add, RANGES, workers=count)


@pytest.mark.parametrize(("how", "said"), [("kill", "SIGKILL"), ("exit", "exit code 3")])
def test_a_dead_worker_is_named_with_its_range(how: str, said: str) -> None:
    results = map_shards(work.die, RANGES, workers=2, context=how)
    begin = time.monotonic()
    with pytest.raises(InputError, match="ids 20 to 29") as caught:
        list(results)
    assert said in str(caught.value) and caught.value.hint
    assert time.monotonic() - begin < 60  # it ended by itself; no time limit of the test runner did


def test_exceptions_keep_their_type() -> None:
    with pytest.raises(SampleError, match="nothing here") as caught:
        list(map_shards(work.fail, RANGES, workers=2))
    assert caught.value.reason == "empty" and caught.value.hint == "look elsewhere"
    notes = "\n".join(caught.value.__notes__)
    assert "ids 20 to 29" in notes and "local_work.py" in notes
    with pytest.raises(SampleError) as direct:
        list(map_shards(work.fail, RANGES, workers=1))
    assert direct.value.reason == "empty"


def test_what_cannot_come_back_is_told() -> None:
    with pytest.raises(InputError, match="Stubborn: cannot travel"):
        list(map_shards(work.fail_stubbornly, RANGES, workers=2))
    with pytest.raises(Exception, match="pickle"):
        list(map_shards(work.unpicklable_answer, RANGES, workers=2))


def test_what_cannot_be_sent_is_refused_before_a_process_starts_pb86() -> None:
    for workload, context, name in (
        (work.add, (1, work.WithLock()), "WithLock"),
        (work.add, work.WithLock(), "WithLock"),
        (lambda c, s: s, None, "function"),
    ):
        with pytest.raises(InputError, match=f"{name} cannot be sent to a worker") as caught:
            map_shards(workload, RANGES, workers=2, context=context)
        assert "workers=1" in str(caught.value.hint)


def test_measuring_that_needs_a_gpu_is_told_pb86() -> None:
    with pytest.raises(Exception, match=r"CUDA|cuda|NVIDIA"):
        list(map_shards(work.lengths, [(0, 1), (1, 2)], workers=2, context=(work.NeedsGpu(), ["a", "b"])))


def test_stopping_early_ends_the_workers() -> None:
    import multiprocessing

    results = map_shards(work.slow_first, RANGES, workers=2)
    assert next(results) == (0, 10)
    results.close()
    assert multiprocessing.active_children() == []


def test_interrupt_cancels() -> None:
    """Ctrl-C in the parent while workers are busy: KeyboardInterrupt, no process left."""
    code = (
        "import multiprocessing, signal, local_work\n"
        "from packtrain.execute.local import map_shards\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
        "try:\n"
        "    print('ready', flush=True)\n"
        "    list(map_shards(local_work.forever, [1, 2, 3], workers=2))\n"
        "except KeyboardInterrupt:\n"
        "    print('cancelled', len(multiprocessing.active_children()))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert out.strip() == "cancelled 0"


def test_a_script_without_main_guard_works_or_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (
        "import local_work\nfrom packtrain.execute.local import map_shards\n"
        "def own(context, shard): return local_work.add(context, shard)\n"
        "print(list(map_shards({work}, [(0, 1), (1, 2)], workers=2, context=0)))\n"
    )
    script.write_text(text.format(work="local_work.add"))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[[0], [1]]\n", run.stderr
    script.write_text(text.format(work="own"))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and not run.stdout
    assert "InputError: workers need own from" in run.stderr and "__main__" in run.stderr


@pytest.mark.parametrize("setting", [None, "true", "false"])
def test_tokenizers_parallelism_is_left_alone(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if setting is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting)
    seen = set(map_shards(work.environment, range(4), workers=2, context="TOKENIZERS_PARALLELISM"))
    assert seen == {setting} and os.environ.get("TOKENIZERS_PARALLELISM") == setting


@pytest.fixture(scope="module")
def measuring(data: Path) -> tuple[Any, list[str], list[int]]:
    """A tokenizer that was already used in a batch in this process, 200 long texts, their lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "processors" / "qwen2_vl" / "tokenizer.json"))
    texts = [(f"row {i} " + "tokens and more tokens, " * 500)[:12_000] for i in range(200)]
    assert len(tokenizer.encode_batch(texts[:64])) == 64
    template = work.RustTokenizer(tokenizer)
    serial = map_shards(work.lengths, TWENTIES, workers=1, context=(template, texts))
    return template, texts, [length for part in serial for length in part]


TWENTIES = [(i, i + 20) for i in range(0, 200, 20)]


@pytest.mark.parametrize("setting", [None, "true", "false"])
def test_measuring_long_texts_after_the_tokenizer_was_used_pb35(
    setting: str | None, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if setting is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting)
    template, texts, expected = measuring
    parts = list(map_shards(work.lengths, TWENTIES, workers=4, context=(template, texts)))
    assert [length for part in parts for length in part] == expected
