"""Law of the closed world, kind by kind: a key that a record holds is used, or named; else it says nothing.

Each test takes a record, adds one key of its kind, and reads both. *Used*: the sample is another one.
*Named*: the record is refused, or the key is counted. What is neither has to say nothing.
"""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packtrain.errors import SampleError
from packtrain.media.knobs import KNOB_KEYS
from packtrain.sources import keys
from packtrain.sources._account import Account
from packtrain.sources._values import absent, meaning
from packtrain.sources.chat import ChatSource

NEEDLE = "zxq"
#: A picture in base64.
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"x" * 91).decode()
few = settings(max_examples=80, deadline=None)

#: A record of every shape; pictures, sounds and videos among them.
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a b?"}, {"role": "assistant", "content": "c"}]},
    {"conversations": [{"from": "human", "value": "a b?"}, {"from": "gpt", "value": "c"}], "id": 3},
    {"instruction": "do it", "output": "done"},
    {"prompt": "a b?", "response": "c"},
    {"texts": [{"user": "a b?", "assistant": "c"}]},
    {"question": "see <image> it", "answer": "c", "image": "x.png"},
    {
        "messages": [{"role": "user", "content": "<video> a"}, {"role": "assistant", "content": "c"}],
        "videos": ["x.mp4"],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "audio", "audio": "x.wav"}]},
            {"role": "assistant", "content": "c"},
        ]
    },
]
records = st.sampled_from(RECORDS).map(copy.deepcopy)
numbers = st.sampled_from([0, 1, 2, 0.5, True, False])
odd = st.sampled_from(
    [NEEDLE, [1, 0, 1], [NEEDLE], {"a": NEEDLE}, -1, f"{NEEDLE}.png", f"/d/{NEEDLE}.wav", "low"]
)
nothing = st.sampled_from([None, "", [], {}, {"a": None}, {"a": {"b": None}}])


def read(record: dict[str, Any], **options: Any) -> tuple[Any, dict[str, int], str]:
    """(sample, counts, error)."""
    source = ChatSource([copy.deepcopy(record)], media_root="/m", **options)
    try:
        return source[0], source.account.drain(), ""
    except SampleError as error:
        return None, {}, f"{error.reason}: {error.message} {error.hint}"


