"""The process that reads for a node is killed at random moments, then its readers, which go on as others.

Three kills of it here, PACKTRAIN_SOAK_KILLS of them in `make soak`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from counted_source import passes
from node_soak_script import EVERY, made

import warm

HERE = Path(__file__).parent
KILLS = int(os.environ.get("PACKTRAIN_SOAK_KILLS", "3"))
GONE = "each reader of this node reads the source by itself: the process that read it for all is gone"


class Life:
    """Ranks of one machine, each a process, from a state on."""

    def __init__(self, folder: Path, ranks: int, states: list[Any] | None, port: int) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir()
        (folder / "states").write_text(json.dumps(states))
        self.readers = []
        for rank in range(ranks):
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            told = {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
            command = [warm.python(), str(HERE / "node_soak_script.py"), str(folder)]
            with (folder / f"stderr.{rank}").open("w") as out:
                process = subprocess.Popen(
                    [*command, "-" if states is None else str(folder / "states")],
                    env={**os.environ, **told, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stderr=out,
                )
            self.readers.append(process)

    def kill_server(self, after: float) -> bool:
        """SIGKILL of the process that reads for all, so many seconds after it has begun."""
        while self.is_on and not passes(self.folder):
            time.sleep(0.01)
        time.sleep(after)
        if not self.is_on or not (begun := passes(self.folder)):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(begun[0][0], signal.SIGKILL)
            return True
        return False

    @property
    def is_on(self) -> bool:
        return all(reader.poll() is None for reader in self.readers)

    def kill(self) -> None:
        for reader in self.readers:
            reader.kill()

    def end(self) -> list[int]:
        return [reader.wait(600) for reader in self.readers]

    def steps(self) -> list[list[tuple[int, ...]]]:
        """The packs of every rank, whole lines alone."""
        files = [self.folder / f"packs.{rank}" for rank in range(self.ranks)]
        texts = [path.read_text() if path.exists() else "" for path in files]
        return [[tuple(json.loads(line)) for line in text.split("\n")[:-1]] for text in texts]

    def saved(self) -> tuple[int, list[Any] | None]:
        """The newest step that all ranks saved, and their states."""
        steps = [
            {int(path.suffix[1:]) for path in self.folder.glob(f"state.{k}.*")} for k in range(self.ranks)
        ]
        newest = max(set.intersection(*steps), default=0)
        paths = [self.folder / f"state.{rank}.{newest}" for rank in range(self.ranks)]
        return newest, [json.loads(path.read_text()) for path in paths] if newest else None

    def told(self) -> list[str]:
        return [(self.folder / f"stderr.{rank}").read_text() for rank in range(self.ranks)]


def test_a_node_whose_reader_is_killed_at_random_moments(tmp_path: Path) -> None:
    whole = [tuple(sample["sample_id"] for sample in pack) for pack in made(tmp_path, rank=0, world_size=1)]
    place = {pack: k for k, pack in enumerate(whole)}
    seed = int.from_bytes(os.urandom(4), "big")
    chance, kills, runs, alone = random.Random(seed), 0, 0, 0
    while kills < KILLS:
        runs += 1
        given: list[tuple[int, ...]] = []
        states: list[Any] | None = None
        for number in range(3):  # two lives that are killed, and one that ends
            life = Life(
                tmp_path / f"{runs}.{number}", chance.choice([2, 4]), states, chance.randrange(1 << 16)
            )
            kills += life.kill_server(chance.uniform(0.0, 0.6))
            if number < 2:
                time.sleep(chance.uniform(0.0, 0.5))
                life.kill()
            codes = life.end()
            told = life.told()
            alone += sum(GONE in text for text in told)
            for code, text in zip(codes, told, strict=True):
                assert code == (0 if number == 2 else code) and code in (0, -signal.SIGKILL), (seed, text)
                assert len(text.splitlines()) - text.count("cannot be indexed") == (GONE in text), (
                    seed,
                    text,
                )
            packs = life.steps()
            if number == 2:
                given += [pack for row in packs for pack in row]
                break
            newest, states = life.saved() if life.saved()[0] else (0, states)
            for step in range(newest):
                taken = [row[step] for row in packs]
                if len(given) + len(taken) < len(whole) // 2:  # no split has ended
                    assert [place[pack] for pack in taken] == [len(given) + k for k in range(len(taken))], (
                        seed
                    )
                given += taken
            assert newest % EVERY == 0
        assert sorted(place[pack] for pack in given) == list(range(len(whole))), seed
    assert alone, "no reader went on by itself"
    print(f"{kills} kills of a node's reader in {runs} runs, {alone} readers went on by themselves")  # noqa: T201
