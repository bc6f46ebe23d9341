"""Every key of a record, message and part is used, harmless or named; what changes training is never lost."""

from __future__ import annotations

import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, InputError, SampleError
from packtrain.media.knobs import STARTS
from packtrain.pipeline.publish import refuse_unread, told
from packtrain.sources import keys
from packtrain.sources._values import absent, kind_of_ref, meaning, pruned
from packtrain.sources.chat import ChatSource
from pages import script

QA = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
USER, BOT = QA
RAW = b"\x89PNG\r\n\x1a\n" + b"x" * 90
PNG = base64.b64encode(RAW).decode()


def source(*records: Any, **options: Any) -> ChatSource:
    return ChatSource(list(records), **options)


def one(record: Any, **options: Any) -> dict[str, Any]:
    return source(record, **options)[0]


def counts(record: Any, **options: Any) -> dict[str, int]:
    opened = source(record, **options)
    opened[0]
    return opened.account.drain()


def reason(record: Any, **options: Any) -> str:
    with pytest.raises(SampleError) as error:
        one(record, **options)
    return error.value.reason


def parts(record: Any, **options: Any) -> list[Any]:
    found = one(record, media_root="/m", **options)["messages"][0]["content"]
    return [(p["type"], p[p["type"]]) for p in found]


def asked(content: Any = "a?", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, BOT], **fields}


# ------------------------------------------------------------------------------------------ used, or named
unknown = st.text("bcdfghjklmnpqrstvwxz_", min_size=3, max_size=9).filter(
    lambda name: name not in keys.HARMLESS and name not in {n for held in keys.FIELDS.values() for n in held}
)
scalars = st.integers() | st.text("cxyz", min_size=2, max_size=9) | st.floats(1, 9)
changing = (
    st.sampled_from(["a.png", "x/b.wav", "https://h/c.mp4?x=1", "data:image/png;base64,AA==", PNG])
    | st.just(b"\x89PNG....")
    | st.just([{"role": "user", "content": "hm"}])
    | st.lists(st.integers(0, 1), min_size=2, max_size=5)
    | st.lists(st.tuples(st.integers(0, 5), st.integers(6, 9)).map(list), min_size=1, max_size=3)
    | st.just({"bytes": None, "path": "a.jpg"})
)
places = st.sampled_from(["record", "message", "part"])


def around(place: str, key: str, value: Any) -> tuple[dict[str, Any], str]:
    if place == "record":
        return {"messages": QA, key: value}, key
    if place == "message":
        return {"messages": [{**USER, key: value}, BOT]}, f"messages[].{key}"
    return asked([{"type": "text", "text": "a?", key: value}]), f"content[].{key}"


@settings(max_examples=150, deadline=None)
@given(places, unknown, scalars)
def test_an_unknown_key_is_counted_by_name(place: str, key: str, value: Any) -> None:
    record, name = around(place, key, value)
    assert counts(record) == {name: 1}
    assert one(record) == one({"messages": QA})
    assert counts(record, ignore_keys=[key]) == {}
    assert name in told({name: 1})


@settings(max_examples=150, deadline=None)
@given(places, unknown, changing)
def test_a_value_that_changes_training_is_never_lost(place: str, key: str, value: Any) -> None:
    record, name = around(place, key, value)
    with pytest.raises(SampleError, match="is not read") as error:
        one(record)
    assert error.value.reason == "unread_key" and repr(name) in str(error.value)
    assert key in str(error.value.hint)
    assert one(record, ignore_keys=[key]) == one({"messages": QA})


@settings(max_examples=100, deadline=None)
@given(places, unknown | st.sampled_from(sorted({*keys.TRAINING, *keys.HARMLESS})), st.data())
def test_absent_values_do_not_count(place: str, key: str, data: Any) -> None:
    if place == "part" and key in ("type", "text"):
        return
    nothing = data.draw(
        st.sampled_from([None, "", [], {}, {"bytes": None, "path": None}, {"a": {"b": None}}])
    )
    record, _ = around(place, key, nothing)
    assert counts(record) == {} and one(record) == one({"messages": QA})


