"""Videos and sounds in chat records, placeholders per modality, hints, and every real multimodal set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sources_chat import QA, Rows, one, reason, text

from packtrain.errors import ConfigError, SampleError, UnknownNameError
from packtrain.media import audio, image, video
from packtrain.media.hints import header_of
from packtrain.media.location import media_refs
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

USER, BOT = QA


def asked(content: Any, **listed: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, BOT], **listed}


def parts(record: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return one(record, **options)["messages"][0]["content"]


def test_placeholders_of_every_modality_take_their_own_list() -> None:
    record = asked(
        "<video><audio>a <image>b<audio>",
        videos=["1.mp4"],
        audios=["1.wav", "2.wav"],
        images=["1.jpg"],
    )
    assert parts(record) == [
        {"type": "video", "video": "/media/1.mp4"},
        {"type": "audio", "audio": "/media/1.wav"},
        text("a "),
        {"type": "image", "image": "/media/1.jpg"},
        text("b"),
        {"type": "audio", "audio": "/media/2.wav"},
    ]
    assert media_refs(one(record)) == ["/media/1.mp4", "/media/1.wav", "/media/1.jpg", "/media/2.wav"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (asked("<video>", videos=[]), "1 video placeholder .*lists 0 videos"),
        (asked("<audio>", audios=["1", "2"]), "1 audio placeholder .*lists 2 audios"),
        (asked("<image>", videos=["1.mp4"]), "1 image placeholder .*lists 0 images"),
        (asked("x", videos=["1.mp4"]), "0 video placeholders"),
    ],
)
def test_counts_are_compared_per_modality(record: dict[str, Any], said: str) -> None:
    assert reason(record) == "placeholder_mismatch"
    with pytest.raises(SampleError, match=said):
        one(record)


def test_html_tags_can_be_plain_words() -> None:
    record = asked("what is <video> in HTML?")
    with pytest.raises(SampleError) as error:
        one(record)
    assert "plain words" in (error.value.hint or "")
    assert parts(record, placeholders={"video": ()}) == [text("what is <video> in HTML?")]
    assert parts(asked("<video> <image>", images=["a"]), placeholders={"video": []})[0] == text("<video> ")


def test_chosen_placeholders() -> None:
    record = asked("<m><m2><s>", images=["1.jpg"], videos=["1.mp4"], audios=["1.wav"])
    found = parts(record, placeholders={"image": "<m>", "video": ["<m2>"], "audio": ["<s>"]})
    assert [part["type"] for part in found] == ["image", "video", "audio"]
    nested = asked("<m><m>x", images=["1.jpg"], videos=["1.mp4"])
    found = parts(nested, placeholders={"image": "<m>", "video": "<m>x"})  # the longest wins
    assert [part["type"] for part in found] == ["image", "video"]
    for bad in ({"image": "<a>", "video": "<a>"}, {"video": ""}, {"video": [3]}):
        with pytest.raises(ConfigError):
            ChatSource(Rows({}), placeholders=bad)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="vidoe"):
        ChatSource(Rows({}), placeholders={"vidoe": "<v>"})


def test_parts() -> None:
    content = [
        {"type": "video", "video": "a.mp4"},
        {"type": "video", "video": ["f1.jpg", {"bytes": b"x"}, "f2.jpg"], "fps": 2},
        {"type": "video_url", "video_url": {"url": "https://host/a.mp4"}},
        {"type": "audio", "audio": {"bytes": b"wav", "path": "x.wav"}},
        {"type": "audio_url", "audio_url": "b.wav", "video_url": None},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
        {"type": "image_url", "image_url": {"url": "c.jpg"}},
        {"type": "audio", "path": "d.wav"},
    ]
    sample = one(asked(content), allow_remote=True)
    assert sample["messages"][0]["content"] == [
        {"type": "video", "video": "/media/a.mp4"},
        {"type": "video", "video": ["/media/f1.jpg", b"x", "/media/f2.jpg"], "fps": 2.0},
        {"type": "video", "video": "https://host/a.mp4"},
        {"type": "audio", "audio": b"wav"},
        {"type": "audio", "audio": "/media/b.wav"},
        {"type": "audio", "audio": "data:audio/mp3;base64,AAAA"},
        {"type": "image", "image": "/media/c.jpg"},
        {"type": "audio", "audio": "/media/d.wav"},
    ]
    assert len(media_refs(sample)) == 10


def test_lists_of_frames_and_lists_of_videos() -> None:
    frames = ["1.jpg", "2.PNG", {"path": "3.jpeg"}]
    assert parts(asked("<video>", video=frames))[0]["video"] == [
        "/media/1.jpg",
        "/media/2.PNG",
        "/media/3.jpeg",
    ]
    assert parts(asked("<video><video>", videos=[["1.jpg"], "2.mp4"])) == [
        {"type": "video", "video": ["/media/1.jpg"]},
        {"type": "video", "video": "/media/2.mp4"},
    ]
    assert len(parts(asked("<video><video>", video=["1.mp4", "2.mp4"]))) == 2
    assert reason(asked("<video>", videos=[[]])) == "malformed_record"
    assert reason(asked("<video>", videos=[["../1.jpg"]])) == "outside_media_root"
    assert reason(asked("<video>", videos=[[7]])) == "malformed_record"


def test_media_without_placeholder() -> None:
    record = asked("x <audio>", images=["1.jpg"], videos=["1.mp4"], audios=["1.wav"])
    found = parts(record, media_without_placeholder="prepend")
    assert [part["type"] for part in found] == ["image", "video", "text", "audio"]


def test_hints() -> None:
    content = [
        {"type": "image", "image": "a.jpg", "width": 64.0, "height": 48, "min_pixels": 7},
        {"type": "audio", "audio": {"path": "a.wav", "frames": 16000, "sample_rate": 16000}},
    ]
    assert parts(asked(content)) == [
        {"type": "image", "image": "/media/a.jpg", "width": 64, "height": 48, "min_pixels": 7},
        {"type": "audio", "audio": "/media/a.wav", "frames": 16000, "sample_rate": 16000},
    ]
    listed = asked("<image><image>", images=[{"path": "a.jpg", "width": 3, "height": 4}, "b.jpg"])
    assert parts(listed)[0]["width"] == 3 and "width" not in parts(listed)[1]
    columns = {"width": "w", "height": "h"}
    mapped = asked("<image><image>", images=["a.jpg", "b.jpg"], w=[3, 5], h=[4, None])
    assert parts(mapped, columns=columns) == [
        {"type": "image", "image": "/media/a.jpg", "width": 3, "height": 4},
        {"type": "image", "image": "/media/b.jpg", "width": 5},
    ]
    assert "width" not in parts({**mapped, "width": [3, 5]})[0]  # only where the field is mapped
    assert parts(asked("<image>", images=["a"], w=7, h=8), columns=columns)[0]["width"] == 7
    assert reason(asked("<image>", images=["a"], w=[7, 8], h=8), columns=columns) == "malformed_record"
    assert reason(asked([{"type": "image", "image": "a", "width": 0}])) == "malformed_record"
    assert reason(asked([{"type": "image", "image": "a", "width": "wide"}])) == "malformed_record"


def test_sequences_as_hugging_face_stores_them() -> None:
    record = {"messages": {"role": ["user", "assistant"], "content": ["a?", "b"]}}
    assert one(record) == one({"messages": QA})
    record = {"conversations": {"from": ["human", "gpt"], "value": ["a?", "b"]}}
    assert one(record) == one({"messages": QA})
    assert reason({"messages": {"role": ["user"], "content": ["a", "b"]}}) == "malformed_record"


def test_a_remote_media_root() -> None:
    record = asked("<image>", images=["a/1.jpg"])
    assert media_refs(one(record, media_root="s3://bucket/set")) == ["s3://bucket/set/a/1.jpg"]
    assert reason(asked("<image>", images=["../1.jpg"]), media_root="s3://bucket/set") == "outside_media_root"
    elsewhere = asked("<image>", images=["https://host/1.jpg"])
    for root in ({}, {"media_root": "/media"}):
        assert reason(elsewhere, **root, allow_outside=True) == "remote_media"
        assert media_refs(one(elsewhere, **root, allow_remote=True)) == ["https://host/1.jpg"]


def test_a_generator_is_no_source() -> None:
    with pytest.raises(ConfigError, match="generator") as error:
        ChatSource(row for row in [{"messages": QA}])  # type: ignore[arg-type]
    assert "JSONL" in (error.value.hint or "")


DEMOS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("mllm_demo.json", {}, {"image": 8}),
    ("mllm_video_demo.json", {}, {"video": 3}),
    ("mllm_audio_demo.json", {}, {"audio": 3}),
    ("mllm_video_audio_demo.json", {}, {"video": 3, "audio": 3}),
    ("v1_multimodal_demo.jsonl", {"media_root": ".", "media_prefix": "data/"}, {"image": 32}),
    (
        "xcomposer/multi_turn_multi_images_example.json",
        {"placeholders": ["<ImageHere>"], "media_root": "xcomposer", "media_prefix": "data/"},
        {"image": 4},
    ),
    (
        "xcomposer/single_turn_single_image_example.json",
        {"media_without_placeholder": "prepend", "media_root": "xcomposer", "media_prefix": "data/"},
        {"image": 2},
    ),
]


@pytest.mark.parametrize(("name", "options", "counts"), DEMOS, ids=[name for name, _, _ in DEMOS])
def test_real_media_open(data: Path, name: str, options: dict[str, Any], counts: dict[str, int]) -> None:
    """Every medium of every real multimodal conversation has a header."""
    folder = data / "mllm_demo"
    if "media_root" in options:
        options = {**options, "media_root": folder / options["media_root"]}
    source = ChatSource(open_source(folder / name), **options)
    found: dict[str, int] = {}
    for index in range(len(source)):
        for message in source[index]["messages"]:
            for part in message["content"]:
                if part["type"] != "text":
                    found[part["type"]] = found.get(part["type"], 0) + 1
                    header = header_of(part)
                    reader = {"image": image, "video": video, "audio": audio}[part["type"]]
                    assert header == reader.read_header(part[part["type"]])
    assert found == counts
