"""Sections of a run's YAML beside `data`: every key with its type, default and limits.

A text under a key is its description in `docs/config.md`. Numbers are never read from switches: `true` is
no count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
)

from ...errors import ConfigError, InputError
from ...remote.ranges import is_remote

_Attention = Literal[
    "auto", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa", "eager"
]
ATTENTIONS: tuple[str, ...] = get_args(_Attention)


def _no_switch(value: Any) -> Any:
    """YAML's true, yes and on are no numbers."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _on_a_disk(value: str) -> str:
    """A run appends to its files, which nothing behind a URL allows."""
    if is_remote(value) or "://" in value:
        raise ValueError("a run writes to a disk; copy what it made elsewhere")
    if "\0" in value:
        raise ValueError("no path holds a NUL byte")
    return value


OnDisk = Annotated[str, AfterValidator(_on_a_disk)]
Count = Annotated[int, Field(ge=1), BeforeValidator(_no_switch)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(_no_switch)]
Tokens = Annotated[int, Field(ge=1, le=2**31), BeforeValidator(_no_switch)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_no_switch)]
Fill = Annotated[float, Field(gt=0, le=1), BeforeValidator(_no_switch)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_switch)]
_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_switch)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_switch)]
_Ratio = Annotated[float, Field(ge=1, allow_inf_nan=False), BeforeValidator(_no_switch)]

#: What may be wrong: is it so, the message, and what to do.
Case = tuple[Any, str, str]


def refuse(*cases: Case) -> None:
    """ConfigError of the first case that is so."""
    for wrong, message, hint in cases:
        if wrong:
            raise ConfigError(message, hint=hint)


class Section(BaseModel):
    """A section: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


@contextlib.contextmanager
def told_of(key: str, hint: str | None = None) -> Iterator[None]:
    """What is wrong with the value of a key, as a ConfigError that names the key.

    Args:
        hint: where the error has none.
    """
    try:
        yield
    except InputError as error:
        raise ConfigError(f"{key}: {error.message}", hint=error.hint or hint) from None


def plain_words(error: Any) -> str:
    """What an error of pydantic says of a value, in the middle of a sentence."""
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def fault_of(section: type[Section], key: str, value: Any) -> str | None:
    """What is wrong with the value of a key, where another place than a file takes it; None: nothing.

    >>> fault_of(TemplateConfig, "fps", -1.0)
    'input should be greater than 0'
    """
    field = section.model_fields[key]
    limited: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(limited).validate_python(value)
    except ValidationError as error:
        return plain_words(error.errors(include_url=False)[0])
    return None


class ModelConfig(Section):
    """Which network, and how its attention runs."""

    name_or_path: str | None = None
    """folder, hub name, or `tiny:qwen3`, `tiny:qwen2_vl`, `tiny:qwen2_5_vl`, `tiny:qwen3_vl`: a small random network of the real class"""  # noqa: E501
    attn: _Attention = "auto"
    """refused where packed samples would read each other; `auto`: `varlen` on a GPU in 16 bit, else `sdpa`"""
    max_model_len: Tokens | None = None
    """longer samples go to the ledger (`beyond_model`) when it differs from the pack length"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type of the weights"""


_Dropped = Literal["text", "system", "reasoning", "tools", "tool_calls", "tool_results"]


#: Options of the template beside its lengths.
TEMPLATE_OPTIONS = (
    *("chat_template", "allow_dropped", "train_on", "reasoning", "answer_end"),
    *("fps", "max_frames", "max_aspect_ratio", "min_pixels", "max_pixels"),
)


class TemplateConfig(Section):
    """How a sample becomes tokens."""

    processor: str | None = None
    """folder or hub name of the processor, or `demo:qwen2_5_vl`; not set: the model's"""
    max_length: Tokens | None = None
    """the pack length; a longer sample follows `data.long_samples`, or `truncation`"""
    system: str | None = None
    """system turn for samples that have none"""
    truncation: Literal["error", "left", "right"] = "error"
    """`error` never cuts; `left`, `right` cut text"""
    chat_template: str | None = None
    """a file with another chat template, or `trl`: TRL's training template for this one"""
    allow_dropped: list[_Dropped] = Field(default_factory=list)
    """what the chat template may leave out of a sample; anything else that it drops stops the run ([templates.md](templates.md))"""  # noqa: E501
    train_on: Literal["all", "last"] = "all"
    """all answers, or those behind the last question"""
    reasoning: Literal["keep", "mask", "drop_history"] = "keep"
    """`mask`: rendered, not trained; `drop_history`: taken out of answers in front of the last question"""
    answer_end: Literal["mark", "line"] = "mark"
    """an answer is trained up to its end mark, or with the line break behind that, as ms-swift trains it"""
    min_pixels: Tokens | None = None
    """smallest area of an image, instead of the processor's"""
    max_pixels: Tokens | None = None
    """largest area of an image, instead of the processor's"""
    fps: _Rate | None = None
    """frames taken of a second of video, instead of the processor's rate"""
    max_frames: Count | None = None
    """the most frames taken of a video"""
    max_aspect_ratio: _Ratio | None = None
    """a longer or narrower picture leaves its sample out (ledger, `unsupported_media`); not set: the processor's own limit"""  # noqa: E501

    def options(self) -> dict[str, Any]:
        """Those of `TEMPLATE_OPTIONS` that are not at their default."""
        plain = TemplateConfig()
        held = {name: getattr(self, name) for name in TEMPLATE_OPTIONS}
        return {name: value for name, value in held.items() if value != getattr(plain, name)}