@pytest.mark.parametrize("key", sorted({*keys.TRAINING, *keys.LOSS} - {"label"}))
def test_keys_that_change_training_are_refused_where_no_shape_reads_them(key: str) -> None:
    assert reason({"messages": QA, key: [1, 0]}) == "unread_key"
    if key not in keys.LOSS:
        assert reason({"messages": QA, key: 1}) == "unread_key"


@pytest.mark.parametrize("key", sorted(keys.HARMLESS))
def test_harmless_keys_are_not_told(key: str) -> None:
    assert counts({"messages": QA, key: "x1"}) == {}


def test_every_spelling_of_the_table_is_read() -> None:
    for field, names in keys.FIELDS.items():
        for name in names:
            if field in ("image", "images", "video", "videos", "audio", "audios"):
                kind = field.removesuffix("s")
                ref = {"image": "a.png", "video": "a.mp4", "audio": "a.wav"}[kind]
                record = asked(f"<{kind}>", **{name: [ref] if field.endswith("s") else ref})
                assert parts(record) == [(kind, f"/m/{ref}")]
            elif field == "media":
                assert parts(asked("<image>", **{name: ["a.png"]})) == [("image", "/m/a.png")]
            elif field in ("prompt", "response"):
                other = {"prompt": "response", "response": "prompt"}[field]
                assert len(one({name: "x", other: "y"})["messages"]) == 2
            elif field == "system":
                assert one({"messages": QA, name: "s"})["messages"][0]["role"] == "system"
            elif field == "tools":
                assert one({"messages": QA, name: [{"name": "f"}]})["tools"] == [{"name": "f"}]
            elif field in ("messages", "conversations"):
                assert one({name: QA}) == one({"messages": QA})
            if name != field:
                continue
    found = counts(asked("<image>", image_path="a.png"))
    assert found == {"image_path -> image": 1}
    assert told(found) == "read as another: image_path → image (1)"


def test_a_repeated_text_is_harmless_and_another_conversation_is_not() -> None:
    assert counts({"messages": QA, "prompt": "a?"}) == {}
    assert reason({"messages": QA, "prompt": "c?"}) == "unread_key"
    turns = [{"from": "human", "value": "c?"}, {"from": "gpt", "value": "d"}]
    assert reason({"messages": QA, "conversations": turns}) == "unread_key"
    assert counts({"messages": QA, "conversations": QA}) == {}
    assert one({"messages": QA, "conversations": turns}, shape="sharegpt") != one({"messages": QA})
    for key in ("chosen", "rejected"):
        assert reason({"messages": QA, key: "x"}) == "unread_key"
    assert reason({"messages": [USER, {**BOT, "value": "c"}]}) == "malformed_record"
    assert reason({"messages": [{**USER, "from": "gpt"}, BOT]}) == "malformed_record"
    assert one({"messages": [{**USER, "from": "human", "value": "a?"}, BOT]}) == one({"messages": QA})


def test_more_than_one_percent_stops_the_run() -> None:
    rows = [(i, "unread_key", f"a.jsonl:{i}: the key 'x'") for i in range(2)]
    assert refuse_unread(rows[:1], 100) == 1 and refuse_unread(rows, 200) == 2
    with pytest.raises(InputError, match=r"2 of 100 records.*'x'") as error:
        refuse_unread(rows, 100)
    assert error.value.exit_code == 2 and "ignore_keys" in str(error.value.hint)
    with pytest.raises(ConfigError):
        source({"messages": QA}, ignore_keys="meta")


