"""packtrain: sequence packing for (multimodal) LLM training, measured, planned once, proven."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import moved
from .errors import PacktrainError, SampleError
from .planning.align import AlignedPlan
from .planning.build import plan
from .planning.ledger import Ledger
from .planning.lengths import Lengths
from .planning.packplan import PackPlan
from .planning.spec import PlanSpec
from .version import __version__

if TYPE_CHECKING:
    from .packs.source import loader
    from .pipeline.measure import measure
    from .planning.forecast import forecast
    from .sources.chat import open_chats

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


#: What is imported when it is asked for: it needs torch, or the readers of media and sources.
_LATER = {
    "forecast": ".planning.forecast",
    "loader": ".packs.source",
    "measure": ".pipeline.measure",
    "open_chats": ".sources.chat",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
