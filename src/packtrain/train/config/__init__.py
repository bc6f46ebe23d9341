"""The configuration of a run: one YAML, one union of kinds of data, one table of names of other layouts."""

from __future__ import annotations

from .data import CacheConfig, Exported, Growing, Planned, Stream, TokenBudget, validation_prefix
from .load import load_config
from .run_config import RunConfig
from .sections import (
    ATTENTIONS,
    ExportConfig,
    ModelConfig,
    ReportConfig,
    TemplateConfig,
    TrainingConfig,
    told_of,
)

__all__ = [
    "ATTENTIONS",
    "CacheConfig",
    "ExportConfig",
    "Exported",
    "Growing",
    "ModelConfig",
    "Planned",
    "ReportConfig",
    "RunConfig",
    "Stream",
    "TemplateConfig",
    "TokenBudget",
    "TrainingConfig",
    "load_config",
    "told_of",
    "validation_prefix",
]
