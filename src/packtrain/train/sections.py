"""The sections of a run's YAML: every key with its type, default and limits.

`config.py` reads files into them. Numbers are never read from switches: `true` is no count.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "ATTENTIONS",
    "CacheConfig",
    "CustomConfig",
    "ExportConfig",
    "ModelConfig",
    "ReportConfig",
    "Section",
    "TemplateConfig",
    "Tokens",
    "TrainingConfig",
]

ATTENTIONS = ("auto", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager")

_Attention = Literal[
    "auto", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager"
]


def _no_switch(value: Any) -> Any:
    """YAML's true, yes and on are no numbers."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


_Count = Annotated[int, Field(ge=1), BeforeValidator(_no_switch)]
Tokens = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(_no_switch)]
_Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_no_switch)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_switch)]
_Fill = Annotated[float, Field(gt=0, le=1), BeforeValidator(_no_switch)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_switch)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """Which network, and how its attention runs."""

    name_or_path: str | None = None
    """Folder, hub name, or tiny:qwen2_5_vl / tiny:qwen3 …: a small random network of the real class."""
    attn: _Attention = "auto"
    max_model_len: Tokens | None = None
    """The longest sample the model can take; longer ones go to the ledger (beyond_model)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class TemplateConfig(Section):
    """How a sample becomes tokens."""

    processor: str | None = None
    """Default: model.name_or_path."""
    max_length: Tokens | None = None
    """The pack length. A longer sample follows the long-sample policy, or `truncation`."""
    system: str | None = None
    truncation: Literal["error", "left", "right"] = "error"


class CustomConfig(Section):
    """Where the samples are and how a record is read."""

    train_jsonl: str | None = None
    val_jsonl: str | None = None
    media_root: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)
    dataset: str | None = None
    """A directory of chunks that may still grow (`training.sharded_lazy`), instead of train_jsonl."""
    fusion_config: str | None = None
    """A static mixture (`sources/mixture.py`) instead of train_jsonl."""
    shape: str = "auto"
    placeholders: dict[str, str | list[str]] | list[str] | None = None
    media_without_placeholder: str | None = None
    media_prefix: str | None = None
    kind: str | None = None
    """Kind of source; None: by name, then by content."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    ignore_keys: list[str] = Field(default_factory=list)
    """Keys of the data that are left out (see docs/keys.md)."""
    frame_rate: Annotated[float, Field(gt=0)] | None = None
    """Frames a second of lists of frames that do not say theirs."""
    long_audio: Literal["error", "cut", "drop"] = "error"
    """A clip longer than the model hears: stop, train what is left of it, or leave the sample out."""
    text_options: dict[str, Any] = Field(default_factory=dict)
    """Options of raw text (`data.task: text`): bos, eos."""
    trust_hints: bool = False
    """Take sizes of media from the data where they give them, after an audit of a sample."""


class CacheConfig(Section):
    """Where lengths and plans are kept for other runs."""

    root_dir: str | None = None
    """A content-addressed folder that runs share; None: the run's own output folder."""


