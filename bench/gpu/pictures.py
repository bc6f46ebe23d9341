"""How many pictures a loader worker encodes, and how many workers keep a card fed.

    python bench/gpu/pictures.py PROCESSOR PICTURES [--workers 1 2 4 8 16] [--times 8]

Each file under PICTURES is a sample with a question and an answer, encoded by `HFTemplate` with a real
processor (decoding, resizing, patches), packed to 8,192 and collated in loader workers, as `packtrain train`
does. The first batches, while workers start, do not count. One line of JSON a number of workers: packs,
pictures and megapixels a second, the same of each worker, and CPU milliseconds of one megapixel.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, PackLoader, PackSampler
from packtrain.template import HFTemplate, load_processor
from packtrain.testing.tiny import tiny_model
from packtrain.workers import worker_context

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
QUESTION, ANSWER = "What is to be seen in this picture?", "Some words about what is to be seen there. " * 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processor")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--times", type=int, default=8, help="how often each picture comes")
    asked = parser.parse_args()
    from PIL import Image

    files = sorted(path for path in asked.pictures.rglob("*") if path.suffix.lower() in ENDINGS)
    sizes = [Image.open(path).size for path in files]
    processor = load_processor(asked.processor)
    template = HFTemplate(processor)
    model = tiny_model("tiny:qwen2_5_vl", processor)
    asks = {"type": "text", "text": QUESTION}
    answer = {"role": "assistant", "content": ANSWER}
    one = [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": str(path)}, asks]}, answer]}
        for path in files
    ]
    begun = time.process_time()
    lengths = [len(template.encode(sample)["input_ids"]) for sample in one]
    cpu = time.process_time() - begun
    pixels = [wide * high / 1e6 for wide, high in sizes]
    samples = one * asked.times
    planned = pt.plan(lengths * asked.times, max(8192, *lengths))
    data = PackedDataset(planned, samples, template.encode)
    told = {
        "pictures": len(files),
        "megapixels_each": round(sum(pixels) / len(files), 2),
        "packs": len(planned),
        "pictures_a_pack": round(len(samples) / len(planned), 1),
        "cpu_ms_a_megapixel": round(cpu * 1000 / sum(pixels), 1),
    }
    print(json.dumps(told), flush=True)
    for workers in asked.workers:
        row = rate(data, model, workers, pixels * asked.times)
        print(json.dumps({"workers": workers, **row}), flush=True)


def rate(data: Any, model: Any, workers: int, pixels: list[float]) -> dict[str, Any]:
    """Packs, pictures and megapixels a second behind the first two packs of every worker."""
    sampler = PackSampler(data.plan.align(1), rank=0)
    loader = PackLoader(
        data, sampler, collate_fn=PaddingFreeCollator(model), num_workers=workers,
        multiprocessing_context=worker_context(),
    )  # fmt: skip
    packs = pictures = seen = 0.0
    begun = time.perf_counter()
    for number, batch in enumerate(loader):
        if number == 2 * workers:
            begun = time.perf_counter()
        if number >= 2 * workers:
            packs += 1
            pictures += len(batch.sample_ids)
            seen += sum(pixels[n] for n in batch.sample_ids)
    took = time.perf_counter() - begun
    return {
        "packs_s": round(packs / took, 2), "pictures_s": round(pictures / took, 1),
        "megapixels_s": round(seen / took, 1), "pictures_s_worker": round(pictures / took / workers, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
