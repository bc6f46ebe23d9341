"""Datasets as LLaMA-Factory's `dataset_info.json` describes them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import ConfigError, PacktrainError, SampleError, SourceError
from packtrain.sources import open_source
from packtrain.sources.chat import open_chats

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def write(folder: Path, entry: dict[str, Any], *records: Any, name: str = "d.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"d": {"file_name": name, **entry}}), encoding="utf-8"
    )
    return folder / "dataset_info.json"


def said(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (m["role"], "".join(part.get("text", f"<{part['type']}>") for part in m["content"]))
        for m in sample["messages"]
    ]


def test_alpaca_with_its_default_columns_and_with_named_ones(tmp_path: Path) -> None:
    record = {"instruction": "Say.", "input": "x", "output": "y"}
    expected = [("user", "Say.\nx"), ("assistant", "y")]
    assert said(open_chats(write(tmp_path, {}, record), kind="llamafactory")[0]) == expected
    columns = {"prompt": "a", "query": "b", "response": "c", "history": "h", "system": "s"}
    record = {"a": "Say.", "b": "", "c": "y", "h": [["q", "r"]], "s": "Be.", "score": 3}
    sample = open_chats(write(tmp_path, {"columns": columns}, record), kind="llamafactory")[0]
    assert said(sample) == [
        ("system", "Be."),
        ("user", "q"),
        ("assistant", "r"),
        ("user", "Say."),
        ("assistant", "y"),
    ]


def test_sharegpt_with_calls_and_tags_of_its_own(tmp_path: Path) -> None:
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"}
    tags |= {"observation_tag": "O", "function_tag": "F", "system_tag": "S"}
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    talk = [("S", "Be."), ("U", "Ask."), ("F", call), ("O", "1"), ("A", "One.")]
    record = {"chat": [{"who": who, "what": what} for who, what in talk], "defs": '[{"name": "f"}]'}
    entry = {"formatting": "sharegpt", "columns": {"messages": "chat", "tools": "defs"}, "tags": tags}
    sample = open_chats(write(tmp_path, entry, record), kind="llamafactory")[0]
    assert [m["role"] for m in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert sample["tools"] == [{"name": "f"}]
    plain = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    sample = open_chats(write(tmp_path, {"formatting": "sharegpt"}, plain), kind="llamafactory")[0]
    assert said(sample) == [("user", "a"), ("assistant", "b")]


def test_openai_keeps_what_a_message_holds(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "Ask."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "assistant", "content": "One."},
    ]
    entry = {
        "formatting": "openai",
        "columns": {"messages": "messages"},
        "tags": {**TAGS, "observation_tag": "tool", "system_tag": "system"},
    }
    sample = open_chats(write(tmp_path, entry, {"messages": talk}), kind="llamafactory")[0]
    assert [m["role"] for m in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert sample["messages"][1]["tool_calls"][0]["function"]["name"] == "f"


def test_the_real_media_demos_have_their_media(data: Path, tmp_path: Path) -> None:
    folder = data / "mllm_demo"
    names = {"image": "mllm_demo", "video": "mllm_video_demo", "audio": "mllm_audio_demo"}
    info = {
        name: {
            "file_name": str(folder / f"{name}.json"),
            "formatting": "sharegpt",
            "columns": {"messages": "messages", f"{kind}s": f"{kind}s"},
            "tags": TAGS,
        }
        for kind, name in names.items()
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    chats = open_chats(tmp_path, kind="llamafactory", dataset=",".join(names.values()), media_dir=folder)
    held = [(p["type"], p[p["type"]]) for s in chats for m in s["messages"] for p in m["content"]]
    for kind in names:
        refs = [ref for found, ref in held if found == kind]
        assert refs and all(Path(ref).is_file() for ref in refs)
    own = [sum(1 for _ in json.loads((folder / f"{n}.json").read_text())) for n in names.values()]
    assert len(chats) == sum(own)
    assert pickle.loads(pickle.dumps(chats))[0] == chats[0]
    again = open_chats(tmp_path, kind="llamafactory", dataset=[*names.values()], media_dir=folder)
    assert again.fingerprint == chats.fingerprint
    assert open_chats(tmp_path, kind="llamafactory", dataset="mllm_demo").fingerprint != chats.fingerprint


def test_num_samples_takes_exactly_so_many(tmp_path: Path) -> None:
    records = [{"instruction": str(n), "output": "y"} for n in range(10)]
    for wanted in (4, 10, 23):
        chats = open_chats(write(tmp_path, {"num_samples": wanted}, *records), kind="llamafactory")
        found = [said(chats[i])[0][1] for i in range(len(chats))]
        assert len(found) == wanted
        assert all(wanted // 10 <= found.count(str(n)) <= -(-wanted // 10) for n in range(10))


CHAT = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": TAGS}
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("entry", "record", "reason"),
    [
        ({}, {"instruction": "a", "output": "b", "system": "Be."}, "unread_key"),
        ({}, {"instruction": "a", "output": "b", "images": ["a.jpg"]}, "unread_key"),
        ({}, {"instruction": "a", "output": "b", "reasoning": "c"}, "unread_key"),
        ({}, {"instruction": "a"}, "no_assistant_turn"),
        ({"columns": {"prompt": "instruction", "response": "output"}},
         {"instruction": "a", "input": "i", "output": "b"}, "unread_key"),
        ({"columns": {"prompt": "instruction", "chosen": "good", "rejected": "bad"}},
         {"instruction": "a", "good": "b", "bad": "c"}, "unread_key"),
        ({**CHAT, "columns": {"messages": "messages", "kto_tag": "ok"}},
         {"messages": TALK, "ok": False}, "unsupervised"),
        (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, "malformed_record"),
        (CHAT, {"messages": TALK, "tools": [{"name": "f"}]}, "unread_key"),
        (CHAT, {"messages": "a"}, "malformed_record"),
    ],
)  # fmt: skip
def test_what_would_train_otherwise_is_named(
    entry: dict[str, Any], record: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    chats = open_chats(write(tmp_path, entry, record), kind="llamafactory")
    with pytest.raises(SampleError) as error:
        chats[0]
    assert error.value.reason == reason and "d.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"ranking": True}, "preference data"),
        ({"formatting": "chatml"}, "has the format"),
        ({"column": {}}, "'columns'"),
        ({"columns": {"promt": "a"}}, "'prompt'"),
        ({"tags": {"user": "a"}}, "'user_tag'"),
        ({"file_name": "", "hf_hub_url": "a/b"}, "lies elsewhere"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_entries_that_cannot_be_kept_are_refused(entry: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_source(write(tmp_path, entry, {"instruction": "a", "output": "b"}), kind="llamafactory")
    assert told in f"{error.value.message} {error.value.hint}"


def test_a_table_may_hold_as_many_sets_as_its_owner_has(tmp_path: Path) -> None:
    path = write(tmp_path, {}, {"instruction": "a", "output": "b"})
    many = {f"set_{n}": {"file_name": "d.jsonl", "tags": {"role_tag": "x" * 2000}} for n in range(4000)}
    path.write_text(json.dumps({**many, "d": {"file_name": "d.jsonl"}}))
    assert len(open_source(path, kind="llamafactory", dataset="d")) == 1


def test_names_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, {}, {"instruction": "a", "output": "b"})
    with pytest.raises(ConfigError, match="no dataset"):
        open_source(path, kind="llamafactory", dataset="dd")
    with pytest.raises(SourceError):
        open_source(tmp_path / "none", kind="llamafactory")
    (tmp_path / "d.jsonl").unlink()
    with pytest.raises(PacktrainError, match=r"d\.jsonl"):
        open_source(path, kind="llamafactory")
