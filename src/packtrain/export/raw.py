"""raw: packs as loose files in one folder, as the offline packing description has them.

    ps_00000000.img000.jpg  ps_00000000.img002.jpg  ps_00000000.json

A folder of a million files is slow on most file systems: take `webdataset` for large sets.
"""

from __future__ import annotations

from typing import Any

from ._job import Job, published

OPTIONS = {"prompts": "prompt"}

needs_template = False


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the files of a part; the record of a pack comes after its media."""
    return [
        published(job.out, f"{pack.key}.{member}", data)
        for pack in map(job.read, job.packs_of(part))
        for member, data in job.members(pack, prompts=job.options["prompts"])
    ]


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing beside the packs."""
    return []
