"""Work functions for the executor's tests: module level, so that spawned workers find them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from packtrain.errors import SampleError


def add(context: int, shard: tuple[int, int]) -> list[int]:
    return [context + i for i in range(*shard)]


def slow_first(context: Any, shard: tuple[int, int]) -> tuple[int, int]:
    time.sleep(0.5 if shard[0] == 0 else 0.0)
    return shard


def process_id(context: Any, shard: Any) -> int:
    return os.getpid()


def environment(context: str, shard: Any) -> str | None:
    return os.environ.get(context)


def die(context: str, shard: tuple[int, int]) -> tuple[int, int]:
    if shard[0] == 20:
        if context == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    time.sleep(0.05)
    return shard


def fail(context: Any, shard: tuple[int, int]) -> tuple[int, int]:
    if shard[0] == 20:
        raise SampleError("empty", "nothing here", hint="look elsewhere")
    return shard


class Stubborn(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def fail_stubbornly(context: Any, shard: Any) -> None:
    raise Stubborn("cannot travel", "at all")


def unpicklable_answer(context: Any, shard: Any) -> Any:
    return lambda: shard


def forever(context: Any, shard: Any) -> None:
    time.sleep(600)


def lengths(context: tuple[Any, list[str]], shard: tuple[int, int]) -> list[int]:
    """Measure texts with a template."""
    template, texts = context
    samples = [
        {
            "messages": [
                {"role": "user", "content": "Go on"},
                {"role": "assistant", "content": texts[i]},
            ]
        }
        for i in range(*shard)
    ]
    return [int(length) for length in template.measure_batch(samples)]


class RustTokenizer:
    """Measures with the tokenizers library alone: starts fast, threads and all."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def measure_batch(self, samples: list[Any]) -> list[int]:
        texts = [sample["messages"][1]["content"] for sample in samples]
        return [len(encoding) for encoding in self.tokenizer.encode_batch(texts)]


class WithLock:
    """A template that holds what cannot be sent."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()


class NeedsGpu:
    """A template whose measuring touches the GPU."""

    def measure_batch(self, samples: list[Any]) -> list[int]:
        import torch

        torch.zeros(1, device="cuda")
        return [1] * len(samples)


def die_once(context: str, shard: tuple[int, int]) -> tuple[int, int]:
    """The first process that gets shard 20 notes it in the file `context` and is killed."""
    if shard[0] == 20 and not os.path.exists(context):
        with open(context, "w") as handle:
            handle.write(str(shard[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    return shard


def doubled(context: Any, task: Any) -> Any:
    """Twice the task; negative ones take a while, `die` and `fail` are what they say."""
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "fail":
        raise SampleError("empty", "nothing here")
    if isinstance(task, int) and task < 0:
        time.sleep(0.1)
    return task * 2
