"""One table: every key of other layouts, and where it stands in ours.

The old name is what a file may say; the new one is where its value goes. `kinds` narrows a row to kinds of
`data`: elsewhere the key has no effect, which is one warning. `docs/config.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .data import KINDS

_SAMPLES = ("planned", "stream", "token_budget")
_PLAN = ("planned", "exported")
_STREAMS = ("stream", "token_budget")

#: Old names that go to several places.
_LONG, _STRICT = "training.packing_allow_single_long", "training.strict"
_WORKERS = "training.dataloader_num_workers"


@dataclass(frozen=True)
class Alias:
    """A key of another layout.

    Attributes:
        old: as it is written there, with its section.
        new: where its value goes, with its section.
        values: value there -> value here; others stay as they are.
        kinds: kinds of `data` in which it has an effect; empty: all that have the new key.
        of: whose name it is.
        passes: on other kinds it is Trainer's own key.
    """

    old: str
    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    of: str = ""
    passes: bool = False

    def holds(self, kind: str) -> bool:
        """True when the key has an effect on data of this kind."""
        section, _, key = self.new.partition(".")
        if section != "data":
            return not self.kinds or kind in self.kinds
        return key in KINDS[kind].model_fields and (not self.kinds or kind in self.kinds)

    def here(self, value: Any) -> Any:
        """The value as our layout has it."""
        for theirs, ours in self.values.items():
            if type(theirs) is type(value) and theirs == value:
                return ours
        return value

    def there(self, value: Any) -> Any:
        """The value as the other layout has it, where that is a switch."""
        for theirs, ours in self.values.items():
            if isinstance(theirs, bool) and type(ours) is type(value) and ours == value:
                return theirs
        return value


def _same(section: str, keys: str) -> tuple[Alias, ...]:
    return tuple(Alias(f"{section}.{key}", f"data.{key}") for key in keys.split())


def _veomni(old: str, new: str, *, kinds: tuple[str, ...] = ()) -> tuple[Alias, ...]:
    """VeOmni has these keys under `train` and `data`; both are accepted."""
    rows = (Alias(f"training.{old}", new, kinds=kinds, of="VeOmni"),)
    return rows if new == f"data.{old}" else (*rows, Alias(f"data.{old}", new, kinds=kinds, of="VeOmni"))


_ATTENTION = {
    **dict.fromkeys(("flash_attn", "flash_attn_2"), "flash_attention_2"),
    "flash_attn_3": "flash_attention_3",
    **dict.fromkeys(("flex", "flex_attn"), "flex_attention"),
}

ALIASES: tuple[Alias, ...] = (
    # what kind of data
    Alias("training.sharded_lazy", "data.kind", {True: "growing"}, of="Megatron-SWIFT"),
    Alias("training.packing_mode", "data.kind", {"static": "planned", "streaming": "stream"}, of="CoordExp"),
    Alias("training.streaming", "data.kind", {True: "stream"}, of="ms-swift"),
    # where the samples or packs are, and how a record is read
    Alias("custom.train_jsonl", "data.path", kinds=_SAMPLES, of="CoordExp"),
    Alias("data.train_path", "data.path", kinds=_SAMPLES, of="VeOmni"),
    Alias("custom.dataset", "data.path", kinds=("growing", "exported"), of="Megatron-SWIFT"),
    Alias("custom.fusion_config", "data.mixture", of="CoordExp"),
    Alias("custom.val_jsonl", "data.val", of="CoordExp"),
    Alias("custom.kind", "data.source"),
    *_same("custom", "media_root columns shape placeholders media_without_placeholder media_prefix"),
    *_same("custom", "allow_outside allow_remote"),
    *_same("custom", "source_options trust_hints ignore_keys frame_rate long_audio text_options"),
    # how packs are made
    Alias("training.packing", "data.packing", of="CoordExp, ms-swift"),
    Alias("custom.packing", "data.packing", of="CoordExp"),
    Alias("custom.packing_length", "template.max_length", of="CoordExp"),
    Alias("training.packing_strategy", "data.packer", {"binpack": "auto"}, of="CoordExp, ms-swift"),
    Alias(_LONG, "data.long_samples", {True: "single", False: "drop"}, kinds=("planned",), of="CoordExp"),
    Alias(_LONG, "data.long_samples", {True: "single", False: "error"}, kinds=_STREAMS, of="CoordExp"),
    Alias("training.packing_drop_last", "data.drop_under_filled", of="CoordExp"),
    Alias("training.packing_min_fill_ratio", "data.min_fill_ratio", of="CoordExp"),
    Alias("training.eval_packing", "data.eval_packing", of="CoordExp"),
    Alias("training.packing_wait_timeout_s", "data.wait_timeout_s", of="CoordExp"),
    Alias("training.packing_length_cache_persist_every", "data.persist_every", of="CoordExp"),
    Alias("training.packing_length_precompute_workers", "data.measure_workers", of="CoordExp"),
    Alias("training.dataset_num_proc", "data.measure_workers", of="ms-swift"),
    Alias("training.num_proc", "data.measure_workers", of="ms-swift"),
    Alias(_STRICT, "data.on_error", {True: "raise", False: "zero"}, kinds=(*_PLAN, "growing"), of="ms-swift"),
    Alias(_STRICT, "data.on_error", {True: "raise", False: "skip"}, kinds=_STREAMS, of="ms-swift"),
    Alias("training.static_packing_cache", "data.cache", of="CoordExp"),
    *_same("training", "samples_per_step skip_samples replan encode_cache encode_cache_workers balance"),
    *_same("training", "repeat_loss max_drop_fraction on_error"),
    # what comes when
    Alias("training.train_dataloader_shuffle", "data.shuffle", of="Megatron-SWIFT"),
    Alias("training.shuffle", "data.shuffle"),
    Alias("training.early_stop_interval", "training.early_stopping_patience", of="ms-swift"),
    Alias("training.early_stopping_steps", "training.early_stopping_patience", of="LLaMA-Factory"),
    Alias("training.torch_compile", "training.compile", of="transformers"),
    Alias("training.dataloader_drop_last", "data.drop_last", kinds=_PLAN, of="CoordExp, transformers"),
    # a directory of chunks
    Alias("training.sharded_lazy_max_wait_s", "data.timeout_s"),
    Alias("training.sharded_lazy_poll_s", "data.poll_s"),
    Alias("training.sharded_lazy_start", "data.start"),
    # streams of samples
    Alias("training.stream_window", "data.window", kinds=("stream",)),
    Alias("training.stream_window", "data.buffer_size", kinds=("token_budget",)),
    Alias("training.packing_interval", "data.window", kinds=("stream",), of="ms-swift"),
    Alias("training.stream_shuffle_buffer", "data.shuffle_buffer"),
    Alias("training.shuffle_buffer_size", "data.shuffle_buffer", of="ms-swift"),
    Alias("training.stream_encode_workers", "data.encode_workers"),
    Alias("training.stream_splits", "data.splits"),
    Alias(_WORKERS, "data.encode_workers", kinds=_STREAMS, of="transformers", passes=True),
    # VeOmni
    *_veomni("micro_batch_size", "data.micro_batch_size"),
    *_veomni("micro_batch_size", "data.samples_per_row", kinds=("planned",)),
    *_veomni("max_seq_len", "template.max_length"),
    *_veomni("dyn_bsz", "data.dyn_bsz"),
    *_veomni("dyn_bsz", "data.packing", kinds=("planned",)),
    *_veomni("dyn_bsz_buffer_size", "data.buffer_size"),
    *_veomni("dyn_bsz_count_mode", "data.count_mode"),
    *_veomni("dyn_bsz_overflow_ratio", "data.overflow_ratio"),
    *_veomni("dyn_bsz_physical_overflow_ratio", "data.overflow_ratio"),
    *_veomni("bsz_warmup_ratio", "data.warmup_ratio"),
    *_veomni("warmup_tokens", "data.warmup_tokens"),
    *_veomni("bsz_warmup_init_mbtoken", "data.warmup_tokens"),
    *_veomni("pad_packed_input", "data.pad_packed_input"),
    *_veomni("pad_packed_to_length", "data.pad_to_length"),
    *_veomni("pad_to_length", "data.pad_to_length"),
    *_veomni("drop_last", "data.drop_last"),
    *_veomni("global_batch_size", "data.global_batch_size"),
    # how a sample becomes tokens, and what packs are written as
    Alias("training.max_length", "template.max_length", of="ms-swift"),
    Alias("template.max_len", "template.max_length", of="LLaVA-OneVision"),
    Alias("export.task_type", "export.task", {"pretrain": "auto", "sft": "multi_turn"}, of="LLaVA-OneVision"),
    # the model
    Alias("training.max_model_len", "model.max_model_len", of="CoordExp"),
    Alias("model.model_path", "model.name_or_path", of="VeOmni"),
    Alias("training.attn_impl", "model.attn", _ATTENTION, of="CoordExp, ms-swift"),
    Alias("model.attn_impl", "model.attn", _ATTENTION, of="ms-swift"),
    Alias("model.attn", "model.attn", _ATTENTION),
)

#: Keys that are told to have no effect, whatever the kind of data -> why.
IGNORED = {
    "template.padding_free": "packed rows never hold padding",
    "training.packing_buffer": "a static plan has no buffer",
    "training.packing_avg_samples": "the plan says how many samples a pack holds",
    "training.packing_num_proc": "a plan is made in one process",
    "training.acc_strategy": "token_acc counts supervised tokens",
    "training.cyclic": "a stream goes on until max_steps",
    "training.lazy_tokenize": "samples are measured from metadata and encoded when they are fetched",
    "training.encoded_sample_cache": "samples are measured from metadata and encoded when they are fetched",
    "custom.val_sample_with_replacement": "evaluation reads every sample exactly once",
}

_LENGTH_HINT = "set template.max_length (or global_max_length): it is the pack length"

#: Keys that are refused -> what to do instead.
MOVED = {
    "training.packing_length": _LENGTH_HINT,
    "training.rescan_files": "use data.kind: growing: files are read as they come, each once",
}

_LENGTH = "write global_max_length: it is the pack length"
_MODEL, _PATH = "write model.name_or_path", "write data.path"
_VAL = "write data.val: a file, or several as {name: file}"
_ROWS = "packs fill themselves: write training.samples_per_step for samples of an optimizer step"
_LORA = "the run's trainer trains all weights: LoRA is packtrain.hosts.transformers or hosts.trl with peft"
_ATTN = "write model.attn, for example flash_attention_2"

#: Keys of LLaMA-Factory's and axolotl's YAML, and of scripts, that are not taken -> what to write here.
FOREIGN = {
    **dict.fromkeys(("cutoff_len", "sequence_len", "max_seq_length", "max_seq_len", "pack_length"), _LENGTH),
    **dict.fromkeys(("packing_length", "max_length", "seq_length", "seq_len", "block_size"), _LENGTH),
    **dict.fromkeys(("model_name_or_path", "base_model", "model_id", "model_name", "model_path"), _MODEL),
    **dict.fromkeys(("dataset", "datasets", "dataset_path", "train_file", "train_data", "path"), _PATH),
    **dict.fromkeys(("val_set_size", "val_size", "eval_dataset", "test_datasets"), _VAL),
    **dict.fromkeys(("sample_packing", "neat_packing", "packing"), "write data.packing; it is on"),
    **dict.fromkeys(("flash_attn", "flash_attention", "attn_implementation", "sdp_attention"), _ATTN),
    **dict.fromkeys(("micro_batch_size", "batch_size", "train_batch_size"), _ROWS),
    **dict.fromkeys(
        ("adapter", "finetuning_type", "lora_r", "lora_rank", "lora_alpha", "lora_target"), _LORA
    ),
    **dict.fromkeys(("media_dir", "image_folder", "image_dir"), "write data.media_root"),
    **dict.fromkeys(("dataset_processes", "preprocessing_num_workers"), "write data.measure_workers"),
    **dict.fromkeys(("train_on_inputs", "train_on_prompt"), "answers are trained, prompts are not"),
    "adafactor": "write training.optim: adafactor",
    "dataset_dir": "write the whole path under data.path",
    "image_max_pixels": "write template.max_pixels",
    "image_min_pixels": "write template.min_pixels",
    "mask_history": "write template.train_on: last",
    "num_epochs": "write training.num_train_epochs",
    "pad_to_sequence_len": "write data.pad_to_length",
    "tokenizer_config": "write template.processor",
    "video_fps": "write template.fps",
    "video_maxlen": "write template.max_frames",
}

_BY_OLD: dict[str, list[Alias]] = {}
for _row in ALIASES:
    _BY_OLD.setdefault(_row.old, []).append(_row)


def aliases_of(old: str) -> list[Alias]:
    """The rows of an old name; empty where it is none."""
    return list(_BY_OLD.get(old, []))


def alias_of(old: str, kind: str) -> Alias | None:
    """The row that an old name has for data of this kind."""
    return next((row for row in _BY_OLD.get(old, []) if row.holds(kind)), None)


def old_names(section: str) -> list[str]:
    """Old names of a section, without it."""
    found = dict.fromkeys(row.old for row in ALIASES if row.old.startswith(f"{section}."))
    return [name.partition(".")[2] for name in found]
