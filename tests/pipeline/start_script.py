"""A rank's start-up without torch: `start_script.py FOLDER SAMPLES PAUSE [ROOT [TIMEOUT]]`; one JSON line.

Rank and world size come from the environment, as a launcher sets them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from words import Words, many

from packtrain.errors import PacktrainError
from packtrain.pipeline import measure as measuring
from packtrain.pipeline import publish as ranges
from packtrain.pipeline.plan import plan_lengths
from packtrain.pipeline.prepare import CacheRoot
from packtrain.pipeline.ranks import StartUp
from packtrain.planning.packplan import PackPlan
from packtrain.world import world

OPTIONS: dict[str, Any] = {"pack_length": 20, "min_fill_ratio": None, "max_drop_fraction": None}


def main() -> None:
    folder, samples, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    root = sys.argv[4] or None if len(sys.argv) > 4 else None
    ranges.UNIT = 8
    source = many(samples, pause)

    def make(tell: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "persist_every": 8,
            "workers": 1,
            "progress": lambda done, total: tell("measuring", done, total),
        }
        if root is not None:
            cache = CacheRoot(root, 60)
            lengths, place = cache.lengths(source, Words(), **options)
            plan, at = cache.plan(lengths, place, **OPTIONS)
        else:
            lengths = measuring.measure(source, Words(), folder / "lengths", **options)
            plan = plan_lengths(lengths, folder / "plan", lengths_folder=folder / "lengths", **OPTIONS)
            at = folder / "plan"
        return {"plan": str(at), "checksum": plan.checksum}

    timeout = float(sys.argv[5]) if len(sys.argv) > 5 else 60.0
    try:
        with StartUp(folder, place=world(), timeout_s=timeout) as start:
            result = start.share(make)
            found = PackPlan.load(result["plan"]).checksum
            sys.stdout.write(json.dumps({"checksum": found, "made": start.makes}) + "\n")
    except PacktrainError as error:
        sys.stdout.write(json.dumps({"error": error.message, "hint": error.hint}) + "\n")
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
