"""From the start of a process to its first optimizer step: packed by us, packed by the host, not packed.

`python -m bench.hosts DATA` runs it; `python -m bench.hosts_start DATA [ROUNDS [HOST …]]` this part alone.
Every variant is a process of its own (imports, tokenising, measuring, planning, first step; `host_child`), by
turns, on the same texts and the same tiny random model on CPU. A step is one pack of 2,048 tokens; unpacked,
eight rows, which is about as many tokens.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from .host_child import start, variants

__all__ = ["first_steps", "report"]

#: Rows or packs that the trainer holds; (wall seconds, processor seconds) to the first step of each round.
Found = dict[str, tuple[int | None, list[tuple[float, float]]]]


def first_steps(data: Path, rows: int = 2000, rounds: int = 3, hosts: tuple[str, ...] = ()) -> Found:
    """What each variant holds, and how long it takes to its first step."""
    found: Found = {}
    chosen = {name: host for name, host in variants().items() if not hosts or host in hosts}
    with tempfile.TemporaryDirectory() as folder:
        _prepare(data, Path(folder), rows)
        for turn in range(rounds):
            for number, (name, host) in enumerate(chosen.items()):
                held, wall, cpu = start(host, name, Path(folder), Path(folder) / f"{turn}-{number}")
                found.setdefault(name, (held, []))[1].append((wall, cpu))
    return found


def report(found: Found) -> None:
    """The shortest of the rounds, since load only adds; ratios to the first variant of the same trainer."""
    own: dict[str, tuple[float, float]] = {}
    for name, (held, times) in found.items():
        best = min(wall for wall, _ in times), min(cpu for _, cpu in times)
        first = own.setdefault(name.split(",")[0], best)
        rounds = ", ".join(f"{wall:.1f}" for wall, _ in times)
        print(
            f"{name}: {held or 0:,} rows of the trainer, first step after {best[0]:.1f} s (rounds: {rounds})",
            end="",
        )
        print(f", {best[1]:.1f} s of processor; {best[0] / first[0]:.2f}, {best[1] / first[1]:.2f}")


def _prepare(data: Path, folder: Path, rows: int) -> None:
    """Texts as chats, and a tiny model with a tokenizer trained on them."""
    from packtrain.template import load_processor
    from packtrain.testing.demo.processor import save_processor, train_tokenizer
    from packtrain.testing.tiny import tiny_model

    chats = []
    with (data / "text_sft" / "gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(rows), strict=False):
            row = json.loads(line)
            asked = {"role": "user", "content": row["question"]}
            chats.append({"messages": [asked, {"role": "assistant", "content": row["answer"]}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    texts = [turn["content"] for chat in chats for turn in chat["messages"]]
    save_processor(folder / "processor", train_tokenizer(texts, 900))
    processor = load_processor(str(folder / "processor"))
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    tiny_model("tiny:qwen3", processor).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    held.pop("processor_class", None)
    path.write_text(json.dumps(held), encoding="utf-8")


if __name__ == "__main__":
    given, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    report(first_steps(given, rounds=rounds, hosts=tuple(sys.argv[3:])))