def test_keys_that_records_are_left_out_for_are_told() -> None:
    opened = source(
        {"messages": QA}, {"messages": QA, "objects": [1]}, {"messages": [{**USER, "masks": 2}, BOT]}
    )
    for index in range(3):
        with contextlib.suppress(SampleError):
            opened[index]
    found = opened.account.drain()
    assert found == {"messages[].masks -> ledger": 1, "objects -> ledger": 1}
    assert told({**found, "x": 2, "img -> image": 1}) == (
        "read as another: img → image (1); not read: x (2); left out for: messages[].masks (1), objects (1)"
    )


def test_a_key_that_is_no_text() -> None:
    record: dict[Any, Any] = {"messages": QA, 3: "x"}
    assert reason(record) == "malformed_record"
    assert counts({"messages": [{**USER, 3: "x"}, BOT]}) == {"messages[].3": 1}


def test_a_name_of_a_speaker_is_told() -> None:
    """It goes to the template, and few write it."""
    assert counts({"messages": [{**USER, "name": "Al"}, BOT]}) == {"messages[].name": 1}
    assert counts({"messages": [*QA, {"role": "tool", "name": "f", "content": "r"}, BOT]}) == {}


def test_the_page_of_keys_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text(encoding="utf-8") == script("keys").page()


# ------------------------------------------------------------------------------------------ loss flags
@pytest.mark.parametrize("flag", sorted(keys.LOSS))
def test_loss_flags_and_their_polarity(flag: str) -> None:
    on = keys.LOSS[flag]
    for value, trained in ((True, on), (False, not on), (1, on), (0, not on)):
        record = {"messages": [USER, BOT, USER, {**BOT, flag: value}]}
        assert one(record)["messages"][3].get("loss") == (None if trained else 0.0)
    assert reason({"messages": [USER, {**BOT, flag: not on}]}) == "unsupervised"
    for odd in ("x", -1, float("nan"), [1]):
        assert reason({"messages": [USER, BOT, USER, {**BOT, flag: odd}]}) == "malformed_record"
    if on:
        assert one({"messages": [USER, {**BOT, flag: 0.25}]})["messages"][1]["loss"] == 0.25
        assert reason({"messages": [{**USER, flag: True}, BOT]}) == "malformed_record"
    assert one({"messages": [{**USER, flag: not on}, BOT]}) == one({"messages": QA})


def test_flags_that_disagree_and_preference_labels() -> None:
    assert reason({"messages": [USER, {**BOT, "loss": True, "weight": 0}]}) == "malformed_record"
    assert one({"messages": [USER, {**BOT, "loss": 0.5, "weight": 0.5}]})["messages"][1]["loss"] == 0.5
    for name in keys.WANTED:
        kto = {"prompt": "a?", "completion": "b", name: False}
        assert reason(kto) == "unsupervised"
        assert one({**kto, name: True}) == one(kto, ignore_keys=[name]) == one({"messages": QA})
    assert counts({"messages": QA, "label": 3}) == {"label": 1}
    assert reason({"messages": QA, "kto_tag": 3}) == "unread_key"


@pytest.mark.parametrize("key", keys.BESIDE)
def test_texts_that_belong_to_a_question_are_said_in_it_or_refused(key: str) -> None:
    """A context or choices beside question and answer; a conversation says all there is."""
    choices = ["red", "blue"]
    for held in (choices, "red", [{"text": ["red"]}], {"label": ["A"], "text": ["red"]}):
        for record in ({"question": "Which?", "answer": "red"}, {"instruction": "Which?", "output": "red"}):
            assert reason({**record, key: held}) == "unread_key"
            assert one({**record, key: held}, ignore_keys=[key]) == one(record)
            assert one({**record, key: None}) == one({**record, key: []}) == one(record)
        assert counts({"messages": QA, key: held}) == {key: 1}
    said = {"question": "Which: red or blue?", "answer": "red"}
    assert counts({**said, key: choices})[key] == 1 and one({**said, key: choices}) == one(said)