def holders(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record, its messages and their parts."""
    found = [record]
    for name in ("messages", "conversations", "texts"):
        for message in record.get(name, ()):
            found.append(message)
            found += [part for part in message.get("content") or () if isinstance(part, dict)]
    return found


def added(record: dict[str, Any], draw: Any, key: str, value: Any) -> dict[str, Any] | None:
    """The record with the key at one of its places; None where all have it."""
    free = [holder for holder in holders(record) if key not in holder]
    if not free:
        return None
    free[draw(st.integers(0, len(free) - 1))][key] = value
    return record


def used_or_named(before: dict[str, Any], after: dict[str, Any], key: str) -> bool:
    base, base_counts, base_error = read(before)
    sample, counts, error = read(after)
    told = {name: count for name, count in counts.items() if base_counts.get(name) != count}
    return bool(error or base_error) or sample != base or any(key in name for name in told)


@few
@given(records, st.sampled_from(sorted(keys.LOSS)), numbers | odd, st.data())
def test_a_loss_flag(record: dict[str, Any], flag: str, value: Any, data: st.DataObject) -> None:
    before = copy.deepcopy(record)
    after = added(record, data.draw, flag, value)
    if after is None or used_or_named(before, after, flag):
        return
    trains = float(value) == float(keys.LOSS[flag])
    user = any(h.get("role", h.get("from")) in ("user", "human") and flag in h for h in holders(after))
    assert trains or user, (flag, value, after)  # says what holds anyway


spellings = sorted({name for names in keys.FIELDS.values() for name in names})


@few
@given(records, st.sampled_from(spellings), st.data())
def test_an_alias(record: dict[str, Any], key: str, data: st.DataObject) -> None:
    values = [NEEDLE, f"{NEEDLE}.png", [f"{NEEDLE}.png"], [[NEEDLE, NEEDLE]], [{"name": NEEDLE}]]
    values += [[{"role": "user", "content": NEEDLE}, {"role": "assistant", "content": NEEDLE}]]
    before = copy.deepcopy(record)
    after = added(record, data.draw, key, data.draw(st.sampled_from(values)))
    if after is not None:
        assert used_or_named(before, after, key), after


@few
@given(
    records,
    st.sampled_from(sorted({*keys.TRAINING, "token_mask", "regions", "caption_file"})),
    odd,
    st.data(),
)
def test_a_key_that_changes_training(
    record: dict[str, Any], key: str, value: Any, data: st.DataObject
) -> None:
    before = copy.deepcopy(record)
    after = added(record, data.draw, key, value)
    if after is not None:
        assert used_or_named(before, after, key), after


@few
@given(st.sampled_from(RECORDS[:5]).map(copy.deepcopy), st.sampled_from(sorted(keys.HARMLESS)), st.data())
def test_a_medium_under_a_harmless_key(record: dict[str, Any], key: str, data: st.DataObject) -> None:
    """Where a record has no media, a reference is one, whatever its key; else it may be an origin."""
    values = [
        {"bytes": b"\xff\xd8\xff" + b"x" * 20},
        {"path": f"{NEEDLE}.png"},
        [{"role": "user", "content": NEEDLE}],
    ]
    values += [f"http://h/{NEEDLE}.png", f"{NEEDLE}.jpg"]
    before = copy.deepcopy(record)
    after = added(record, data.draw, key, data.draw(st.sampled_from(values)))
    if after is not None:
        assert used_or_named(before, after, key), after


media = st.sampled_from(
    [
        f"/d/{NEEDLE}.wav",
        [f"{NEEDLE}.jpg", f"{NEEDLE}.png"],
        {"bytes": b"\xff\xd8\xff" + b"x" * 20},
        [{"path": f"{NEEDLE}.mp4"}],
        {"odd": [{"url": f"https://h/{NEEDLE}.webp"}]},
    ]
)
turns = st.just([{"role": "user", "content": NEEDLE}, {"role": "assistant", "content": NEEDLE}])


@few
@given(st.sampled_from(RECORDS).map(copy.deepcopy), st.sampled_from(keys.NUMBERS), media, st.booleans())
def test_a_key_of_numbers_never_hides_a_medium(
    record: dict[str, Any], key: str, value: Any, text: bool
) -> None:
    """`frames: [a.jpg, …]` is refused, also beside media that are read and as JSON text."""
    plain = not isinstance(value, str) and "bytes" not in value
    _, _, error = read({**record, key: json.dumps(value) if text and plain else value})
    assert error.startswith(("unread_key", "malformed_record"))


@few
@given(st.sampled_from(RECORDS[:5]).map(copy.deepcopy), st.sampled_from(sorted(keys.HARMLESS)), media | turns)
def test_what_a_harmless_key_hides_in_json_or_lists(record: dict[str, Any], key: str, value: Any) -> None:
    """Lists, objects and JSON text of them say under a harmless key what they say under any."""
    error = read({**record, key: value})[2]
    if isinstance(value, str):
        assert used_or_named(record, {**record, key: value}, key)
        return
    assert error.startswith("unread_key")
    if "bytes" not in value:
        assert meaning(json.dumps(value)) == meaning(value)
        assert used_or_named(record, {**record, key: json.dumps(value)}, key)


def camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(map(str.capitalize, rest))


@few
@given(
    st.sampled_from(RECORDS[:5]).map(copy.deepcopy),
    st.sampled_from(sorted({*keys.TRAINING, *keys.LOSS, *spellings})),
    st.sampled_from([str.upper, str.title, str.capitalize, camel, lambda key: key.replace("_", "-")]),
)
def test_a_key_in_other_case_is_refused(record: dict[str, Any], key: str, change: Any) -> None:
    assume(change(key) != key)
    _, counts, error = read({**record, change(key): [NEEDLE]})
    told = change(key) in counts and key == "label"  # a class
    assert error.startswith("unread_key") or told, (change(key), counts)


@few
@given(
    st.sampled_from(
        [f"{NEEDLE}.png", f"http://h/{NEEDLE}.wav", PNG, PNG * 40, f"data:image/png;base64,{PNG * 40}"]
    ),
    st.booleans(),
    st.booleans(),
)
def test_a_medium_as_the_text_of_a_user(text: str, part: bool, space: bool) -> None:
    """A file name, a data URL and base64 of any length are never trained as text."""
    text = f" {text}\n" if space else text
    content = [{"type": "text", "text": text}, {"type": "text", "text": "what is it?"}] if part else text
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "c"}]
    assert read({"messages": turns})[2].startswith("unread_key")


@pytest.mark.parametrize("tag", ["img", "image", "video", "audio"])
def test_a_medium_named_in_tags(tag: str) -> None:
    """Read where a user says it, refused where an answer does."""
    name = f"see <{tag}>{NEEDLE}.jpg</{tag}> it"
    asked = {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "c"}]}
    sample, _, error = read(asked)
    assert not error and len(sample["messages"][0]["content"]) == 3
    for content in (name, [{"type": "text", "text": name}]):
        said = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": content}]}
        assert read(said)[2].startswith("unread_key")


knobs = sorted({*KNOB_KEYS, "fps", "raw_fps", "duration", "frames", "width", "height", "sample_rate"})


@few
@given(st.sampled_from(RECORDS[5:]).map(copy.deepcopy), st.sampled_from(knobs), numbers | odd, st.data())
def test_a_knob(record: dict[str, Any], key: str, value: Any, data: st.DataObject) -> None:
    before = copy.deepcopy(record)
    after = added(record, data.draw, key, value)
    if after is None or used_or_named(before, after, key):
        return
    assert key in keys.HARMLESS or (key == "start" and not value) or value in ("auto", "high"), (
        key,
        value,
        after,
    )


@few
@given(
    st.sampled_from(["tool_calls", "function_call", "role", "content", "tools", "functions", "tool_defs"]),
    st.sampled_from(["arguments", "parameters", "input", "args", "kwargs"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_spelling_of_a_tool(place: str, arguments: str, wrapped: bool, text: bool, listed: bool) -> None:
    """Name and arguments of a call come out, or the record is refused."""
    call: Any = {
        "name": f"{NEEDLE}_f",
        arguments: json.dumps({"q": f"{NEEDLE}_v"}) if text else {"q": f"{NEEDLE}_v"},
    }
    call = {"type": "function", "function": call} if wrapped else call
    given_ = [call] if listed or place.startswith("tool") else call
    given_ = json.dumps(given_) if text else given_
    turns: list[Any] = [{"role": "user", "content": "a b?"}, {"role": "assistant", "content": "c"}]
    record: dict[str, Any] = {"messages": turns}
    if place in ("tools", "functions", "tool_defs"):
        record[place] = given_
    elif place == "role":
        turns.insert(1, {"role": "tool_call", "content": given_})
    elif place == "content":
        turns.insert(1, {"from": "function_call", "value": given_})
    else:
        turns[1][place] = given_
    sample, counts, error = read(record)
    said = json.dumps(sample)
    assert error or (f"{NEEDLE}_f" in said and f"{NEEDLE}_v" in said), (record, counts)


every = sorted(
    {*spellings, *keys.LOSS, *keys.TRAINING, *knobs, *keys.MESSAGE, "odd_one"}
    - {"content", "value", "role", "from"}
)


@few
@given(records, st.sampled_from(every), nothing, st.data())
def test_a_value_that_says_nothing(record: dict[str, Any], key: str, value: Any, data: st.DataObject) -> None:
    """Null, empty and null-filled values change nothing and count nowhere, at any key and place."""
    assert absent(value)
    before = copy.deepcopy(record)
    after = added(record, data.draw, key, value)
    if after is not None:
        assert read(after) == read(before), after


@few
@given(
    st.sampled_from([*keys.PART, "refusal", "thinking", "document", "file", "tool_use", "audio_path"]),
    st.sampled_from(
        [
            "text",
            "value",
            "content",
            "image",
            "image_url",
            "url",
            "path",
            "audio",
            "video",
            "source",
            "data",
            "thinking",
            "odd",
        ]
    ),
    st.sampled_from(
        [
            NEEDLE,
            f"{NEEDLE}.png",
            {"url": f"{NEEDLE}.png"},
            {"path": f"{NEEDLE}.wav"},
            [f"{NEEDLE}.jpg"],
            {"odd": NEEDLE},
        ]
    ),
    st.booleans(),
)
def test_a_typed_part(kind: str, key: str, value: Any, text: bool) -> None:
    """What a part holds comes out, or the record is refused or the key is counted."""
    part = {"type": kind, key: value, **({"text": "beside"} if text and key != "text" else {})}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "a b?"}]}]
    record = {"messages": [*turns, {"role": "assistant", "content": "c"}]}
    sample, counts, error = read(record)
    said = json.dumps(sample)
    origin = key in keys.HARMLESS and value in (NEEDLE, {"odd": NEEDLE})  # no reference to a medium
    assert error or NEEDLE in said or any(key in name for name in counts) or origin, (part, sample)
    assert error or not text or key == "text" or "beside" in said, (part, sample)


def test_the_law_finds_a_reader_that_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the account, the laws above break."""
    record, more = copy.deepcopy(RECORDS[0]), {"objects": {"bbox": [[1, 2, 3, 4]]}}
    assert used_or_named(record, {**record, **more}, "objects")
    monkeypatch.setattr(Account, "rest", lambda *_, **__: None)
    assert not used_or_named(record, {**record, **more}, "objects")


def test_objects_are_filled_in_or_refused() -> None:
    asked = {"role": "user", "content": "<image> find <ref-object>"}
    said = {"role": "assistant", "content": "<bbox>"}
    boxes: dict[str, Any] = {"ref": ["a dog"], "bbox": [[1, 2, 3, 4]]}
    record = {"messages": [asked, said], "images": ["x.png"], "objects": boxes}
    sample, _, _ = read(record)
    assert sample["objects"] == {**boxes, "bbox_type": "real", "image_id": [0]}
    for more in ({"bbox": [[1, 2, 3, 4], [1, 2]]}, {"ref": []}):
        assert read({**record, "objects": {**boxes, **more}})[2].startswith("placeholder_mismatch")
    for more in (
        {"bbox": [[1, 2, 3]]},
        {"bbox_type": "x"},
        {"image_id": [1]},
        {"score": [1.5]},
        {"bbox": "x"},
    ):
        assert read({**record, "objects": {**boxes, **more}})[2].startswith("malformed_record"), more
    assert read({**record, "objects": [1]})[2].startswith("unread_key")
    assert read({**record, "messages": [{**asked, "content": "<image> a"}, {**said, "content": "b"}]})[
        2
    ].startswith("unread_key")
    assert read(record, ignore_keys=["objects"])[0]["messages"][1]["content"][0]["text"] == "<bbox>"
