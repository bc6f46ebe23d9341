"""Reads an export in order, through the public door, with few file descriptors; prints how many packs."""

from __future__ import annotations

import resource
import sys

import packtrain as pt
from packtrain.data import open_packs

packs = open_packs(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
read = [int(number) for batch in pt.loader(packs, shuffle=False) for number in batch.sample_ids]
if read != packs.plan.indices.tolist():
    sys.exit("other samples, or in another order")
held = [pack for _, pack in zip(range(100), packs, strict=False)]  # a consumer that keeps packs
sys.stdout.write(f"{len(packs)} {len(held)}")
