"""Several records of one image: split without clashes, merged within a length, both read back."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import NAMES, Set, captions
from verbs import call

from packtrain.errors import ForeignArtefactError, InputError, SampleError
from packtrain.media.location import media_refs, read_bytes
from packtrain.pipeline import pairs
from packtrain.pipeline.pairs import merge_images, split_pairs
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.testing import crash_points


def said(sample: Any) -> list[Any]:
    return [(m["role"], [p.get("text") for p in m["content"]]) for m in sample["messages"]]


def told(source: Any) -> list[str]:
    samples = [source[i] for i in range(len(source))]
    return sorted(repr((said(sample), [read_bytes(ref) for ref in media_refs(sample)])) for sample in samples)


@pytest.mark.spec(
    "003",
    "several records of one image: pairs without duplicate names",
    key="`packtrain pairs`",
    api="`pipeline.pairs`",
)
def test_split_keeps_every_record_apart(made: Callable[..., Set]) -> None:
    names = [*NAMES, "X.jpg", "X_1.jpg", "x_1.png", "X.1.jpg"]
    rows = [
        *captions(names, 3 * len(names), "\nwhat?"),
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {
            "messages": [
                {"role": "user", "content": "<image><image>both?"},
                {"role": "assistant", "content": "yes"},
            ],
            "images": ["X.1.jpg", "0001.jpg"],
        },
    ]
    held = made(rows=rows, names=names)
    out = held.folder / "pairs"
    done = split_pairs(held.source, out)
    assert done == {"records": len(rows), "images": 3 * len(names) + 2, "without_image": 1}
    listed = [path.name for path in out.iterdir() if not path.name.startswith(".")]
    assert len({unicodedata.normalize("NFC", name).casefold() for name in listed}) == len(listed)
    assert all(len(name.encode()) <= 255 for name in listed)
    assert {"X.json", "X_1.json", "X_2.json"} <= set(listed)
    assert json.loads((out / "X_1.json").read_text())["names"] == ["X_1.jpg"], "the real X_1 keeps its name"
    back = ChatSource(open_source(out))
    assert told(back) == told(held.source)


def test_split_stopped_at_any_write(made: Callable[..., Set], tmp_path: Path) -> None:
    held = made(rows=captions(NAMES[:2], 5), names=NAMES[:2])
    assert crash_points(lambda out: split_pairs(held.source, out), tmp_path / "crash") > 40


def test_split_refuses_other_content(made: Callable[..., Set]) -> None:
    held, other = made(rows=captions(NAMES[:1], 3)), made(rows=captions(NAMES[:1], 4))
    split_pairs(held.source, held.folder / "pairs")
    with pytest.raises(ForeignArtefactError, match="another source"):
        split_pairs(other.source, held.folder / "pairs")
    with pytest.raises(ForeignArtefactError, match="not empty"):
        split_pairs(held.source, other.folder)


@pytest.mark.spec(
    "003",
    "several records of one image: one dialogue within the length",
    key="`packtrain pairs --way merge`",
    api="`pipeline.pairs`",
)
@pytest.mark.parametrize("limit", [1, 30, 50, 10_000])
def test_merge_joins_records_of_an_image(made: Callable[..., Set], limit: int) -> None:
    rows = [*captions(NAMES[:3], 12, "\nwhat?"), {"instruction": "a", "output": "b"}]
    held = made(rows=rows)
    out = held.folder / "merged.jsonl"
    done = merge_images(held.source, out, held.template.measure, limit)
    merged = ChatSource(open_source(out))
    read = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(i for row in read for i in row["ids"]) == list(range(13)), "every record once"
    assert done["samples"] == len(merged) == len(read)
    for number, row in enumerate(read):
        sample = merged[number]
        assert len(row["ids"]) == 1 or held.template.measure(sample) <= limit
        first = held.source[row["ids"][0]]
        assert media_refs(sample) == media_refs(first)
        answers = [m["content"][0]["text"] for m in sample["messages"] if m["role"] == "assistant"]
        assert answers == [held.source[i]["messages"][1]["content"][0]["text"] for i in row["ids"]]
    assert done["merged"] == (0 if limit == 1 else done["merged"]) and len(read) == (
        13 if limit == 1 else 4 if limit == 10_000 else len(read)
    )


def test_what_cannot_be_written_is_said(made: Callable[..., Set]) -> None:
    held = made(rows=captions(NAMES[:1], 3))
    source = ChatSource(
        open_source(held.path), placeholders={"image": ("<pic>",)}, media_without_placeholder="prepend"
    )
    with pytest.raises(InputError, match="text <image>"):
        split_pairs(source, held.folder / "pairs")


def broken(held: Set) -> ChatSource:
    """Rows 1 and 4 cannot be read, row 2 has no image file, row 6 holds what pairs cannot."""
    lines = held.path.read_text(encoding="utf-8").splitlines()
    lines[1], lines[4] = "{torn", '{"messages": 3}'
    lines[2] = json.dumps({**json.loads(lines[2]), "images": ["gone.jpg"]})
    held.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return held.open()


def test_a_bad_record_stops_by_its_line(made: Callable[..., Set]) -> None:
    held = made(rows=captions(NAMES[:3], 9, "\nwhat?"), names=NAMES[:3])
    good = held.path.read_text(encoding="utf-8")
    source = broken(held)
    out = held.folder / "pairs"
    for _ in range(2):
        with pytest.raises(InputError, match=r"train\.jsonl:2"):
            split_pairs(source, out)
        with pytest.raises(InputError, match=r"train\.jsonl:2"):
            merge_images(source, held.folder / "merged.jsonl", held.template.measure, 10_000)
    assert not out.exists() and not (held.folder / "merged.jsonl").exists(), "refused before the first write"
    held.path.write_text(good, encoding="utf-8")
    assert split_pairs(held.open(), out)["records"] == 9, "the mended source goes into the same folder"


def test_skipped_records_stand_in_the_ledger(made: Callable[..., Set]) -> None:
    held = made(rows=captions(NAMES[:3], 9, "\nwhat?"), names=NAMES[:3])
    source = broken(held)
    out, merged = held.folder / "pairs", held.folder / "merged.jsonl"
    done = split_pairs(source, out, skip=True)
    assert done == {"records": 6, "images": 6, "without_image": 0, "skipped": 3}
    rows = [json.loads(line) for line in (out / ".packtrain-ledger.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reason"]) for row in rows] == [
        (1, "malformed_record"),
        (2, "missing_media"),
        (4, "malformed_record"),
    ]
    assert rows[1]["where"] == "train.jsonl:3" and "gone.jpg" in rows[1]["message"]
    assert len(ChatSource(open_source(out))) == 6, "the ledger is not taken for data"
    assert split_pairs(source, out, skip=True) == done
    with pytest.raises(ForeignArtefactError):
        split_pairs(source, out)
    done = merge_images(source, merged, held.template.measure, 10_000, skip=True)
    rows = [json.loads(line) for line in (held.folder / "merged.jsonl.ledger.jsonl").read_text().splitlines()]
    kept = [i for line in merged.read_text(encoding="utf-8").splitlines() for i in json.loads(line)["ids"]]
    assert sorted(kept + [row["id"] for row in rows]) == list(range(9)), "each record is in one of the two"
    assert done["skipped"] == len(rows) == 2, "media are opened only where they are measured"


def test_a_medium_that_cannot_be_measured_is_skipped(made: Callable[..., Set]) -> None:
    held = made(rows=captions(NAMES[:2], 8, "\nwhat?"), names=NAMES[:2])
    bad = held.source[1]["messages"][0]["content"][0]["image"]

    def measure(sample: Any) -> int:
        if bad in media_refs(sample):
            raise SampleError("unreadable_media", f"{bad} cannot be read")
        return held.template.measure(sample)

    out = held.folder / "merged.jsonl"
    with pytest.raises(InputError, match=r"train\.jsonl:2.*cannot be read"):
        merge_images(held.source, out, measure, 10_000)
    done = merge_images(held.source, out, measure, 10_000, skip=True)
    assert done == {"records": 8, "samples": 1, "merged": 1, "skipped": 4}
    held_ids = json.loads(out.read_text(encoding="utf-8"))["ids"]
    assert held_ids == [0, 2, 4, 6]


def test_pairs_and_merge_say_what_to_do(made: Callable[..., Set], tmp_path: Path) -> None:
    held = made(rows=captions(NAMES[:3], 9, "\nwhat?"), names=NAMES[:3])
    broken(held)
    told = call("pairs", str(held.path), str(tmp_path / "pairs"), code=2)
    assert "train.jsonl:2" in told.output
    told = json.loads(call("pairs", str(held.path), str(tmp_path / "pairs"), "--skip", "--json").stdout)
    assert told["records"] == 6 and told["skipped"] == 3
    for out, what in ((tmp_path / "none", "does not exist"), (held.path, "is a file")):
        told = call("merge", str(out), code=2)
        assert what in told.output and "export --shard" in " ".join(told.output.split())
    assert "holds no shards" in call("merge", str(held.plan_folder), code=2).output


def test_a_merge_never_replaces_its_source_or_foreign_files(made: Callable[..., Set], tmp_path: Path) -> None:
    held = made(rows=captions(["a.jpg", "b.jpg"], 6), names=["a.jpg", "b.jpg"])
    text = held.path.read_bytes()
    with pytest.raises(ForeignArtefactError, match="no file of merged samples"):
        merge_images(held.source, held.path, held.template.measure, 1000)
    with pytest.raises(InputError, match="is a folder"):
        merge_images(held.source, tmp_path, held.template.measure, 1000)
    out = tmp_path / "merged.jsonl"
    merge_images(held.source, out, held.template.measure, 1000)
    whole = out.read_bytes()
    merge_images(held.source, out, held.template.measure, 1000)
    assert out.read_bytes() == whole and held.path.read_bytes() == text
    words = ("pairs", str(out), str(out), "--way", "merge", "-p", "none", "--max-length", "9")
    assert "is the source itself" in call(*words, code=2).output
    assert out.read_bytes() == whole


@pytest.mark.parametrize("fault", ["video", "missing"])
def test_a_fault_in_the_last_record_is_found_before_anything_is_written(
    made: Callable[..., Set], tmp_path: Path, fault: str
) -> None:
    names = ["a.jpg", "b.jpg", "c.jpg"]
    rows = captions(names, 3)
    held = made(rows=rows, names=names)
    if fault == "missing":
        (held.folder / "c.jpg").unlink()
    else:
        rows[2]["messages"][0]["content"] = "<video>What happens?"
        rows[2] = {"messages": rows[2]["messages"], "videos": ["c.jpg"]}
        held.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = held.open()
    out = tmp_path / "pairs"
    with pytest.raises(InputError):
        split_pairs(source, out)
    assert not out.exists()
    assert split_pairs(source, out, skip=True)["skipped"] == 1


def test_a_call_that_a_medium_stopped_goes_on_with_skip(made: Callable[..., Set], tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "c.jpg"]
    held = made(rows=captions(names, 3), names=names)
    out = tmp_path / "pairs"
    with pytest.MonkeyPatch.context() as patch:

        def read(ref: Any) -> bytes:
            if str(ref).endswith("c.jpg"):
                raise SampleError("unreadable_media", "the disk says no")
            return read_bytes(ref)

        patch.setattr(pairs, "read_bytes", read)
        with pytest.raises(InputError, match="the disk says no"):
            split_pairs(held.source, out)
        assert split_pairs(held.source, out, skip=True)["skipped"] == 1
    assert sorted(path.name for path in out.glob("[a-z]*")) == ["a.jpg", "a.json", "b.jpg", "b.json"]
    with pytest.raises(ForeignArtefactError):  # a whole folder is of one kind
        split_pairs(held.source, out)


def test_pairs_account_for_every_key(tmp_path: Path, made: Callable[..., Set]) -> None:
    """Keys that nothing read are counted once a record; those that change training stop, also with skip."""
    rows = captions(NAMES[:2], 6)
    held = made(rows=[{**row, "mood": "x"} for row in rows], names=NAMES[:2])
    assert split_pairs(held.source, held.folder / "pairs")["keys"] == {"mood": 6}
    merged = merge_images(held.source, held.folder / "merged.jsonl", lambda _: 1, 9)
    assert merged["keys"] == {"mood": 6}
    lines = [rows[0], {**rows[1], "token_mask": [0, 1]}]
    held.path.write_text("".join(f"{json.dumps(row)}\n" for row in lines), encoding="utf-8")
    bad = ChatSource(open_source(held.path))
    for way in (split_pairs, lambda *a, **k: merge_images(*a, lambda _: 1, 9, **k)):
        with pytest.raises(InputError, match="token_mask"):
            way(bad, tmp_path / "out")
        with pytest.raises(InputError, match=r"1 of 2 records.*token_mask") as error:
            way(bad, tmp_path / "out", skip=True)
        assert error.value.exit_code == 2 and "ignore_keys=['KEY']" in str(error.value.hint)
        assert not (tmp_path / "out").exists()
    out, ignore = str(tmp_path / "out"), ("--ignore-key", "token_mask", "--json")
    said_ = json.loads(call("pairs", str(held.path), out, *ignore).stdout)
    assert said_["records"] == 2 and said_["keys"] == {}


def test_a_setting_of_an_image_is_not_lost_in_pairs(made: Callable[..., Set]) -> None:
    rows = [{**row, "max_pixels": 3136} for row in captions(NAMES[:1], 1)]
    held = made(rows=rows, names=NAMES[:1])
    with pytest.raises(InputError, match="max_pixels"):
        split_pairs(held.source, held.folder / "pairs")
