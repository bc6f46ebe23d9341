"""`data`: where the packs of a run come from. One class a kind, each with just its keys.

    data: {kind: planned, path: train.jsonl}            # measured, planned, then trained
    data: {kind: exported, path: packs/}                # what `packtrain export` wrote
    data: {kind: growing, path: packed/}                # chunks that `packtrain produce` may still write
    data: {kind: stream, path: train.jsonl}             # encoded and packed as they come
    data: {kind: token_budget, path: train.jsonl, micro_batch_size: 2}    # rows by tokens, or of N samples

Names of other layouts are mapped onto these by `aliases`. What a kind refuses here it refuses from YAML and
Python alike, before anything is measured. A text under a key is its description in `docs/config.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...extend import lookup
from .sections import Case, Count, Fill, Fraction, OnDisk, Seconds, Section, Tokens, Whole, refuse, told_of

#: Keys of `Records` that say what becomes of rows that are trained; the others read records.
OF_ROWS = ("pad_to_length", "skip_samples", "on_error", "max_skip_fraction")

#: Name of a validation set: part of the names of metrics and folders.
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def _validation(value: Any) -> Any:
    """A file, or files by the names of their sets."""
    sets = value if isinstance(value, Mapping) else {"val": value}
    for name in sets:
        if not isinstance(name, str) or not _SET_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a set: letters and digits, then also . _ and -")
    if value is not None and not (sets and all(isinstance(file, str) for file in sets.values())):
        raise ValueError("expected a file, or several as {name: file}")
    return value


class CacheConfig(Section):
    """Where lengths and plans are kept for other runs."""

    root_dir: OnDisk | None = None
    """a content-addressed folder that runs share; not set: the run's own output folder"""


class Records(Section):
    """Keys of every kind: how records are read, the validation samples, and rows."""

    val: Annotated[str | dict[str, str] | None, BeforeValidator(_validation)] = None
    """validation samples: `.jsonl` or `.json`, or `demo:formulas-val`, or several sets, `{name: file}`; measured and planned for every kind"""  # noqa: E501
    media_root: str | None = None
    """folder or URL of relative media paths; not set: the file's, and absolute paths are read as written"""
    allow_outside: bool = False
    """media paths and links may leave `media_root`"""
    allow_remote: bool = False
    """fetch media that records name by a URL"""
    columns: dict[str, str] = Field(default_factory=dict)
    """plain pairs: `{prompt: question, response: answer}`"""
    shape: str = "auto"
    """chat shape of the records"""
    placeholders: dict[str, str | list[str]] | list[str] | None = None
    """text that stands for a medium; not set: `<image>` …"""
    media_without_placeholder: str | None = None
    """`error`, or `prepend`"""
    media_prefix: str | None = None
    """cut from the front of relative media paths"""
    source: str | None = None
    """kind of source plug-in; not set: by name, then by content"""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """options of that plug-in, such as `split` or `rows`"""
    task: Literal["chat", "text"] = "chat"
    """`chat`: conversations; `text`: raw documents"""
    text_options: dict[str, Any] = Field(default_factory=dict)
    """options of raw text: bos, eos, control_tokens"""
    ignore_keys: list[str] = Field(default_factory=list)
    """keys of the records that are left out"""
    frame_rate: Annotated[float, Field(gt=0)] | None = None
    """frames a second of lists of frames that do not say theirs"""
    long_audio: Literal["error", "cut", "drop"] = "error"
    """a clip longer than the model hears: stop, train what is left of it, or leave the sample out"""
    trust_hints: bool = False
    """take sizes of media from the data where they give them, after an audit of a sample"""
    eval_packing: bool = True
    """evaluation uses the same plan pipeline and drops nothing; false: every sample is a pack of its own"""
    wait_timeout_s: Seconds = 7200.0
    """seconds that other ranks, or another run in a shared cache, wait for lengths and plan; 0: for ever"""
    persist_every: Count | None = None
    """samples per published part of an unfinished measurement; not set: adaptive"""
    measure_workers: Count = 8
    """processes that measure, at most one per core and 2,048 samples"""
    cache: CacheConfig = Field(default_factory=CacheConfig)
    """`{root_dir: folder}` of lengths and plans that runs share, named by content"""
    skip_samples: str | None = None
    """file of ids of samples that are not trained, one a line or a JSON list (ledger, `skipped`)"""
    on_error: Literal["raise", "skip", "zero"] = "raise"
    """a sample that cannot be encoded: `raise` stops the run; `skip`: it leaves its pack; `zero`: a segment without weight in its place (a stream has no places: `skip`); written into `failed.jsonl`, without a plan of the run's own `left_out.jsonl`"""  # noqa: E501
    max_skip_fraction: Fraction | None = None
    """with `skip` or `zero`: stop when a larger share fails, of the planned samples, or of those read"""
    pad_to_length: Tokens | None = None
    """tokens that every row is padded to, as one further segment; a longer row is an error"""

    def validations(self) -> dict[str, str]:
        """Files of validation samples by the name of their set; one without a name has the name ""."""
        if self.val is None:
            return {}
        return {"": self.val} if isinstance(self.val, str) else dict(self.val)


