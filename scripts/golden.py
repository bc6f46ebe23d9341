"""The golden set: what packtrain gave before its parts were put together anew.

    python scripts/golden.py OUT        (writes what OUT does not hold yet; what it holds is never changed)

Plans, orders, streams and losses are values, in `*.json`; `folders/` and `states/` what that version left.
Each function here makes a value with the code at hand, through public names; `tests/test_golden.py` compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

import packtrain as pt

Values = dict[str, Any]
PACKERS = ("auto", "bfd", "refine", "optimal", "ffd", "sequential", "random_fit", "diverse")
REAL = ("t0_train_50k", "gsm8k_train", "images_qwen2_5_vl", "audio_omni_300s", "new_codealpaca")


def digest(values: Any) -> str:
    """Of integers: the values count, not their type."""
    return hashlib.sha256(np.asarray(values, dtype="<i8").tobytes()).hexdigest()[:16]


def hashed(count: int, low: int, high: int, salt: int = 0) -> Any:
    """int64[count] in low..high-1, by integer arithmetic alone."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return low + ((x ^ (x >> np.uint64(31))) % np.uint64(high - low)).astype(np.int64)


def tailed(count: int, salt: int = 0) -> Any:
    """Mostly short, a long tail: the product of three draws."""
    draws = [hashed(count, 1, 101, salt + k) for k in range(3)]
    return np.maximum(1, draws[0] * draws[1] * draws[2] // 100)


def made_lengths() -> dict[str, pt.Lengths]:
    few = np.array([17, 100, 250, 333, 512, 700])[hashed(900, 0, 6, 5)]
    status = np.where(hashed(700, 0, 40, 8) == 0, 2, 0)
    return {
        "uniform": pt.Lengths(hashed(1500, 1, 1025, 1)),
        "tailed": pt.Lengths(tailed(2000, 2)),
        "few": pt.Lengths(few),
        "near_cap": pt.Lengths(hashed(400, 900, 1100, 3)),
        "costs": pt.Lengths(
            hashed(700, 1, 700, 4), costs={"images": hashed(700, 0, 4, 6)}, status=status.tolist()
        ),
    }


# --------------------------------------------------------------------------------------------
# plans
# --------------------------------------------------------------------------------------------
def plan_facts(plan: pt.PackPlan) -> Values:
    return {
        "checksum": plan.checksum,
        "packs": len(plan),
        "bound": int(plan.certificate.bound),
        "ledger": plan.ledger.counts(),
    }


def plans() -> Values:
    """Plans of made lengths under every packer and every option."""
    out: Values = {}
    sets = made_lengths()
    for (name, lengths), packer in product(sets.items(), PACKERS):
        out[f"{name} {packer}"] = plan_facts(pt.plan(lengths, 1024, packer=packer))
    options: dict[str, Values] = {
        "seed": {"seed": 7},
        "large seed": {"seed": 1 << 70},
        "long drop": {"long_samples": "drop"},
        "long from cap": {"long_samples": "drop", "long_rule": ">="},
        "multiple": {"multiple_of": 8},
        "few samples": {"max_samples": 5},
        "window": {"window": 128},
        "window seed": {"window": 300, "seed": 3},
        "steps": {"samples_per_step": 48, "packs_multiple": 4, "seed": 2},
        "steps plain": {"samples_per_step": 30},
    }
    for (name, lengths), (title, given) in product(sets.items(), options.items()):
        out[f"{name} {title}"] = plan_facts(pt.plan(lengths, 1024, **given))
    for packer in ("auto", "sequential", "ffd"):
        given = {"packer": packer, "limits": {"images": 9}, "max_samples": 6}
        out[f"costs limits {packer}"] = plan_facts(pt.plan(sets["costs"], 1024, **given))
    for title, given in options.items():
        if "long" not in title:
            out[f"costs limits {title}"] = plan_facts(
                pt.plan(sets["costs"], 1024, **{"limits": {"images": 9}, **given})
            )
    out["forecast"] = [
        {key: value for key, value in row.items() if isinstance(value, (int, str, type(None)))}
        for row in pt.forecast(sets["tailed"], pack_lengths=[1024, 4096], world_size=4, grad_accum=2)
    ]
    return out


def real_plans(folder: Path) -> Values:
    """Plans of real lengths; `folder` holds them as `.npy`."""
    out: Values = {}
    for name in REAL:
        lengths = pt.Lengths(np.load(folder / f"{name}.npy"))
        cap = 8192 if int(lengths.tokens.max()) > 2048 else 2048
        for packer in PACKERS:
            out[f"{name} {packer}"] = plan_facts(pt.plan(lengths, cap, packer=packer))
        out[f"{name} window"] = plan_facts(pt.plan(lengths, cap, window=500, seed=1))
        out[f"{name} steps"] = plan_facts(pt.plan(lengths, cap, samples_per_step=64, packs_multiple=2))
        out[f"{name} multiple"] = plan_facts(pt.plan(lengths, cap, multiple_of=16, long_samples="drop"))
    return out


# --------------------------------------------------------------------------------------------
# orders
# --------------------------------------------------------------------------------------------
def order_plans() -> dict[str, pt.PackPlan]:
    sets = made_lengths()
    return {
        "plain": pt.plan(sets["tailed"], 1024),
        "small": pt.plan(hashed(40, 1, 300, 9), 1024),
        "images": pt.plan(sets["costs"], 1024, limits={"images": 9}),
        "steps": pt.plan(sets["tailed"], 1024, samples_per_step=48, packs_multiple=4, seed=2),
    }


def sampled(view: Any, rank: int, epoch: int, **options: Any) -> list[int]:
    from packtrain.data import PackSampler

    sampler = PackSampler(view, rank, **options)
    sampler.set_epoch(epoch)
    return [view.pack_id(position) for position in sampler]


def settings_of(**values: Any) -> Any:
    from packtrain.planning.balance import Balance

    return Balance(**values)


def aligned_orders() -> Values:
    """Views, balanced views, and what samplers read of them."""
    out: Values = {}
    for (name, plan), world, drop in product(order_plans().items(), (1, 2, 3, 4, 8), (False, True)):
        if (name == "steps" and world not in (1, 2, 4)) or (drop and len(plan) < world):
            continue
        view = plan.align(world, drop)
        title = f"{name} W{world} {'drop' if drop else 'pad'}"
        out[title] = {
            "checksum": view.checksum,
            "packs": digest(view.pack_ids),
            "kept": view.kept,
            "repeated": digest(view.repeated),
            "dropped": digest(view.dropped),
            "fillers": digest(view.fillers),
            "ranks": [
                [digest(sampled(view, rank, epoch, seed=5)) for rank in range(world)] for epoch in (0, 1, 7)
            ],
            "unshuffled": digest(sampled(view, world - 1, 0, shuffle=False)),
        }
    return out


def balanced_orders() -> Values:
    out: Values = {}
    for (name, plan), world in product(order_plans().items(), (1, 2, 4)):
        view = plan.align(world)
        accums = (view.block // world,) if view.block > 1 else (1, 2, 4)
        variants: list[Values] = [{"mode": "step"}, {"mode": "step", "cost": "tokens", "sync": "step"}]
        if view.block == 1:
            variants += [{"mode": "window"}, {"mode": "global", "cost": "attention"}]
        if name == "images":
            variants.append({"mode": "step", "even": "images"})
        for accum, variant in product(accums, variants):
            title = f"{name} W{world} GA{accum} {json.dumps(variant)}"
            made = [view.balance(accum, **variant, seed=s, epoch=e) for s, e in ((None, 0), (3, 0), (3, 2))]
            out[title] = {
                "checksums": [each.checksum for each in made],
                "packs": [digest(each.pack_ids) for each in made],
                "ranks": [
                    digest(
                        sampled(
                            view,
                            rank,
                            2,
                            seed=3,
                            grad_accum=accum,
                            balance=settings_of(grad_accum=accum, **variant),
                        )
                    )
                    for rank in range(world)
                ],
            }
    return out


def replanned_orders() -> Values:
    from packtrain.data import PackSampler
    from packtrain.planning.replan import EpochPlans

    lengths = made_lengths()["few"]
    plan = pt.plan(lengths, 1024, seed=4)
    out: Values = {}
    for balance, world in product((None, "step"), (1, 2)):
        epochs = EpochPlans(plan, lengths)
        for rank in range(world):
            sampler = PackSampler(
                plan.align(world), rank, seed=5, grad_accum=2, balance=balance, replan=epochs
            )
            rows = []
            for epoch in range(3):
                sampler.set_epoch(epoch)
                ids = [i for position in sampler for i in sampler.aligned[position].tolist()]
                rows.append([sampler.aligned.plan.checksum, digest(ids)])
            out[f"{balance} W{world} r{rank}"] = rows
    return out


STOPS: tuple[tuple[str, int, int, int], ...] = (  # plan, ranks, grad_accum, micro step
    ("plain", 2, 2, 0),
    ("plain", 2, 2, 7),
    ("plain", 2, 2, 8),
    ("plain", 4, 1, 10**9),
    ("small", 2, 2, 3),
    ("images", 4, 2, 6),
    ("steps", 2, 0, 1),
    ("steps", 4, 0, 2),
)
RESUMES: tuple[tuple[int, int], ...] = ((1, 4), (2, 2), (4, 1), (4, 2), (8, 1), (3, 1))


def saved_positions() -> list[Values]:
    """States of samplers, as they stand in `packs.json`."""
    from packtrain.data import PackSampler

    out = []
    for (name, world, accum, step), balance in product(STOPS, (None, "step", "window")):
        view = order_plans()[name].align(world)
        if balance == "window" and view.block > 1:
            continue
        accum = accum or view.block // world
        sampler = PackSampler(view, 0, seed=5, grad_accum=accum, balance=balance)
        step = min(step, len(sampler))
        state = sampler.state_dict(micro_step=step)
        out.append({"plan": name, "balance": balance, "state": json.loads(json.dumps(state))})
    return out


def resumed_positions(saved: list[Values]) -> list[Values]:
    """What follows each saved state, on its own and on other numbers of ranks; None: refused."""
    from packtrain.data import PackSampler
    from packtrain.errors import ForeignArtefactError

    out = []
    every = order_plans()
    for entry in saved:
        state, plan = entry["state"], every[entry["plan"]]
        follows: Values = {}
        for world, accum in {(state["world_size"], state["grad_accum"]), *RESUMES}:
            title = f"W{world} GA{accum}"
            try:
                view = plan.align(world)
                samplers = [
                    PackSampler(view, rank, seed=5, grad_accum=accum, balance=entry["balance"])
                    for rank in range(world)
                ]
            except pt.PacktrainError:
                continue  # these ranks cannot share the plan at all
            try:
                for sampler in samplers:
                    sampler.load_state_dict(json.loads(json.dumps(state)))
            except ForeignArtefactError:
                follows[title] = None
                continue
            follows[title] = [samplers[0].epoch, digest([list(sampler) for sampler in samplers])]
        out.append(dict(sorted(follows.items())))
    return out


def orders() -> Values:
    saved = saved_positions()
    return {
        "aligned": aligned_orders(),
        "balanced": balanced_orders(),
        "replanned": replanned_orders(),
        "saved": saved,
        "resumed": resumed_positions(saved),
    }


# --------------------------------------------------------------------------------------------
# streams
# --------------------------------------------------------------------------------------------
def rows(count: int = 90) -> list[Values]:
    """Encoded samples whose tokens are made of their id."""
    out = []
    for i, length in enumerate(hashed(count, 2, 33, 11).tolist()):
        ids = hashed(length, 1, 500, 1000 + i).tolist()
        labels = [-100, *ids[1:]] if i % 5 else [-100] * (length // 2) + ids[length // 2 :]
        out.append({"input_ids": ids, "labels": labels})
    return out


def ids_of(pack: Any) -> Any:
    """Sample ids of a pack; None: a filler."""
    if isinstance(pack, list):
        return None if pack[0].get("filler") else [int(sample["sample_id"]) for sample in pack]
    held = [int(i) for i in pack["sample_ids"]]
    return held or None


@cache
def stream_kinds() -> dict[str, Callable[..., Any]]:
    """Name -> maker of a stream, by (rank, world_size)."""
    from packtrain.data import EqualSteps, StreamingPackedDataset, TokenBudgetDataset, WeightedSources

    data = rows()
    lengths = [len(row["input_ids"]) for row in data]

    def streaming(**options: Any) -> Callable[..., Any]:
        given = {"pack_length": 64, "window": 16, "seed": 3, **options}
        return lambda rank=0, world=1: StreamingPackedDataset(data, rank=rank, world_size=world, **given)

    def budget(**options: Any) -> Callable[..., Any]:
        given = {"micro_batch_size": 2, "max_seq_len": 32, "buffer_size": 16, "seed": 3, **options}
        return lambda rank=0, world=1: TokenBudgetDataset(data, rank=rank, world_size=world, **given)

    def unindexed(rank: int = 0, world: int = 1) -> Any:
        given = {"pack_length": 64, "window": 16, "shuffle_buffer": 8, "seed": 3}
        return StreamingPackedDataset(lambda: iter(data), rank=rank, world_size=world, **given)

    def weighted(rank: int = 0, world: int = 1) -> Any:
        mixed = WeightedSources({"a": data[:30], "b": data[30:]}, {"a": 1, "b": 3}, stopping="first")
        return StreamingPackedDataset(mixed, pack_length=64, window=16, rank=rank, world_size=world)

    return {
        "stream": streaming(),
        "stream shuffled": streaming(shuffle_buffer=8),
        "stream single": streaming(max_samples=3, max_carry=1, pack_length=40),
        "stream unindexed": unindexed,
        "stream weighted": weighted,
        "budget": budget(),
        "budget shuffled": budget(shuffle_buffer=8),
        "budget arrival": budget(order="arrival"),
        "budget fixed": budget(dyn_bsz=False, micro_batch_size=3),
        "budget effective": budget(count_mode="effective"),
        "budget warm": budget(warmup_steps=6, warmup_tokens=32),
        "budget planned": budget(lengths=lengths, balance="step", grad_accum=2, shuffle_buffer=8),
        "equal": lambda rank=0, world=1: EqualSteps(streaming(shuffle_buffer=8)(rank, world)),
    }


def streams() -> Values:
    """Ids of the packs of streams in order, and states along the way."""
    out: Values = {}
    for name, make in stream_kinds().items():
        whole = [[ids_of(pack) for pack in make(rank, world)] for world in (1, 2) for rank in range(world)]
        one = make()
        if hasattr(one, "set_epoch"):
            one.set_epoch(1)
        states = {}
        for stop in (1, 7, 10):
            stream = make()
            passed = iter(stream)
            for _ in range(stop):
                next(passed)
            states[str(stop)] = json.loads(json.dumps(stream.state_dict()))
        out[name] = {"ranks": whole, "second epoch": [ids_of(pack) for pack in one], "states": states}
    return out


def followed(name: str, state: Values) -> list[Any]:
    """The packs that a stream gives from a saved state on."""
    stream = stream_kinds()[name]()
    stream.load_state_dict(state)
    return [ids_of(pack) for pack in stream]


# --------------------------------------------------------------------------------------------
# folders
# --------------------------------------------------------------------------------------------
def called(*words: Any) -> Values:
    """A verb of the command line in this process: what it told with --json."""
    from packtrain.cli import main

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        try:
            main([*map(str, words), "--json"])
        except SystemExit as stop:
            if stop.code:
                raise AssertionError(f"packtrain {' '.join(map(str, words))}: exit {stop.code}") from None
    lines = [line for line in told.getvalue().splitlines() if line.startswith("{")]
    found: Values = json.loads(lines[-1]) if lines else {}
    return found


def written(path: Path, count: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)), encoding="utf-8")
    return path


def make_folders(out: Path) -> None:
    """Lengths, plan, an export and a growing directory that two ranks have begun to read."""
    from packtrain.data import LazyShardedDataset

    out = out.resolve()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        root = Path(scratch)
        stack.enter_context(contextlib.chdir(root))
        source = written(root / "rows.jsonl")
        called("measure", source, "--kind", "encoded", "--out", root / "lengths")
        called("plan", root / "lengths", "--pack-length", 64, "--out", root / "plan")
        called("export", root / "plan", "--format", "chunks", root / "chunks")
        written(root / "raw" / "rows.jsonl", 60)
        packing = ("--pack-length", 64, "--packs-per-chunk", 3, "--window", 20)
        called("produce", root / "raw", root / "growing", "--once", "--kind", "encoded", *packing)
        for rank in range(2):
            reader = LazyShardedDataset(root / "growing", rank, 2)
            for _ in islice(reader, 4):
                pass
            reader.acknowledge()
        out.mkdir(parents=True)
        for name in ("lengths", "plan", "chunks", "growing"):
            shutil.copytree(root / name, out / name)


def folder_facts(folders: Path) -> Values:
    """What the stored folders hold, read by the code at hand (from a copy: reading may leave marks)."""
    from packtrain.data import ChunkedPacks, LazyShardedDataset, PackSampler

    lengths, plan = pt.Lengths.load(folders / "lengths"), pt.PackPlan.load(folders / "plan")
    packs = ChunkedPacks(folders / "chunks")
    sampler = PackSampler(packs.plan.align(1), 0, seed=5)
    out: Values = {
        "lengths": [digest(lengths.tokens), lengths.digest, len(lengths)],
        "plan": [plan.checksum, digest(plan.indices), digest(plan.pack_tokens)],
        "replanned": pt.plan(lengths, 64).checksum,
        "exported": [ids_of(packs[position]) for position in sampler],
        "tokens": digest([i for sample in packs[0] for i in np.asarray(sample["input_ids"]).tolist()]),
    }
    for world in (1, 2, 3):
        for start in ("acknowledged", "beginning"):
            readers = [
                LazyShardedDataset(folders / "growing", rank, world, start=start) for rank in range(world)
            ]
            out[f"growing W{world} {start}"] = [[ids_of(pack) for pack in reader] for reader in readers]
    reader = LazyShardedDataset(folders / "growing", 1, 2, start="beginning")
    for _ in islice(reader, 3):
        pass
    state = json.loads(json.dumps(reader.state_dict()))
    out["growing state"] = state
    out["growing followed"] = followed_growing(folders, state)
    return out


def followed_growing(folders: Path, state: Values) -> Values:
    """What a saved cursor of a growing directory leaves for two ranks and for one."""
    from packtrain.data import LazyShardedDataset

    out: Values = {}
    for world in (1, 2):
        told = []
        for rank in range(world):
            reader = LazyShardedDataset(folders / "growing", rank, world, start="beginning")
            reader.load_state_dict(json.loads(json.dumps(state)))
            told.append([ids_of(pack) for pack in reader])
        out[str(world)] = told
    return out


# --------------------------------------------------------------------------------------------
def main(out: Path, data: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "folders").exists():
        make_folders(out / "folders")
    copied = Path(tempfile.mkdtemp()) / "folders"
    shutil.copytree(out / "folders", copied)
    from golden_runs import losses

    makers: dict[str, Callable[[], Any]] = {
        "plans": plans,
        "real_plans": lambda: real_plans(data / "lengths"),
        "orders": orders,
        "streams": streams,
        "folders": lambda: folder_facts(copied),
        "losses": lambda: losses(out / "folders", out / "states"),
    }
    for name, make in makers.items():
        path = out / f"{name}.json"
        if path.exists():
            print(f"{path} is there already: kept")  # noqa: T201
            continue
        path.write_text(json.dumps(make(), separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        print(f"{path}: {path.stat().st_size} bytes")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(os.environ.get("PACKTRAIN_TEST_DATA", "../shared/data")))