class TrainingConfig(Section):
    """How the packs are trained on. Keys that say what the packs are stand in `data`.

    Names of other layouts (`training.packing_strategy` …) can be read here as attributes too.
    """

    output_dir: OnDisk = "runs/run"
    """everything the run writes; a folder, for a run appends to its files"""
    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_no_switch)] = 42
    """order of epochs, initial weights"""
    effective_batch_size: Count | None = None
    """packs per optimizer step over all ranks; must be divisible by them"""
    per_device_train_batch_size: Count = 1
    """without `effective_batch_size` its product with the accumulation is kept: a device step is one pack, accumulation the product"""  # noqa: E501
    gradient_accumulation_steps: Count = 1
    """see above"""
    dummy_media: bool = False
    """a pack without media gets a weightless one, so that every rank's towers take part in the step; refused where there are no media"""  # noqa: E501
    loss_reduction: Literal["token", "sample", "sqrt"] = "token"
    """one vote a token, a sample, or between them (1/sqrt of a sample's supervised tokens)"""
    source_weights: dict[str, _Weight] = Field(default_factory=dict)
    """weights of the sources of a mixture in the loss; those not named weigh 1"""
    log_sample_loss: bool = True
    """write the loss of every sample to `sample_loss/rank-N.jsonl`, a line a step"""
    log_source_loss: bool = False
    """log `loss/NAME` for every source of a mixture, also in evaluation"""
    num_train_epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """passes over the packs; streams and growing directories are read once"""
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0e-4
    """Trainer's"""
    max_steps: Annotated[int, Field(ge=-1), BeforeValidator(_no_switch)] = -1
    """optimizer steps; -1: `num_train_epochs` decide. Streams need it"""
    resume: Literal["auto"] | None = "auto"
    """`auto`: from the last whole checkpoint in `output_dir` where there is one; null: from the beginning"""
    early_stopping_patience: Count | None = None
    """end after so many evaluations without a better `metric_for_best_model` (not set: `loss`)"""
    early_stopping_threshold: _Weight = 0.0
    """better by more than this"""
    proof: bool = True
    """prove on the first packs, before training, that packed samples do not read each other"""
    compile: bool = False
    """compile the layers of the language model: the first steps take longer, later ones less; rows keep their lengths"""  # noqa: E501
    device_profile: str | None = None
    """what `packtrain doctor --calibrate` wrote: a pack that would not fit is a warning before training, and the report forecasts in seconds"""  # noqa: E501
    trainer: dict[str, Any] = Field(default_factory=dict)
    """further TrainingArguments; in the YAML they stand directly under `training`"""

    _other: dict[str, Any] = PrivateAttr(default_factory=dict)

    def also_named(self, values: Mapping[str, Any]) -> None:
        """Values by their names in other layouts, for `__getattr__`."""
        self._other.update(values)

    def __getattr__(self, name: str) -> Any:
        private = object.__getattribute__(self, "__pydantic_private__") or {}
        if name in private.get("_other", {}):
            return private["_other"][name]
        return super().__getattr__(name)  # type: ignore[misc]


class ReportConfig(Section):
    """The page of a run."""

    html: bool = True
    """write `report.html` (`packtrain run`, `train`)"""


class ExportConfig(Section):
    """Write the packs as files instead of training; the options of `packtrain export`."""

    format: (
        Literal["raw", "webdataset", "energon", "chunks", "mds", "litdata", "lance", "datasets", "megatron"]
        | None
    ) = None
    """not set: train; else the packs are exported and nothing is trained"""
    out: str | None = None
    """folder of the export, or its URL; not set: `export` in `training.output_dir`"""
    task: Literal["auto", "captions", "vqa", "multi_turn"] = "auto"
    """what a record is written as"""
    maxcount: Count = 1000
    """packs a part"""
    maxsize: Count = 3_000_000_000
    """bytes a part"""
    prompts: Literal["prompt", "prompts"] | None = None
    """name of the prompt's key"""
    layout: Literal["packtrain", "llava", "parquet", "npy"] | None = None
    """layout of records; of `megatron`: `parquet`, `npy`"""
    media: Literal["source", "uint8", "tensor"] | None = None
    """how chunks hold media"""
    workers: Count = 1
    """processes that encode"""