@pytest.mark.parametrize("key", keys.SAYS)
def test_more_of_what_a_message_says_is_refused(key: str) -> None:
    for held in ("more", ["more"], [{"file_id": "f"}]):
        record = {"messages": [{**USER, key: held}, BOT]}
        assert reason(record) == "unread_key" and one(record, ignore_keys=[key]) == one({"messages": QA})
    assert one({"messages": [{**USER, key: USER["content"]}, BOT]}) == one({"messages": QA})


@pytest.mark.parametrize("key", keys.STRETCH)
def test_a_stretch_or_frames_of_a_medium_are_refused(key: str) -> None:
    video = {"type": "video", "video": "a.mp4"}
    for held in ([1.0, 3.0], [0, 4, 8], {"start": 1, "stop": 2}):
        assert reason(asked("<video>", video="a.mp4", **{key: held})) == "unread_key"
        assert reason(asked([{**video, key: held}])) == "unread_key"
    assert counts({"messages": QA, key: 0.3}) == {key: 1}


def test_the_way_out_that_is_told_is_one() -> None:
    """`ignore_keys` takes the name of a key without its place, and so it is told."""
    for record in (
        {"messages": [USER, {**BOT, "thought": "t"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a?", "bbox": [1]}]}, BOT]},
        {"messages": QA, "crop": [0, 0, 1, 1]},
    ):
        with pytest.raises(SampleError) as error:
            one(record)
        key = str(error.value.hint).partition("[")[2].partition("]")[0]
        assert one(record, ignore_keys=[key]) == one({"messages": QA})


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(keys.LOSS)),
    st.sampled_from([True, False, 0, 1, 0.25, 3.0]),
    st.sampled_from([{}, {"loss": False}, {"weight": 0.5}]),
)
def test_a_flag_on_a_record_holds_for_all_its_answers(flag: str, value: Any, own: dict[str, Any]) -> None:
    record = {"messages": [USER, BOT, USER, {**BOT, **own}], flag: value}
    if value not in (0, 1) and flag not in ("weight", "loss_weight", "loss_scale"):
        assert reason(record) == "unread_key"  # a recorded loss is no weight
        return
    asked = float(value) if keys.LOSS[flag] else 1.0 - value
    if not asked:
        assert reason(record) == "unsupervised"
        return
    weights = [asked, asked * float(own.get("loss", own.get("weight", 1.0)))]
    assert [m.get("loss", 1.0) for m in one(record)["messages"][1::2]] == weights
    assert counts(record) == {f"{flag} -> loss of its answers": 1}
    assert one(record, ignore_keys=[flag, *own]) == one({"messages": QA * 2})


def test_flags_of_a_record_that_are_none_or_disagree() -> None:
    assert reason({"messages": QA, "loss_mask": [0, 1]}) == "unread_key"
    assert reason({"messages": QA, "train": "split-a"}) == "unread_key"
    assert reason({"messages": QA, "train": True, "mask": True}) == "malformed_record"
    assert reason({"messages": QA, "weight": -1}) == "malformed_record"


def test_empty_answers_in_the_middle_are_not_trained() -> None:
    sample = one({"messages": [USER, {**BOT, "content": ""}, USER, BOT]})
    assert [m.get("loss") for m in sample["messages"]] == [None, 0.0, None, None]


# ------------------------------------------------------------------------------------------ media
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked("<image>", image_path="x.png"), [("image", "/m/x.png")]),
        (asked("<image 1> or <image_2>", image_1="x.png", image_2="y.png"),
         [("image", "/m/x.png"), ("text", " or "), ("image", "/m/y.png")]),
        (asked("<image 2><image 1>, <image 1>", images=["x.png", "y.png"]),
         [("image", "/m/y.png"), ("image", "/m/x.png"), ("text", ", <image 1>")]),
        (asked("see <img>x.png</img>!"), [("text", "see "), ("image", "/m/x.png"), ("text", "!")]),
        (asked("<audio>x.wav</audio>"), [("audio", "/m/x.wav")]),
        (asked([{"type": "text", "text": "a", "image": "x.png"}]), [("text", "a"), ("image", "/m/x.png")]),
        (asked([{"type": "image", "image": "x.png", "text": "a"}]), [("image", "/m/x.png"), ("text", "a")]),
        (asked([{"image": "x.png"}, {"text": "a"}]), [("image", "/m/x.png"), ("text", "a")]),
        (asked([{"type": "input_image", "image_url": "x.png"}, {"type": "input_text", "text": "a"}]),
         [("image", "/m/x.png"), ("text", "a")]),
        (asked([{"type": "image", "source": {"type": "url", "url": "https://h/x.png"}}]),
         [("image", "https://h/x.png")]),
        (asked([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]),
         [("image", "data:image/png;base64,AAAA")]),
        (asked([{"type": "image", "image": PNG}]), [("image", RAW)]),
        ({"messages": [{**USER, "images": ["x.png"]}, BOT]}, [("image", "/m/x.png"), ("text", "a?")]),
        ({"messages": [{"role": "user", "content": "a <image>", "image": "x.png"}, BOT]},
         [("text", "a "), ("image", "/m/x.png")]),
        ({"messages": [{"role": "user", "type": "audio", "content": "x.wav"}, BOT]}, [("audio", "/m/x.wav")]),
        ({"texts": [{"user": "a?", "assistant": "b"}], "images": ["x.png"]},
         [("image", "/m/x.png"), ("text", "a?")]),
    ],
)  # fmt: skip
def test_media_as_people_write_them(record: dict[str, Any], expected: list[Any]) -> None:
    assert parts(record, allow_outside=True, allow_remote=True) == expected


