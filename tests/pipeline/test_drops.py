"""How many samples a plan may leave out: a share that is asked for; a tenth for media that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.errors import PlanError
from packtrain.pipeline.plan import check_measured, plan_lengths
from packtrain.planning.lengths import STATUS_FAILED, Lengths


def lengths_without(count: int, reason: str) -> Lengths:
    """A hundred samples, of which the first `count` failed for `reason`."""
    status = np.zeros(100, np.uint8)
    status[:count] = STATUS_FAILED
    tokens = np.where(status, 0, 10)
    return Lengths(tokens, {}, status, dict.fromkeys(range(count), reason))


@pytest.mark.parametrize("reason", ["missing_media", "remote_media", "placeholder_mismatch"])
@pytest.mark.parametrize(
    ("count", "limit", "stops"),
    [
        (10, None, False),
        (11, None, True),
        (50, None, True),
        (50, 0.5, False),
        (50, 0.4, True),
        (1, 0.0, True),
    ],
)
def test_media_that_are_not_there(
    reason: str, count: int, limit: float | None, stops: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"pack_length": 100, "max_drop_fraction": limit}
    if not stops:
        made = plan_lengths(lengths_without(count, reason), tmp_path / "plan", **options)
        assert made.ledger.counts() == {reason: count} and len(made.indices) == 100 - count
        return
    with pytest.raises(PlanError, match=rf"{count} of 100 samples .* are left out: {reason} {count}") as told:
        plan_lengths(lengths_without(count, reason), tmp_path / "plan", **options)
    assert "max_drop_fraction" in str(told.value.hint)
    assert not (tmp_path / "plan").exists()


def test_other_reasons_have_the_limit_that_is_asked_for(tmp_path: Path) -> None:
    made = plan_lengths(lengths_without(60, "template_error"), tmp_path / "plan", pack_length=100)
    assert made.ledger.counts() == {"template_error": 60}


@given(
    st.integers(0, 100),
    st.none() | st.floats(0, 1),
    st.sampled_from(["missing_media", "placeholder_mismatch", "template_error"]),
)
def test_a_measurement_stops_where_its_plan_would(count: int, limit: float | None, reason: str) -> None:
    """The same share of the same samples; only a measurement with nothing usable stops without a limit."""
    lengths = lengths_without(count, reason)

    def stops(check: Any) -> bool:
        try:
            check()
        except PlanError as error:
            assert f"{reason} {count}" in error.message and "100 samples" in error.message
            return True
        return False

    measured = stops(lambda: check_measured(lengths, "absent", limit))
    planned = stops(lambda: plan_lengths(lengths, None, pack_length=100, max_drop_fraction=limit))
    assert measured == planned or (count == 100 and limit == 1.0)
