"""chunks: packs that are encoded already, one Arrow file a part, one record batch a pack (`store.chunks`).

Read without a tokenizer: token ids, labels, positions and lengths are as the template gave them. Media are
kept as `uint8`, as the tensors they became, or as their bytes (`media: source`, encoded when read).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import one_of
from ..store.chunks import DEFAULT_MEDIA, MEDIA, ChunkWriter, manifest_of
from ._job import Job, listed

OPTIONS = {"media": DEFAULT_MEDIA}

needs_template = True


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be, before anything is written."""
    one_of("media", options["media"], MEDIA)


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the chunk of a part.

    Raises:
        DriftError: a sample encodes to another length than it was planned with.
    """
    path = job.out / f"chunk_{part:08d}.arrow"
    numbers = job.packs_of(part)
    meta = {"plan": job.plan.checksum, "packs": [numbers.start, numbers.stop]}
    with ChunkWriter(path, media=job.options["media"], meta=meta) as writer:
        for number in numbers:
            pack = job.read(number)
            encoded = job.encoded(pack)
            records = None if getattr(job.source, "encoded", False) else pack.samples
            writer.add(encoded, records)
    manifest = writer.manifest
    told = {"count": len(numbers), "first_pack": numbers.start}
    row = {"name": path.name, "bytes": manifest["bytes"], "sha256": manifest["sha256"], **told}
    return [row, listed(manifest_of(path), manifest_of(path).name)]


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing beside the chunks."""
    return []
