"""Reads the packs of a folder of chunks in order with few file descriptors; prints how many packs."""

from __future__ import annotations

import resource
import sys

from packtrain.packs.open_chunks import OpenChunks
from packtrain.store.chunks import ChunkReader

resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
chunks = OpenChunks(lambda number: ChunkReader(f"{sys.argv[1]}/{number}.arrow"))
count = int(sys.argv[2])
sys.stdout.write(str(sum(int(chunks[number][0][0]["sample_id"]) == number for number in range(count))))
