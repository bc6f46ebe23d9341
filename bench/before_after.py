"""Planner, streams, exports, the collator and the import: two versions of the package, in one run.

    python -m bench.before_after OLD/src NEW/src [--rounds 40]

Two processes, one of each version, stay alive and take turns: each round runs the job once in both, the
second first in every other round. Figures are CPU seconds of the job alone, without the interpreter's
collections; the ratio is the median of the rounds' ratios, with its quartiles. On a machine whose clock moves
by half this holds to about 2 %, where minima of single runs do not. An import needs processes of its own.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOBS = ("plan", "stream", "collate", "export", "import")


def plan() -> Callable[[], Any]:
    """100,000 lognormal samples."""
    import numpy as np

    import packtrain as pt

    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, 100_000), 8, 8192).astype(int)
    return lambda: pt.plan(lengths, pack_length=8192)


def stream() -> Callable[[], Any]:
    """40,000 lognormal samples through windows of 1,000."""
    import numpy as np
    import torch

    from packtrain.data import StreamingPackedDataset

    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1.0, 40_000), 8, 8192).astype(int).tolist()
    row = torch.arange(8192)
    samples = [{"input_ids": row[:n], "labels": row[:n]} for n in lengths]
    return lambda: sum(1 for _ in StreamingPackedDataset(samples, pack_length=8192, window=1000))


def collate() -> Callable[[], Any]:
    """400 rows of 100 segments, 8,192 tokens, as numbers of samples are packed."""
    import torch

    from packtrain.collate import PaddingFreeCollator

    pack = [{"input_ids": torch.arange(81), "labels": torch.arange(81), "sample_id": n} for n in range(100)]
    made = PaddingFreeCollator()

    def rows() -> None:
        for _ in range(400):
            made([pack])

    return rows


class Source(list):  # type: ignore[type-arg]
    fingerprint = "bench"

    def where(self, number: int) -> str:
        return f"sample {number}"


class Encoded:
    def encode(self, sample: Any) -> Any:
        return dict(sample)

    def config(self) -> dict[str, Any]:
        return {"name": "encoded"}


def export() -> Callable[[], Any]:
    """6,000 encoded samples as chunks, media as tensors."""
    import numpy as np

    import packtrain as pt
    from packtrain.pipeline.export import export as write

    lengths = np.random.default_rng(0).integers(50, 800, 6000).tolist()
    ids = np.arange(800)
    samples = Source({"input_ids": ids[:n], "labels": ids[:n]} for n in lengths)
    scratch = tempfile.TemporaryDirectory()
    atexit.register(scratch.cleanup)
    root = Path(scratch.name)
    found = pt.Lengths(lengths)
    found.save(root / "lengths")
    pt.plan(found, pack_length=4096).save(root / "plan", origin={"lengths": str(root / "lengths")})
    number = iter(range(9999))

    def once() -> None:
        out = root / f"out{next(number)}"
        write(
            root / "plan", out, format="chunks", source=samples, template=Encoded(),
            options={"media": "tensor"},
        )  # fmt: skip

    return once


def serve(job: Callable[[], Any]) -> None:
    """Run the job once for every line that comes in, and say what it took."""
    job()
    gc.collect()
    gc.freeze()
    gc.disable()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        job()
        print(time.process_time() - start, flush=True)
        gc.collect()


class Version:
    """A process that has one version loaded, or for an import a new one each time."""

    def __init__(self, path: str, job: str) -> None:
        self.command = [sys.executable, __file__, path, "--one", "--jobs", job]
        self.process = None if job == "import" else self._start()
        if self.process is not None:
            assert self.process.stdout is not None
            self.process.stdout.readline()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> float:
        if self.process is None:
            return float(subprocess.check_output(self.command, text=True).split()[-1])
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", help="OLD/src NEW/src")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--jobs", nargs="+", default=JOBS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.path.insert(0, args.sources[0])
        if args.jobs == ["import"]:
            start = time.process_time()
            import packtrain  # noqa: F401

            print(time.process_time() - start)
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        serve({"plan": plan, "stream": stream, "collate": collate, "export": export}[args.jobs[0]]())
        return
    for job in args.jobs:
        versions = [Version(path, job) for path in args.sources]
        rounds = []
        for number in range(args.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            took = {k: versions[k].seconds() for k in order}
            rounds.append(took[1] / took[0])
        for version in versions:
            version.close()
        low, middle, high = (round(x, 3) for x in statistics.quantiles(rounds, n=4))
        print(json.dumps({"job": job, "ratio": middle, "quartiles": [low, high]}), flush=True)


if __name__ == "__main__":
    main()
