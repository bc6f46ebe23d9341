"""Fixtures of the media tests."""

from __future__ import annotations

import pytest
from made_images import MADE


@pytest.fixture(params=sorted(MADE))
def made(request: pytest.FixtureRequest) -> bytes:
    """The bytes of one made image."""
    return MADE[request.param]()
