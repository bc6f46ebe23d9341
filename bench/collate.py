"""Collator bench: one linear concatenation against repeated addition of lists, in one run.

    python bench/collate.py                # 100 segments, 8,192 tokens
    python bench/collate.py --segments 100 --tokens 8192 --repeat 7

The same row of input_ids, labels and positions, made by `row = row + sample` for every sample and field
(whose cost grows with segments x tokens) and by the collator: its concatenation alone (`join`), and the
whole call with every check of every sample (`call`). Times are the best of the repeats. The floors of
the documentation are asserted at the end.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from packtrain.collate import PaddingFreeCollator
from packtrain.collate.padding_free import join_positions

FLOOR = 20.0


def samples(segments: int, tokens: int) -> list[dict[str, Any]]:
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, tokens), segments - 1, replace=False))
    sizes = np.diff([0, *cuts.tolist(), tokens]).tolist()
    return [
        {"input_ids": torch.arange(n), "labels": torch.arange(n), "position_ids": torch.arange(n)}
        for n in sizes
    ]


def repeated_addition(pack: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every sample copies the row so far, once per field, as lists of numbers."""
    row: dict[str, list[Any]] = {name: [] for name in pack[0]}
    for sample in pack:
        for name, values in sample.items():
            row[name] = row[name] + values.tolist()
    return {name: torch.tensor([values]) for name, values in row.items()}


def joined(collate: PaddingFreeCollator, segments: list[Any]) -> None:
    collate._tokens(segments, 0)
    join_positions(segments, False, 0)


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """Best of `repeat` calls in a row."""
    return min(timeit.repeat(call, number=1, repeat=repeat))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--segments", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for scale in (1, 2):
        pack = samples(args.segments * scale, args.tokens * scale)
        collate = PaddingFreeCollator()
        segments = collate._read([pack])
        join = seconds(partial(joined, collate, segments), args.repeat)
        call = seconds(partial(collate, [pack]), args.repeat)
        theirs = seconds(partial(repeated_addition, pack), args.repeat)
        row, plain = collate([pack]), repeated_addition(pack)
        assert torch.equal(row["input_ids"], plain["input_ids"])
        assert torch.equal(row["position_ids"], plain["position_ids"])
        for name, ours in (("join", join), ("call", call)):
            found[f"{name}_ms_{scale}x"] = ours * 1e3
            found[f"{name}_ratio_{scale}x"] = theirs / ours
        found[f"addition_ms_{scale}x"] = theirs * 1e3
    found["growth"] = found["call_ms_2x"] / found["call_ms_1x"]
    print(json.dumps({key: round(value, 2) for key, value in found.items()}))
    assert found["join_ratio_1x"] >= FLOOR, f"{found['join_ratio_1x']:.1f}x repeated addition, {FLOOR} wanted"
    assert found["growth"] < 3, "the collator is not linear"


if __name__ == "__main__":
    main()
