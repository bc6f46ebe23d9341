"""What the proof says on each kind of model, clean and patched: one line of JSON a case.

quantised_run.py '["folders that are imported from"]'
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

sys.path += json.loads(sys.argv[1])

from leaks import on_the_object, pooled
from train_samples import text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.errors import IsolationError
from packtrain.template import ensure_torchvision
from packtrain.testing.tiny import tiny_model
from packtrain.train import prove

ensure_torchvision()
torch.set_num_threads(1)
warnings.simplefilter("ignore")
PACKS = [[text_sample(n, i) for i, n in enumerate((7, 5, 12))]]
FOLDER = tempfile.mkdtemp()


DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
LARGE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    "use_cache": False,
}  # fmt: skip


def plain() -> Any:
    if DEVICE == "cpu":
        return tiny_model("tiny:qwen3", seed=1)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**LARGE)).to(DEVICE, torch.bfloat16)


def loaded(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = {} if DEVICE == "cpu" else {"dtype": torch.bfloat16}
    return AutoModelForCausalLM.from_pretrained(
        FOLDER, quantization_config=config, device_map=DEVICE, **dtype
    )


def bits(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return loaded(BitsAndBytesConfig(**options))


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return made


def int8(model: Any, by_token: bool = False) -> Any:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    quantize_(model, Int8DynamicActivationInt8WeightConfig() if by_token else Int8WeightOnlyConfig())
    return model


def int8_of_transformers() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return loaded(TorchAoConfig(Int8WeightOnlyConfig()))


def experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    size = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512}
    config = Qwen3MoeConfig(**size, **heads, num_experts=8, num_experts_per_tok=2, use_cache=False)
    return Qwen3MoeForCausalLM(config).to(DEVICE)


CASES = {
    "4 bit": lambda: bits(load_in_4bit=True),
    "4 bit with adapters": lambda: adapted(bits(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "8 bit": lambda: bits(load_in_8bit=True),
    "8 bit with outliers and adapters": lambda: adapted(bits(load_in_8bit=True, llm_int8_threshold=1.0)),
    "int8 weights": lambda: int8(plain()),
    "int8 weights with adapters": lambda: adapted(int8(plain())),
    "int8 weights of transformers": int8_of_transformers,
    "int8 by token": lambda: int8(plain(), by_token=True),
    "compiled": lambda: torch.compile(plain()),
    "4 bit with adapters, compiled": lambda: torch.compile(adapted(bits(load_in_4bit=True))),
    "experts": experts,
    "experts in bfloat16": lambda: experts().bfloat16(),
}


def inner(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)
    return model.base_model.model if hasattr(model, "peft_config") else model


def held(model: Any) -> dict[str, str]:
    """Everything that must not move, as text to the bit."""
    found = {f"weight {name}": _bits(value) for name, value in model.state_dict().items()}
    found |= {f"buffer {name}": _bits(value) for name, value in model.named_buffers()}
    found |= {f"gradient {name}": str(p.grad is None) for name, p in model.named_parameters()}
    found |= {f"mode {name}": str(module.training) for name, module in model.named_modules()}
    found["random states"] = repr(
        (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    )
    return found


def _bits(value: Any) -> str:
    if hasattr(value, "dequantize") and type(value) is not torch.Tensor and not value.is_quantized:
        with contextlib.suppress(Exception):
            value = value.dequantize()
    plain = value.detach().contiguous().cpu()
    return str(hash(plain.view(torch.uint8).numpy().tobytes())) if plain.dim() else repr(plain.item())


def verdict(model: Any) -> str:
    try:
        prove(model, PACKS)
    except IsolationError as error:
        return str(error)
    return "accepted"


def told(make: Any) -> dict[str, Any]:
    model = make()
    model.train()
    batch = PaddingFreeCollator(inner(model))(PACKS)
    given = {key: value for key, value in batch.items() if key != "labels"}
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with torch.no_grad():
        inner(model)(**moved)  # 8-bit layers take their weights apart at the first pass
    before, began = held(model), time.perf_counter()
    found: dict[str, Any] = {"clean": verdict(model), "seconds": round(time.perf_counter() - began, 2)}
    after = held(model)
    found["changed"] = sorted(key for key in {**before, **after} if before.get(key) != after.get(key))
    for leak in (on_the_object, pooled):
        with ExitStack() as stack:
            model = make()
            leak(inner(model), stack)
            found[leak.__name__] = verdict(model)
    return found


def main() -> None:
    plain().save_pretrained(FOLDER)
    for name, make in CASES.items():
        torch._dynamo.reset()
        try:
            found = told(make)
        except ImportError as error:
            found = {"cannot be made here": str(error).splitlines()[0]}
        sys.stdout.write(json.dumps({"case": name, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
