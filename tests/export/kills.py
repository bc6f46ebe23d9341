"""Real kills: a producer and a reader process, one of them killed again and again, over growing input.

    python tests/export/kills.py FOLDER KILLS      # exit 0: every sample was used exactly once

Also the two processes themselves: `kills.py produce IN OUT`, `kills.py read OUT CHECKPOINT`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROWS = 40


def produce(inputs: str, output: str) -> None:
    from packtrain.export import PackingProducer
    from packtrain.sources.encoded import EncodedTemplate

    class Slow(EncodedTemplate):
        def encode(self, sample):  # type: ignore[no-untyped-def]
            time.sleep(0.002)
            return super().encode(sample)

    PackingProducer(
        inputs,
        output,
        Slow(),
        pack_length=100,
        packs_per_chunk=2,
        window=16,
        kind="encoded",
        flush_s=0.1,
        poll_s=0.02,
        max_ahead=6,
        keep_completed=1,
    ).run(watch=True)


def read(output: str, checkpoint: str) -> None:
    from packtrain.data import LazyShardedDataset

    dataset = LazyShardedDataset(output, timeout_s=120, poll_s=0.02)
    used: list[int] = []
    if os.path.exists(checkpoint):
        with open(checkpoint, encoding="utf-8") as handle:
            held = json.load(handle)
        used = held["used"]
        dataset.load_state_dict(held["state"])

    def save() -> None:
        with open(f"{checkpoint}.tmp", "w", encoding="utf-8") as handle:
            json.dump({"used": used, "state": dataset.state_dict()}, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(f"{checkpoint}.tmp", checkpoint)
        dataset.acknowledge()

    for number, pack in enumerate(dataset):
        used += pack["sample_ids"]
        if number % 3 == 2:
            save()
    save()


def start(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *args], stderr=subprocess.PIPE)


def put(folder: Path, number: int) -> None:
    rows = []
    for row in range(ROWS):
        length = (number * ROWS + row) * 37 % 90 + 2
        ids = [1 + (number + row + place) % 200 for place in range(length)]
        rows.append(json.dumps({"input_ids": ids, "labels": ids, "channel": f"{number}:{row}"}) + "\n")
    hidden = folder / f".{number}"
    hidden.write_text("".join(rows), encoding="utf-8")
    os.replace(hidden, folder / f"part-{number}.jsonl")


def run(folder: Path, kills: int, seed: int = 0, pause: float = 1.0) -> dict[str, int]:
    """Returns counts; AssertionError where a sample was lost or doubled."""
    chance = random.Random(seed)
    raw, out, checkpoint = folder / "in", folder / "out", folder / "checkpoint.json"
    raw.mkdir(parents=True)
    verbs = {"produce": ("produce", str(raw), str(out)), "read": ("read", str(out), str(checkpoint))}
    running: dict[str, subprocess.Popen[bytes]] = {}
    killed = 0
    for number in range(kills):
        put(raw, number)
        for verb, args in verbs.items():
            if verb not in running or running[verb].poll() is not None:
                running[verb] = start(*args)
        time.sleep(pause * (0.5 + chance.random()))
        victim = running[chance.choice(sorted(verbs))]
        assert victim.poll() is None, victim.stderr and victim.stderr.read().decode()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert victim.stderr is not None
        victim.stderr.close()
        killed += 1
    (raw / "END").touch()
    for verb, args in verbs.items():
        if running[verb].poll() is not None:
            running[verb] = start(*args)
    for process in running.values():
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error.decode()
    used = json.loads(checkpoint.read_text(encoding="utf-8"))["used"]
    end = json.loads((out / "END").read_text(encoding="utf-8"))
    total = kills * ROWS
    assert sorted(used) == list(range(total)), f"{len(used)} used of {total}"
    assert end["stats"]["packed"] == end["stats"]["read"] == total
    return {"kills": killed, "samples": total, "chunks": end["chunks"]}


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        produce(*sys.argv[2:])
    elif sys.argv[1] == "read":
        read(*sys.argv[2:])
    else:
        sys.stdout.write(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