def validation_prefix(name: str) -> str:
    """What the folders of a validation set begin with; "": the set without a name."""
    return f"val_{name}_" if name else "val_"


class Planned(Records):
    """Samples are measured, then planned: packs, steps and checksums are known before training."""

    kind: Literal["planned"] = "planned"
    path: str | None = None
    """samples: `.jsonl`, `.json`, parquet, tar …, or `demo:formulas`"""
    mixture: str | None = None
    """a static mixture instead of `path`"""
    packing: bool = True
    """false: every row holds `samples_per_row` samples, through the same plan"""
    samples_per_row: Count = 1
    """with `packing: false`: samples of a row, drawn at random (with `shuffle: false` neighbours), whatever their lengths"""  # noqa: E501
    global_batch_size: Count | None = None
    """with `packing: false`: samples of an optimizer step, over all ranks"""
    packer: str = "auto"
    """packing strategy"""
    packer_options: dict[str, Any] = Field(default_factory=dict)
    """knobs of the packer, such as `{max_items: 8}` of `diverse` ([planning.md](planning.md))"""
    limits: dict[str, Whole] = Field(default_factory=dict)
    """further hard caps of a pack by measured cost, such as `{images: 8}`"""
    max_samples: Count | None = None
    """samples of a pack, at most"""
    long_samples: Literal["single", "drop", "error"] = "single"
    """a sample of `length >= cap` gets a pack of its own, goes to the ledger (`over_long`), or stops; `packtrain plan` has `>` ([planning.md](planning.md#long-samples))"""  # noqa: E501
    drop_under_filled: bool = False
    """drop packs filled less than `min_fill_ratio`, into the ledger (`under_filled`)"""
    min_fill_ratio: Fill = 0.65
    """see above"""
    samples_per_step: Count | None = None
    """exactly so many samples per optimizer step over all ranks; accumulation follows from the plan"""
    replan: Literal["epoch"] | None = None
    """`epoch`: a new plan every epoch, of as many packs, in which samples of equal length change places"""
    shuffle: bool = True
    """false: every epoch is in the order of the plan; true: in an order of its own, by the seed"""
    drop_last: bool = False
    """drop, instead of repeat, packs that do not fill the last step of all ranks"""
    repeat_loss: Literal["keep", "zero"] = "keep"
    """packs repeated to fill the last step of all ranks: trained again, or without weight"""
    balance: Literal["step", "window", "global"] | None = "step"
    """packs of a step rearranged so that ranks finish it together; `window`, `global`, or null"""
    encode_cache: str | None = None
    """folder of encoded packs: made before the first step, read in every epoch and by later runs"""
    encode_cache_workers: Count = 1
    """processes of each rank that encode ahead"""
    max_drop_fraction: Fraction | None = None
    """stop when a larger share of the samples is left out"""

    @model_validator(mode="after")
    def _agree(self) -> Planned:
        _check_samples(self)
        refuse(*self._rows_of_samples(), *self._steps_of_samples(), *self._new_plans())
        untrue = f"data.encode_cache and data.on_error {self.on_error!r}: encoded packs would not stay true"
        refuse((self.encode_cache is not None and self.on_error != "raise", untrue, "remove one of them"))
        return self

    def _rows_of_samples(self) -> Iterator[Case]:
        rows = self.samples_per_row > 1
        name = "samples_per_row" if rows else "global_batch_size"
        yield (
            self.packing and (rows or self.global_batch_size is not None),
            f"data.{name} is {getattr(self, name)}, and data.packing is true: a packed row holds as many as "
            "fit",
            "set data.packing: false, or samples_per_step for steps of samples in full packs",
        )
        capped = not self.packing and self.max_samples is not None
        yield capped, "data.max_samples caps packs, and data.packing is false", "set data.samples_per_row"
        for name in ("samples_per_step", "replan", "drop_under_filled", "limits"):
            told = f"data.samples_per_row {self.samples_per_row} and data.{name}: rows count samples"
            yield rows and getattr(self, name) not in (None, False, {}), told, f"remove data.{name}"
        yield (
            rows and self.long_samples != "single",
            f"data.long_samples {self.long_samples!r} with samples_per_row: such a row has no length to be "
            "longer than",
            "set model.max_model_len: longer samples go to the ledger (beyond_model)",
        )

    def _steps_of_samples(self) -> Iterator[Case]:
        if self.samples_per_step is None:
            return
        told = "data.drop_under_filled would take packs out of steps of samples"
        yield self.drop_under_filled, told, "set data.drop_under_filled: false"
        told = f"data.balance {self.balance!r} would mix the samples of steps"
        yield self.balance in ("window", "global"), told, "use step, or null"

    def _new_plans(self) -> Iterator[Case]:
        if self.replan is None:
            return
        new = f"data.replan {self.replan!r}"
        yield (
            self.samples_per_step is not None,
            f"{new} and data.samples_per_step {self.samples_per_step}: a plan by steps changes its shape "
            "with the seed",
            "the steps of samples are shuffled in every epoch anyway; remove data.replan",
        )
        yield (
            self.drop_under_filled,
            f"{new} and data.drop_under_filled: other samples would be dropped in every epoch, and none of "
            "them is in the ledger",
            "set data.drop_under_filled: false",
        )
        told = f"{new} and data.packer {self.packer!r}: such a plan changes its shape with the seed"
        yield getattr(lookup("packers", self.packer), "SEEDED", False), told, "use data.packer: auto"
        told = f"data.encode_cache and {new}: every epoch has other packs"
        yield self.encode_cache is not None, told, "remove one of them"