class TrainingConfig(Section):
    """How packs are made and trained on."""

    output_dir: str = "runs/run"
    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_no_switch)] = 42
    packing: bool = True
    packing_mode: Literal["static", "streaming"] = "static"
    dyn_bsz: bool = False
    """Streaming: a micro batch takes micro_batch_size * max_length tokens."""
    micro_batch_size: _Count = 1
    stream_window: _Count = 1000
    """Streaming: samples that are planned together."""
    stream_shuffle_buffer: Annotated[int, Field(ge=0), BeforeValidator(_no_switch)] = 10_000
    """Streaming: 0 keeps the order; a source that can be indexed is permuted as a whole."""
    stream_encode_workers: Annotated[int, Field(ge=0), BeforeValidator(_no_switch)] = 0
    eval_packing: bool = True
    packing_strategy: str = "auto"
    packing_allow_single_long: bool = True
    packing_drop_last: bool = False
    packing_min_fill_ratio: _Fill = 0.65
    packing_wait_timeout_s: _Seconds = 7200.0
    """0 waits for ever."""
    packing_length_cache_persist_every: _Count | None = None
    packing_length_precompute_workers: _Count = 8
    static_packing_cache: CacheConfig = CacheConfig()
    effective_batch_size: _Count | None = None
    """Packs per optimizer step, over all ranks."""
    samples_per_step: _Count | None = None
    """Samples per optimizer step, over all ranks: the plan is made step by step."""
    skip_samples: str | None = None
    """File of sample ids to leave out of the plan (ledger: skipped)."""
    replan: Literal["epoch"] | None = None
    """`epoch`: a new plan every epoch, of as many packs, in which samples of equal length change places."""
    encode_cache: str | None = None
    """Folder of encoded packs: made before the first step, read in every epoch and by later runs."""
    encode_cache_workers: _Count = 1
    """Processes of each rank that encode ahead."""
    per_device_train_batch_size: _Count = 1
    gradient_accumulation_steps: _Count = 1
    dataloader_drop_last: bool = False
    repeat_loss: Literal["keep", "zero"] = "keep"
    """Packs repeated to fill the last step of all ranks: trained again, or without weight."""
    dummy_media: bool = False
    """Rows that would leave a tower idle get a weightless medium (several ranks that train the towers)."""
    balance: Literal["step", "window", "global"] | None = "step"
    loss_reduction: Literal["token", "sample", "sqrt"] = "token"
    """One vote per token, per sample, or between them (1/sqrt of a sample's supervised tokens)."""
    source_weights: dict[str, _Weight] = Field(default_factory=dict)
    """Weight of the samples of each source of a mixture in the loss; those not named weigh 1."""
    log_sample_loss: bool = True
    """Write the loss of every sample, step by step, to sample_loss/rank-N.jsonl."""
    log_source_loss: bool = False
    """Log the token mean of every source of a mixture as loss/NAME, also in evaluation."""
    num_train_epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0e-4
    max_steps: Annotated[int, Field(ge=-1), BeforeValidator(_no_switch)] = -1
    sharded_lazy: bool = False
    """Train on the packs of `custom.dataset`, each rank from its own chunks, while they are made."""
    sharded_lazy_pre_packed: bool = False
    """Says that the chunks hold packs; has to be true with `sharded_lazy`."""
    sharded_lazy_max_wait_s: _Seconds = 0.0
    """Longest wait for one pack; 0 waits for ever."""
    sharded_lazy_poll_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    sharded_lazy_start: Literal["acknowledged", "beginning"] | None = None
    """Where a run without a checkpoint begins; None: refused where an earlier run has acknowledged packs."""
    train_dataloader_shuffle: bool = False
    """Only with `sharded_lazy`, where it has to be false. A static plan shuffles its epochs by the seed."""
    on_error: Literal["raise", "zero"] = "raise"
    max_drop_fraction: _Fraction | None = None
    """The run fails when a larger share of the samples went to the ledger."""
    proof: bool = True
    """Prove on the first packs, before training, that packed samples do not read each other."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Further TrainingArguments, checked; in the YAML they stand directly under `training`."""


class ReportConfig(Section):
    html: bool = True


class ExportConfig(Section):
    """Write the packs as files instead of training."""

    format: Literal["raw", "webdataset", "energon", "chunks"] | None = None
    """None: train. Else the packs are exported and nothing is trained."""
    out: str | None = None
    """Folder of the export; default `export` in training.output_dir."""
    task: Literal["auto", "captions", "vqa", "multi_turn"] = "auto"
    maxcount: _Count = 1000
    maxsize: _Count = 3_000_000_000
    prompts: Literal["prompt", "prompts"] | None = None
    layout: Literal["packtrain", "llava"] | None = None
    media: Literal["source", "uint8", "tensor"] | None = None
    workers: _Count = 1
