"""Planner bench: speed as a ratio to a memory floor, quality as packs over the proven bound.

    python bench/planner.py                     # 1e6 samples, capacity 8192, all packers
    python bench/planner.py --n 1e7 --capacity 2048 8192 131072 --kinds sft vlm
    python bench/planner.py --peers             # also lightbinpack, binpacking and trl, where installed
    python bench/planner.py --limits            # three tight limits against single-dimension bounds
    python bench/planner.py --real ../shared/data/lengths   # windows of 1000 with carry on real lengths
    python bench/planner.py --laws 3000         # random instances through the law checks, on threads and
                                                # on two CPU feature settings

The floor is what any planner must do: a histogram, a stable counting argsort, and writing the ids. CPU
seconds of this process, best of three, compilers warm; the checksum is timed apart. On a busy machine
compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import packtrain as pt
from packtrain import extend
from packtrain.packers._jit import kernel
from packtrain.planning.laws import check_laws


def lengths_of(kind: str, n: int, cap: int, seed: int = 0) -> np.ndarray:
    """Lengths 1..cap of a kind that occurs in training, or that is hard to pack."""
    r = np.random.default_rng(seed)

    def lognormal(median: float, sigma: float, low: int) -> np.ndarray:
        return np.clip(r.lognormal(np.log(median), sigma, n).astype(np.int64), low, cap)

    if kind == "sft":
        return lognormal(357, 1.2, 16)
    if kind == "vlm":
        return np.clip(lognormal(150, 0.8, 20) + r.integers(4, 2000, n) * (r.random(n) < 0.8), 1, cap)
    if kind == "caption":
        return lognormal(32, 0.5, 4)
    if kind == "tiles":  # a few image sizes and a caption: four narrow peaks
        return np.clip(lognormal(60, 0.5, 10) + r.choice([256, 576, 729, 1024], n), 1, cap)
    if kind == "bimodal":
        return np.where(
            r.random(n) < 0.7, lognormal(100, 0.6, 8), np.clip(r.normal(cap * 0.7, cap * 0.05, n), 1, cap)
        ).astype(np.int64)
    if kind == "hard":  # all above half a pack: one sample a pack
        return r.integers(cap // 2 + 1, cap + 1, n)
    if kind == "latexocr":
        return np.clip(lognormal(90, 0.7, 10) + r.choice([64, 128, 256, 512], n), 1, cap)
    if kind == "thirds":  # three a pack, if they are chosen well
        return np.clip(r.integers(cap // 3 - cap // 20, cap // 3 + cap // 20 + 1, n), 1, cap)
    if kind == "uniform":
        return r.integers(1, cap + 1, n)
    if kind == "triplet":  # an optimum without a gap exists
        m = max(1, n // 3)
        a = r.integers(cap // 4 + 1, cap // 2, m)
        b = np.minimum(r.integers(cap // 8, cap // 3, m), cap - a - 1)
        return np.concatenate([a, b, cap - a - b])
    raise SystemExit(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")


KINDS = ("sft", "vlm", "caption", "tiles", "bimodal", "hard", "latexocr", "thirds", "uniform", "triplet")


@kernel
def floor_kernel(tokens: Any, top: Any, out: Any) -> Any:
    """Histogram, stable counting argsort, write."""
    start = np.zeros(top + 2, dtype=np.int64)
    for i in range(len(tokens)):
        start[tokens[i] + 1] += 1
    for c in range(1, top + 2):
        start[c] += start[c - 1]
    for i in range(len(tokens)):
        c = tokens[i]
        out[start[c]] = i
        start[c] += 1
    return 0


def best_cpu(run: Callable[[], Any], repeat: int = 3) -> tuple[float, Any]:
    """(least CPU seconds, last result)."""
    seconds, result = [], None
    for _ in range(repeat):
        begin = time.process_time()
        result = run()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def facts() -> dict[str, Any]:
    import numba

    cpu = (
        next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.processor(),
        )
        if Path("/proc/cpuinfo").is_file()
        else platform.processor()
    )
    return {
        "cpu": cpu, "cores": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__,
    }  # fmt: skip


def bench(kind: str, n: int, cap: int, packers: list[str]) -> list[dict[str, Any]]:
    lengths = pt.Lengths(lengths_of(kind, n, cap).astype(np.int32))
    out = np.empty(len(lengths), dtype=np.uint32)
    floor_kernel(lengths.tokens[:10], cap, out)
    floor, _ = best_cpu(lambda: floor_kernel(lengths.tokens, cap, out))
    rows = []
    for packer in packers:
        seconds, plan = best_cpu(lambda packer=packer: pt.plan(lengths, cap, packer=packer))
        begin = time.process_time()
        _ = plan.checksum
        rows.append({
            "kind": kind, "n": len(lengths), "capacity": cap, "packer": packer, "cpu_s": round(seconds, 5),
            "x_floor": round(seconds / floor, 2), "floor_s": round(floor, 5), "packs": len(plan),
            "over": len(plan) - plan.certificate.bound, "bound": plan.certificate.name,
            "gap": round(plan.certificate.gap, 7), "checksum_s": round(time.process_time() - begin, 5),
        })  # fmt: skip
    return rows


def peers(kind: str, n: int, cap: int) -> list[dict[str, Any]]:
    """Planners on PyPI on the same lengths, as far as installed; their input lists are built before."""
    tokens = lengths_of(kind, n, cap).tolist()
    found: list[tuple[str, Callable[[], Any]]] = []
    try:
        import lightbinpack

        for name in ("obfd", "bfd", "ffd"):
            if hasattr(lightbinpack, name):
                found.append((f"lightbinpack.{name}", partial(getattr(lightbinpack, name), tokens, cap)))
    except ImportError:
        pass
    if n <= 10_000:  # quadratic
        try:
            import binpacking

            found.append(("binpacking", partial(binpacking.to_constant_volume, dict(enumerate(tokens)), cap)))
        except ImportError:
            pass
    try:
        import datasets  # type: ignore[import-not-found]
        import pyarrow as pa
        from trl.data_utils import pack_dataset  # type: ignore[import-not-found]

        rows = datasets.Dataset(pa.table({"input_ids": [np.zeros(t, dtype=np.int8) for t in tokens]}))
        found.append(("trl pack_dataset bfd", partial(pack_dataset, rows, cap, "bfd")))
    except ImportError:
        pass
    out = []
    for name, run in found:
        seconds, packs = best_cpu(run, 1)
        out.append(
            {
                "kind": kind,
                "n": n,
                "capacity": cap,
                "packer": name,
                "cpu_s": round(seconds, 5),
                "packs": len(packs),
            }
        )
    return out


# tokens, images, patches, samples: first where one dimension binds, then where three or four do
TIGHT = ((16384, 8, 40960, 24), (32768, 16, 96000, 64), (8192, 17, 26200, 64), (8192, 19, 29000, 64),
         (8192, 17, 26200, 8))  # fmt: skip


def image_chats(n: int, seed: int = 0) -> pt.Lengths:
    """Chats with 0 to 6 images: tokens = text + patches / 4."""
    r = np.random.default_rng(seed)
    images = r.choice([0, 1, 1, 2, 3, 6], n)
    patches = images * r.integers(64, 3000, n)
    text = np.clip(r.lognormal(np.log(150), 0.8, n).astype(np.int64), 10, 2000)
    return pt.Lengths((text + patches // 4).astype(np.int32), costs={"images": images, "patches": patches})


def limited(n: int) -> list[dict[str, Any]]:
    """Plans under tokens, images, patches and samples at once; the bound is the best of one dimension."""
    lengths = image_chats(n)
    rows = []
    for cap, images, patches, samples in TIGHT:
        make = partial(
            pt.plan, lengths, cap, limits={"images": images, "patches": patches}, max_samples=samples,
            long_samples="drop",
        )  # fmt: skip
        seconds, plan = best_cpu(make, 1)
        rows.append(row_of(f"{images}/{patches}/{samples}", plan, cap, "auto", seconds))
    return rows


def windowed(folder: Path) -> list[dict[str, Any]]:
    """Windows of 1000 with carry on every array of a folder, capacities that hold 99 % of the samples."""
    rows = []
    for path in sorted(folder.glob("*.npy")):
        tokens = np.load(path)
        lengths = pt.Lengths(tokens[tokens > 0].astype(np.int32))
        cap = next(c for c in (2048, 4096, 8192, 16384, 32768) if np.mean(tokens <= c) >= 0.99)
        seconds, plan = best_cpu(partial(pt.plan, lengths, cap, window=1000), 1)
        rows.append(row_of(path.stem, plan, cap, "auto, window 1000", seconds))
    return rows


def row_of(kind: str, plan: pt.PackPlan, cap: int, packer: str, seconds: float) -> dict[str, Any]:
    return {
        "kind": kind, "n": len(plan.indices), "capacity": cap, "packer": packer, "cpu_s": round(seconds, 5),
        "packs": len(plan), "over": len(plan) - plan.certificate.bound, "bound": plan.certificate.name,
        "gap": round(plan.certificate.gap, 7),
    }  # fmt: skip


def instance(seed: int, packers: list[str]) -> tuple[pt.Lengths, int, dict[str, Any]]:
    """A random instance: lengths, capacity, options."""
    r = np.random.default_rng(seed)
    cap = int(r.choice([1, 7, 64, 1000, 8192, 131072, 1 << 23]))
    n = int(r.integers(0, 3000))
    tokens = lengths_of(str(r.choice(KINDS)), n, cap, seed) if cap > 64 else r.integers(0, 2 * cap, n)
    lengths = pt.Lengths(tokens, costs={"images": r.integers(0, 5, len(tokens))})
    packer = packers[seed % len(packers)]
    options: dict[str, Any] = {
        "packer": packer,
        "multiple_of": int(r.choice([1, 8])),
        "seed": int(r.choice([0, 3])) or None,
        "long_samples": str(r.choice(["single", "drop"])),
    }
    if getattr(extend.lookup("packers", packer), "LIMITS", False) and seed % 3 == 0:
        options |= {"limits": {"images": int(r.integers(1, 9))}, "max_samples": int(r.integers(1, 30))}
    if seed % 5 == 0:
        options["window"] = int(r.integers(1, 500))
    return lengths, cap, options


def laws(instances: int, *, one_cpu: bool = False) -> str:
    """Random instances through every packer and the law checks, by compiled kernels on four threads.

    Unless only the digest of one CPU is wanted, one in seven is planned without threads and one in eight by
    plain Python too, and must be equal. Returns a digest of all checksums.
    """
    from packtrain.testing import compiled_path, plain_path  # needs hypothesis

    packers = [name for name in extend.names("packers") if name != "optimal"]

    def one(seed: int) -> str:
        lengths, cap, options = instance(seed, packers)
        plan = pt.plan(lengths, cap, **options)
        check_laws(plan, lengths)
        return plan.checksum

    with compiled_path():
        with ThreadPoolExecutor(4) as pool:
            threaded = list(pool.map(one, range(instances)))
        some = range(0, 0 if one_cpu else instances, 7)
        if [one(seed) for seed in some] != [threaded[seed] for seed in some]:
            raise SystemExit("plans made on threads differ from plans made one by one")
    some = range(0, 0 if one_cpu else instances, 8)
    with plain_path():
        if [one(seed) for seed in some] != [threaded[seed] for seed in some]:
            raise SystemExit("compiled and plain plans differ")
    digest = hashlib.sha256("".join(threaded).encode()).hexdigest()[:16]
    print(f"laws hold on {instances} random instances: {digest}")
    return digest


def laws_on_a_plain_cpu(instances: int) -> str:
    """The same in a process whose kernels are compiled for a processor without vector extensions."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache}
        command = [sys.executable, str(Path(__file__).resolve()), "--laws", str(instances), "--one-cpu"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


_COLUMNS = ("kind", "n", "capacity", "packer", "cpu_s", "x_floor", "packs", "over", "gap")
_LINE = "{:24} {:>9} {:>8} {:24} {:>9} {:>8} {:>9} {:>7} {:>11}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=float, default=1e6)
    parser.add_argument("--capacity", type=int, nargs="+", default=[8192])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--packers", nargs="+", default=["bfd", "refine", "auto"])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--real", type=Path, help="folder of .npy arrays of lengths")
    parser.add_argument("--laws", type=int, default=0)
    parser.add_argument("--one-cpu", action="store_true", help="--laws on this CPU's features only")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if args.laws:
        digest = laws(args.laws, one_cpu=args.one_cpu)
        if not args.one_cpu and laws_on_a_plain_cpu(args.laws) != digest:
            raise SystemExit("plans differ between CPU feature settings")
        return
    machine = facts()
    os.environ.setdefault("PACKTRAIN_THREADS", "1")  # CPU seconds add up over threads; see threads.py
    print(json.dumps(machine))
    for packer in args.packers:  # compile
        pt.plan(np.arange(1, 60_001) % 500 + 1, 1024, packer=packer)
    rows: list[dict[str, Any]] = []
    print(_LINE.format(*_COLUMNS))
    if args.limits or args.real:
        rows += limited(int(args.n)) if args.limits else []
        rows += windowed(args.real) if args.real else []
        for row in rows:
            print(_LINE.format(*(row.get(column, "") for column in _COLUMNS)))
        args.capacity = []
    for cap in args.capacity:
        for kind in args.kinds:
            new = bench(kind, int(args.n), cap, args.packers)
            if args.peers:
                new += peers(kind, int(args.n), cap)
            for row in new:
                print(_LINE.format(*(row.get(column, "") for column in _COLUMNS)), flush=True)
            rows += new
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
