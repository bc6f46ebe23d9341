"""How much faster lengths are than encoding: ratios from one run, and an exhaustive comparison.

    python bench/measure.py [--data ../shared/data] [--repeats 3]     ratios (quiet machine, one core)
    python bench/measure.py --exhaustive                              every image, sound and video against
                                                                      every processor of the data folder

Images: header and batched arithmetic against opening the image and running the processor's default back end.
Audio: header and arithmetic against decoding, resampling and the feature extractor. Text: rendering and
counting in batches of 256 against rendering and tokenising one by one. Medians; media files are read once
before, so that they are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from packtrain.errors import SampleError
from packtrain.media.audio import open_audio
from packtrain.media.image import open_image, read_header
from packtrain.template import HFTemplate, load_processor
from packtrain.template.running import mono, resample

FLOORS = {"images": 300.0, "audio": 100.0, "text words": 4.0, "text tiktoken": 4.0, "text gigatoken": 12.0}
TEXTS = ("alpaca_en_demo.json", "alpaca_zh_demo.json", "gpteacher_codegen-instruct.json")


def ask(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    answer = [{"type": "text", "text": "An answer."}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def part(kind: str, path: Path) -> dict[str, Any]:
    return {"type": kind, kind: str(path)}


def found(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def median(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def images(data: Path, repeats: int) -> dict[str, float]:
    paths = found(data / "images_real", ".jpg", ".png")
    for path in paths:
        path.read_bytes()
    out = {}
    for name in ("qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl3"):
        template = HFTemplate(load_processor(data / "processors" / name))
        media = template.media
        assert media is not None
        parts = {i: [part("image", path)] for i, path in enumerate(paths)}

        def processor(template: HFTemplate = template) -> None:
            for path in paths[::6]:
                template.processor.image_processor(images=[open_image(str(path))], return_tensors="pt")

        ours = median(lambda media=media, parts=parts: media.expand(parts), 3 * repeats) / len(paths)
        theirs = median(processor, 1) / len(paths[::6])
        out[f"images {name}"] = theirs / ours
        print(f"  {name}: {ours * 1e6:.1f} us an image, processor {theirs * 1e3:.1f} ms")
    return out


def audio(data: Path, repeats: int) -> dict[str, float]:
    paths = found(data / "audio", ".wav", ".flac", ".mp3", ".ogg")
    template = HFTemplate(load_processor(data / "processors" / "qwen2_audio"))
    extractor = template.processor.feature_extractor
    parts = {i: [part("audio", path)] for i, path in enumerate(paths)}

    def processor() -> None:
        for path in paths[::8]:
            samples, rate = open_audio(str(path))
            sound = resample(mono(samples), rate, extractor.sampling_rate)
            extractor(sound, sampling_rate=extractor.sampling_rate, return_attention_mask=True)

    assert template.media is not None
    media = template.media
    processor()
    ours = median(lambda: media.expand(parts), repeats) / len(paths)
    theirs = median(processor, repeats) / len(paths[::8])
    print(f"  {ours * 1e6:.1f} us a clip, processor {theirs * 1e3:.1f} ms")
    return {"audio": theirs / ours}


def conversations(data: Path) -> list[dict[str, Any]]:
    out = []
    for name in TEXTS:
        for row in json.loads((data / "text_sft" / name).read_text()):
            asked, said = f"{row['instruction']}\n{row['input']}", row.get("output") or row.get("response")
            out.append(ask(asked))
            out[-1]["messages"][1]["content"][0]["text"] = said
    for line in (data / "text_sft" / "gsm8k_train.jsonl").read_text().splitlines():
        row = json.loads(line)
        out.append(ask(row["question"]))
        out[-1]["messages"][1]["content"][0]["text"] = row["answer"]
    return out


def text(data: Path, repeats: int) -> dict[str, float]:
    tokenizer = load_processor(data / "processors" / "qwen2_5_vl").tokenizer
    tokenizer.chat_template = load_processor(data / "processors" / "qwen2_5_vl").chat_template
    samples = conversations(data)
    flat = [
        [{"role": m["role"], "content": m["content"][0]["text"]} for m in sample["messages"]]
        for sample in samples
    ]

    def one_by_one() -> list[int]:
        texts = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in flat)
        return [len(tokenizer(rendered, add_special_tokens=False)["input_ids"]) for rendered in texts]

    expected = one_by_one()
    theirs = median(one_by_one, repeats)
    out = {}
    for name in ("hf", "words", "tiktoken", "gigatoken"):
        try:
            template = HFTemplate(tokenizer, text_counter=name)
            template.measure_batch(samples[:256])
        except Exception as error:
            print(f"  {name}: {error}")
            continue

        def batches(template: HFTemplate = template) -> list[Any]:
            return [
                m for i in range(0, len(samples), 256) for m in template.measure_batch(samples[i : i + 256])
            ]

        lengths = batches()
        if [int(length) for length in lengths] != expected:
            raise SystemExit(f"{name} counts other lengths than the tokenizer")
        ours = median(batches, repeats)
        out[f"text {name}"] = theirs / ours
        each = (ours / len(samples) * 1e6, theirs / len(samples) * 1e6)
        print(f"  {name}: {each[0]:.1f} us a sample, one by one {each[1]:.1f} us")
    return out


# ------------------------------------------------------------------------------------- exhaustive
def exhaustive(data: Path) -> int:
    """Every medium against every processor: measured, then encoded for real."""
    files = {
        "image": found(data / "images_real", ".jpg", ".png") + found(data / "mllm_demo", ".jpg"),
        "video": found(data / "mllm_demo", ".mp4", ".avi"),
        "audio": found(data / "audio", ".wav", ".flac", ".mp3", ".ogg"),
    }
    wrong = 0
    for folder in sorted((data / "processors").iterdir()):
        template = HFTemplate(load_processor(folder))
        for kind in template.family.modalities:
            samples = [ask("see", part(kind, path), "What?") for path in files[kind]]
            bad = refused = 0
            for path, sample, measured in zip(
                files[kind], samples, template.measure_batch(samples), strict=True
            ):
                if isinstance(measured, SampleError):
                    refused += 1
                    print(f"  {folder.name} {path.name}: {measured.reason}")
                    continue
                try:
                    same = len(template.encode(sample)["input_ids"]) == measured
                except Exception as error:
                    same = False
                    print(f"  {folder.name} {path.name}: {type(error).__name__}: {str(error)[:200]}")
                bad += not same
            wrong += bad
            print(
                f"{folder.name} {kind}: {len(samples)} measured and encoded, {bad} differ, {refused} refused"
            )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--only", choices=("images", "audio", "text"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    read_header(str(found(options.data / "images_real", ".jpg")[0]))
    if options.exhaustive:
        wrong = exhaustive(options.data)
        print(f"{wrong} differences")
        return int(wrong > 0)
    ratios: dict[str, float] = {}
    for name, part_of in (("images", images), ("audio", audio), ("text", text)):
        if options.only in (None, name):
            print(name)
            ratios.update(part_of(options.data, options.repeats))
    low = 0
    for name, ratio in ratios.items():
        floor = FLOORS.get(name, FLOORS.get(name.split()[0], 0.0))
        low += ratio < floor
        print(f"{name:28} {ratio:9.1f}x   floor {floor:g}")
    return int(low > 0)


if __name__ == "__main__":
    sys.exit(main())
