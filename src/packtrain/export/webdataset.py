"""webdataset: packs as plain tars that `webdataset`, Hugging Face `datasets`, `tarfile` and energon read.

    ps_00000000.img000.jpg  ps_00000000.img002.jpg  ps_00000000.json      one pack; members adjacent

The key (text before the first dot) is the pack's number: letters, digits and `_` only, unique over the
export. The record comes last, so a tar that was cut inside a pack has no record there.
"""

from __future__ import annotations

from typing import Any

from ._job import Job
from ._tar import write_tars

OPTIONS = {"prompts": "prompt"}

needs_template = False


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the shards of a part."""
    return write_tars(job, part, prompts=job.options["prompts"])


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing beside the shards."""
    return []
