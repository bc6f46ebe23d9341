"""Random lives of a stream: shards arrive, the producer and its readers stop anywhere, worlds change size.

Whatever happens, samples that checkpoints cover are used exactly once, and every rank makes the same steps.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from test_produce import Unclaimed
from words_in import lengths_of, producer, put

from packtrain import files
from packtrain.data import LazyShardedDataset
from packtrain.errors import WaitTimeoutError
from packtrain.testing import Stopped


class Producing:
    """A producer that is stopped after a random number of durable steps, whenever it is turned on."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root, self.chance = root, chance
        self.samples = 0
        self.options = {
            "packs_per_chunk": chance.choice([1, 2, 3]),
            "window": chance.choice([3, 10, 40]),
            "keep_completed": chance.choice([None, 0, 1]),
            "flush_s": 1,
            "poll_s": 1,
        }
        (root / "in").mkdir(parents=True)

    def arrive(self, number: int) -> None:
        count = self.chance.randint(1, 30)
        put(self.root / "in", f"p{number}.jsonl", lengths_of(count, self.samples), self.samples)
        self.samples += count

    def live(self) -> bool:
        """Produce until it is stopped (False) or the stream has ended (True)."""
        left = self.chance.randint(5, 200)
        clock = Ticking()

        def observe(kind: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise Stopped(f"{kind} {path}")

        files.observer = observe
        try:
            producer(self.root / "in", self.root / "out", clock=clock, **self.options).run(watch=True)
        except Stopped:
            return False
        finally:
            files.observer = None
        return True


class Ticking:
    """Stops a producer that waits for what does not come."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self.time > 5:
            raise Stopped("nothing comes")


class Impatient:
    """A reader's clock: waiting ends at once."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def train(root: Path, world: int, checkpoint: dict[str, Any], chance: random.Random) -> None:
    """All ranks read in step, save now and then, and stop anywhere; `checkpoint` is what was saved."""
    readers = [
        LazyShardedDataset(root / "out", rank, world, 0.5, 0.5, clock=Impatient()) for rank in range(world)
    ]
    for reader in readers:
        if checkpoint["state"] is not None:
            reader.load_state_dict(checkpoint["state"])
    used = list(checkpoint["used"])
    passes = [iter(reader) for reader in readers]
    for _ in range(chance.randint(1, 40)):
        packs = []
        for one in passes:
            try:
                packs.append(next(one))
            except (StopIteration, WaitTimeoutError) as error:
                packs.append(type(error))
        kinds = {pack if isinstance(pack, type) else None for pack in packs}
        assert len(kinds) == 1, f"ranks differ: {kinds}"
        if None not in kinds:
            break
        used += [one for pack in packs for one in pack["sample_ids"]]
        if chance.random() < 0.3:
            checkpoint.update(used=list(used), state=readers[chance.randrange(world)].state_dict())
            for rank in range(world):
                if chance.random() < 0.9:  # a rank may die between the checkpoint and its word
                    readers[rank].acknowledge()
    if chance.random() < 0.5 and readers[0]._cursor is not None:
        checkpoint.update(used=used, state=readers[0].state_dict())
        for reader in readers:
            reader.acknowledge()


@pytest.mark.parametrize("seed", range(int(os.environ.get("PACKTRAIN_LIVES", "5"))))
def test_random_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    chance = random.Random(seed)
    made = Producing(tmp_path, chance)
    checkpoint: dict[str, Any] = {"used": [], "state": None}
    shards = chance.randint(1, 6)
    for number in range(shards):
        made.arrive(number)
        made.live()
        if chance.random() < 0.7:
            train(tmp_path, chance.choice([1, 2, 3]), checkpoint, chance)
    (tmp_path / "in" / "END").touch()
    while not made.live():
        train(tmp_path, chance.choice([1, 2, 3]), checkpoint, chance)
    while sorted(checkpoint["used"]) != list(range(made.samples)):
        before = len(checkpoint["used"])
        train(tmp_path, chance.choice([1, 2, 3, 4]), checkpoint, chance)
        assert len(set(checkpoint["used"])) == len(checkpoint["used"]) >= before, "used twice"
    end = files.read_json(tmp_path / "out" / "END")["stats"]
    assert end["packed"] == end["read"] == made.samples
