"""Chunks: bit-exact round trips of every kind of value, three ways to keep media, torn and edited files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc
import pytest
import torch
from PIL import Image

from packtrain.errors import ChecksumError, DriftError, FormatError, InputError, UnknownNameError
from packtrain.store._folders import sealed
from packtrain.store.chunks import ChunkReader, ChunkWriter, manifest_of
from packtrain.testing import crash_points

Sample = dict[str, Any]


def text(sample_id: int | str | None, ids: list[int], **fields: Any) -> Sample:
    tensor = torch.tensor(ids)
    sample = {"input_ids": tensor, "labels": tensor.clone(), "position_ids": torch.arange(len(ids)), **fields}
    sample["labels"][0] = -100
    return sample if sample_id is None else {"sample_id": sample_id, **sample}


def write(path: Path, packs: list[list[Sample]], **options: Any) -> ChunkReader:
    with ChunkWriter(path, **{"media": "tensor", **options}) as writer:
        for pack in packs:
            writer.add(pack)
    return ChunkReader(path)


def assert_same(found: Any, want: Any) -> None:
    assert type(found) is type(want)
    if isinstance(want, torch.Tensor):
        assert found.dtype == want.dtype and found.shape == want.shape
        assert (
            found.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))
            if want.dim()
            else (torch.equal(found, want))
        )
    elif isinstance(want, np.ndarray):
        assert found.dtype == want.dtype and found.shape == want.shape and found.tobytes() == want.tobytes()
    else:
        assert found == want


def test_facts_of_a_row(tmp_path: Path) -> None:
    """[1,2,3] + [4,5] -> positions [0,1,2,0,1], lengths [3,2]."""
    reader = write(tmp_path / "c.arrow", [[text(7, [1, 2, 3]), text(9, [4, 5])]])
    row = reader.row(0)
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5] and row["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert row["lengths"].tolist() == [3, 2] and row["cu_seq_lens"].tolist() == [0, 3, 5]
    assert row["labels"].tolist() == [-100, 2, 3, -100, 5] and row["sample_ids"] == [7, 9]
    assert row["cu_seq_lens"].dtype == np.int32


def test_every_kind_of_value_comes_back_bit_for_bit(tmp_path: Path) -> None:
    many: Sample = {
        "half": torch.randn(2, 3).half(),
        "brain": torch.randn(4, 2).bfloat16(),
        "double": np.array([1e300, -0.0, np.nan]),
        "flags": torch.tensor([True, False]),
        "bytes": np.arange(256, dtype=np.uint8).reshape(16, 16),
        "wide": np.array([0, 2**64 - 1], dtype=np.uint64),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 128),
        "numbers": [1.5, 2.5],
        "channel": "chat",
        "weight": 0.25,
        "extra": {"a": [None, True, "ü"]},
        "loss_scale": torch.tensor([0.0, 1.0, 0.5]),
    }
    packs = [[text(0, [1, 2, 3], **many), text(None, [5])], [text(2, [70000, 3])]]
    reader = write(tmp_path / "c.arrow", packs)
    for number, pack in enumerate(packs):
        for found, want in zip(reader[number], pack, strict=True):
            assert set(found) == set(want)
            for name in want:
                assert_same(found[name], want[name])
    assert reader.sample_ids(0) == [0, None] and reader.lengths(0).tolist() == [3, 1]
    assert reader.manifest["samples"] == 2 and reader.manifest["segments"] == 3
    reader.verify()


@pytest.mark.parametrize(
    ("largest", "stored"), [(255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "uint32")]
)
def test_ids_take_the_smallest_exact_type(tmp_path: Path, largest: int, stored: str) -> None:
    reader = write(tmp_path / "c.arrow", [[text(0, [0, largest])], [text(1, [3])]])
    assert reader.manifest["fields"]["input_ids"]["stored"] == stored
    assert (
        reader[0][0]["input_ids"].tolist() == [0, largest] and reader[0][0]["input_ids"].dtype is torch.int64
    )
    with pyarrow.ipc.open_file(tmp_path / "c.arrow") as file:
        assert file.num_record_batches == 2
        assert str(file.schema.field("input_ids").type) == f"large_list<item: {stored} not null>"


def test_tensors_are_views_and_writing_to_them_stays_here(tmp_path: Path) -> None:
    features = torch.randn(1, 4, 8)
    reader = write(tmp_path / "c.arrow", [[text(0, [1, 2], input_features=features)]])
    before = (tmp_path / "c.arrow").read_bytes()
    held = reader[0][0]["input_features"]
    held.zero_()
    assert (tmp_path / "c.arrow").read_bytes() == before
    assert torch.equal(ChunkReader(tmp_path / "c.arrow")[0][0]["input_features"], features)


def test_three_row_positions_and_media_join(tmp_path: Path) -> None:
    one = text(0, [1, 2, 3], pixel_values=torch.randn(4, 6), image_grid_thw=torch.tensor([[1, 2, 2]]))
    two = text("x", [4, 5])
    one["position_ids"] = torch.arange(9).reshape(3, 3)
    two["position_ids"] = torch.arange(6).reshape(3, 2)
    row = write(tmp_path / "c.arrow", [[one, two]]).row(0)
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 2, 3], [6, 7, 8, 4, 5]]
    assert torch.equal(row["pixel_values"], one["pixel_values"]) and row["sample_ids"] == ["0", "x"]


@pytest.mark.parametrize("shape", [(5, 3 * 2 * 4), (2, 3, 4, 4), (2, 2, 3, 4, 4)])
def test_normalised_pictures_as_bytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, shape, generator=generator).float()
    axis = 1 if len(shape) != 5 else 2
    planes = raw.reshape(*shape[:axis], 3, -1)
    mean, std = torch.tensor([0.48, 0.45, 0.40]), torch.tensor([0.26, 0.27, 0.28])
    pixels = ((planes / 255 - mean[:, None]) / std[:, None]).reshape(shape)
    big = write(tmp_path / "t.arrow", [[text(0, [1], pixel_values=pixels)]] * 8)
    small = write(tmp_path / "u.arrow", [[text(0, [1], pixel_values=pixels)]] * 8, media="uint8")
    assert_same(small[3][0]["pixel_values"], pixels)
    assert small.manifest["fields"]["pixel_values"]["palette"]
    assert big.manifest["fields"]["pixel_values"]["stored"] == "float32"


def test_a_tensor_without_palette_stays_whole(tmp_path: Path) -> None:
    """One picture that is not made of bytes decides for its field, also for those before it."""
    flat, free = torch.zeros(2, 3, 2, 2), torch.randn(20, 3, 8, 8)
    packs = [[text(0, [1], pixel_values=flat)], [text(1, [1], pixel_values=free)]]
    reader = write(tmp_path / "c.arrow", packs, media="uint8")
    assert not reader.manifest["fields"]["pixel_values"]["palette"]
    assert_same(reader[0][0]["pixel_values"], flat)
    assert_same(reader[1][0]["pixel_values"], free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_padding_of_sound_features_is_not_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    """A clip of 70 of 3,000 frames, one that fills them, an empty one: bit for bit, at their own size."""
    short, full = torch.full((2, 8, 3000), -0.75), torch.randn(1, 8, 3000) * 100
    short[:, :, :70] = torch.randn(2, 8, 70) * 100
    silent = torch.full((1, 8, 3000), -0.0)
    tensors = [tensor.to(dtype) for tensor in (short, full, silent)]
    packs = [[text(n, [1], input_features=tensor) for n, tensor in enumerate(tensors)], [text(3, [2])]]
    reader = write(tmp_path / "c.arrow", packs)
    for sample, tensor in zip(reader[0], tensors, strict=True):
        assert_same(sample["input_features"], tensor)
    assert reader.manifest["fields"]["input_features"]["tail"]
    assert reader.manifest["bytes"] < 1.2 * full.numel() * torch.empty(0, dtype=dtype).element_size() + 16_000
    reader.row(0)["input_features"].zero_()
    assert_same(ChunkReader(tmp_path / "c.arrow")[0][0]["input_features"], tensors[0])


class Encoder:
    """Counts pixels: input_ids [width, height], pixel_values from the picture."""

    def encode(self, record: Sample) -> Sample:
        import io

        ref = record["messages"][0]["content"][0]["image"]
        image = Image.open(io.BytesIO(ref) if isinstance(ref, bytes) else ref)
        sample = text(None, [image.width, image.height])
        return {**sample, "pixel_values": torch.from_numpy(np.array(image)).float()}


def test_media_as_their_source_bytes(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "a.png")
    record = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")}]},
            {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        ]
    }
    encoder = Encoder()
    sample = {"sample_id": 3, **encoder.encode(record)}
    with (
        pytest.raises(InputError, match="pixel_values"),
        ChunkWriter(tmp_path / "c.arrow", media="source") as writer,
    ):
        writer.add([sample])
    assert not (tmp_path / "c.arrow").exists()
    with ChunkWriter(tmp_path / "c.arrow", media="source") as writer:
        writer.add([sample, text(4, [9])], [record, {"messages": []}])
    (tmp_path / "a.png").unlink()
    assert "pixel_values" not in writer.manifest["fields"]
    with pytest.raises(InputError, match="encode"):
        ChunkReader(tmp_path / "c.arrow")[0]
    found = ChunkReader(tmp_path / "c.arrow", encode=encoder.encode)[0]
    assert set(found[0]) == set(sample)
    for name in sample:
        assert_same(found[0][name], sample[name])

    def other(record: Sample) -> Sample:
        return {**encoder.encode(record), "input_ids": torch.tensor([1, 1])}

    with pytest.raises(DriftError, match="other token ids"):
        ChunkReader(tmp_path / "c.arrow", encode=other)[0]


def test_torn_edited_and_mixed_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.arrow"
    write(path, [[text(0, list(range(100)))]])
    whole, told = path.read_bytes(), manifest_of(path).read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(FormatError, match="its manifest says"):
        ChunkReader(path)
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(ChecksumError):
        ChunkReader(path).verify()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 4]) + whole[-19:])
    with pytest.raises(ChecksumError):
        ChunkReader(path)
    path.write_bytes(whole)
    manifest_of(path).write_bytes(told.replace(b'"packs": 1', b'"packs": 2'))
    with pytest.raises(ChecksumError, match="edited"):
        ChunkReader(path)
    other = tmp_path / "d.arrow"
    write(other, [[text(0, [1])], [text(1, [2])]])
    values = json.loads(manifest_of(other).read_bytes()) | {"packs": 3}
    values = sealed({key: value for key, value in values.items() if key != "seal"})
    manifest_of(other).write_text(json.dumps(values))
    with pytest.raises(FormatError, match=r"d\.arrow holds 2 packs, its manifest says 3"):
        ChunkReader(other)
    manifest_of(path).unlink()
    with pytest.raises(FormatError, match="missing"):
        ChunkReader(path)
    manifest_of(path).write_bytes(told)
    path.unlink()
    with pytest.raises(FormatError, match=r"c\.arrow is missing"):
        ChunkReader(path)


def test_what_a_chunk_refuses(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError):
        ChunkWriter(tmp_path / "c.arrow", media="uint9")
    writer = ChunkWriter(tmp_path / "c.arrow", media="tensor")
    with pytest.raises(InputError, match="without samples"):
        writer.add([])
    with pytest.raises(InputError, match="no input_ids"):
        writer.add([{"labels": torch.tensor([1])}])
    with pytest.raises(InputError, match="pack 0: odd is a object"):
        writer.add([text(0, [1], odd=object())])
    writer = ChunkWriter(tmp_path / "c.arrow", media="tensor")
    writer.add([text(0, [1], feature=torch.zeros(2))])
    with pytest.raises(InputError, match="encode all samples of a chunk alike"):
        writer.add([text(1, [1], feature="word")])
    with pytest.raises(InputError, match="no pack"):
        ChunkWriter(tmp_path / "d.arrow", media="tensor").close()
    assert not list(tmp_path.glob("*.arrow"))


def test_a_reader_travels_and_the_spool_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.store.chunks.SPOOL", 100)
    packs = [[text(10 * p + s, list(range(p + s + 1))) for s in range(3)] for p in range(9)]
    spilled = write(tmp_path / "a.arrow", packs)
    monkeypatch.undo()
    write(tmp_path / "b.arrow", packs)
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()
    again = pickle.loads(pickle.dumps(spilled))
    assert [[s["sample_id"] for s in pack] for pack in again] == [[s["sample_id"] for s in p] for p in packs]


def test_crash_after_every_step(tmp_path: Path) -> None:
    def verb(folder: Path) -> None:
        write(folder / "c.arrow", [[text(0, [1, 2])], [text(1, [3])]])

    def check(folder: Path) -> None:
        if manifest_of(folder / "c.arrow").exists():
            ChunkReader(folder / "c.arrow").verify()

    assert crash_points(verb, tmp_path, check=check) >= 8
