"""Run in VeOmni's environment by two ranks: `torchrun veomni_run.py SPEC.json`; writes what each saw.

spec: config (a YAML file), overrides (further words of the command line), report, and one of
    example     the user's file
    pictures    its VLMTrainer
    stream      a file of chats and a folder of a processor: a TokenBudgetDataset over them is the source
    cases       name -> settings of runs that are refused: their messages are what is written
    collate     sequence parallel: VeOmni's own batch of samples and ours
leak: attention that forgets the boundaries.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
RANK = int(os.environ["RANK"])
SEEN: dict[str, list[Any]] = {"ids": [], "losses": [], "alone": [], "widths": [], "boundaries": []}


def on_a_processor() -> None:
    """VeOmni asks its device for what `torch.cpu` has not, and has no backend of its own for it."""
    cpu: Any = torch.cpu
    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        setattr(cpu, name, lambda *_: 0)
    cpu.get_device_name, cpu.memory_stats = lambda *_: "CPU", lambda *_: {"num_alloc_retries": 0}
    cpu.memory_allocated = cpu.memory_reserved = lambda *_: 0
    cpu.mem_get_info = lambda *_: (1, 1)
    dist.init_process_group("gloo")


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def watch(sample: Any) -> None:
    """Note samples, losses, and the losses of VeOmni's own batch of each sample alone.

    Args:
        sample: (trainer, id) -> sample as VeOmni's transform makes it.
    """
    from veomni.trainer.base import BaseTrainer

    begin, step = BaseTrainer.on_step_begin, BaseTrainer.forward_backward_step

    def on_step_begin(self: Any, micro_batches: Any = None, **kwargs: Any) -> Any:
        ids = [int(number) for batch in micro_batches for number in batch.sample_ids]
        SEEN["ids"].append(ids)
        SEEN["losses"].append([])
        SEEN["widths"].append([batch["input_ids"].shape[-1] for batch in micro_batches])
        SEEN["boundaries"].append([batch["cu_seq_lens_q"].tolist() for batch in micro_batches])
        count = torch.tensor(len(ids))
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # sharded ranks pass together
        made = [alone(self, sample(self, number)) for number in (ids + ids[:1] * int(count))[: int(count)]]
        SEEN["alone"].append(made[: len(ids)])
        return begin(self, micro_batches=micro_batches, **kwargs)

    def forward_backward_step(self: Any, micro_batch: Any) -> Any:
        made = step(self, micro_batch)
        SEEN["losses"][-1].append(float(made[0]))
        return made

    BaseTrainer.on_step_begin, BaseTrainer.forward_backward_step = on_step_begin, forward_backward_step


def alone(base: Any, sample: Any) -> list[float]:
    own = {key: value.clone() if hasattr(value, "clone") else value for key, value in sample.items()}
    count = int((own["labels"][1:] != -100).sum())
    batch = base.preforward(dict(base.collate_fn([own])))
    with torch.no_grad():
        loss = base.model(**batch, use_cache=False).loss
    loss = next(iter(loss.values())) if isinstance(loss, dict) else loss
    return [float(loss) if count else 0.0, count]


def pictures() -> None:
    """VLMTrainer with a preprocessor of the user for rows {"conversations", "images", "source"}."""
    from veomni.arguments import parse_args
    from veomni.data.multimodal.preprocess import PREPROCESSOR_REGISTRY
    from veomni.trainer.vlm_trainer import VeOmniVLMArguments, VLMTrainer

    from packtrain.hosts.veomni import pack

    @PREPROCESSOR_REGISTRY.register("rows")
    def rows(conversations, **kwargs):
        made = []
        for message in conversations:
            turn: list[Any] = [message["role"]]
            for number, piece in enumerate(message["content"].split("<image>")):
                turn += [("image", None)] if number else []
                turn += [("text", piece)] if piece else []
            made.append(turn)
        return made

    trainer = VLMTrainer(parse_args(VeOmniVLMArguments))
    pack(trainer)
    trainer.train()


def text_trainer() -> Any:
    from veomni.arguments import VeOmniArguments, parse_args
    from veomni.trainer.text_trainer import TextTrainer

    return TextTrainer(parse_args(VeOmniArguments))


def refusals(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    from veomni.data import build_dataset

    from packtrain.errors import PacktrainError
    from packtrain.hosts.veomni import pack

    trainer, told = text_trainer(), {}
    args, rows = trainer.base.args, trainer.base.train_dataset
    for name, given in cases.items():
        held = args.data.data_type
        trainer.base.train_dataset = rows
        if given.get("iterable"):
            trainer.base.train_dataset = build_dataset("iterable", train_path=args.data.train_path)
        args.data.data_type = given.get("data_type", held)
        try:
            pack(trainer, **given.get("options", {}))
            told[name] = "packed"
        except PacktrainError as error:
            told[name] = f"{error.message} (hint: {error.hint})"
        args.data.data_type = held
    return told


def parallel(pad: int) -> dict[str, Any]:
    """Keys of VeOmni's own batch and of ours, of two ranks that share a row; padded to `pad` too."""
    from transformers import Qwen3Config
    from veomni.data.data_collator import MainCollator
    from veomni.distributed.parallel_state import init_parallel_state

    from packtrain.hosts.veomni import MainBatch

    init_parallel_state(ulysses_size=2, dp_mode="ddp")
    config = Qwen3Config(attn_implementation="flash_attention_2")
    lengths = (5, 1, 7)
    samples = [{"input_ids": torch.arange(1, 1 + n), "labels": torch.arange(1, 1 + n)} for n in lengths]
    made = {}
    for case, given in (("row", 0), ("padded", pad)):
        collate = MainCollator(pad_to_length=given)
        ours = MainBatch(collate, config)([[dict(one, sample_id=i) for i, one in enumerate(samples)]])
        assert all(int(one["labels"][0]) == int(one["input_ids"][0]) for one in samples)  # as they were given
        own = [{key: value.clone() for key, value in one.items()} for one in samples]
        own[0]["labels"][0] = -100
        for one in own:
            one["attention_mask"] = torch.ones_like(one["input_ids"])
        theirs = collate(own)
        both = {"ours": ours, "theirs": theirs}
        made[case] = {name: {k: _plain(v) for k, v in batch.items()} for name, batch in both.items()}
    return made


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = ["veomni", spec.get("config", ""), *spec.get("overrides", [])]
    on_a_processor()
    if spec.get("leak"):
        leak()
    seen: Any = SEEN
    if "collate" in spec:
        seen = parallel(spec["collate"])
    elif "cases" in spec:
        seen = refusals(spec["cases"])
    elif "stream" in spec:
        stream(**spec["stream"])
    else:
        watch(lambda base, number: base.train_dataset[number][0])
        if spec.get("pictures"):
            pictures()
        else:
            runpy.run_path(spec["example"], run_name="__main__")
    path = Path(spec["report"])
    path.with_name(f"{path.name}.{RANK}").write_text(json.dumps(seen))


def stream(file: str, processor: str) -> None:
    """Our source and template in the place of VeOmni's dynamic batches: the same settings."""
    import packtrain as pt
    from packtrain.data import TokenBudgetDataset
    from packtrain.hosts.veomni import pack
    from packtrain.template import HFTemplate, load_processor

    trainer = text_trainer()
    chats, template = pt.open_chats(file), HFTemplate(load_processor(processor))
    train, data = trainer.base.args.train, trainer.base.args.data
    budget = TokenBudgetDataset(
        chats, template, micro_batch_size=train.micro_batch_size, max_seq_len=data.max_seq_len,
        dyn_bsz=train.dyn_bsz, pad_packed_input=bool(train.pad_to_length), buffer_size=64, shuffle_buffer=0,
    )  # fmt: skip

    def own(base: Any, number: int) -> Any:
        encoded = template.encode(chats[number])
        row = {name: torch.as_tensor(encoded[name]) for name in ("input_ids", "labels")}
        return {**row, "attention_mask": torch.ones_like(row["input_ids"])}

    watch(own)
    pack(trainer, source=budget)
    trainer.train()


if __name__ == "__main__":
    main()
