"""Packs encoded ahead are the packs: same values, same order, resumable, never those of another plan."""

from __future__ import annotations

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import packtrain as pt
from packtrain.data import EncodeCache, PackedDataset, PackLoader, PackSampler
from packtrain.errors import ChecksumError, DriftError, ForeignArtefactError, InputError, SampleError

pytest.importorskip("pyarrow", reason="chunks need pyarrow")

LENGTHS = np.arange(60) % 9 + 1
KEY = {"template": "test"}


class Counted:
    """Encodes ids with weights and a picture; counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, i: int) -> dict[str, Any]:
        self.calls += 1
        if i == 999:
            raise SampleError("missing_media", "gone")
        generator = torch.Generator().manual_seed(i)
        length = int(LENGTHS[i])
        return {
            "input_ids": torch.full((length,), i),
            "labels": torch.randint(0, 9, (length,), generator=generator),
            "position_ids": torch.arange(length).expand(3, -1).contiguous(),
            "loss_scale": torch.rand(length, generator=generator),
            "pixel_values": torch.rand(2 * (1 + i % 2), 5, generator=generator),
            "channel": "chat",
        }


def made(tmp_path: Path, **options: Any) -> tuple[pt.PackPlan, PackedDataset, EncodeCache]:
    plan = pt.plan(LENGTHS, pack_length=20)
    data = PackedDataset(plan, range(60), Counted(), lengths=LENGTHS)
    return plan, data, EncodeCache(tmp_path / "c", plan, key=KEY, packs_per_chunk=4, **options)


def equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    for one, two in zip(a, b, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                other = torch.as_tensor(two[name])
                assert other.dtype == value.dtype and torch.equal(other, value), name
            else:
                assert two[name] == value, name
    return True


@pytest.mark.parametrize("media", ["uint8", "tensor"])
def test_a_filled_cache_gives_every_pack_and_encodes_nothing(tmp_path: Path, media: str) -> None:
    plan, plain, cache = made(tmp_path, media=media)
    assert cache.fill(plain) == cache.chunks == -(-len(plan) // 4)
    assert cache.fill(plain) == 0
    encode = Counted()
    data = PackedDataset(plan.align(4), range(60), encode, lengths=LENGTHS, cache=cache)
    for position in range(len(data)):
        assert equal(data[position], plain[data.pack_id(position)])
    assert encode.calls == 0
    assert equal(pickle.loads(pickle.dumps(data))[3], data[3])


def test_the_order_of_a_loader_is_the_same_with_half_a_cache(tmp_path: Path) -> None:
    plan, plain, cache = made(tmp_path)
    cache.fill(plain, share=(1, 2))
    assert [cache.has(chunk) for chunk in range(cache.chunks)] == [bool(k % 2) for k in range(cache.chunks)]
    assert cache.get(0) is None and cache.get(4) is not None
    view = plan.align(2)

    def order(held: Any) -> list[list[int]]:
        data = PackedDataset(view, range(60), Counted(), cache=held)
        return [
            [s["sample_id"] for s in pack]
            for batch in PackLoader(data, PackSampler(view, 1))
            for pack in batch
        ]

    assert order(cache) == order(None)


def test_a_stop_at_a_failing_sample_keeps_what_was_made_and_goes_on(tmp_path: Path) -> None:
    plan, plain, cache = made(tmp_path)
    late = int(plan[len(plan) - 1][0])
    broken = PackedDataset(plan, [999 if i == late else i for i in range(60)], Counted())
    with pytest.raises(SampleError, match="gone"):
        cache.fill(broken)
    there = [chunk for chunk in range(cache.chunks) if cache.has(chunk)]
    assert 0 < len(there) < cache.chunks
    assert not list(cache.folder.glob("*.tmp*"))
    again = EncodeCache(cache.folder, plan, key=KEY)
    assert again.packs_per_chunk == 4
    assert again.fill(plain) == cache.chunks - len(there)
    assert all(equal(again.get(pack) or [], plain[pack]) for pack in range(len(plan)))


def test_another_plan_template_or_sample_is_refused(tmp_path: Path) -> None:
    plan, plain, cache = made(tmp_path)
    cache.fill(plain)
    with pytest.raises(ForeignArtefactError, match="another template"):
        EncodeCache(cache.folder, plan, key={"template": "other"})
    with pytest.raises(ForeignArtefactError, match="another plan"):
        EncodeCache(cache.folder, pt.plan(LENGTHS, pack_length=21), key=KEY)
    data = PackedDataset(plan, range(60), Counted(), lengths=LENGTHS + 1, cache=cache)
    with pytest.raises(DriftError, match="measured with"):
        data[0]
    with pytest.raises(InputError, match="not over the raw plan"):
        cache.fill(PackedDataset(plan.align(2), range(60), Counted()))
    with pytest.raises(InputError, match="packs_per_chunk"):
        EncodeCache(tmp_path / "x", plan, key=KEY, packs_per_chunk=0)
    with pytest.raises(InputError, match="key is a method"):
        EncodeCache(tmp_path / "x", plan, key=tmp_path.joinpath)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="replan"):
        PackedDataset(plan, range(60), cache=cache, replan=object())  # type: ignore[arg-type]


def test_training_reads_the_cache_and_gives_the_same_losses(tmp_path: Path, caplog: Any) -> None:
    from packtrain.errors import ConfigError
    from packtrain.testing.tiny import tiny_model
    from packtrain.train.config import load_config
    from packtrain.train.sft import train

    samples = [
        {"input_ids": torch.arange(1, n + 1), "labels": torch.arange(1, n + 1), "sample_id": i}
        for i, n in enumerate(LENGTHS.tolist())
    ]

    class Rows:
        config = {"name": "rows"}  # noqa: RUF012 - as a template has it
        calls = 0

        def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
            Rows.calls += 1
            return dict(sample)

    def run(name: str, **training: Any) -> Any:
        options = {
            "output_dir": str(tmp_path / name),
            "logging_steps": 1,
            "save_strategy": "no",
            "proof": False,
        }
        config = load_config({"training": {**options, **training}})
        plan = pt.plan(pt.Lengths(LENGTHS), pack_length=40)
        return train(
            config, plan, samples, Rows(), lengths=pt.Lengths(LENGTHS), model=tiny_model("tiny:qwen3")
        )

    with caplog.at_level(logging.INFO):
        cached = run("a", encode_cache=str(tmp_path / "c"), num_train_epochs=2)
    assert Rows.calls == 60 and "encode cache" in caplog.text
    assert cached.losses == run("b", num_train_epochs=2).losses
    Rows.calls = 0
    run("d", encode_cache=str(tmp_path / "c"))
    assert Rows.calls == 0
    with pytest.raises(ConfigError, match=r"training\.encode_cache and training\.replan"):
        run("e", encode_cache=str(tmp_path / "c"), replan="epoch")


def test_a_run_with_a_real_template_reads_its_cache_and_trains_the_same(
    text_run: Any, tmp_path: Path
) -> None:
    from packtrain.pipeline.run import run
    from packtrain.train.config import load_config

    curves = []
    for name, cache in (("plain", {}), ("cached", {"encode_cache": str(tmp_path / "cache")})):
        values = text_run(output_dir=tmp_path / name, max_steps=3)
        values["data"] = cache
        (tmp_path / "run.yaml").write_text(json.dumps(values))
        curves.append(run(load_config(tmp_path / "run.yaml"), compare=False, html=False).loss_curve)
    assert curves[0] == curves[1] and list((tmp_path / "cache").iterdir())


def test_a_changed_chunk_and_other_media_are_never_trained(tmp_path: Path) -> None:
    """A flipped bit behind the same size and time; a picture that was replaced since."""
    plan, data, _ = made(tmp_path)
    cache = EncodeCache(tmp_path / "m", plan, key=KEY, packs_per_chunk=4, of_media="one")
    cache.fill(data)
    assert equal(EncodeCache(tmp_path / "m", plan, key=KEY, of_media="one").get(0) or [], data[0])
    EncodeCache(tmp_path / "m", plan, key=KEY)  # of a caller who does not know the media
    with pytest.raises(ForeignArtefactError, match="of another state of the media"):
        EncodeCache(tmp_path / "m", plan, key=KEY, of_media="two")
    path = cache.path(1)
    held, times = bytearray(path.read_bytes()), path.stat()
    held[len(held) // 2] ^= 1
    path.write_bytes(held)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = EncodeCache(tmp_path / "m", plan, key=KEY)
    assert changed.get(0) is not None
    with pytest.raises(ChecksumError, match=path.name):
        changed.get(4)
