"""A corpus from end to end: measuring 100 k and 1 M image and text records with one worker.

    python bench/corpus.py --folder /tmp/corpus                     all of it, some minutes
    python bench/corpus.py --folder /tmp/corpus --records 20000 --lines 1000000

Prints samples per second of CPU (decoding records, media headers, rendering, counting, publishing), growth
of the memory from the smaller to the larger corpus (sampled over the second half and until the lengths are
published: start-up has a peak of its own that would hide it), the most that a killed run measures again,
and how long a JSONL file of 10 M lines takes to open again. Each measurement is a process of its own; files
are read once before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from packtrain.pipeline.publish import LEAST, PARTS, UNIT

IMAGES = 400
TARGETS = {"samples/s/core": 3000, "RSS growth MB": 100, "resume extra %": 1.0, "reopen s": 1.0}


def make(folder: Path, records: int, words: list[str]) -> Path:
    """A JSONL of chats about small images; the shorter one is the beginning of the longer one."""
    from PIL import Image

    (folder / "img").mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for i in range(IMAGES):
        path = folder / "img" / f"{i}.jpg"
        size = rng.randint(64, 1600), rng.randint(64, 1600)
        if not path.exists():
            Image.new("RGB", size, (i % 255, 3, 9)).save(path, quality=30)
    path = folder / f"{records}.jsonl"
    if path.exists():
        return path
    with open(path.with_suffix(".part"), "w", encoding="utf-8") as handle:
        for i in range(records):
            count, at = rng.randint(5, 60), rng.randint(0, len(words) - 200)
            asked, said = words[at : at + count], words[at + count : at + 2 * count]
            turns = [
                {"role": "user", "content": "<image>" + " ".join(asked)},
                {"role": "assistant", "content": " ".join(said)},
            ]
            handle.write(json.dumps({"messages": turns, "images": [f"img/{i % IMAGES}.jpg"]}) + "\n")
    path.with_suffix(".part").rename(path)
    return path


def measure(source: str, processor: str, out: str) -> None:
    """One measurement; its figures as one JSON line."""
    import threading

    import psutil

    import packtrain as pt
    from packtrain.sources import open_source
    from packtrain.sources.chat import ChatSource
    from packtrain.template import HFTemplate, load_processor

    template = HFTemplate(load_processor(processor))
    chats = ChatSource(open_source(source))
    reached: list[int] = []
    earlier: list[int] = []
    highest: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.05):
            held = psutil.Process().memory_info().rss
            if reached and reached[-1] >= len(chats) // 2:
                highest.append(held)
            elif reached:
                earlier.append(held)

    def progress(done: int, total: int) -> None:
        if not reached:
            starts.append((time.perf_counter(), time.process_time()))
        reached.append(done)
        print(done, file=sys.stderr, flush=True)

    threading.Thread(target=sample, daemon=True).start()
    starts = [(time.perf_counter(), time.process_time())]

    lengths = pt.measure(chats, template, out, workers=1, progress=progress)
    ended.set()
    figures = {
        "samples": len(lengths),
        "wall": time.perf_counter() - starts[0][0],
        "cpu": time.process_time() - starts[0][1],
        "begin": starts[1][1] - starts[0][1],
        "rss": max(highest) / 1e6,
        "half": highest[0] / 1e6,
        "earlier": max(earlier) / 1e6,
        "digest": lengths.digest,
        "first": reached[0],
    }
    print(json.dumps(figures))


def child(*args: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def killed(source: Path, processor: str, out: Path, seconds: float) -> dict[str, Any]:
    """Kill a run some seconds after its first part, finish it, and see what was measured twice."""
    log = out.with_suffix(".log")
    with open(log, "w") as handle:
        command = [sys.executable, __file__, "--one", str(source), processor, str(out)]
        process = subprocess.Popen(command, stderr=handle)
        while not list((out / "partial").glob("*.npz")):
            time.sleep(0.1)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    reached = int(log.read_text().split()[-1])
    again = child("--one", str(source), processor, str(out))
    begun = again["first"] - UNIT
    part = max(LEAST, -(-again["samples"] // PARTS))
    twice = reached + UNIT - begun  # with the range that was being measured
    return {**again, "killed": reached, "twice": 100 * twice / again["samples"], "part": part}


def reopen(folder: Path, lines: int) -> tuple[float, float]:
    """(seconds of the first opening, seconds of the second) of a JSONL of short lines."""
    from packtrain.sources import open_source

    path = folder / f"lines_{lines}.jsonl"
    if not path.exists():
        with open(path, "w") as handle:
            for start in range(0, lines, 10_000):
                block = range(start, min(start + 10_000, lines))
                handle.write("".join(f'{{"text": "record {i}"}}\n' for i in block))
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        source = open_source(path)
        times.append(time.perf_counter() - begun)
        assert len(source) == lines and source[lines - 1]["text"] == f"record {lines - 1}"
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("corpus"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--kill-after", type=float, default=20.0, help="seconds after the first part")
    parser.add_argument("--one", nargs=3, metavar=("SOURCE", "PROCESSOR", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one)
        return
    processor = str(args.data / "processors" / "qwen2_5_vl")
    text = (args.data / "text_sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8")[:400_000]
    found: dict[str, float] = {}
    runs = []
    stamp = f"{os.getpid()}"
    for records in (args.records // 10, args.records):
        source = make(args.folder, records, text.split())
        source.read_bytes()
        runs.append(child("--one", str(source), processor, str(args.folder / f"l_{records}_{stamp}")))
        run = runs[-1]
        print(
            f"{records:>10,} records: {run['wall']:.1f} s, {run['cpu']:.1f} s CPU, "
            f"{records / run['cpu']:,.0f} samples/s/core ({run['begin']:.1f} s to the first range), "
            f"{run['rss']:,.0f} MB ({run['half']:,.0f} half-way, {run['earlier']:,.0f} at most before)",
            flush=True,
        )
    found["samples/s/core"] = args.records / runs[-1]["cpu"]
    found["RSS growth MB"] = runs[-1]["rss"] - runs[0]["rss"]
    again = killed(source, processor, args.folder / f"k_{stamp}", args.kill_after)
    assert again["digest"] == runs[-1]["digest"], "a killed run gave other lengths"
    found["resume extra %"] = 100 * (again["part"] + UNIT) / again["samples"]
    print(f"killed after {again['killed']:,} samples: {again['twice']:.2f} % measured twice", flush=True)
    first, found["reopen s"] = reopen(args.folder, args.lines)
    print(f"{args.lines:>10,} lines: first opening {first:.1f} s, {found['reopen s']:.2f} s after that")
    for name, value in found.items():
        good = value >= TARGETS[name] if name == "samples/s/core" else value <= TARGETS[name]
        print(f"{name:>16}: {value:,.2f} (target {TARGETS[name]:,}) {'ok' if good else 'MISSED'}")


if __name__ == "__main__":
    main()