class Exported(Records):
    """Packs that `packtrain export` wrote, in any of its formats: nothing is measured or planned again."""

    kind: Literal["exported"] = "exported"
    path: str
    """folder of the export"""
    shuffle: bool = True
    """false: the packs in the order of the plan"""
    drop_last: bool = False
    """drop, instead of repeat, packs that do not fill the last step of all ranks"""
    balance: Literal["step", "window", "global"] | None = "step"
    """packs of a step rearranged so that ranks finish it together; `window`, `global`, or null"""
    verify: bool = True
    """hash each chunk before its first pack is read"""


class Growing(Records):
    """A directory of chunks that `packtrain produce` may still write to; each rank reads its own."""

    kind: Literal["growing"] = "growing"
    path: str
    """the directory"""
    timeout_s: Seconds = 0.0
    """longest wait for one pack; 0 waits for ever"""
    poll_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """seconds between two looks at the directory"""
    start: Literal["acknowledged", "beginning"] | None = None
    """where a run without a checkpoint begins when an earlier run has used packs; not set: refused"""


class _Samples(Records):
    """What streams of samples share."""

    path: str | None = None
    """samples, as of `planned`"""
    mixture: str | None = None
    """a static mixture instead of `path`"""
    packer: str = "auto"
    """packing strategy of a window"""
    long_samples: Literal["single", "drop", "error"] = "single"
    """a sample longer than a pack gets a pack of its own, goes to the ledger (`over_long`), or stops"""
    shuffle: bool = True
    """false: the order of the source"""
    shuffle_buffer: Whole = 10_000
    """samples that are mixed; a source that can be indexed is permuted as a whole; 0: its order"""
    splits: Count | None = None
    """parts of the stream, which any number of ranks that divides it may go on with; not set: the ranks"""
    encode_workers: Whole = 0
    """processes that encode; the packs are the same for any number"""

    @model_validator(mode="before")
    @classmethod
    def _one_order(cls, given: Any) -> Any:
        """`shuffle` and `shuffle_buffer` say the same."""
        if not isinstance(given, dict):
            return given
        buffer, shuffle = given.get("shuffle_buffer"), given.get("shuffle")
        mixes = f"data.shuffle is false, and data.shuffle_buffer {buffer} would mix the samples"
        keeps = "data.shuffle is true, and data.shuffle_buffer 0 keeps the order"
        refuse(
            (shuffle is False and isinstance(buffer, int) and buffer > 0, mixes, "keep one of them"),
            (shuffle is True and buffer == 0, keeps, "keep one of them"),
        )
        if shuffle is False:
            return {**given, "shuffle_buffer": 0}
        return {**given, "shuffle": False} if buffer == 0 and shuffle is None else given

    @model_validator(mode="after")
    def _agree(self) -> Any:
        _check_samples(self)
        return self


