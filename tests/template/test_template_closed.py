"""A record that nobody read as a chat is refused where it says more than a template reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.errors import SampleError
from packtrain.sources.chat import ChatSource
from packtrain.sources.keys import LOSS, TRAINING
from packtrain.template.conversation import _MESSAGE, _SAMPLE, check_closed

PLAIN = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def said(place: str, key: str, value: Any) -> dict[str, Any]:
    """The plain record with one more key at a place."""
    user: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    record: dict[str, Any] = {"messages": [user, {"role": "assistant", "content": "b"}]}
    holder = {"": record, "message": user, "part": user["content"][0]}[place]
    holder[key] = value
    return record


CHANGES = sorted({*TRAINING, *LOSS, "image_path", "images", "conversations"} - _SAMPLE - _MESSAGE)


@pytest.mark.parametrize("place", ["", "message", "part"])
@given(key=st.sampled_from(CHANGES))
def test_a_key_that_changes_training_is_refused_at_every_place(place: str, key: str) -> None:
    value = False if key == "label" else ["x.png"]
    with pytest.raises(SampleError, match=key) as caught:
        check_closed(said(place, key, value))
    assert caught.value.reason == "unread_key" and "open_chats" in str(caught.value)
    check_closed(said(place, key, None))  # null is absent


@pytest.mark.parametrize("key", ["id", "score", "url", "foo"])
def test_what_changes_nothing_is_let_through(key: str) -> None:
    check_closed(said("", key, "7"))


def test_what_a_source_read_is_closed() -> None:
    records = [
        {**PLAIN, "id": 3},
        {"messages": [{**PLAIN["messages"][0]}, {**PLAIN["messages"][1], "weight": 0.5}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    for sample in ChatSource(records):
        check_closed(sample)
