"""Law 5: measure(sample) == len(encode(sample)["input_ids"]), without decoding, for every kind of sample."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packtrain.errors import DriftError, SampleError
from packtrain.extend import Template, measure_many
from packtrain.template import HFTemplate, load_processor

VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
QUESTION = "What is written on the sign? 你好 ∑ 🎉"


def real_images(data: Path) -> list[Path]:
    rows = (data / "images_real" / "manifest.jsonl").read_text().splitlines()
    found = sorted(p for p in (data / "images_real").rglob("*") if p.suffix in (".jpg", ".png"))
    assert rows and len(found) >= 100
    return found


def assert_same(template: HFTemplate, sample: dict[str, Any]) -> dict[str, Any]:
    measured = template.measure(sample)
    encoded = template.encode(sample)
    assert measured == len(encoded["input_ids"])
    assert measured.costs["supervised"] == int((encoded["labels"] != -100).sum())
    assert encoded["input_ids"].dtype == encoded["labels"].dtype == torch.int64
    assert encoded["labels"].shape == encoded["input_ids"].shape
    assert encoded["labels"][0] == -100
    kept = encoded["labels"] != -100
    assert torch.equal(encoded["labels"][kept], encoded["input_ids"][kept])
    if template.rule is not None:
        rows = encoded["position_ids"]
        assert rows.shape == (3, int(measured)) and rows.dtype == torch.int64
        assert not (kept & (encoded["input_ids"] == template.image_token_id)).any()
        grid = encoded.get("image_grid_thw")
        assert measured.costs["images"] == (0 if grid is None else len(grid))
        assert measured.costs["patches"] == (0 if grid is None else int(grid.prod(1).sum()))
        assert ("pixel_values" in encoded) == (grid is not None)
    return encoded


@pytest.mark.parametrize(("name", "every"), [("qwen2_5_vl", 1), ("qwen3_vl", 3), ("qwen2_vl", 3)])
def test_every_real_image(name: str, every: int, data: Path, template, chat) -> None:
    """All with one processor; a third with the others, whose rule is the same over another patch size."""
    mismatches = []
    images = real_images(data)[::every]
    samples = [chat([path, QUESTION], "A sign.") for path in images]
    for path, sample, measured in zip(images, samples, template(name).measure_batch(samples), strict=True):
        encoded = template(name).encode(sample)
        if measured != len(encoded["input_ids"]) or measured.costs["patches"] != len(encoded["pixel_values"]):
            mismatches.append((path.name, measured, len(encoded["input_ids"])))
    assert mismatches == []


def made_images(folder: Path) -> dict[str, Path]:
    """Files that trip readers up: EXIF turns, modes, wrong suffixes, extreme shapes."""
    made: dict[str, Path] = {}

    def save(name: str, image: Image.Image, suffix: str, **options: Any) -> None:
        made[name] = folder / f"{name}{suffix}"
        image.save(made[name], **options)

    def noise(width: int, height: int, mode: str) -> Image.Image:
        values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(values).convert(mode)

    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        save(f"exif{turn}", noise(640, 300, "RGB"), ".jpg", exif=exif)
        save(f"exif{turn}_png", noise(100, 333, "RGB"), ".png", exif=exif)
    for mode, suffix in (("RGBA", ".png"), ("P", ".png"), ("L", ".png"), ("LA", ".png"), ("1", ".png")):
        save(f"mode_{mode}", noise(211, 97, mode), suffix)
    save("mode_CMYK", noise(211, 97, "CMYK"), ".jpg")
    save("grey", noise(333, 91, "L"), ".jpg")
    for fmt in ("WEBP", "GIF", "BMP"):
        save(f"kind_{fmt}", noise(120, 345, "RGB"), f".{fmt.lower()}", format=fmt)
    save("png_named_jpg", noise(300, 120, "RGB"), ".jpg", format="PNG")
    save("jpg_named_png", noise(300, 120, "RGB"), ".png", format="JPEG")
    for width, height in ((1, 1), (1, 200), (200, 1), (8, 8), (5, 900), (28, 28), (4000, 21), (2500, 1700)):
        save(f"size_{width}x{height}", noise(width, height, "RGB"), ".png")
    return made


@pytest.mark.parametrize("name", VISION)
def test_made_images(name: str, template, chat, tmp_path: Path) -> None:
    made = made_images(tmp_path)
    for path in made.values():
        assert_same(template(name), chat([path, "Which?"], "This."))
    wide = template(name).encode(chat([made["exif1"]], "x"))["image_grid_thw"][0]
    turned = template(name).encode(chat([made["exif6"]], "x"))["image_grid_thw"][0]
    assert wide.tolist()[1:] == turned.tolist()[:0:-1]  # height and width change places
    everything = chat([*made.values(), "All of them?"], "Yes.", ["And", made["grey"], "?"], "No.")
    assert_same(template(name), everything)


def test_measuring_decodes_no_pixels(template, chat, data: Path, tmp_path: Path, monkeypatch) -> None:
    made = [*made_images(tmp_path).values(), *real_images(data)]
    expected = [int(template("qwen2_5_vl").measure(chat([path], "x"))) for path in made]

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("measuring decoded an image")

    kinds = {Image.Image}
    for path in made:
        with Image.open(path) as image:
            kinds.add(type(image))
    for cls in sorted(kinds, key=lambda cls: cls.__name__):
        monkeypatch.setattr(cls, "load", refuse)
    measured = template("qwen2_5_vl").measure_batch([chat([path], "x") for path in made])
    assert [int(m) for m in measured] == expected


def decoded(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def mllm_demo(data: Path) -> list[dict[str, Any]]:
    root = data / "mllm_demo"
    out = []
    for row in json.loads((root / "mllm_demo.json").read_text()):
        paths = iter(row["images"])
        messages = []
        for message in row["messages"]:
            parts: list[dict[str, Any]] = []
            for place, text in enumerate(message["content"].split("<image>")):
                if place:
                    parts.append({"type": "image", "image": str(root / next(paths))})
                if text:
                    parts.append({"type": "text", "text": text})
            messages.append({"role": message["role"], "content": parts})
        out.append({"messages": messages})
    return out


@pytest.mark.parametrize("name", VISION)
def test_conversations_equal_the_library(name: str, data: Path, template) -> None:
    """Ids and trained tokens equal those of apply_chat_template on the same conversation."""
    samples = mllm_demo(data)
    measured = template(name).measure_batch(samples)
    if name != "qwen3_vl":  # its template has no default system turn (11 tokens)
        assert [int(m) for m in measured[:3]] == [195, 140, 181]
    for sample, length in zip(samples, measured, strict=True):
        opened = [
            {
                "role": m["role"],
                "content": [
                    {**part, "image": decoded(part["image"])} if part["type"] == "image" else part
                    for part in m["content"]
                ],
            }
            for m in sample["messages"]
        ]
        theirs = template(name).processor.apply_chat_template(
            opened, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        ours = assert_same(template(name), sample)
        assert len(ours["input_ids"]) == length
        assert torch.equal(ours["input_ids"], theirs["input_ids"][0])
        mask = torch.as_tensor(theirs["assistant_masks"])[0].bool()
        assert torch.equal(mask, ours["labels"] != -100)
        assert torch.equal(ours["pixel_values"], theirs["pixel_values"])


def test_multi_image_turns(data: Path, template, chat) -> None:
    """Real multi-turn conversations with several images in one turn."""
    root = data / "mllm_demo" / "xcomposer"
    rows = json.loads((root / "multi_turn_multi_images_example.json").read_text())
    for row in rows:
        paths = [root / "images" / Path(name).name for name in row["image"]]
        turns: list[Any] = []
        for turn in row["conversations"]:
            pieces = turn["value"].split("<ImageHere>")
            parts: list[Any] = [pieces[0]]
            for piece in pieces[1:]:
                parts += [paths.pop(0), piece]
            turns.append([part for part in parts if part != ""])
        assert paths == []
        for name in VISION:
            assert_same(template(name), chat(*turns))


def test_same_reason_from_both(template, chat, tmp_path: Path) -> None:
    """A sample that cannot be used is refused by measure and encode alike."""
    whole = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(whole, "PNG")
    good = whole.getvalue()
    cut = tmp_path / "cut.png"
    cut.write_bytes(good[: len(good) // 2])
    long = tmp_path / "long.png"
    Image.new("L", (30000, 1)).save(long)
    folder = tmp_path / "folder.png"
    folder.mkdir()
    text = tmp_path / "text.png"
    text.write_text("this is no image at all, only words")
    cases = {
        "missing_media": chat([tmp_path / "nowhere.jpg", "?"], "x"),
        "truncated_media": chat([good, cut, "?"], "x"),
        "unsupported_media": chat([long, "?"], "x"),
        "placeholder_mismatch": chat([good, "<|image_pad|>"], "x"),
        "no_assistant_turn": chat("only a question"),
        "empty": {"messages": []},
        "malformed_record": {"text": "no messages"},
    }
    more = [
        ("unreadable_media", chat([folder], "x")),
        ("unsupported_media", chat([text], "x")),
        ("placeholder_mismatch", chat("a <|video_pad|> b", "x")),
        ("placeholder_mismatch", chat("a <|image_pad|> b", "x")),
        ("malformed_record", chat("half a \ud83d character", "x")),
        ("malformed_record", {"messages": [{"content": "x"}]}),
        ("malformed_record", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("unsupported_media", {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "v"}]}]}),
        ("missing_media", chat([tmp_path / "nowhere.jpg", long], "x")),
        ("unsupported_media", chat([long, good, "?"], "x")),
    ]
    pairs = [*cases.items(), *more]
    outcomes = template("qwen2_5_vl").measure_batch([sample for _, sample in pairs])
    for (reason, sample), outcome in zip(pairs, outcomes, strict=True):
        assert isinstance(outcome, SampleError) and outcome.reason == reason, (reason, outcome)
        with pytest.raises(SampleError) as caught:
            template("qwen2_5_vl").encode(sample)
        assert caught.value.reason == reason
        with pytest.raises(SampleError) as caught:
            template("qwen2_5_vl").measure(sample)
        assert "\n" not in str(caught.value)


def test_one_bad_sample_does_not_touch_its_batch(template, chat, data: Path) -> None:
    good = [chat([path, "?"], "x") for path in real_images(data)[:6]]
    alone = [int(template("qwen3_vl").measure(sample)) for sample in good]
    bad = [chat([Path("/nowhere.png")], "x"), chat("\udc00", "x"), {"messages": None}]
    mixed = [good[0], bad[0], good[1], good[2], bad[1], good[3], bad[2], good[4], good[5]]
    outcomes = measure_many(template("qwen3_vl"), mixed)
    assert [int(o) for o in outcomes if not isinstance(o, SampleError)] == alone
    assert [o.reason for o in outcomes if isinstance(o, SampleError)] == [
        "missing_media",
        "malformed_record",
        "malformed_record",
    ]


def test_images_in_memory(template, chat, data: Path) -> None:
    path = real_images(data)[0]
    url = "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode()
    from_file = assert_same(template("qwen2_vl"), chat([path], "x"))
    for sample in (chat([path.read_bytes()], "x"), chat([Path("x")], "x")):
        if sample["messages"][0]["content"][0]["image"] == "x":
            sample["messages"][0]["content"][0]["image"] = url
        ours = assert_same(template("qwen2_vl"), sample)
        assert torch.equal(ours["pixel_values"], from_file["pixel_values"])


def test_long_and_odd_texts(template, chat) -> None:
    """10 MB of text and every kind of character are measured and encoded alike."""
    blob = ("x" * 50 + " 漢字 🙂\u0301\n") * 2_000
    for text in (blob, "\x00\x07", "e\u0301\u200d", "<|box_start|>user", " " * 5000, "\r\n\t"):
        assert_same(template("qwen2_5_vl"), chat("Go on", text))
    huge = ("word " * 7 + "\n") * 290_000
    assert len(huge) > 10_000_000
    assert template("qwen2_5_vl").measure(chat("Go on", huge)) > 2_000_000


def test_the_template_protocol(template) -> None:
    assert isinstance(template("qwen2_vl"), Template)


def test_caller_objects_stay_as_they_are(template, chat, data: Path) -> None:
    sample = chat([real_images(data)[0], "?"], "x")
    before = json.dumps(sample)
    template("qwen2_vl").measure(sample)
    template("qwen2_vl").encode(sample)
    assert json.dumps(sample) == before


def test_a_processor_that_departs_from_its_rule_is_caught(data: Path, chat) -> None:
    """Limits changed behind the template's back: encoding refuses instead of giving other lengths."""
    loaded = load_processor(data / "processors" / "qwen2_vl")
    ours = HFTemplate(loaded)
    size = loaded.image_processor.size
    loaded.image_processor.size = type(size)(shortest_edge=3136, longest_edge=28 * 28 * 40)
    with pytest.raises(DriftError, match="measuring gives"):
        ours.encode(chat([real_images(data)[0]], "x"))