def test_media_that_nothing_can_settle_are_refused() -> None:
    assert reason(asked("x.wav")) == "unread_key"
    assert reason(asked("<image 3>", images=["x.png"])) == "placeholder_mismatch"
    assert reason(asked("<image 1>")) == "placeholder_mismatch"
    assert reason(asked("<image>", image="x.png", image_1="y.png")) == "unread_key"
    assert reason(asked("<image>", image_path="x.png", image_url="https://h/y.png")) == "unread_key"
    assert reason({"messages": [{**USER, "image": "x.png", "content": "<image><image>"}, BOT]}) == (
        "placeholder_mismatch"
    )
    assert reason(asked("<bbox>", objects={"bbox": [[1, 2, 3, 4]]})) == "unread_key"


def test_prose_about_a_placeholder_in_an_answer_is_text() -> None:
    answer = {"role": "assistant", "content": "use `<image>` here"}
    record = {"messages": [{"role": "user", "content": "<image>how?"}, answer], "images": ["x.png"]}
    sample = one(record)
    assert sample["messages"][1]["content"] == [{"type": "text", "text": "use `<image>` here"}]
    assert parts(record) == [("image", "/m/x.png"), ("text", "how?")]
    drawn = {"messages": [USER, {"role": "assistant", "content": "<image> so"}], "images": ["x.png"]}
    assert one(drawn)["messages"][1]["content"][0]["type"] == "image"


MARKERS = (
    "<image>",
    "<IMG>",
    "<img>",
    "[IMG]",
    "<|image|>",
    "<|image_1|>",
    "<image 2>",
    "<IMG_CONTEXT>",
    "<video>",
)


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("marker", MARKERS)
def test_a_file_under_a_harmless_key_and_a_marker_without_its_medium_are_refused(
    marker: str, role: str
) -> None:
    """`id: "0.jpg"` is counted beside media, or where no text speaks of one; never where one is lost."""
    pair = {"user": "What is it?", "assistant": "A cat."}
    pair[role] += f" {marker}"
    record = {
        "messages": [{"role": r, "content": text} for r, text in pair.items()],
        "id": "000000033471.jpg",
    }
    assert reason(record) in ("unread_key", "placeholder_mismatch")
    assert reason({**record, "id": 7, "source": "a.jpg"}) in ("unread_key", "placeholder_mismatch")
    assert counts(asked(id="000000033471.jpg")) == {"id": 1}
    assert counts(asked("<image>", id="000000033471.jpg", image="a.jpg")) in ({}, {"id": 1})


