"""Folders and states that packtrain wrote, each with all that reads it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import packtrain as pt
from packtrain.errors import PacktrainError

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"
sys.path.append(str(REPOSITORY / "scripts"))

import golden  # noqa: E402


def called(*words: Any) -> None:
    """A verb of the command line in this process; it ends with a code that it knows."""
    from packtrain.cli._app import app

    told = (PacktrainError, SystemExit, OSError)  # `main` makes one line and exit 2 of the last, too
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(*told):
        app.main(args=[*map(str, words)], standalone_mode=False)


def lengths(folder: Path) -> None:
    from packtrain.store import lengths as store

    store.verify(folder)
    pt.plan(pt.Lengths.load(folder), 64)


def plan(folder: Path) -> None:
    from packtrain.store import plans as store

    store.verify(folder)
    held = pt.PackPlan.load(folder)
    held.stats()
    held.ledger.counts()
    held.align(2).balance(2)


def chunks(folder: Path) -> None:
    from packtrain.data import ChunkedPacks
    from packtrain.pipeline.verify_export import verify_export

    packs = ChunkedPacks(folder)
    packs[0]
    packs.row(0) if hasattr(packs, "row") else None
    verify_export(folder, encode=0)


def growing(folder: Path) -> None:
    from packtrain.data import LazyShardedDataset

    for start in ("acknowledged", "beginning"):
        with contextlib.suppress(PacktrainError):
            reader = LazyShardedDataset(folder, 1, 2, start=start, timeout_s=0.05, poll_s=0.01)
            for _ in islice(reader, 4):
                pass
            reader.acknowledge()


def measured(folder: Path) -> None:
    """A measurement that was stopped goes on."""
    called("measure", folder / "train.jsonl", "--processor", folder / "text", "--out", folder / "out")


def verbs(*words: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        for word in words:
            called(word, folder)

    return read


#: Folder of `tests/golden/folders` -> what reads it.
FOLDERS: dict[str, list[Callable[[Path], None]]] = {
    "lengths": [lengths, verbs("show", "verify")],
    "plan": [plan, verbs("show", "verify", "which")],
    "chunks": [chunks, verbs("show", "verify")],
    "growing": [growing, verbs("show", "verify")],
}


class Files:
    """A copy of a folder, as it was again after every reader."""

    def __init__(self, origin: Path, at: Path) -> None:
        self.folder = Path(shutil.copytree(origin, at))
        self.held = {path: path.read_bytes() for path in sorted(at.rglob("*")) if path.is_file()}

    def put(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def restore(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.held:
                path.unlink()
        for path, data in self.held.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)


# ----------------------------------------------------------------------------------------- states
def orders() -> tuple[list[Any], Callable[[Any], None]]:
    """Positions in a plan: `packs.json`."""
    from packtrain.data import PackSampler

    saved, plans = golden.saved_positions(), golden.order_plans()
    samplers = [
        PackSampler(
            plans[entry["plan"]].align(entry["state"]["world_size"]),
            0,
            seed=5,
            grad_accum=entry["state"]["grad_accum"],
            balance=entry["balance"],
        )
        for entry in saved
    ]

    def read(state: Any) -> None:
        for sampler in samplers[:6]:
            with contextlib.suppress(PacktrainError):
                sampler.check_state(state)
                sampler.load_state_dict(state)
                list(islice(sampler, 2))

    return [entry["state"] for entry in saved], read


def streams(name: str) -> tuple[list[Any], Callable[[Any], None]]:
    held = json.loads((GOLDEN / "streams.json").read_text())[name]["states"]
    stream = golden.stream_kinds()[name]
    now = stream()
    for _ in islice(now, 7):  # the form of today beside those of then
        pass
    held["now"] = json.loads(json.dumps(now.state_dict()))

    def read(state: Any) -> None:
        with contextlib.suppress(PacktrainError):
            fresh = stream()
            if hasattr(fresh, "check_state"):
                fresh.check_state(state)
            fresh.load_state_dict(state)
            for _ in islice(fresh, 2):
                pass

    return list(held.values()), read


def split_streams(name: str) -> tuple[list[Any], Callable[[Any], None]]:
    """States of version 2 of an elastic stream of 4 splits on 2 ranks; read on 1, 2 and 4."""
    from packtrain.data import StreamingPackedDataset, TokenBudgetDataset, WeightedSources

    data = golden.rows()

    def stream(rank: int, world: int) -> Any:
        given: dict[str, Any] = {
            "rank": rank,
            "world_size": world,
            "splits": 4,
            "shuffle_buffer": 8,
            "seed": 3,
        }
        if name == "budget":
            return TokenBudgetDataset(data, micro_batch_size=2, max_seq_len=32, buffer_size=16, **given)
        mixed = WeightedSources({"a": data[:30], "b": data[30:]}, {"a": 1, "b": 3}, stopping="first")
        source: Any = mixed if name == "weighted" else lambda: iter(data)
        return StreamingPackedDataset(source, pack_length=64, window=16, **given)

    saved = []
    for rank in range(2):
        now = stream(rank, 2)
        for _ in islice(now, 6):
            pass
        saved.append(json.loads(json.dumps(now.state_dict())))

    def read(states: Any) -> None:
        for world in (1, 2, 4):
            with contextlib.suppress(PacktrainError):
                fresh = stream(world - 1, world)
                fresh.load_state_dict(states)
                for _ in islice(fresh, 2):
                    pass

    return [saved, saved[:1], saved[0]], read


def cursor(folder: Path) -> tuple[list[Any], Callable[[Any], None]]:
    from packtrain.data import LazyShardedDataset

    held = json.loads((GOLDEN / "folders.json").read_text())["growing state"]

    def read(state: Any) -> None:
        with contextlib.suppress(PacktrainError):
            reader = LazyShardedDataset(folder, 0, 1, start="beginning", timeout_s=0.05, poll_s=0.01)
            reader.load_state_dict(state)
            for _ in islice(reader, 2):
                pass

    return [held], read
