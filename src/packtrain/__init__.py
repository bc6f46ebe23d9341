"""packtrain: sequence packing for (multimodal) LLM training, measured, planned once, proven."""

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
    "measure",
    "plan",
]
