"""Real sound through the real Qwen2-Audio processor: bursts, four readers at once, the packed forward."""

from __future__ import annotations

import json
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packtrain.collate import PaddingFreeCollator
from packtrain.data import LazyShardedDataset
from packtrain.export import PackingProducer
from packtrain.sources.chat import ChatSource
from packtrain.sources.jsonl import open_source
from packtrain.store.chunks import ChunkReader
from packtrain.template import HFTemplate

WORLD = 4


@pytest.fixture(scope="module")
def template(data: Path) -> HFTemplate:
    return HFTemplate(str(data / "processors" / "qwen2_audio"))


def clips(data: Path) -> list[Path]:
    found = sorted(p for p in (data / "audio").rglob("*") if p.suffix in (".wav", ".flac", ".mp3", ".ogg"))
    return found[::5]


def rows_of(paths: list[Path]) -> str:
    return "".join(
        json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "audio", "audio": str(path)}, {"type": "text", "text": "What?"}],
                    },
                    {"role": "assistant", "content": f"It is called {path.name}."},
                ],
                "weight": 0.5 + number,
            }
        )
        + "\n"
        for number, path in enumerate(paths)
    )


def test_bursts_and_four_readers(data: Path, template: HFTemplate, tmp_path: Path) -> None:
    """The union of what four ranks read while it is produced is the input, once; all make the same steps."""
    paths, out = clips(data), tmp_path / "out"
    (tmp_path / "in").mkdir()
    producer = PackingProducer(
        tmp_path / "in",
        out,
        template,
        pack_length=1500,
        packs_per_chunk=2,
        window=12,
        flush_s=0.2,
        poll_s=0.02,
        chat={"allow_outside": True},
    )
    read: list[list[Any]] = [[] for _ in range(WORLD)]
    errors: list[BaseException] = []

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def reader(rank: int) -> None:
        dataset = LazyShardedDataset(out, rank, WORLD, timeout_s=60, poll_s=0.02)
        for pack in dataset:
            read[rank].append(pack)
            dataset.acknowledge()

    threads = [guarded(lambda: producer.run(watch=True))]
    threads += [guarded(lambda rank=rank: reader(rank)) for rank in range(WORLD)]
    third = -(-len(paths) // 3)
    for burst in range(3):
        unfinished = tmp_path / "in" / f".burst{burst}.jsonl"
        unfinished.write_text(rows_of(paths[burst * third : (burst + 1) * third]), encoding="utf-8")
        os.replace(unfinished, tmp_path / "in" / f"burst{burst}.jsonl")
        threads[0].join(0.4)
    (tmp_path / "in" / "END").touch()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert len({len(packs) for packs in read}) == 1
    packs = [pack for packs in read for pack in packs if not pack.is_filler]
    seen = sorted(one for pack in packs for one in pack["sample_ids"])
    assert seen == list(range(len(paths))) and producer.stats.packed == len(paths)
    assert all(len(pack["input_ids"]) <= 1500 for pack in packs)
    assert len(list(out.glob("*.completed"))) == producer.stats.chunks
    sources = [
        ChatSource(open_source(tmp_path / "in" / f"burst{burst}.jsonl"), allow_outside=True)
        for burst in range(3)
    ]
    samples = [source[row] for source in sources for row in range(len(source))]
    for pack in packs[::3]:
        for member in pack.members():
            want = template.encode(samples[member["sample_id"]])
            assert member.keys() - {"sample_id", "weight"} == want.keys()
            assert member["weight"] == 0.5 + member["sample_id"] % third
            for name, value in want.items():
                assert value.dtype == member[name].dtype and torch.equal(value, member[name]), name
    assert {"input_features", "feature_attention_mask", "weight"} <= packs[0].keys()


def tiny_qwen2_audio(template: HFTemplate) -> Any:
    """A small random network of the real class."""
    import transformers

    tokenizer = template.tokenizer
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 128,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer) + 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "pad_token_id": None,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.Qwen2AudioForConditionalGeneration(config).float().eval()