class Stream(_Samples):
    """Samples are encoded and packed as they come; nobody measures them. `max_steps` ends the run."""

    kind: Literal["stream"] = "stream"
    window: Count = 1000
    """samples that are planned together"""


class TokenBudget(_Samples):
    """Rows of `micro_batch_size * max_length` tokens (`dyn_bsz`), or of `micro_batch_size` samples."""

    kind: Literal["token_budget"] = "token_budget"
    micro_batch_size: Count = 1
    """rows hold so many times `template.max_length` tokens; without `dyn_bsz` so many samples"""
    dyn_bsz: bool = True
    """false: exactly `micro_batch_size` samples a row, whatever their lengths"""
    buffer_size: Count = 1000
    """samples that are looked at together"""
    count_mode: Literal["total", "effective"] = "total"
    """what the budget counts: all tokens, or supervised ones"""
    overflow_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.5
    """with `effective`: a row holds at most so many times the budget in tokens"""
    order: Literal["packed", "arrival"] = "packed"
    """packed by packtrain's packers, or taken as samples arrive"""
    warmup_ratio: Fraction = 0.0
    """over this share of the run's micro steps the budget grows from `warmup_tokens`"""
    warmup_tokens: Count | None = None
    """tokens of the first row of the warm-up"""
    pad_packed_input: bool = False
    """rows are padded to `pad_to_length`, or to the budget"""
    drop_last: bool = False
    """leave the last row of an epoch out where it is not full, into `left_out.jsonl`"""
    global_batch_size: Count | None = None
    """micro batches times `micro_batch_size` of an optimizer step, over all ranks"""

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, given: Any) -> Any:
        """`pad_to_length` as a switch says what `pad_packed_input` does; as a number it asks for it."""
        if not isinstance(given, dict):
            return given
        given = dict(given)
        if isinstance(given.get("pad_to_length"), bool):
            given.setdefault("pad_packed_input", given.pop("pad_to_length"))
        elif given.get("pad_to_length") is not None:
            given.setdefault("pad_packed_input", True)
        if given.get("pad_packed_input") is True:
            refuse(
                (
                    given.get("long_samples") == "single",
                    "data.long_samples 'single' and data.pad_packed_input: a longer sample would not fit a "
                    "row that is padded",
                    "remove data.long_samples: such a sample then stops the run",
                )
            )
            given.setdefault("long_samples", "error")
        return given

    def longest_row(self, length: int) -> int:
        """The most tokens of a row under this budget, for a pack length."""
        budget = length * self.micro_batch_size
        return math.ceil(budget * self.overflow_ratio) if self.count_mode == "effective" else budget


def _check_samples(data: Any) -> None:
    """Their packer is there, and they are named once."""
    with told_of("data.packer"):
        lookup("packers", data.packer)
    hint = "name the file of samples among the sources of the mixture"
    both = data.path is not None and data.mixture is not None
    refuse((both, "data.path and data.mixture are both set", hint))


#: Kind -> its class.
KINDS: dict[str, type[Records]] = {
    "planned": Planned,
    "exported": Exported,
    "growing": Growing,
    "stream": Stream,
    "token_budget": TokenBudget,
}

DataConfig = Annotated[Planned | Exported | Growing | Stream | TokenBudget, Field(discriminator="kind")]
