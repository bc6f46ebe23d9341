"""Where the tokens of a sample are, before and after media placeholders are expanded.

Measuring and encoding both work on this value: one entry per token of the unexpanded text, each with
the number of tokens it becomes. So their lengths, labels and cuts come from the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError

__all__ = ["TRUNCATIONS", "Layout", "media_layout", "text_layout"]

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: What to do with samples over max_length: leave them (the plan decides), or cut one side.
TRUNCATIONS = ("error", "left", "right")


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens of one sample, unexpanded.

    Attributes:
        ids: int64[K] token ids.
        width: int64[K] tokens each becomes (1, or the tokens of an image).
        trained: bool[K], inside a trained range and no media.
        image: bool[K], placeholder of an image.
    """

    ids: I64
    width: I64
    trained: Mask
    image: Mask

    @property
    def total(self) -> int:
        """Tokens after expansion."""
        return int(self.width.sum())

    def expand(self, values: NDArray[Any]) -> NDArray[Any]:
        """One entry per token after expansion (a fresh array)."""
        return np.repeat(values, self.width)

    def cut(self, truncation: str, max_length: int | None) -> tuple[int, int]:
        """First and one-past-last expanded token that stay.

        Raises:
            SampleError: `truncation_cuts_media`, when image tokens would go.
        """
        total = self.total
        if truncation == "error" or max_length is None or total <= max_length:
            return 0, total
        begin, end = (0, max_length) if truncation == "right" else (total - max_length, total)
        image = self.expand(self.image)
        if image[:begin].any() or image[end:].any():
            raise SampleError(
                "truncation_cuts_media",
                f"cutting {total} tokens to max_length {max_length} on the {truncation} would cut an image",
                hint="raise max_length, or use truncation: error and a long-sample policy",
            )
        return begin, end


def text_layout(ids: I64, trained: Mask) -> Layout:
    """Layout of a sample without media."""
    return Layout(ids, np.ones(len(ids), dtype=np.int64), trained, np.zeros(len(ids), dtype=bool))


def media_layout(ids: I64, trained: Mask, image_token_id: int | None, patches: I64, merge: int) -> Layout:
    """Layout of a sample whose k image placeholders take the grids `patches` int64[k,2], in order.

    Raises:
        SampleError: `placeholder_mismatch`, when the numbers differ.
    """
    image = ids == image_token_id
    if int(image.sum()) != len(patches):
        raise SampleError(
            "placeholder_mismatch",
            f"the text has {int(image.sum())} image tokens for {len(patches)} images",
        )
    width = np.ones(len(ids), dtype=np.int64)
    width[image] = patches[:, 0] * patches[:, 1] // merge**2
    return Layout(ids, width, trained & ~image, image)
