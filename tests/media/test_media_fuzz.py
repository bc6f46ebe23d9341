"""Damaged files: never another exception than SampleError, never a size that the decoder denies."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from made_images import MADE, pillow_size

from packtrain.errors import SampleError
from packtrain.media.image import open_image, read_header

SEEDS = {name: make() for name, make in MADE.items()}


def check(data: bytes) -> None:
    try:
        header = read_header(data)
    except SampleError:
        header = None
    size = pillow_size(data)
    if header is not None and size is not None:
        assert (header.width, header.height) == size
    try:
        opened = open_image(data)
    except SampleError:
        return
    assert header is not None  # what opens has a header
    assert opened.size == (header.width, header.height)


def test_byte_flips_and_cuts() -> None:
    rng = random.Random(20240)
    for data in SEEDS.values():
        for _ in range(60):
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                damaged[rng.randrange(min(len(damaged), 400))] = rng.randrange(256)
            if rng.random() < 0.3:
                del damaged[rng.randrange(len(damaged)) :]
            check(bytes(damaged))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(SEEDS)), st.integers(0, 80), st.binary(max_size=40))
def test_any_tail_behind_any_prefix(name: str, keep: int, tail: bytes) -> None:
    check(SEEDS[name][:keep] + tail)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    check(data)
