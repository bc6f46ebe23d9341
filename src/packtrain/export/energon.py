"""energon: the tars of `webdataset` with the metadata that Megatron-Energon 5 and 7 ask for.

    pack-000000-000.tar.idx     where every sample starts (what `energon prepare` would write)
    .nv-meta/dataset.yaml       how samples are built; split.yaml: which shards are for what
             .info.yaml .info.json   shard counts (5.0 reads the first, 7.4 the second)

`layout: packtrain` (default) describes crude samples, for `packtrain.hosts.energon.PackedTaskEncoder`.
`layout: llava` writes what LLaVA-OneVision-1.5's encoders read: the field `prompts` with `<image>` in it,
`img0.jpg`, its sample class and a loader; samples that they would read wrongly are refused
(`store.pack_records`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .. import files
from ..checks import one_of
from ..errors import ConfigError
from ._job import Job, published
from .webdataset import write_tars

OPTIONS = {"prompts": None, "layout": "packtrain"}

#: The version that the metadata claims: its readers compare nothing but the fields.
_VERSION = "7.4.1"

needs_template = False

_CRUDE = """__class__: CrudeWebdataset
__module__: megatron.energon
"""
_LLAVA = """sample_type:
  __module__: aiak_training_llm.data.multimodal
  __class__: PackedCaptioningSample
part_filter: sample_loader.py:part_filter
sample_loader: sample_loader.py:sample_loader
"""
_LOADER = '''"""Builds one packed sample of LLaVA-OneVision from the members of a key."""


def sample_loader(sample):
    record = sample["json"]

    def image(name):
        return sample.get(name) if name else None

    images = [
        [image(one) for one in held] if isinstance(held, list) else image(held) for held in record["images"]
    ]
    return dict(
        __key__=sample["__key__"],
        __restore_key__=sample["__restore_key__"],
        images=[one[0] if isinstance(one, list) and len(one) == 1 else one for one in images],
        prompts=record["prompts"],
        captions=record["captions"],
    )


def part_filter(part):
    return True
'''


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be, before anything is written."""
    layout = options["layout"]
    one_of("layout", layout, ("packtrain", "llava"))
    if layout == "llava" and options["prompts"] not in (None, "prompts"):
        raise ConfigError(
            f"layout llava has the field prompts, not {options['prompts']}", hint="leave prompts out"
        )


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the shards of a part with their indexes."""
    if job.options["layout"] == "llava":
        return write_tars(job, part, index=True, prompts="prompts", width=1, llava=True)
    return write_tars(job, part, index=True, prompts=job.options["prompts"] or "prompt")


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write `.nv-meta` for all shards."""
    counts = {row["name"]: row["count"] for part in parts for row in part["files"] if "count" in row}
    info = {"energon_version": _VERSION, "shard_counts": counts}
    names = "".join(f"  - {name}\n" for name in counts)
    llava = job.options["layout"] == "llava"
    texts = {
        "dataset.yaml": _LLAVA if llava else _CRUDE,
        "split.yaml": f"split_parts:\n  train:\n{names}  val: []\n  test: []\nexclude: []\n",
        ".info.yaml": f"energon_version: {_VERSION}\nshard_counts:\n"
        + "".join(f"  {name}: {count}\n" for name, count in counts.items()),
        ".info.json": json.dumps(info, indent=2) + "\n",
    }
    if llava:
        texts["sample_loader.py"] = _LOADER
    files.remove_leftovers(job.out / ".nv-meta")
    return [published(job.out, f".nv-meta/{name}", text.encode()) for name, text in texts.items()]
