"""Four ranks under torchrun: start up on files, then compare what every rank would read (no model)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from packtrain.data import PackSampler
from packtrain.pipeline.prepare import prepare_ranks
from packtrain.pipeline.ranks import StartUp
from packtrain.train.config import load_config
from packtrain.world import world


def main() -> None:
    config = load_config(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    place = world()
    assert not dist.is_initialized()
    with StartUp(Path(config.training.output_dir), place=place, timeout_s=60) as start:
        prepared, _ = prepare_ranks(config, start)
        dist.init_process_group("gloo")
        aligned = prepared.plan.align(place.size)
        sampler = PackSampler(aligned, place.rank, seed=1)
        mine = [aligned.pack_id(position) for position in sampler]
        ids = prepared.source[int(prepared.plan.indices[0])]["messages"][0]["content"][0]["text"]
        row = {
            "rank": place.rank,
            "packs": mine,
            "checksum": aligned.checksum,
            "made": start.makes,
            "text": ids,
            "folder": str(prepared.plan.folder),
        }
        rows: list[dict[str, object]] = [{}] * place.size
        dist.all_gather_object(rows, row)
        if place.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(rows), encoding="utf-8")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
