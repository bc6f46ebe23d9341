"""LoRA by unsloth and TRL's SFTTrainer. Lines that packtrain adds end in `# packtrain`.

python examples/unsloth_sft.py MODEL train.jsonl out
"""

import sys

from unsloth import FastLanguageModel

from datasets import load_dataset  # isort: skip
from trl import SFTConfig, SFTTrainer  # isort: skip

from packtrain.hosts.trl import pack  # packtrain  # isort: skip


def main(model_path, data_path, out, **more):
    model, tokenizer = FastLanguageModel.from_pretrained(model_path, max_seq_length=2048, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing="unsloth")
    settings = {"output_dir": out, "max_length": 2048, "padding_free": False, "report_to": "none"}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**{**settings, **more}),
        train_dataset=load_dataset("json", data_files=str(data_path), split="train"),
        processing_class=tokenizer,
    )
    pack(trainer, samples_per_step="same")  # packtrain
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4]).train()
