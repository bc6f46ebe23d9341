"""packtrain: sequence packing for (multimodal) LLM training, measured, planned once, proven."""

from typing import Any

from . import moved
from .errors import PacktrainError, SampleError
from .pipeline.measure import measure
from .planning.align import AlignedPlan
from .planning.build import plan
from .planning.forecast import forecast
from .planning.ledger import Ledger
from .planning.lengths import Lengths
from .planning.packplan import PackPlan
from .planning.spec import PlanSpec
from .version import __version__

moved.install()

__all__ = [
    "AlignedPlan",
    "Ledger",
    "Lengths",
    "PackPlan",
    "PacktrainError",
    "PlanSpec",
    "SampleError",
    "__version__",
    "forecast",
    "loader",
    "measure",
    "open_chats",
    "plan",
]


def __getattr__(name: str) -> Any:
    """What needs torch, or a source, is imported when it is asked for."""
    if name == "loader":
        from .packs.source import loader

        return loader
    if name == "open_chats":
        from .sources.chat import open_chats

        return open_chats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
