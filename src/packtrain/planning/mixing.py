"""How well packs mix sources: of how many sources a pack holds samples, against chance.

The source of a sample is a group number; lengths carry it as the cost named `source` (a number that says
where a sample comes from, not one to limit). A packer never reads it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SOURCE", "source_mixing"]

SOURCE = "source"


def source_mixing(offsets: NDArray[Any], indices: NDArray[Any], groups: NDArray[Any]) -> dict[str, Any]:
    """Figures on packs p = indices[offsets[p]:offsets[p+1]] with the group number of each sample.

    Returns:
        `sources` in the plan; `sources_per_pack`, the mean; `sources_per_pack_at_random`, what the mean
        would be if packs of these sizes drew their samples at random; `mixed_packs`, the share of packs
        that hold at least two sources. Means are rounded to 4 places.
    """
    packs = len(offsets) - 1
    if packs == 0:
        return {"sources": 0, "sources_per_pack": 0.0, "sources_per_pack_at_random": 0.0, "mixed_packs": 0.0}
    sizes = np.diff(offsets)
    names, group = np.unique(groups[indices], return_inverse=True)
    pack = np.repeat(np.arange(packs, dtype=np.int64), sizes)
    held = np.unique(pack * len(names) + group) // len(names)
    distinct = np.bincount(held, minlength=packs)
    share = np.bincount(group, minlength=len(names)).tolist()
    widths, number = np.unique(sizes, return_counts=True)
    chance = math.fsum(
        count * math.fsum(1.0 - (1.0 - k / len(group)) ** width for k in share)
        for width, count in zip(widths.tolist(), number.tolist(), strict=True)
    )
    return {
        "sources": len(names),
        "sources_per_pack": round(int(distinct.sum()) / packs, 4),
        "sources_per_pack_at_random": round(chance / packs, 4),
        "mixed_packs": round(int((distinct > 1).sum()) / packs, 4),
    }