@pytest.mark.parametrize(
    "spelled", ["<|image|>", "<|video_pad|>", "<IMG_CONTEXT>", "<ImageHere>", "<|AUDIO|>"]
)
def test_placeholders_of_other_models_are_no_words(spelled: str) -> None:
    kind = next((k for k in ("video", "audio") if k in spelled.lower()), "image")
    assert reason(asked(f"{spelled} What?")) == reason(asked(f"{spelled} What?", **{f"{kind}s": ["a.bin"]}))
    assert one(asked(f"{spelled} What?"), placeholders={kind: []})["messages"]
    named = parts(asked(f"{spelled}?", **{f"{kind}s": ["a.bin"]}), placeholders={kind: [spelled]})
    assert named == [(kind, "/m/a.bin"), ("text", "?")]


def test_numbered_placeholders_between_bars() -> None:
    found = parts(asked("<|image_2|> or <|image_1|>? See <|image_1|>.", images=["a.jpg", "b.jpg"]))
    assert found == [
        ("image", "/m/b.jpg"),
        ("text", " or "),
        ("image", "/m/a.jpg"),
        ("text", "? See <|image_1|>."),
    ]


def test_decoded_sound_is_a_wave() -> None:
    from packtrain.media.audio import open_audio

    sound = {"array": [0.0, 0.5, -0.5, 0.25], "sampling_rate": 8000, "path": None}
    (part,) = one(asked("<audio>", audio=sound))["messages"][0]["content"]
    samples, rate = open_audio(part["audio"])
    assert rate == 8000 and samples.reshape(-1).tolist() == [0.0, 0.5, -0.5, 0.25]


# ------------------------------------------------------------------------------------------ tool calls
CALL = {"name": "f", "arguments": {"q": 1}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"q": 1}'}}]},  # noqa: E501
        {"role": "assistant", "content": "", "tool_calls": json.dumps([{"function": CALL}])},
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"q": 1}'}},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "Function_Call", "content": json.dumps({**CALL, "arguments": '{"q": 1}'})},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"q": 1, "z": None}}}]},  # noqa: E501
    ],
)  # fmt: skip
def test_calls_come_out_as_objects(turn: dict[str, Any]) -> None:
    (call,) = one({"messages": [USER, turn]})["messages"][1]["tool_calls"]
    assert call["function"] == CALL


def test_tools_and_calls_in_other_places() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert one({"messages": QA, "tools": json.dumps([tool])})["tools"] == [tool]
    assert one({"messages": QA, "tools": [json.dumps(tool)]})["tools"] == [tool]
    assert one({"messages": [{"role": "system", "content": "s", "tools": [tool]}, *QA]})["tools"] == [tool]
    assert one({"messages": json.dumps(QA)}) == one({"messages": QA})
    assert one({"messages": [{"role": "USER", "content": "a?"}, {"role": "Assistant", "content": "b"}]}) == (
        one({"messages": QA})
    )
    two = [{"role": "tool_call", "content": json.dumps({**CALL, "name": name})} for name in "fg"]
    sample = one({"messages": [USER, *two]})
    assert [c["function"]["name"] for c in sample["messages"][1]["tool_calls"]] == ["f", "g"]
    assert reason({"messages": QA, "tools": '[{"name": "f", "name": "g"}]'}) == "malformed_record"
    assert reason({"messages": [USER, {"role": "tool_call", "content": '{"name": "f", "x": 1}'}]}) == (
        "malformed_record"
    )
    asked_ = {"prompt": [USER, BOT, USER], "completion": [BOT]}
    assert [m.get("loss") for m in one(asked_)["messages"]] == [None, 0.0, None, None]
    said = {"query": "a?", "response": "b", "history": [["q", "r"]]}
    assert len(one(said)["messages"]) == 4


