"""What a change of reading or rendering costs: two source trees measure in turns, ratio in one run.

    python bench/reading.py OLD NEW [--data ../shared/data] [--pairs 9] [--rounds 2]

OLD and NEW are checkouts (`git worktree add ../old COMMIT`). Each side is one process at a time that measures
3,999 real chats (3,000 of GSM8K as messages, 999 of Alpaca) and 402 chats about 134 real pictures, with
Qwen2.5-VL's processor; CPU seconds of the process and its children, sides alternating within a pair. Printed:
the ratio of the medians, and the median of the ratios of pairs, for reading alone and for measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("text", "pictures")


def write_records(data: Path, folder: Path) -> None:
    """The records of both kinds as JSONL."""
    chats: list[dict[str, Any]] = []
    with open(data / "text_sft/gsm8k_train.jsonl", encoding="utf-8") as lines:
        for line in lines:
            held = json.loads(line)
            turns = ({"role": "user", "content": held["question"]},)
            turns += ({"role": "assistant", "content": held["answer"]},)
            chats.append({"messages": list(turns)})
            if len(chats) == 3000:
                break
    alpaca = json.loads((data / "text_sft/alpaca_en_demo.json").read_text(encoding="utf-8"))
    chats += alpaca[:999]
    pictures = []
    for line in (data / "images_real/manifest.jsonl").read_text(encoding="utf-8").splitlines():
        held = json.loads(line)
        path = str((data / "images_real" / held["file"]).resolve())
        for turn in range(3):
            asked = {
                "from": "human",
                "value": f"<image>\nWhat is in picture {turn}? {chats[turn]['messages'][0]['content']}",
            }
            said = {
                "from": "gpt",
                "value": f"It shows {held['path']}. {chats[turn]['messages'][1]['content']}",
            }
            pictures.append({"id": len(pictures), "image": path, "conversations": [asked, said]})
    for kind, records in zip(KINDS, (chats, pictures), strict=True):
        with open(folder / f"{kind}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def work(folder: str, processor: str) -> None:
    """Answer each line of standard input (`KIND`) with the CPU seconds of reading and of measuring."""
    from packtrain.measuring.run import measure_range
    from packtrain.sources import open_source
    from packtrain.sources.chat import ChatSource
    from packtrain.template import HFTemplate, load_processor

    template = HFTemplate(load_processor(processor))
    chats = {kind: ChatSource(open_source(f"{folder}/{kind}.jsonl"), media_root="/") for kind in KINDS}
    for source in chats.values():
        measure_range((source, template), (0, len(source)))
    print("ready", flush=True)
    for line in sys.stdin:
        source = chats[line.strip()]
        times = max(1, 2000 // len(source))
        begin = _cpu()
        for _ in range(times):
            for i in range(len(source)):
                source[i]
        read = _cpu()
        for _ in range(times):
            measure_range((source, template), (0, len(source)))
        print(f"{read - begin} {_cpu() - read}", flush=True)


def _cpu() -> float:
    own = os.times()
    return time.process_time() + own.children_user + own.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=2, help="each with fresh processes")
    arguments = parser.parse_args()
    data = Path(arguments.data).resolve()
    processor = str(data / "processors/qwen2_5_vl")
    taken: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_records(data, Path(folder))
        for _ in range(arguments.rounds):
            sides = {name: _start(getattr(arguments, name), folder, processor) for name in ("old", "new")}
            for pair in range(arguments.pairs):
                for kind in KINDS:
                    for name in ("old", "new") if pair % 2 else ("new", "old"):
                        taken.setdefault((kind, name), []).append(_asked(sides[name], kind))
            for side in sides.values():
                side.communicate()
    for kind in KINDS:
        for column, what in enumerate(("reading", "measuring")):
            old, new = ([one[column] for one in taken[kind, name]] for name in ("old", "new"))
            pairs = statistics.median(b / a for a, b in zip(old, new, strict=True))
            medians = statistics.median(new) / statistics.median(old)
            print(
                f"{kind:9}{what:10} old {statistics.median(old):.3f} s  new {statistics.median(new):.3f} s  "
                f"ratio of medians {medians:.3f}  of lowest {min(new) / min(old):.3f}  "
                f"median of pairs {pairs:.3f}"
            )


def _start(tree: str, folder: str, processor: str) -> subprocess.Popen[str]:
    beside = {
        "PYTHONPATH": str(Path(tree).resolve() / "src"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    side = subprocess.Popen(
        [sys.executable, __file__, "--work", folder, processor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **beside},
        text=True,
    )
    assert side.stdout is not None and side.stdout.readline() == "ready\n"
    return side


def _asked(side: subprocess.Popen[str], kind: str) -> list[float]:
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(f"{kind}\n")
    side.stdin.flush()
    return [float(value) for value in side.stdout.readline().split()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
