"""Fine-tune a Qwen-VL model with the transformers Trainer. Lines that packtrain adds end in `# packtrain`.

python examples/hf_trainer_vl.py MODEL train.jsonl out
"""

import json
import sys

import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from packtrain.hosts.transformers import pack  # packtrain

ANSWER = "<|im_start|>assistant\n"


class Chats:
    """Rows {"messages": [{"role", "content"}], "images": [path]}, `<image>` in a text for each image."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as lines:
            self.rows = [json.loads(line) for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Collate:
    """Chats -> one padded batch; only the answers are trained."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, rows):
        texts = [self.render(row["messages"]) for row in rows]
        images = [Image.open(path).convert("RGB") for row in rows for path in row["images"]]
        batch = self.processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        start = self.processor.tokenizer(ANSWER)["input_ids"]
        end = self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        for ids, row in zip(batch["input_ids"].tolist(), labels, strict=True):
            inside, place = False, 0
            while place < len(ids):
                if not inside and ids[place : place + len(start)] == start:
                    row[place : place + len(start)] = -100
                    inside, place = True, place + len(start)
                    continue
                if not inside:
                    row[place] = -100
                inside = inside and ids[place] != end
                place += 1
        return {**batch, "labels": labels}

    def render(self, messages):
        chat = []
        for message in messages:
            pieces = message["content"].split("<image>")
            content = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
            for piece in pieces[1:]:
                content += [{"type": "image"}] + ([{"type": "text", "text": piece}] if piece else [])
            chat.append({"role": message["role"], "content": content})
        return self.processor.apply_chat_template(chat, tokenize=False)


def main(model_path, data_path, out, eval_path=None, trainer_class=Trainer, wrap=lambda model: model, **more):
    transformers.set_seed(0)
    processor = AutoProcessor.from_pretrained(model_path)
    model = wrap(AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32"))
    settings = {
        "output_dir": out,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": "none",
        "remove_unused_columns": False,
        "save_strategy": "no",
    }
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(**{**settings, **more}),
        train_dataset=Chats(data_path),
        eval_dataset=Chats(eval_path) if eval_path else None,
        data_collator=Collate(processor),
        processing_class=processor,
    )
    pack(trainer, pack_length=2048, samples_per_step="same")  # packtrain
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:4]).train()