# ------------------------------------------------------------------------------------------ values
@pytest.mark.parametrize("name", [*STARTS, "start"])
def test_a_stretch_that_a_record_sets_is_told_and_a_start_alone_is_refused(name: str) -> None:
    end = {"offset": "duration", "begin_time": "end_time"}.get(name, "end")
    turns = [{"role": "user", "content": "<audio>q"}, {"role": "assistant", "content": "a"}]
    record = {"messages": turns, "audios": ["/a.wav"], name: 3}
    with pytest.raises(SampleError, match=f"'{name}' stands without an end"):
        ChatSource([record])[0]
    source = ChatSource([{**record, end: 5}])
    (part, _) = source[0]["messages"][0]["content"]
    assert part["start"] == 3 and part["end"] == (8 if end == "duration" else 5)
    assert source.account.drain() == {f"{key} -> audio": 1 for key in (name, end)}
    alone = [{"role": "user", "content": [{"type": "audio", "audio": "/a.wav", name: 3}]}, turns[1]]
    assert ChatSource([{"messages": alone}])[0]["messages"][0]["content"][0]["start"] == 3


@pytest.mark.parametrize("place", ["listed", "part", "message"])
def test_knobs_of_a_record_are_its_one_medium_s_wherever_that_stands(place: str) -> None:
    image = {"type": "image", "image": "/a.png"}
    content: Any = {"listed": "<image>q", "part": [image, {"type": "text", "text": "q"}], "message": "q"}[
        place
    ]
    asked = {"role": "user", "content": content, **({"image": "/a.png"} if place == "message" else {})}
    record = {"messages": [asked, {"role": "assistant", "content": "a"}], "max_pixels": 9999}
    if place == "listed":
        record["images"] = ["/a.png"]
    source = ChatSource([record])
    assert source[0]["messages"][0]["content"][0] == {**image, "max_pixels": 9999}
    assert source.account.drain()["max_pixels -> image"] == 1
    asked["content"] = [image, image, {"type": "text", "text": "q"}]
    record.pop("images", None)
    asked.pop("image", None)
    with pytest.raises(SampleError, match="'max_pixels' may belong to any of 2 media"):
        ChatSource([record])[0]
    asked["content"] = [{"type": "video", "video": "/a.mp4"}, {"type": "text", "text": "q"}]
    del record["max_pixels"]
    for beside in ({}, {"images": []}):  # a harmless number beside pictures
        assert ChatSource([{**record, **beside, "fps": 2}])[0]["messages"][0]["content"][0]["sample_fps"] == 2


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.sampled_from(["is", "my", "turn", "x", "step"]), max_size=2),
    word=st.sampled_from(keys.FLAG_WORDS),
    value=st.booleans() | st.sampled_from([0, 1, 0.5, [0.5, 1.0]]),
    place=st.sampled_from(["record", "message"]),
    style=st.sampled_from(["_", "-", " "]),
)
def test_numbers_under_a_name_that_speaks_of_training_are_used_or_refused(
    words: list[str], word: str, value: Any, place: str, style: str
) -> None:
    name = style.join([*words, word])
    record: dict[str, Any] = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    }
    (record if place == "record" else record["messages"][1])[name] = value
    plain = {**record, "messages": [dict(turn) for turn in record["messages"]]}
    (plain if place == "record" else plain["messages"][1]).pop(name)
    source = ChatSource([record, plain])
    try:
        told = source[0]
    except SampleError as error:
        assert error.reason in ("unread_key", "malformed_record", "unsupervised")
        return
    counted = source.account.drain()
    assert name in keys.LOSS or (place == "record" and word in ("train", "trained", "training") and counted)
    assert told == source[1] or told["messages"][1].get("loss") is not None


