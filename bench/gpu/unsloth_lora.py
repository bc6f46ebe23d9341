"""unsloth's patched models on packs: losses as unpacked, the proof, a leak that it must refuse.

    PYTHONPATH=src python bench/gpu/unsloth_lora.py                      # text, on the card
    PYTHONPATH=src python bench/gpu/unsloth_lora.py --processor FOLDER   # Qwen2.5-VL with pictures too
    PYTHONPATH=src python bench/gpu/unsloth_lora.py --cpu                # tries it on unsloth's CPU backend

Needs unsloth, unsloth_zoo, trl and datasets beside torch and transformers; the weights are random.
One process and one line of JSON a case: samples of every step, the loss of each beside the mean over the
tokens of unsloth's own unpacked losses (`worst`, relative), what its attention ran on.

text        LoRA, bfloat16, unsloth's gradient checkpointing
float32     the same in float32
leak        its attention is told no boundaries: the proof must refuse
pictures    Qwen2.5-VL, LoRA on text and tower, its own collator
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "src"), str(ROOT / "tests" / "hosts")]

from packtrain.template import ensure_torchvision  # noqa: E402

ensure_torchvision()
SAMPLES, STEPS = 200, 5
TEXT = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}


def words(count: int) -> str:
    return " ".join(f"word {random.randrange(999)}" for _ in range(count))


def text_parts(folder: Path) -> None:
    """A Qwen3 with a tokenizer of its own, and chats of many lengths."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from packtrain.template import load_processor
    from packtrain.testing.demo.processor import save_processor, train_tokenizer

    save_processor(folder / "processor", train_tokenizer([words(3) for _ in range(3000)], 1200))
    processor = load_processor(str(folder / "processor"))
    tokenizer = processor.tokenizer
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **TEXT, **HEADS)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    path = folder / "model" / "tokenizer_config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    held.pop("processor_class", None)
    path.write_text(json.dumps(held), encoding="utf-8")


def picture_parts(folder: Path, processor: str) -> None:
    """A Qwen2.5-VL of two layers with the published processor, its pictures kept small."""
    from packtrain.template import load_processor
    from packtrain.testing.tiny import tiny_model

    made = load_processor(processor)
    made.image_processor.size = {"shortest_edge": 3136, "longest_edge": 23520}
    tiny_model("tiny:qwen2_5_vl", made).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")


def rows(pictures: bool) -> list[dict[str, Any]]:
    from PIL import Image

    made = []
    for number in range(SAMPLES):
        asked: Any = words(random.randrange(3, 40))
        answer: Any = words(random.choice([2, 5, 20, 60]))
        if pictures:
            size = random.randrange(28, 140), random.randrange(28, 140)
            image = Image.new("RGB", size, (number, 90, 255 - number))
            shown = [{"type": "image", "image": image}] if number % 4 else []
            asked = [*shown, {"type": "text", "text": asked}]
            answer = [{"type": "text", "text": answer}]
        talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        made.append({"messages": talk})
    return made


def trainer_of(case: str, folder: Path) -> Any:
    """unsloth's trainer as its users build it."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel, FastVisionModel

    dtype = torch.float32 if case == "float32" else torch.bfloat16
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "max_length": 2048, "padding_free": False, "report_to": "none",
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": SAMPLES // STEPS // 8,
        "num_train_epochs": 1, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
        "bf16": dtype == torch.bfloat16 and torch.cuda.is_available(),
    }  # fmt: skip
    given = {"max_seq_length": 2048, "load_in_4bit": False, "dtype": dtype}
    if not torch.cuda.is_available():
        given.pop("dtype")
    random.seed(1)
    held = rows(case == "pictures")
    if case == "pictures":
        from unsloth.trainer import UnslothVisionDataCollator

        model, processor = FastVisionModel.from_pretrained(str(folder / "model"), **given)
        model = FastVisionModel.get_peft_model(model, r=8)
        FastVisionModel.for_training(model)
        settings |= {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        collate = UnslothVisionDataCollator(model, processor)
        return SFTTrainer(
            model=model, args=SFTConfig(**settings), train_dataset=held, data_collator=collate,
            processing_class=processor.tokenizer,
        )  # fmt: skip
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder / "model"), **given)
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing="unsloth")
    data = Dataset.from_list(held)
    return SFTTrainer(model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)


def forget_boundaries() -> None:
    """Its attention is told of none, whatever a batch says."""
    import unsloth.models as models

    for name in dir(models):
        module = getattr(models, name)
        if hasattr(module, "get_packed_info_from_kwargs"):
            module.get_packed_info_from_kwargs = lambda *given, **named: None


def run(case: str, folder: Path) -> dict[str, Any]:
    import unsloth  # noqa: F401  (it patches what follows)
    from host_seen import watch

    from packtrain.errors import PacktrainError
    from packtrain.hosts.trl import pack

    began = time.perf_counter()
    if case == "leak":
        forget_boundaries()
    seen = watch()
    trainer = trainer_of(case, folder)
    told: dict[str, Any] = {"case": case, "trainer": type(trainer).__mro__[0].__module__}
    try:
        pack(trainer, samples_per_step="same")
        trainer.train()
    except PacktrainError as error:
        return {**told, "refused": f"{type(error).__name__}: {error.message}"[:600]}
    losses, worst = [sum(step) for step in seen["losses"]], 0.0
    for loss, alone in zip(losses, seen["alone"], strict=True):
        wanted = sum(value * count for value, count in alone if count) / sum(count for _, count in alone)
        worst = max(worst, abs(loss - wanted) / wanted)
    told["once"] = sorted(number for step in seen["ids"] for number in step) == list(range(SAMPLES))
    told |= {"steps": [len(step) for step in seen["ids"]], "losses": losses, "worst": worst}
    told["seconds"] = round(time.perf_counter() - began, 1)
    try:
        from unsloth.utils.hf_packed_attention import HF_PACKED_ATTENTION_STATS

        told["varlen"] = dict(HF_PACKED_ATTENTION_STATS)
    except ImportError:
        pass
    return told


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--processor", default="")
    options.add_argument("--cpu", action="store_true")
    options.add_argument("--cases", nargs="*")
    options.add_argument("--case")
    options.add_argument("--folder")
    given = options.parse_args()
    if given.case:
        print("CASE " + json.dumps(run(given.case, Path(given.folder))), flush=True)
        return
    cases = ["text", "float32", "leak", *(["pictures"] if given.processor else [])]
    for case in given.cases or (["text"] if given.cpu else cases):
        with tempfile.TemporaryDirectory() as folder:
            random.seed(0)
            if case == "pictures":
                picture_parts(Path(folder), given.processor)
            else:
                text_parts(Path(folder))
            line = [sys.executable, __file__, "--case", case, "--folder", folder]
            env = {**os.environ, "HF_HUB_OFFLINE": "1", **({"CUDA_VISIBLE_DEVICES": ""} if given.cpu else {})}
            done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=folder)
            found = [row[5:] for row in done.stdout.splitlines() if row.startswith("CASE ")]
            failed = json.dumps({"case": case, "failed": done.stderr[-3000:]})
            print(found[0] if found else failed, flush=True)


if __name__ == "__main__":
    main()
