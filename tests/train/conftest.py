"""Tiny real models, loaded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_samples import ALL

from packtrain.testing.tiny import tiny_model

torch.set_num_threads(1)  # tiny matrices: threads only wait for each other


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Every tiny model, once; tests leave them as they are."""
    return {name: tiny_model(name, seed=1) for name in ALL}