@pytest.mark.parametrize(
    ("numbers", "fine"), [((0, 1), True), ((1, 2), True), ((1, 0), False), ((0, 2), False), ((2, 1), False),
                          ((4711, 12), True)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["index", "image_id", "image_index"])
def test_parts_that_number_their_medium_mean_the_next_one(
    name: str, numbers: tuple[int, int], fine: bool
) -> None:
    parts = [{"type": "image", name: number} for number in numbers]
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}]
    turns.append({"role": "assistant", "content": "a"})
    source = ChatSource([{"messages": turns, "images": ["/a.png", "/b.png"]}])
    if fine:
        assert [part.get("image") for part in source[0]["messages"][0]["content"]] == [
            "/a.png",
            "/b.png",
            None,
        ]
    else:
        with pytest.raises(SampleError, match=f"{name}.*another than the next image"):
            source[0]


USE = {"type": "tool_use", "id": "a", "name": "w", "input": {"c": "P"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
WORDS = {"type": "text", "text": "let me"}
FOUND = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "22"}]}


def _blocks(said: Any, asked: Any = "q") -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
    return [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": "b"}]


def test_blocks_of_anthropic_are_calls_results_and_thoughts() -> None:
    two = {"type": "tool_result", "tool_use_id": "b", "content": "no"}
    asked = [FOUND, two, {"type": "text", "text": "and?"}]
    source = ChatSource([{"messages": _blocks([THOUGHT, WORDS, USE, {**USE, "id": "b"}], asked)}])
    call = {"type": "function", "function": {"name": "w", "arguments": {"c": "P"}}}
    plain = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me",
            "reasoning_content": "hm",
            "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "22"},
        {"role": "tool", "tool_call_id": "b", "content": "no"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "b"},
    ]
    assert source[0] == ChatSource([{"messages": plain}])[0]
    assert source.account.drain() == {}
    null = {key: None for part in (USE, THOUGHT, WORDS, FOUND) for key in part}
    filled = [{**null, **part} for part in (THOUGHT, WORDS, USE)]  # as a table holds them
    again = ChatSource([{"messages": _blocks(filled, [{**null, **FOUND}])}])
    assert again[0] == ChatSource([{"messages": _blocks([THOUGHT, WORDS, USE], [FOUND])}])[0]


@pytest.mark.parametrize(
    "messages",
    [
        _blocks([{"type": "redacted_thinking", "data": "x"}, WORDS]),
        _blocks([USE, WORDS]),
        _blocks([WORDS, THOUGHT]),
        _blocks([THOUGHT, THOUGHT, WORDS]),
        _blocks([WORDS, FOUND]),
        _blocks("a", [USE]),
        _blocks("a", [THOUGHT, WORDS]),
        _blocks([{**USE, "name": None}]),
        _blocks([{**USE, "image": "a.png"}]),
        _blocks([WORDS], [{**FOUND, "images": ["a.png"]}]),
        [{**turn, "reasoning_content": "other"} for turn in _blocks([THOUGHT, WORDS])[:2]],
    ],
    ids=str,
)
def test_blocks_that_no_template_would_keep_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(SampleError) as error:
        ChatSource([{"messages": messages}])[0]
    assert error.value.reason in ("malformed_record", "unread_key")


def test_what_a_value_is() -> None:
    assert absent({"bytes": None, "path": ""}) and not absent(0) and not absent(False)
    assert pruned({"a": {"b": None, "c": [{"d": None}]}, "e": []}) == {"a": {"c": [{}]}, "e": []}
    assert kind_of_ref("a b.JPG") == "image" and kind_of_ref("no file") is None
    assert meaning("see a.jpg for more") is None
    assert meaning({"deep": [{"x": "a.jpg"}]}) == "a reference to a medium"
    assert meaning([[0, 3], [4, 9]]) == "spans" and meaning([3, 4]) is None
