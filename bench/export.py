"""Exports against `tar`, in memory and in number; reading chunks back.

    python -m bench.export                 # throughput and memory, on 1.5 GB of random media
    python -m bench.export --small 100000  # many small samples: exported and verified
    python -m bench.export --chunks        # tokens a second of text chunks

Ratios are taken in one run, by turns, both sides on the same disk, caches warm and written data synced.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.extend import Measured
from packtrain.pipeline.export import export
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import plan_lengths
from packtrain.pipeline.verify_export import verify_export
from packtrain.planning.packplan import PackPlan
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource


class Words:
    """One token a word, 64 an image; no media are opened."""

    def measure(self, sample: dict[str, Any]) -> Measured:
        return Measured(len(self.tokens(sample)))

    def tokens(self, sample: dict[str, Any]) -> list[int]:
        out: list[int] = []
        for message in sample["messages"]:
            for part in message["content"]:
                out += [len(w) for w in part["text"].split()] if part["type"] == "text" else [9] * 64
        return out

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        import torch

        ids = torch.tensor(self.tokens(sample))
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(len(ids))}

    def config(self) -> dict[str, Any]:
        return {"template": "bench words"}


def planned(folder: Path, rows: Iterator[dict[str, Any]], cap: int) -> tuple[Any, Path]:
    path = folder / "train.jsonl"
    with open(path, "w") as handle:
        for row in rows:
            handle.write(json.dumps(row) + "\n")
    source = ChatSource(open_source(path))
    lengths = measure(source, Words(), folder / "lengths", workers=1)
    plan_lengths(lengths, folder / "plan", lengths_folder=folder / "lengths", pack_length=cap)
    return source, folder / "plan"


def with_images(count: int, name: str = "m{}.jpg") -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {
            "messages": [
                {"role": "user", "content": f"<image>\nwhat is in picture {i}?"},
                {"role": "assistant", "content": f"noise number {i}"},
            ],
            "images": [name.format(i)],
        }


def throughput(folder: Path, megabytes: int, each: int, workers: int, turns: int = 5) -> None:
    """`tar` and export of the same media, by turns; `tar` alone, and with its result synced as ours is."""
    count = megabytes * 1_000_000 // each
    rng = np.random.default_rng(0)
    for i in range(count):
        (folder / f"m{i}.jpg").write_bytes(rng.bytes(each))
    source, plan = planned(folder, with_images(count), 2048)
    names = folder / "names.txt"
    names.write_text("".join(f"m{i}.jpg\n" for i in range(count)))
    ratios, unsynced = [], []
    maxcount = 1000 if workers == 1 else max(1, len(PackPlan.load(plan)) // (4 * workers))
    for turn in range(turns):
        out, tar = folder / "out", folder / "by_tar.tar"
        shutil.rmtree(out, ignore_errors=True)
        tar.unlink(missing_ok=True)
        os.sync()
        start = time.perf_counter()
        subprocess.run(["tar", "cf", str(tar), "-C", str(folder), "-T", str(names)], check=True)
        copied = time.perf_counter() - start
        with open(tar, "rb+") as handle:
            os.fsync(handle.fileno())
        theirs = time.perf_counter() - start
        size = tar.stat().st_size
        tar.unlink()
        os.sync()
        before = os.times()
        start = time.perf_counter()
        told = export(plan, out, source=source, task="multi_turn", workers=workers, maxcount=maxcount)
        ours = time.perf_counter() - start
        spent = [b - a for a, b in zip(before, os.times(), strict=True)]
        ratios.append(theirs / ours * told["bytes"] / size)
        unsynced.append(copied / ours * told["bytes"] / size)
        print(
            f"turn {turn}: tar {size / copied / 1e6:,.0f}, synced {size / theirs / 1e6:,.0f}, export "
            f"{told['bytes'] / ours / 1e6:,.0f} MB/s (CPU {sum(spent[:4]):.2f} of {ours:.2f} s), "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(
        f"export, synced, at {np.median(ratios):.0%} of tar's throughput with its result synced, "
        f"{np.median(unsynced):.0%} of tar's that syncs nothing (medians of {len(ratios)})"
    )


def memory(folder: Path) -> None:
    """Peak memory of exports of growing sets, each in a process of its own."""
    script = (
        "import sys, resource; from bench.export import ChatSource, open_source, export;"
        "s = ChatSource(open_source(sys.argv[1] + '/train.jsonl'));"
        "export(sys.argv[1] + '/plan', sys.argv[1] + '/out', source=s, task='multi_turn');"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    for megabytes in (50, 200, 800):
        place = folder / f"m{megabytes}"
        place.mkdir()
        rng = np.random.default_rng(0)
        count = megabytes * 5
        for i in range(count):
            (place / f"m{i}.jpg").write_bytes(rng.bytes(200_000))
        planned(place, with_images(count), 2048)
        done = subprocess.run(
            [sys.executable, "-c", script, str(place)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(f"{megabytes} MB of media: peak {done.stdout.strip()} MB of memory")
        shutil.rmtree(place)


def small(folder: Path, count: int) -> None:
    """Many small samples, exported and verified."""
    (folder / "m.jpg").write_bytes(np.random.default_rng(0).bytes(900))
    start = time.perf_counter()
    source, plan = planned(folder, with_images(count, "m.jpg"), 2048)
    print(f"{count:,} samples measured and planned: {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    told = export(plan, folder / "out", source=source)
    wrote = time.perf_counter() - start
    start = time.perf_counter()
    done = verify_export(folder / "out", source=source, template=Words())
    checked = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"exported {told['samples']:,} samples in {told['packs']:,} packs: {wrote:.1f} s ({told['task']})")
    print(f"verified: {checked:.1f} s; {done['samples']}; peak memory {peak} MB")


def chunks(folder: Path) -> None:
    """Text chunks, read pack by pack."""
    from packtrain.data import open_packs  # here: worker processes of the others import this module

    def texts() -> Iterator[dict[str, Any]]:
        for i in range(20_000):
            words = " ".join(["word"] * (50 + i * 37 % 400))
            yield {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": words}]}

    source, plan = planned(folder, texts(), 8192)
    told = export(plan, folder / "out", format="chunks", source=source, template=Words(), maxcount=200)
    packs = open_packs(folder / "out")
    for _ in range(2):
        start = time.perf_counter()
        tokens = sum(len(one["input_ids"]) for i in range(len(packs)) for one in packs[i])
        spent = time.perf_counter() - start
    print(f"{tokens:,} tokens of {told['packs']:,} packs: {tokens / spent / 1e6:.1f} M tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, help="only: export and verify so many small samples")
    parser.add_argument("--chunks", action="store_true", help="only: read text chunks")
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=1, help="processes that export")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="throughput only")
    parser.add_argument("--each", type=int, default=200_000, help="bytes of a medium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.small:
            small(folder, options.small)
        elif options.chunks:
            chunks(folder)
        else:
            throughput(folder, options.megabytes, options.each, options.workers, options.turns)
            if not options.no_memory:
                memory(folder)


if __name__ == "__main__":
    main()