def test_packed_forward_equals_unpacked(data: Path, template: HFTemplate, tmp_path: Path) -> None:
    """Logits of each sample in a pack that was read from a chunk equal those of the sample alone."""
    chosen = [p for p in clips(data) if p.stat().st_size < 400_000][:5]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(rows_of(chosen), encoding="utf-8")
    PackingProducer(
        tmp_path / "in",
        tmp_path / "out",
        template,
        pack_length=4000,
        chat={"allow_outside": True},
        media="source",
    ).run()
    model = tiny_qwen2_audio(template)
    hidden = model.config.get_text_config().hidden_size
    model.set_output_embeddings(torch.nn.Linear(hidden, 64, bias=False))  # logits of few tokens are quick
    collate = PaddingFreeCollator(model)

    def logits(pack: Any) -> torch.Tensor:
        return model(**{name: value for name, value in collate([pack]).items() if name != "labels"}).logits[0]

    (pack,) = LazyShardedDataset(tmp_path / "out", encode=template.encode)
    with torch.no_grad():
        packed = logits(pack)
        start = 0
        for member in pack.members():
            alone = logits([member])
            assert torch.allclose(packed[start : start + len(alone)], alone, atol=2e-5)
            start += len(alone)
        other = dict(pack.members()[0])
        other["input_ids"] = other["input_ids"].clone()
        other["input_ids"][0] += 1
        changed = logits([other, *pack.members()[1:]])
    first = len(other["input_ids"])
    assert len(pack.members()) == 5 and start == len(packed)
    assert torch.equal(changed[first:], packed[first:]) and not torch.equal(changed[:first], packed[:first])


def test_uint8_and_tensor_hold_pictures_alike(data: Path, tmp_path: Path) -> None:
    """Pictures kept as bytes and a table come back bit for bit, at less than a third of the size."""
    pictures = sorted((data / "mllm_demo" / "mllm_demo_data").glob("*.jpg"))[:3]
    template = HFTemplate(str(data / "processors" / "qwen2_5_vl"))
    text = "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "image": str(path)}]},
                    {"role": "assistant", "content": "A picture."},
                ]
            }
        )
        + "\n"
        for path in pictures
    )
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(text, encoding="utf-8")
    held = {}
    for media in ("tensor", "uint8"):
        out = tmp_path / media
        PackingProducer(
            tmp_path / "in", out, template, pack_length=9000, chat={"allow_outside": True}, media=media
        ).run()
        held[media] = ChunkReader(out / "chunk_00000000.arrow")
    for one, two in zip(held["tensor"][0], held["uint8"][0], strict=True):
        assert one["pixel_values"].dtype == torch.float32 and torch.equal(
            one["pixel_values"], two["pixel_values"]
        )
    assert held["uint8"].manifest["fields"]["pixel_values"]["palette"]
    assert held["uint8"].manifest["bytes"] < held["tensor"].manifest["bytes"] / 3


def test_every_kind_of_raw_shard_in_one_stream(data: Path, tmp_path: Path) -> None:
    """Text in JSONL, pictures in a tar, clips of 0.5 s and 5 min in a folder: one stream, all kept."""
    import soundfile

    omni = HFTemplate(str(data / "processors" / "qwen2_5_omni"))
    raw = tmp_path / "in"
    (raw / "c").mkdir(parents=True)
    (raw / "a.jsonl").write_text(json.dumps({"prompt": "One?", "response": "Two."}) + "\n", encoding="utf-8")
    with tarfile.open(raw / "b.tar", "w") as tar:
        for number, path in enumerate(sorted((data / "mllm_demo" / "mllm_demo_data").glob("*.jpg"))[:2]):
            said = {
                "messages": [
                    {"role": "user", "content": "<image>What?"},
                    {"role": "assistant", "content": "It."},
                ]
            }
            (tmp_path / f"{number}.json").write_text(json.dumps(said), encoding="utf-8")
            tar.add(path, f"{number}.jpg")
            tar.add(tmp_path / f"{number}.json", f"{number}.json")
    wave = np.sin(np.arange(16_000 * 300) / 40).astype(np.float32) / 4
    for name, frames in (("long", len(wave)), ("short", 8_000)):
        soundfile.write(raw / "c" / f"{name}.wav", wave[:frames], 16_000)
        (raw / "c" / f"{name}.txt").write_text(name, encoding="utf-8")
    stats = PackingProducer(raw, tmp_path / "out", omni, pack_length=9000).run()
    assert (stats.shards, stats.read, stats.packed, stats.dropped) == (3, 5, 5, {})
    dataset = LazyShardedDataset(tmp_path / "out")
    members = {one["sample_id"]: one for pack in dataset for one in pack.members()}
    assert [dataset.where(one) for one in range(5)] == [
        *[("a.jsonl", 0), ("b.tar", 0), ("b.tar", 1)],
        *[("c", 0), ("c", 1)],
    ]
    assert {"pixel_values", "image_grid_thw"} <= members[1].keys() and "input_features" in members[3]
    assert len(members[3]["input_ids"]) > 7500 > 60 > len(members[4]["input_ids"])
    assert members[4]["feature_attention_mask"].sum() == 50
