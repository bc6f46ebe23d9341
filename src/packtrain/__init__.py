"""packtrain: sequence packing for (multimodal) LLM training, measured, planned once, proven."""

from typing import TYPE_CHECKING

from . import moved
from .errors import PacktrainError, SampleError
from .extend import on_first_use
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
    "forecast": "planning.forecast",
    "loader": "packs.source",
    "measure": "pipeline.measure",
    "open_chats": "sources.chat",
}
__getattr__ = on_first_use(__name__, _LATER)
