"""Streams: throughput against a loop of list concatenations, loss against the bound, flat memory.

    python -m bench.streaming [--samples 200000] [--memory 1000000]
    python -m bench.streaming --only shared elastic

Encoded text, lognormal lengths. The peer is what trainers with dynamic batching do in Python: lists of ids,
labels and positions that are added up until the budget is reached, then tensors. Lengths of real sets:
packs of a stream (windows of 1,000 with carry)
and of arrival order, over the lower bound. `shared`: an iterable of costly samples, read by each of four
loader workers and by one process for all. `first`: the first pack over 100,000 files, opened for the first
time and again. `elastic`: one stream of so many splits that its readers may change against one of as many
splits as readers.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import packtrain as pt
import packtrain.packs._node_reader as node_reader
from packtrain.collate import PaddingFreeCollator
from packtrain.data import StreamingPackedDataset, TokenBudgetDataset
from packtrain.planning.window import WindowPacker
from packtrain.sources import open_source
from packtrain.template import load_processor

CAP = 8192
PARTS = ("speed", "loss", "memory", "shared", "first", "elastic")
WORDS = (
    "the",
    "model",
    "packs",
    "sequences",
    "of",
    "different",
    "lengths",
    "into",
    "one",
    "row",
    "and",
    "trains",
)


class Ids:
    """Samples made when they are read: lognormal lengths around `median`, up to `most` of them and again."""

    def __init__(self, count: int, median: int = 350, most: int = 1_000_000) -> None:
        rng = np.random.default_rng(0)
        self.count, drawn = count, rng.lognormal(np.log(median), 1.0, min(count, most))
        self.lengths = np.clip(drawn, 8, CAP).astype(np.int64).tolist()
        self.row = torch.arange(CAP)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = self.row[: self.lengths[i % len(self.lengths)]]
        return {"input_ids": ids, "labels": ids}


def concatenated(source: list[dict[str, list[int]]]) -> int:
    """Rows of ids, labels and positions by list addition, as samples come, then as tensors."""
    rows = 0
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for sample in source:
        if len(row["input_ids"]) + len(sample["input_ids"]) > CAP:
            rows += len({key: torch.tensor([value]) for key, value in row.items()}) > 0
            row = {"input_ids": [], "labels": [], "position_ids": []}
        row["input_ids"] = row["input_ids"] + sample["input_ids"]
        row["labels"] = row["labels"] + [-100] + sample["labels"][1:]
        row["position_ids"] = row["position_ids"] + list(range(len(sample["input_ids"])))
    return rows + 1


def speed(name: str, lengths: list[int]) -> None:
    """Tokens a second of processor time, best of three each, over the same samples in memory."""
    tokens = sum(lengths)
    row = torch.arange(max(lengths))
    source = [{"input_ids": row[:n], "labels": row[:n]} for n in lengths]
    lists = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in lengths]
    stream = StreamingPackedDataset(source, pack_length=CAP, window=1000, shuffle_buffer=1)
    collate = PaddingFreeCollator()
    alone, packs = best(lambda: sum(1 for _ in stream))
    ours, _ = best(lambda: sum(1 for pack in stream if collate([pack])))
    theirs, rows = best(lambda: concatenated(lists))
    rates = [tokens / seconds / 1e6 for seconds in (alone, ours, theirs)]
    print(
        f"{name}: {len(lengths):,} samples, {tokens / 1e6:.0f} M tokens; stream {rates[0]:.1f} M tokens/s "
        f"({packs:,} packs), with rows {rates[1]:.1f}; lists {rates[2]:.1f} ({rows:,} rows): "
        f"{theirs / alone:.1f} and {theirs / ours:.1f} times"
    )


def best(job: Callable[[], int]) -> tuple[float, int]:
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        made = job()
        seconds.append(time.process_time() - begun)
    return min(seconds), made


def loss(folder: Path) -> None:
    for path in sorted(folder.glob("*.npy")):
        tokens = np.load(path).astype(np.int64)
        tokens = tokens[tokens > 0][:100_000]
        if tokens.ndim != 1 or len(tokens) < 1000:
            continue
        samples = [{"input_ids": np.broadcast_to(np.int8(0), n)} for n in tokens.tolist()]
        bound = pt.plan(tokens, pack_length=CAP).certificate.bound
        ours = sum(1 for _ in StreamingPackedDataset(samples, pack_length=CAP, window=1000))
        arrival = sum(
            1 for _ in TokenBudgetDataset(samples, max_seq_len=CAP, order="arrival", buffer_size=1000)
        )
        over = f"stream {ours / bound - 1:+.3%}, arrival {arrival / bound - 1:+.3%}"
        print(f"{path.stem}: bound {bound:,}, {over}")


def memory(count: int) -> None:
    marks = []
    stream = StreamingPackedDataset(Ids(count), pack_length=CAP, window=1000, shuffle_buffer=1)
    for k, _ in enumerate(stream):
        if k % 2000 == 0:
            marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    print(f"{count:,} samples: peak {marks[1]} MB after 2,000 packs, {marks[-1]} MB at the end")


class Documents:
    """JSON lines of long documents from a compressed file: parsed as they are read, and counted."""

    def __init__(self, folder: Path, count: int) -> None:
        self.path, self.read = folder / "documents.jsonl.gz", folder / "read"
        rng = np.random.default_rng(0)
        with gzip.open(self.path, "wt", compresslevel=1) as out:
            for _ in range(count):
                out.write(
                    json.dumps(
                        {"text": rng.bytes(6000).hex(), "ids": list(range(int(rng.integers(20, 300))))}
                    )
                )
                out.write("\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        count = 0
        with gzip.open(self.path, "rt") as lines:
            for line in lines:
                record = json.loads(line)
                count += 1
                yield {"input_ids": record["ids"], "text": record["text"][:200]}
        with self.read.open("a") as out:
            out.write(f"{count}\n")


def shared(samples: int, readers: int = 4) -> None:
    """Wall and processor time of a pass by loader workers, each for itself and fed by one process."""
    from torch.utils.data import DataLoader

    with tempfile.TemporaryDirectory() as folder:
        source = Documents(Path(folder), samples)
        told = {}
        for name, worth in (("own", float("inf")), ("shared", node_reader.WORTH_S)):
            node_reader.WORTH_S = worth
            source.read.write_text("")
            stream = StreamingPackedDataset(source, pack_length=CAP, window=1000)
            begun = time.perf_counter()
            loader = DataLoader(stream, batch_size=None, num_workers=readers, multiprocessing_context="fork")
            packs = [[sample["sample_id"] for sample in pack] for pack in loader]
            wall = time.perf_counter() - begun
            whole = sum(map(int, source.read.read_text().split()))
            told[name] = packs, wall, whole
        assert told["own"][0] == told["shared"][0]
        (_, own, own_read), (_, fed, fed_read) = told.values()
        print(
            f"{samples:,} documents, {readers} workers, {os.cpu_count()} processors: "
            f"own reading {own:.1f} s, shared {fed:.1f} s: {own / fed:.2f} times; readings of the source "
            f"{own_read / samples:.0f} and {fed_read / samples:.0f}"
        )


def texts(folder: Path, count: int, median: int) -> Any:
    """A JSONL source of `count` texts of around `median` words."""
    words = np.random.default_rng(1).integers(0, len(WORDS), (2000, 1000)).tolist()
    rows = zip(words, Ids(2000, median).lengths, strict=True)
    lines = [json.dumps({"text": " ".join(map(WORDS.__getitem__, row[:n]))}) for row, n in rows]
    path = folder / f"texts-{median}.jsonl"
    with path.open("w") as out:
        for i in range(count):
            out.write(lines[i % len(lines)] + "\n")
    return open_source(path)


def elastic(
    count: int, data: Path, pairs: int, asked: list[int], folder: Path, only: str, readers: int = 4
) -> None:
    """Processor time of one of four readers with the same options: many splits over one split a reader, in
    turns; in a process as it is, and with the objects of its start frozen, as in a loader's worker."""
    kinds: dict[str, tuple[Any, Any, Any]] = {}
    for median in (60, 600):
        source = Ids(count, median, 50_000)
        kinds[f"encoded, {np.mean(source.lengths):.0f} tokens"] = source, None, None
        kinds[f"encoded, {np.mean(source.lengths):.0f} tokens, collated"] = (
            source,
            None,
            PaddingFreeCollator(),
        )
    if (data / "processors" / "qwen2_5_vl").is_dir():
        tokenizer = load_processor(data / "processors" / "qwen2_5_vl").tokenizer

        def encode(record: dict[str, str]) -> dict[str, Any]:
            ids = torch.tensor(tokenizer(record["text"])["input_ids"])
            return {"input_ids": ids, "labels": ids}

        for median, few in ((350, 20), (40, 1)):
            source = texts(folder, count // few, median)
            kinds[f"text of around {median} words, tokenized, collated"] = (
                source,
                encode,
                PaddingFreeCollator(),
            )
    kinds = {name: kind for name, kind in kinds.items() if name.startswith(only)}
    WindowPacker.seen = 1 << 30  # compiled from the first window on, in all
    for name, (source, template, collate) in kinds.items():
        wanted = [n for n in asked if len(source) >= 512 * n]  # two windows of each at least

        def read(
            splits: int | None, source: Any = source, template: Any = template, collate: Any = collate
        ) -> float:
            stream = StreamingPackedDataset(
                source,
                template,
                pack_length=CAP,
                window=1000,
                shuffle_buffer=10_000,
                world_size=readers,
                rank=0,
                splits=splits,
            )
            begun = time.process_time()
            for pack in stream:
                if collate is not None:
                    collate([pack])
            return (time.process_time() - begun) / len(source) * readers * 1e6

        for frozen in (False, True) if template is None else (True,):
            gc.collect()
            if frozen:
                gc.freeze()
            read(wanted[0])
            rows = [[read(n) for n in (None, *wanted)] for _ in range(pairs)]
            gc.unfreeze()
            one, *many = np.array(rows).T
            print(f"{name}{', frozen' * frozen}: {np.median(one):.1f} us a sample with {readers} splits")
            for n, took in zip(wanted, many, strict=True):
                low, middle, high = np.quantile(took / one - 1, (0.25, 0.5, 0.75))
                told = f"{middle:+.1%} ({low:+.1%} to {high:+.1%}, {pairs} pairs)"
                print(f"    {n} splits: {told}, {np.median(took - one):+.2f} us", flush=True)


def first(folder: Path, count: int = 100_000) -> None:
    """Processor time until the first pack of a shuffled stream over so many files of one record."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    record = json.dumps({"messages": turns}) + "\n"
    for kind, name in (("shards", "part-{}.jsonl"), ("pairs", "output_{:08d}.json")):
        data, cache = folder / kind, folder / f"{kind}-cache"
        data.mkdir()
        for number in range(count):
            (data / name.format(number)).write_text(record, encoding="utf-8")
        took = []
        for _ in range(2):
            began = time.process_time()
            source = open_source(data, kind=kind, cache_dir=cache)
            stream = StreamingPackedDataset(source, _one_word, pack_length=CAP, shuffle_buffer=1000)
            next(iter(stream))
            took.append(time.process_time() - began)
        began = time.process_time()
        for path in data.iterdir():
            hashlib.sha256(path.read_bytes())
        floor = time.process_time() - began
        print(
            f"first pack of {count:,} files, {kind}: {took[0]:.1f} s, opened again {took[1]:.1f} s; "
            f"reading and hashing them alone: {floor:.1f} s"
        )


def _one_word(record: Any) -> dict[str, list[int]]:
    return {"input_ids": [1] * 8}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--memory", type=int, default=1_000_000)
    parser.add_argument("--lengths", type=Path, default=Path("../shared/data/lengths"))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--splits", type=int, nargs="*", default=[8, 64, 1344])
    parser.add_argument("--kinds", default="", help="of elastic: those whose names begin so")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    told = parser.parse_args()
    asked = told.only or PARTS
    if "speed" in asked:
        for median in (350, 60):
            speed(f"lognormal, median {median}", Ids(told.samples, median).lengths)
        for name in ("t0_train_50k", "gsm8k_train", "c4_demo") if told.lengths.is_dir() else ():
            own = np.load(told.lengths / f"{name}.npy").astype(np.int64)
            speed(name, np.resize(own[own <= CAP], told.samples).tolist())
    if "loss" in asked and told.lengths.is_dir():
        loss(told.lengths)
    if "memory" in asked:
        memory(told.memory)
    if "shared" in asked:
        shared(told.samples // 2)
    if "first" in asked:
        with tempfile.TemporaryDirectory() as folder:
            first(Path(folder))
    if "elastic" in asked:
        with tempfile.TemporaryDirectory() as folder:
            elastic(told.samples * 10, told.lengths.parent, told.pairs, told.splits, Path(folder), told.kinds)


if __name__ == "__main__":
    main()
