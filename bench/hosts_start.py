"""From the start of a process to its first optimizer step: packed by us, packed by the host, not packed.

`python -m bench.hosts DATA` runs it. Every variant is a process of its own (imports, tokenising, measuring,
planning, first step), by turns, on the same texts and the same tiny random model on CPU. A step is one pack
of 2,048 tokens; unpacked, eight rows, which is about as many tokens. Those of ms-swift and
LLaMA-Factory run in their environments, where there are any (`hosts_swift.py`, `hosts_llamafactory.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import hosts_llamafactory, hosts_swift

__all__ = ["first_steps"]

CAP = 2048
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: name -> (script of examples/, packed by us, settings)
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "Trainer, unpacked": ("hf_trainer_text", False, {"per_device_train_batch_size": 8}),
    "Trainer, packtrain": ("hf_trainer_text", True, {"per_device_train_batch_size": 1}),
    "TRL, its packing (bfd)": (
        "trl_sft",
        False,
        {"per_device_train_batch_size": 1, "packing": True, "packing_strategy": "bfd"},
    ),
    "TRL, packtrain": ("trl_sft", True, {"per_device_train_batch_size": 1}),
}
#: Variants of other environments, each with what starts it.
OTHERS = {
    **dict.fromkeys(hosts_swift.VARIANTS if hosts_swift.SWIFT else (), hosts_swift.start),
    **dict.fromkeys(
        hosts_llamafactory.VARIANTS if hosts_llamafactory.LLAMAFACTORY else (), hosts_llamafactory.start
    ),
}
NAMES = [*VARIANTS, *OTHERS]


#: Rows or packs that the trainer holds; (wall seconds, processor seconds) to the first step of each round.
Found = dict[str, tuple[int, list[tuple[float, float]]]]


def first_steps(data: Path, rows: int = 2000, rounds: int = 3) -> Found:
    """What each variant holds, and how long it takes to its first step."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        _prepare(data, Path(folder), rows)
        for turn in range(rounds):
            for name in NAMES:
                out = Path(folder) / f"{turn}-{NAMES.index(name)}"
                run = OTHERS.get(name, _start)
                held, wall, cpu = run(name, Path(folder), out)
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
            f"{name}: {held:,} rows of the trainer, first step after {best[0]:.1f} s (rounds: {rounds})",
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
            chats.append({"messages": [asked, {"role": "assistant", "content": row["answer"]}], "images": []})
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


def _start(name: str, folder: Path, out: Path) -> tuple[int, float, float]:
    words = [sys.executable, "-m", "bench.hosts_start", name, str(folder), str(out)]
    started = time.time()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return int(told["held"]), float(told["stepped"]) - started, float(told["cpu"])


def _child(name: str, folder: Path, out: str) -> None:
    from packtrain.template import ensure_torchvision

    ensure_torchvision()
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    file, packed, settings = VARIANTS[name]
    text = (EXAMPLES / f"{file}.py").read_text(encoding="utf-8")
    text = re.sub(r"^.*#\s*packtrain$\n", "", text, flags=re.M)
    names: dict[str, Any] = {"__name__": file}
    exec(compile(text, file, "exec"), names)

    class First(TrainerCallback):  # type: ignore[misc]
        stepped = cpu = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stepped, self.cpu = time.time(), time.process_time()
            control.should_training_stop = True

    more = {"gradient_accumulation_steps": 1, "use_cpu": True, **settings}
    if file == "trl_sft":
        more |= {"bf16": False, "gradient_checkpointing": False, "max_length": CAP}
    trainer = names["main"](str(folder / "model"), str(folder / "rows.jsonl"), out, **more)
    if packed and file == "trl_sft":
        from packtrain.hosts.trl import pack as pack_trl

        pack_trl(trainer)
    elif packed:
        from packtrain.hosts.transformers import pack

        pack(trainer, CAP)
    first = First()
    trainer.add_callback(first)
    trainer.train()
    held = trainer.packs if packed else trainer.train_dataset
    print(json.dumps({"held": len(held), "stepped": first.stepped, "cpu": first.cpu}))


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
