"""Growing directories: speed of reading, start-up behind 10,000 old chunks, memory, and 100 real kills.

    python bench/growing.py                 # everything, a few minutes
    python bench/growing.py --kills 0       # without the kills

Floors that must hold are asserted: 20 million text tokens a second as rows, 1 s from opening the folder to
the first pack behind 10,000 used-up chunks, memory that does not grow with what was read, nothing lost or
doubled.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from packtrain import files
from packtrain.data import LazyShardedDataset
from packtrain.packs._acknowledge import Cursor
from packtrain.store._folders import sealed
from packtrain.store.chunk_folder import INDEX, STREAM, STREAM_SCHEMA, chunk_name
from packtrain.store.chunks import ChunkReader, ChunkWriter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "export"))
import kills as real_kills

OLD = 10_000


def text_pack(rng: np.random.Generator, first: int, tokens: int) -> list[dict[str, object]]:
    pack: list[dict[str, object]] = []
    left = tokens
    while left:
        length = int(min(left, rng.integers(20, 400)))
        left -= length
        ids = torch.from_numpy(rng.integers(0, 150_000, length))
        labels = ids.clone()
        labels[:5] = -100
        pack.append(
            {
                "sample_id": first + len(pack),
                "input_ids": ids,
                "labels": labels,
                "position_ids": torch.arange(length),
            }
        )
    return pack


def reading(folder: Path) -> dict[str, float]:
    """Million tokens a second of text packs of 8,192 tokens, warm; median of five passes."""
    rng = np.random.default_rng(0)
    with ChunkWriter(folder / "c.arrow", media="tensor") as writer:
        for number in range(200):
            writer.add(text_pack(rng, 1000 * number, 8192))
    reader = ChunkReader(folder / "c.arrow")
    found = {}
    for name, read in (("rows", reader.row), ("samples", reader.__getitem__)):
        speeds = []
        for _ in range(5):
            begin = time.perf_counter()
            for number in range(len(reader)):
                read(number)
            speeds.append(reader.manifest["tokens"] / (time.perf_counter() - begin) / 1e6)
        found[name] = float(np.median(speeds))
    print(
        f"reading text: {found['rows']:.0f} M tokens/s as rows, {found['samples']:.0f} M tokens/s as samples"
    )
    found["bytes_per_token"] = reader.manifest["bytes"] / reader.manifest["tokens"]
    return found


def old_chunks(folder: Path) -> dict[str, float]:
    """Seconds to the first pack behind 10,000 used-up chunks that are still there, and growth of memory."""
    told = {"schema": STREAM_SCHEMA, "stream": "bench", "config": {}}
    files.publish_json(folder / STREAM, sealed(told))
    rng = np.random.default_rng(1)
    with ChunkWriter(folder / chunk_name(0), media="tensor", meta={"stream": "bench"}) as writer:
        for number in range(4):
            writer.add(text_pack(rng, 100 * number, 2048))
    whole = (folder / chunk_name(0)).read_bytes()
    manifest = (folder / chunk_name(0)).with_suffix(".json").read_bytes()
    for number in range(1, OLD + 500):
        path = folder / chunk_name(number)
        path.write_bytes(whole)
        path.with_suffix(".json").write_bytes(manifest)
        if number < OLD:
            path.with_name(f"{path.name}.completed").touch()
    files.publish_json(folder / INDEX, sealed({"stream": "bench", "packs": [4] * (OLD + 448)}))
    acked = {**Cursor(1, 0, 1, 0, 4 * OLD).to_dict(), "stream": "bench"}
    files.publish_json(folder / "acks" / "w00001_r00000.json", acked)
    begin = time.perf_counter()
    dataset = LazyShardedDataset(folder)
    packs = iter(dataset)
    first = next(packs)
    seconds = time.perf_counter() - begin
    assert first.chunk == OLD
    for _ in range(40):
        next(packs)
    before = resident()
    for _ in range(1_900):
        next(packs)
    grown = resident() - before
    print(f"{OLD:,} old chunks: first pack after {seconds:.2f} s; 1,900 packs more: {grown / 1e6:+.1f} MB")
    return {"first_pack_s": seconds, "grown_mb": grown / 1e6}


def resident() -> int:
    """Bytes of this process in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    for name, part in (("reading", reading), ("old_chunks", old_chunks)):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = part(Path(folder))
    if options.kills:
        with tempfile.TemporaryDirectory() as folder:
            found["kills"] = real_kills.run(Path(folder) / "killed", options.kills)
        print(f"kills: {found['kills']}, nothing lost or doubled")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found["reading"]["rows"] >= 20, "text is read below 20 M tokens/s"  # type: ignore[index]
    assert found["old_chunks"]["first_pack_s"] <= 1, "start-up takes over 1 s"  # type: ignore[index]
    assert found["old_chunks"]["grown_mb"] < 20, "memory grows with what was read"  # type: ignore[index]


if __name__ == "__main__":
    main()
