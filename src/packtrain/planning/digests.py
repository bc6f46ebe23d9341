"""Digests of arrays by blocks of 64 MiB: the unit in which plans and lengths are vouched for.

A block digest is the SHA-256 of the block's stored little-endian bytes, so it does not depend on the
machine and can be checked block by block, in any order, against a memory map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import BLOCK, canonical_json


def block_digests(array: NDArray[Any]) -> Iterator[bytes]:
    """SHA-256 of each 64 MiB block of `array`'s little-endian bytes (none for an empty array)."""
    little = array.dtype.newbyteorder("<")
    rows = BLOCK // array.dtype.itemsize
    for start in range(0, len(array), rows):
        block = np.ascontiguousarray(array[start : start + rows]).astype(little, copy=False)
        yield hashlib.sha256(block.data.cast("B")).digest()


def checksum_of(header: Mapping[str, Any], blocks: Iterator[bytes] | list[bytes]) -> str:
    """SHA-256 (hex) over a header (as canonical JSON) followed by block digests."""
    digest = hashlib.sha256(canonical_json(dict(header)))
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
