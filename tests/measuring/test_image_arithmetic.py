"""Image token arithmetic: scalar, batch and the library's own function agree everywhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError
from packtrain.measuring.image_tokens import PixelRule, rule_of, smart_resize, verify_limits
from packtrain.measuring.video_tokens import VideoRule

QWEN2 = PixelRule(patch=14, merge=2, minimum=3136, maximum=12_845_056)
QWEN3 = PixelRule(patch=16, merge=2, minimum=65_536, maximum=16_777_216)
SMALL = PixelRule(patch=14, merge=2, minimum=3136, maximum=200_000)


def grids(heights: Any, widths: Any, rule: PixelRule) -> tuple[Any, list[str | None]]:
    """int64[n,2] patches of many images (0 where refused), and why each is refused."""
    table = np.zeros((len(heights), 2), dtype=np.int64)
    problems: list[str | None] = [None] * len(heights)
    for place, (height, width) in enumerate(zip(heights, widths, strict=True)):
        try:
            table[place] = smart_resize(int(height), int(width), rule)
        except SampleError as error:
            problems[place] = error.message
    return table // rule.patch, problems


def library(height: int, width: int, rule: PixelRule) -> tuple[int, int] | None:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as theirs

    try:
        return theirs(height, width, rule.factor, rule.minimum, rule.maximum)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("height", "width", "rule", "expected"),
    [
        (3000, 4000, SMALL, (364, 504)),
        (3000, 4000, QWEN2, (2996, 4004)),
        (8, 8, QWEN2, (56, 56)),
        (14, 14, QWEN2, (56, 56)),
        (42, 42, PixelRule(patch=14, merge=2, minimum=1, maximum=10**7), (56, 56)),  # 1.5 rounds to even
        (70, 70, PixelRule(patch=14, merge=2, minimum=1, maximum=10**7), (56, 56)),  # 2.5 rounds to even
        (1, 1, QWEN3, (256, 256)),
    ],
)
def test_known_sizes(height: int, width: int, rule: PixelRule, expected: tuple[int, int]) -> None:
    assert smart_resize(height, width, rule) == library(height, width, rule) == expected


sizes = st.one_of(st.integers(1, 64), st.integers(1, 3000), st.integers(1, 40_000))
rules = st.one_of(
    st.sampled_from([QWEN2, QWEN3, SMALL]),
    st.builds(
        lambda patch, merge, low, more: PixelRule(patch=patch, merge=merge, minimum=low, maximum=low + more),
        st.integers(1, 20),
        st.integers(1, 4),
        st.integers(1, 200_000),
        st.integers(0, 20_000_000),
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=40), rules)
def test_three_ways_agree(images: list[tuple[int, int]], rule: PixelRule) -> None:
    table, problems = grids([h for h, _ in images], [w for _, w in images], rule)
    assert table.shape == (len(images), 2) and table.dtype == np.int64
    for (height, width), row, problem in zip(images, table.tolist(), problems, strict=True):
        theirs = library(height, width, rule)
        if theirs is None:
            assert row == [0, 0] and problem is not None and "aspect ratio" in problem
            with pytest.raises(SampleError) as caught:
                smart_resize(height, width, rule)
            assert caught.value.reason == "unsupported_media"
        else:
            assert problem is None
            assert smart_resize(height, width, rule) == theirs
            assert row == [theirs[0] // rule.patch, theirs[1] // rule.patch]


def test_two_thousand_random_sizes_per_family() -> None:
    rng = np.random.default_rng(11)
    for rule in (QWEN2, QWEN3):
        high, wide = rng.integers(1, 9000, (2, 2000))
        table, problems = grids(high, wide, rule)
        for h, w, row, problem in zip(high.tolist(), wide.tolist(), table.tolist(), problems, strict=True):
            theirs = library(h, w, rule)
            assert (theirs is None) == (problem is not None)
            if theirs is not None:
                assert [theirs[0] // rule.patch, theirs[1] // rule.patch] == row


def test_aspect_limit_is_exact() -> None:
    assert smart_resize(1, 200, QWEN2)
    assert grids([200, 201], [1, 1], QWEN2)[1][0] is None
    assert "aspect ratio above 200" in str(grids([200, 201], [1, 1], QWEN2)[1][1])
    for empty in ((0, 5), (5, 0)):
        with pytest.raises(SampleError, match="empty"):
            smart_resize(*empty, QWEN2)
    assert grids([], [], QWEN2)[0].shape == (0, 2)


def test_a_processor_that_does_not_resize() -> None:
    rule = PixelRule(patch=14, merge=2, minimum=1, maximum=1, resize=False)
    assert smart_resize(56, 2800, rule) == (56, 2800)
    table, problems = grids([56, 57], [28, 28], rule)
    assert table.tolist() == [[4, 2], [0, 0]] and "multiple of 28" in str(problems[1])


def image_processor(**changes: Any) -> Any:
    values = {
        "patch_size": 14,
        "merge_size": 2,
        "size": {"shortest_edge": 3136, "longest_edge": 200_000},
        "do_resize": True,
    }
    return SimpleNamespace(**{**values, **changes})


def test_rule_is_read_from_the_object() -> None:
    assert rule_of(image_processor()) == SMALL and SMALL.factor == 28
    for bad in (
        None,
        SimpleNamespace(),
        image_processor(size={"height": 224, "width": 224}),
        image_processor(size=None),
    ):
        with pytest.raises(ConfigError, match="patch_size"):
            rule_of(bad)
    impossible = rule_of(image_processor(size={"shortest_edge": 10, "longest_edge": 5}))
    with pytest.raises(ConfigError, match="image processor settings are impossible"):
        impossible.check("image")
    video = VideoRule(kind="frames", token="<v>", pixels=impossible)  # told by the first video, not before
    with pytest.raises(ConfigError, match="video processor settings are impossible"):
        video.grid(2, 56, 56)


def test_limits_in_effect_pb77() -> None:
    """200,000 pixels: 234 tokens. A processor that ignores the limit takes 15,301 and is refused."""

    def tokens(rule: PixelRule) -> Any:
        return lambda h, w: np.prod(smart_resize(h, w, rule)) // rule.factor**2

    assert verify_limits(tokens(SMALL), SMALL, probes=[(3000, 4000)]) == {(3000, 4000): 234}
    with pytest.raises(ConfigError, match=r"15301 tokens .*234 were expected under 3136..200000 pixels"):
        verify_limits(tokens(QWEN2), SMALL, probes=[(3000, 4000)])
    for effective in (QWEN2, PixelRule(patch=14, merge=2, minimum=10_000, maximum=200_000)):
        with pytest.raises(ConfigError):  # the default probes find a wrong limit on either side
            verify_limits(tokens(effective), SMALL)
    for rule in (QWEN2, QWEN3, SMALL):
        assert len(verify_limits(tokens(rule), rule)) == 3
