"""What the LLaVA-like families share: one-row positions, a language model that takes them as they are.

Their vision part turns each crop into a fixed number of features, so packing touches only the
language model, which isolates samples like any text model. Measured (fp32, CPU, transformers 5.24,
small random models): logits of packed samples equal those of the samples alone on sdpa and eager.
Flash and varlen keywords are not sent: the classes forward every keyword to the vision tower too.
"""

from __future__ import annotations

from functools import partial

from ._family import BACKENDS, Family

_PROVEN = ("eager", "sdpa")

#: A family of one-row positions whose boundaries are the restarting text positions.
llava_like = partial(
    Family,
    position_backends=_PROVEN,
    refused={name: "only sdpa and eager are proven for it" for name in BACKENDS if name not in _PROVEN},
)
