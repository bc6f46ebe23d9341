"""What is read by the form of its keys is what the full reading gives: sample, faults and counts."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import SampleError
from packtrain.sources.chat import ChatSource

texts = st.sampled_from(
    [
        *("a?", "", " ", "<image>", "<image>\nwhat?", "x <image 1> y", "see <img>a.jpg</img>", "<video> hm"),
        *("1 < 2", "ü<b>", "a.jpg", "data:image/png;base64,AAAA", "\ud800", "<image><image>", "<audio>"),
        *("two  words. ", "é", "/9j/" + "A" * 80),
    ]
)
part = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.sampled_from(
        [
            {"type": "image"},
            {"type": "image", "image": "b.png"},
            {"type": "image_url", "image_url": {"url": "b.png"}},
            {"type": "image_url", "image_url": "b.png"},
            {"type": "image_url", "image_url": {"url": "b.png", "detail": "high"}},
            {"type": "image_url", "image_url": {"url": None}},
            {"type": "image", "image": ""},
            {"type": "input_image", "input_image": "b.png"},
            {"type": "video", "video": ["1.jpg", "2.jpg"]},
        ]
    ),
    st.sampled_from(
        [{"type": "text", "text": "a", "odd": 1}, {"type": "image", "image": "c.png", "max_pixels": 9}, {}]
    ),
)
content = st.one_of(texts, texts, st.lists(part, max_size=3), st.none())
role = st.sampled_from(
    ["user", "human", "assistant", "gpt", "system", "tool", "function_call", "User", "nobody"]
)
turn = st.one_of(
    st.builds(lambda r, c: {"role": r, "content": c}, role, content),
    st.builds(lambda r, c: {"from": r, "value": c}, role, content),
    st.builds(
        lambda r, c, f: {"role": r, "content": c, **f},
        role,
        content,
        st.sampled_from([{"loss": 0}, {"odd": 1}, {"id": 3}]),
    ),
)
usual = st.lists(
    st.tuples(content, texts).map(
        lambda pair: [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    ),
    min_size=1,
    max_size=2,
).map(lambda pairs: [message for pair in pairs for message in pair])
conversation = st.one_of(usual, usual, st.lists(turn, max_size=3), st.none(), st.just("[]"))
names = ["id", "source", "width", "url", "score", "system", "tools", "image", "images", "image_path", "video"]
names += [
    "file_name",
    "fps",
    "duration",
    "offset",
    "max_pixels",
    "videos",
    "audio",
    "history",
    "label",
    "loss",
    "objects",
    "odd",
    "input",
    "media",
    "image_1",
    "texts",
]
nothing = st.sampled_from([None, "", [], {}])
values = st.one_of(nothing, st.just(1), st.just(False), texts, st.lists(texts, max_size=2))
beside = st.dictionaries(st.sampled_from(names), values, max_size=3)
shape = st.one_of(
    conversation.map(lambda held: {"messages": held}),
    conversation.map(lambda held: {"conversations": held}),
    conversation.map(lambda held: {"dialog": held}),
    st.builds(lambda a, b, c: {"instruction": a, "input": b, "output": c}, texts, texts | st.none(), texts),
    st.builds(lambda a, b: {"prompt": a, "response": b}, texts, texts),
    st.builds(lambda a, b: {"question": a, "answer": b}, content, content),
)
options = st.sampled_from(
    [{}, {}, {"media_root": "/m"}, {"ignore_keys": ["odd"]}, {"media_prefix": "b"}, {"frame_rate": 2.0}]
)


def outcome(record: Any, full: bool, chosen: dict[str, Any]) -> Any:
    source = ChatSource([copy.deepcopy(record)], **chosen)
    if full:
        source._plain = False
    try:
        return source[0], source.account.drain()
    except SampleError as error:
        return error.reason, str(error)


@settings(deadline=None, max_examples=400)
@given(shape, beside, options)
def test_plain_reading_is_full_reading(record: Any, more: dict[str, Any], chosen: dict[str, Any]) -> None:
    held = {**more, **record}
    assert outcome(held, False, chosen) == outcome(held, True, chosen)


def test_ordinary_records_are_read_by_their_form() -> None:
    """Negative control of the law above: it would hold if nothing were read this way."""
    asked = [{"role": "user", "content": "<image>a b"}, {"role": "assistant", "content": "b"}]
    records: list[dict[str, Any]] = [
        {"id": 1, "messages": asked, "images": ["a.jpg"]},
        {
            "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "b"}],
            "system": "be kind",
        },
        {"instruction": "do it", "input": "", "output": "done"},
        {"question": "how many?", "answer": "2", "score": 0.5},
    ]
    source = ChatSource(records)
    assert all(source._read_plain(record) is not None for record in records)
