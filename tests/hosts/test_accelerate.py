"""accelerate on packs: two ranks, 200 real samples, by the example as it stands.

Each step's loss is that of training without packs: the mean over the tokens of the samples of the step, one
forward pass each, on weights that were trained so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from host_runs import leak_of, refused, start
from loops import EXAMPLES, SETTINGS, named, unpacked

pytestmark = pytest.mark.hosts


def steps_of(seen: list[Any], count: int) -> list[list[int]]:
    """Samples of every step over all ranks."""
    accum = len(seen[0]["ids"]) // count
    return [
        [n for rank in seen for pack in rank["ids"][step * accum : (step + 1) * accum] for n in pack]
        for step in range(count)
    ]


def loop(network: Path, talks: Path, out: Path, name: str, **options: Any) -> list[Any]:
    words = [str(network), str(talks), str(out)]
    given = {
        "example": str(EXAMPLES / "accelerate_loop.py"),
        "words": words,
        "options": {**SETTINGS, **options},
    }
    return start(Path(sys.executable), "accelerate_run.py", out.parent, name, ranks=2, **given)


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
def test_it_trains_as_unpacked_and_goes_on(network: Path, talks: Path, tmp_path: Path) -> None:
    assert named("accelerate_loop.py")
    seen = loop(network, talks, tmp_path / "out", "whole", save_at=2)
    steps = steps_of(seen, 5)
    assert [len(step) for step in steps] == [40] * 5
    assert sorted(number for step in steps for number in step) == list(range(200))
    assert seen[0]["losses"] == pytest.approx(unpacked(network, talks, steps), rel=1e-4)
    again = loop(network, talks, tmp_path / "out", "resumed")  # behind the checkpoint of step 2
    assert steps_of(again, 3) == steps[2:]
    assert again[0]["losses"] == pytest.approx(seen[0]["losses"][2:], rel=1e-5)


def test_attention_that_forgets_boundaries_is_refused(
    network: Path, talks: Path, tmp_path: Path, record_property: Any
) -> None:
    words = [str(network), str(talks), str(tmp_path / "out")]
    told = refused(
        Path(sys.executable), "accelerate_run.py", tmp_path, "leak", ranks=2, leak=True,
        example=str(EXAMPLES / "accelerate_loop.py"), words=words, options=SETTINGS,
    )  # fmt: skip
    record_property("refused", leak_of(told))
