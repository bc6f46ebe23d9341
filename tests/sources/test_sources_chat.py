"""Every chat shape as one: messages of parts, refs ready to open, clear reasons for what cannot be used."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError, UnknownNameError
from packtrain.extend import Source
from packtrain.media.location import exists, media_refs
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

Write = Callable[..., Path]


class Rows:
    """Records in memory."""

    fingerprint = "rows"
    folder = "/media"

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]

    def where(self, index: int) -> str:
        return f"rows[{index}]"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(name: str) -> dict[str, Any]:
    return {"type": "image", "image": name}


def one(record: Any, **options: Any) -> dict[str, Any]:
    before = copy.deepcopy(record)
    sample = ChatSource(Rows(record), **options)[0]
    assert record == before  # never mutated
    return sample


def reason(record: Any, **options: Any) -> str:
    with pytest.raises(SampleError, match=r"^rows\[0\]: ") as error:
        one(record, **options)
    return error.value.reason


ASK = [
    {"role": "user", "content": [text("a?")]},
    {"role": "assistant", "content": [text("b")]},
]
QA = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": QA}, {}),
        ({"messages": ASK}, {}),
        ({"messages": QA, "images": [], "image": "", "conversations": None}, {}),
        ({"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]}, {}),
        (
            {"conversations": [{"from": "user", "value": "a?"}, {"from": "bot", "value": "b"}], "image": ""},
            {},
        ),
        ({"instruction": "a?", "output": "b"}, {}),
        ({"instruction": "a?", "input": "", "output": "b", "history": None}, {}),
        ({"question": "a?", "answer": "b"}, {"columns": {"prompt": "question", "response": "answer"}}),
        ({"prompt": "a?", "response": "b"}, {}),
        ({"instruction": "a?", "response": "b"}, {"columns": {"output": "response"}}),
        ({"dialog": QA}, {"columns": {"messages": "dialog"}}),
    ],
)
def test_one_shape_from_all(record: dict[str, Any], options: dict[str, Any]) -> None:
    assert one(record, **options) == {"messages": ASK}
    assert isinstance(ChatSource(Rows(record), **options), Source)


def test_content_parts() -> None:
    parts = [
        {"type": "image", "image": "a.jpg", "text": None},
        {"type": "image", "path": "b.jpg"},
        {"type": "image", "url": "/abs/c.jpg"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image_url", "image_url": "d.jpg"},
        {"type": "image_url", "value": "e.jpg"},
        {"type": "image", "image": {"bytes": b"xyz", "path": "f.jpg"}},
        {"type": "image", "image": {"bytes": None, "path": "g.jpg"}},
        {"type": "text", "value": "what?", "image": None},
        {"type": "text", "text": ""},
    ]
    sample = one({"messages": [{"role": "user", "content": parts}, QA[1]]})
    assert sample["messages"][0]["content"] == [
        image("/media/a.jpg"),
        image("/media/b.jpg"),
        image("/abs/c.jpg"),
        image("data:image/png;base64,AA=="),
        image("/media/d.jpg"),
        image("/media/e.jpg"),
        {"type": "image", "image": b"xyz"},
        image("/media/g.jpg"),
        text("what?"),
    ]
    assert len(media_refs(sample)) == 8


def test_placeholders_take_the_listed_images_in_order() -> None:
    record = {
        "messages": [
            {"role": "user", "content": "<image>\nwho <image>?"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and?"}]},
            {"role": "assistant", "content": "y"},
        ],
        "images": ["1.jpg", "2.jpg", "3.jpg"],
    }
    sample = one(record)
    assert sample["messages"][0]["content"] == [
        image("/media/1.jpg"),
        text("\nwho "),
        image("/media/2.jpg"),
        text("?"),
    ]
    assert sample["messages"][2]["content"] == [image("/media/3.jpg"), text("and?")]


@pytest.mark.parametrize(
    ("said", "images", "numbers"),
    [("<image><image>", ["1.jpg"], "2 image placeholders.*1 image"), ("x", ["1", "2"], "0 image.*2 images")],
)
def test_placeholder_mismatch_says_both_numbers(said: str, images: list[str], numbers: str) -> None:
    record = {"messages": [{"role": "user", "content": said}, QA[1]], "images": images}
    assert reason(record) == "placeholder_mismatch"
    with pytest.raises(SampleError, match=numbers):
        one(record)
    inline = {"messages": [{"role": "user", "content": [image("a.jpg"), text("<image>")]}, QA[1]]}
    assert reason(inline) == "placeholder_mismatch"


def test_images_without_placeholder() -> None:
    record = {"messages": [{"role": "system", "content": "s"}, *QA], "images": ["1.jpg", "2.jpg"]}
    assert reason(record) == "placeholder_mismatch"
    sample = one(record, media_without_placeholder="prepend")
    assert sample["messages"][1]["content"] == [image("/media/1.jpg"), image("/media/2.jpg"), text("a?")]
    both = {"messages": [{"role": "user", "content": "<image>"}, QA[1]], "images": ["1.jpg", "2.jpg"]}
    assert reason(both, media_without_placeholder="prepend") == "placeholder_mismatch"


def test_other_placeholders() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "<ImageHere> and <ImageHere2>"},
            {"from": "bot", "value": "b"},
        ],
        "image": ["1.jpg", "2.jpg"],
    }
    sample = one(record, placeholders=("<ImageHere>", "<ImageHere2>"))
    assert sample["messages"][0]["content"] == [image("/media/1.jpg"), text(" and "), image("/media/2.jpg")]
    literal = {"messages": [{"role": "user", "content": "what is <image> in HTML?"}, QA[1]]}
    assert reason(literal) == "placeholder_mismatch"
    assert one(literal, placeholders=())["messages"][0]["content"] == [text("what is <image> in HTML?")]
    assert one(literal, placeholders="<img>")["messages"][0]["content"] == [text("what is <image> in HTML?")]


def test_alpaca_history_system_and_input() -> None:
    record = {
        "instruction": "do",
        "input": "this",
        "output": "done",
        "history": [["q", "r"]],
        "system": "be brief",
    }
    assert [(m["role"], m["content"]) for m in one(record)["messages"]] == [
        ("system", [text("be brief")]),
        ("user", [text("q")]),
        ("assistant", [text("r")]),
        ("user", [text("do\nthis")]),
        ("assistant", [text("done")]),
    ]


def test_tools_and_tool_messages() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    record = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": '{"r": 2}'},
            {"from": "gpt", "value": "two"},
        ],
        "tools": '[{"name": "f"}]',
    }
    sample = one(record)
    assert sample["tools"] == [{"name": "f"}]
    assert sample["messages"][1] == {
        "role": "assistant",
        "content": [],
        "tool_calls": [{"type": "function", "function": call}],
    }
    assert sample["messages"][2] == {"role": "tool", "content": [text('{"r": 2}')]}
    assert one(record, tool_calls="text")["messages"][1] == {
        "role": "assistant",
        "content": [text(json.dumps(call))],
    }
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    result = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"}
    kept = one({"messages": [QA[0], called, result, QA[1]], "tools": []})
    assert "tools" not in kept
    assert kept["messages"][1] == {"role": "assistant", "content": [], "tool_calls": [{"function": call}]}
    assert kept["messages"][2]["tool_call_id"] == "c1"
    record["conversations"][1]["value"] = "not json"
    assert reason(record) == "malformed_record"


USER, BOT = QA


@pytest.mark.parametrize("key", ["loss_weight", "min_pixels", "fps"])
def test_a_number_that_no_float_holds_is_one_bad_record(key: str) -> None:
    """JSON has integers of any size; the rest of the file is read."""
    part = {"type": "video" if key == "fps" else "image", "url": "a.bin", key: 10**400}
    user = {"role": "user", "content": [part, {"type": "text", "text": "a"}]}
    bot = {**BOT, key: -(10**400)} if key == "loss_weight" else BOT
    assert reason({"messages": [USER if key == "loss_weight" else user, bot]}) == "malformed_record"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty"),
        ({"messages": [{"role": "user", "content": ""}, BOT]}, "empty"),
        ({"messages": [{"role": "user", "content": "  "}, BOT]}, "empty"),
        ({"instruction": "a?", "output": ""}, "empty"),
        ({"instruction": "", "input": "", "output": "b"}, "empty"),
        ({"messages": [USER]}, "no_assistant_turn"),
        ({"conversations": [{"from": "human", "value": "a?"}]}, "no_assistant_turn"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant"}]}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant", "content": [7]}]}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "poem"}]}]}, "malformed_record"),
        ({"messages": [USER, {"role": "wizard", "content": "b"}]}, "malformed_record"),
        ({"messages": [USER, {"role": ["a"], "content": "b"}]}, "malformed_record"),
        ({"messages": [USER, {"content": "b"}]}, "malformed_record"),
        ({"messages": [USER, "b"]}, "malformed_record"),
        ({"messages": "b"}, "malformed_record"),
        ({"messages": {"role": "user"}}, "malformed_record"),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "malformed_record"),
        ({"messages": [USER, {**BOT, "tool_calls": ["\udfff"]}]}, "malformed_record"),
        ({"messages": QA, "tools": "["}, "malformed_record"),
        ({"messages": QA, "tools": {"a": 1}}, "malformed_record"),
        ({"messages": [{"role": "system", "content": "s"}, *QA], "system": "t"}, "malformed_record"),
        ({"messages": [USER, {**BOT, "loss_weight": -0.5}]}, "malformed_record"),
        ({"messages": [{**USER, "loss_weight": 1}, BOT]}, "malformed_record"),
        ({"messages": QA, "images": 7}, "malformed_record"),
        ({"messages": QA, "images": [""]}, "malformed_record"),
        ({"messages": QA, "images": ["\ud800.jpg"]}, "malformed_record"),
        ({"messages": QA, "images": ["a"], "image": "b"}, "malformed_record"),
        ({"instruction": 7, "output": "b"}, "malformed_record"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "malformed_record"),
        ({"text": "b"}, "malformed_record"),
        ({}, "malformed_record"),
        ([1], "malformed_record"),
        ({"messages": QA, "videos": ["a.mp4"]}, "placeholder_mismatch"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, BOT]}, "placeholder_mismatch"),
        ({"messages": [{"role": "user", "content": [image("../a.jpg")]}, BOT]}, "outside_media_root"),
        ({"messages": [{"role": "user", "content": [image("ftp://a/b.jpg")]}, BOT]}, "unsupported_media"),
    ],
)
def test_reasons(record: Any, expected: str) -> None:
    assert reason(record) == expected


def test_what_is_not_refused() -> None:
    only_image = {"messages": [{"role": "user", "content": [image("a.jpg")]}, BOT]}
    assert one(only_image)["messages"][0]["content"] == [image("/media/a.jpg")]
    assert len(one({"messages": [USER, BOT, USER]})["messages"]) == 3
    assert len(one({"messages": [{**USER, "content": ""}, BOT, USER, BOT]})["messages"]) == 4
    assert one({"messages": [{**USER, "loss_weight": 0.0}, {**BOT, "loss_weight": 1.0}]})["messages"] == ASK


def test_an_explicit_shape_refuses_others() -> None:
    record = {"messages": QA}
    for shape in ("alpaca", "sharegpt", "columns"):
        assert reason(record, shape=shape) == "malformed_record"
    assert one(record, shape="messages") == {"messages": ASK}
    assert one({"messages": QA, "instruction": "a?", "output": "b"}, shape="alpaca") == {"messages": ASK}


def test_a_missing_column_is_named() -> None:
    with pytest.raises(SampleError, match=r"no field 'answer'.*'question'"):
        one({"question": "a?"}, columns={"prompt": "question", "response": "answer"})


def test_bad_options() -> None:
    for options in (
        {"shape": "alpacca"},
        {"columns": {"promt": "q"}},
        {"columns": {"prompt": ""}},
        {"columns": {"prompt": "q"}, "shape": "alpaca"},
        {"placeholders": [""]},
        {"media_without_placeholder": "append"},
        {"tool_calls": "none"},
    ):
        with pytest.raises((ConfigError, UnknownNameError)) as error:
            ChatSource(Rows({}), **options)  # type: ignore[arg-type]
        assert error.value.exit_code == 2


def test_media_root(tmp_path: Path) -> None:
    inside, outside = str(tmp_path / "a.jpg"), "/elsewhere/a.jpg"
    record = {"messages": [{"role": "user", "content": [image(outside)]}, BOT]}
    assert media_refs(one(record)) == [outside]
    assert reason(record, media_root=tmp_path) == "outside_media_root"
    assert media_refs(one(record, media_root=tmp_path, allow_outside=True)) == [outside]
    record = {"messages": [{"role": "user", "content": [image("a.jpg")]}, BOT]}
    assert media_refs(one(record, media_root=tmp_path)) == [inside]
    record = {"messages": [{"role": "user", "content": [image("../a.jpg")]}, BOT]}
    assert media_refs(one(record, media_root=tmp_path / "x", allow_outside=True)) == [inside]


def test_the_fingerprint_is_content_and_options(write: Write, tmp_path: Path) -> None:
    """K5: equal inputs in other places are a hit; another option is a miss."""
    here = ChatSource(open_source(write("one/a.jsonl", [{"messages": QA}])), media_root=tmp_path / "one")
    there = ChatSource(open_source(write("two/b.jsonl", [{"messages": QA}])), media_root=tmp_path / "two")
    assert here.fingerprint == there.fingerprint and here.fields() == there.fields()
    assert here.media_root != there.media_root
    inner = here.source
    others = [
        ChatSource(inner),
        ChatSource(inner, media_root=tmp_path, allow_outside=True),
        ChatSource(inner, shape="messages"),
        ChatSource(inner, columns={"images": "pictures"}),
        ChatSource(inner, placeholders=["<img>"]),
        ChatSource(inner, media_without_placeholder="prepend"),
        ChatSource(inner, tool_calls="text"),
        ChatSource(open_source(write("one/c.jsonl", [{"messages": QA}, {"messages": QA}]))),
    ]
    prints = [source.fingerprint for source in [here, *others]]
    assert len(set(prints)) == len(prints)


def test_pickled_for_workers(write: Write) -> None:
    source = ChatSource(open_source(write("a.jsonl", [{"messages": QA}])), placeholders=["<img>"])
    again = pickle.loads(pickle.dumps(source))
    assert again[0] == source[0] and again.fingerprint == source.fingerprint
    assert again.where(0) == "a.jsonl:1" and len(again) == 1


def test_a_bad_line_names_its_place(write: Write) -> None:
    source = ChatSource(open_source(write("a.jsonl", b'{"messages": []}\n{oops\n')))
    for index, where in ((0, "a.jsonl:1"), (1, "a.jsonl:2")):
        with pytest.raises(SampleError, match=where):
            source[index]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "image", "role", "from", "value", "content", "name", "url"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
fields = st.sampled_from(
    [
        *("messages", "conversations", "images", "image", "tools", "system", "instruction", "output"),
        *("history", "videos", "video", "audios", "audio"),
    ]
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": junk}),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(fields, junk, max_size=4) | st.fixed_dictionaries({"messages": turns, "images": junk}))
def test_any_record_is_a_sample_or_a_reason(record: dict[str, Any]) -> None:
    try:
        sample = ChatSource(Rows(record))[0]
    except SampleError as error:
        assert error.reason and str(error).startswith("rows[0]: ")
        return
    for message in sample["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        for part in message["content"]:
            assert part["type"] in ("text", "image", "video", "audio") and part[part["type"]]


CHAT_FILES: list[tuple[str, int, dict[str, Any]]] = [
    ("mllm_demo/mllm_demo.json", 6, {}),
    ("mllm_demo/v1_multimodal_demo.jsonl", 24, {"media_root": "mllm_demo", "shape": "messages"}),
    ("mllm_demo/mllm_video_demo.json", 3, {}),
    ("mllm_demo/mllm_audio_demo.json", 3, {}),
    ("mllm_demo/mllm_video_audio_demo.json", 3, {}),
    ("mllm_demo/xcomposer/multi_turn_multi_images_example.json", 2, {"placeholders": ["<ImageHere>"]}),
    ("mllm_demo/xcomposer/only_text_example.json", 2, {}),
    (
        "mllm_demo/xcomposer/single_turn_single_image_example.json",
        2,
        {"media_without_placeholder": "prepend"},
    ),
    ("mllm_demo/llava/coco2014_val_gpt4_qa_30x3.jsonl", 90, {"media_without_placeholder": "prepend"}),
    ("text_sft/alpaca_en_demo.json", 999, {"shape": "alpaca"}),
    ("text_sft/alpaca_zh_demo.json", 1000, {}),
    ("text_sft/gsm8k_train.jsonl", 7473, {"columns": {"prompt": "question", "response": "answer"}}),
    ("text_sft/identity.json", 91, {}),
    ("text_sft/glaive_toolcall_en_demo.json", 300, {"shape": "sharegpt"}),
    ("text_sft/v1_sft_demo.jsonl", 500, {}),
    ("text_sft/gpteacher_codegen-instruct.json", 4535, {"columns": {"output": "response"}}),
]


@pytest.mark.parametrize(("name", "count", "options"), CHAT_FILES, ids=[name for name, _, _ in CHAT_FILES])
def test_real_chat_files(data: Path, name: str, count: int, options: dict[str, Any]) -> None:
    root = options.get("media_root")
    source = ChatSource(
        open_source(data / name), **{**options, **({"media_root": data / root} if root else {})}
    )
    assert len(source) == count
    for sample in source:
        assert any(message["role"] == "assistant" for message in sample["messages"])


def test_real_media_are_found(data: Path) -> None:
    source = ChatSource(open_source(data / "mllm_demo/mllm_demo.json"))
    refs = [ref for sample in source for ref in media_refs(sample)]
    assert len(refs) == 8 and all(exists(ref) for ref in refs)
    first = source[0]["messages"]
    assert [part["type"] for part in first[0]["content"]] == ["image", "text"]
    assert [part["type"] for part in first[2]["content"]] == ["text", "image"]


def test_plain_text_is_a_column_without_a_prompt(data: Path) -> None:
    source = ChatSource(open_source(data / "text_sft" / "c4_demo.jsonl"), columns={"response": "text"})
    assert len(source) == 300
    for index in range(len(source)):
        (message,) = source[index]["messages"]
        assert message["role"] == "assistant" and message["content"][0]["text"]


def test_self_instruct_tasks_with_their_one_instance(data: Path) -> None:
    source = ChatSource(open_source(data / "text_sft" / "self_instruct_seed_tasks.jsonl"))
    roles = [[message["role"] for message in source[index]["messages"]] for index in range(len(source))]
    assert roles == [["user", "assistant"]] * 175
    two = {"instruction": "do", "instances": [{"input": "", "output": "a"}, {"input": "", "output": "b"}]}
    with pytest.raises(SampleError, match="exactly one instance"):
        ChatSource(Rows(two))[0]


CAPTION = [
    {"role": "user", "content": [image("/media/a.jpg")]},
    {"role": "assistant", "content": [text("a cat")]},
]
SAID = [{"role": "assistant", "content": [image("/media/a.jpg"), text("a cat")]}]


@pytest.mark.spec(
    "003",
    "caption records: `captions`, `caption`, an image with an answer alone",
    key="`data.shape`",
    api="`ChatSource`",
)
@pytest.mark.parametrize("option", [{}, {"media_without_placeholder": "prepend"}])
@pytest.mark.parametrize(
    ("record", "want"),
    [
        ({"captions": [{"content": "a cat"}], "images": ["a.jpg"]}, CAPTION),
        ({"captions": ["a cat"], "images": ["a.jpg"], "id": 3}, CAPTION),
        ({"caption": "a cat", "image": "a.jpg"}, CAPTION),
        ({"messages": [{"role": "assistant", "content": "a cat"}], "images": ["a.jpg"]}, SAID),
        ({"messages": [{"role": "assistant", "content": "<image>a cat"}], "images": ["a.jpg"]}, SAID),
        ({"conversations": [{"from": "gpt", "value": "a cat"}], "image": "a.jpg"}, SAID),
    ],
)
def test_a_caption_needs_no_question(record: Any, want: Any, option: Any) -> None:
    assert one(record, **option)["messages"] == want


def test_a_caption_under_another_name_is_reached_by_its_hint() -> None:
    told = ChatSource(Rows({"said": "a cat", "image": "a.jpg"}))
    with pytest.raises(SampleError, match="columns="):
        told[0]
    assert one({"said": "a cat", "image": "a.jpg"}, columns={"response": "said"})["messages"] == SAID


def test_captions_that_are_several_or_beside_a_conversation() -> None:
    assert reason({"captions": ["a", "b"], "images": ["a.jpg"]}) == "malformed_record"
    assert reason({"captions": ["a"], "caption": "b", "images": ["a.jpg"]}) == "malformed_record"
    assert reason({"captions": [3], "images": ["a.jpg"]}) == "malformed_record"
    assert reason({"caption": "a cat"}) == "malformed_record"
    beside = one({"messages": QA, "caption": "metadata, as before"})
    assert beside["messages"] == ASK
