"""ms-swift: `swift sft … --packing true --external_plugins plugin.py`, where the plugin calls `install()`.

    from packtrain.hosts.ms_swift import install
    install()                                              # our plan of the rows of --dataset
    install(source=lambda: open_packs("export", encode))   # packs that are made, of any kind

Everything else stays ms-swift's: arguments, template, collator, trainer, losses. With `--packing true`,
our plan and sampler stand in the place of its packing dataset: one plan over the whole dataset, its last
`N mod W` packs are not lost, a row that fails is never replaced by another (`--strict true` stops, else a
weightless segment takes its place and `packs/failed.jsonl` says so), and lengths come from metadata, so that
`--lazy_tokenize` and packing go together. Flags that cannot keep their meaning are refused with the reason.

With `--streaming true` our stream stands in the place of its iterable packing: rows are read, encoded and
packed a window at a time, every rank its own part, and a resume goes on behind the last pack that was used.
Rows that make no tokens are left out and stand in `packs/left_out-train.RANK.jsonl` (`--strict true` stops).

Packs that are made are collated by `PaddingFreeCollator`: they were encoded by another template than
ms-swift's, whose collator would not know their fields. ms-swift still asks for `--dataset`; it is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..collate import PackBatch, is_filler
from ..collate.model_traits import family_for
from ..data import Pack, PackedDataset, StreamingPackedDataset
from ..errors import ConfigError, IsolationError, counted
from ..packs.source import is_packs
from ..planning.lengths import Lengths
from ..template import ensure_torchvision
from ..train.attention import segments_of
from ..train.consumed import supervised
from ..train.culprit import foreign_functions
from ..train.loss import bare_model
from ..world import World

ensure_torchvision()

from ..train.mixin import check_isolation  # noqa: E402
from ._checks import (  # noqa: E402
    check_loss,
    check_samples_per_step,
    check_source,
    never_kept,
    own_loss,
    unchanged_on_failure,
)
from ._plan import PLACE, pack_rows  # noqa: E402
from ._rows import ChatReader, unread_rows  # noqa: E402
from ._swift_template import READS, RowReader, SwiftTemplate, Watch, watch_rows  # noqa: E402
from .transformers import HostMixin  # noqa: E402

logger = logging.getLogger(__name__)

#: Rows that are encoded before they are packed, as in ms-swift's own packing of streams.
WINDOW = 128


def install(
    *,
    source: Any = None,
    samples_per_step: int | str | None = None,
    balance: str | None = "step",
    ignore_keys: Sequence[str] = (),
    allow_remote: bool = False,
    **options: Any,
) -> None:
    """Put our plan and sampler into `swift sft`. Call it in the file named by `--external_plugins`.

    Args:
        source: packs that are made: a dataset of any kind, or a function that makes it (called in every
            process when its rank is known); None: the rows of `--dataset` are planned.
        samples_per_step: as in `hosts.transformers.pack`; with a source there is nothing to choose.
        balance: as there.
        ignore_keys, allow_remote: as there; keys are told before ms-swift drops them.
        options: further keyword arguments of `packtrain.plan`; with `--streaming true` of
            `StreamingPackedDataset`.
    """
    check_samples_per_step(samples_per_step)
    named = [*options, *(["samples_per_step"] if samples_per_step is not None else [])]
    if source is not None and named:
        raise ConfigError(
            f"{', '.join(named)} cannot be kept: the packs of the source are made",
            hint="leave it out, or leave source out",
        )
    from swift.arguments import SftArguments
    from swift.arguments.base_args.base_args import BaseArguments
    from swift.pipelines.train.sft import SwiftSft

    settings = {
        "source": source,
        "samples_per_step": samples_per_step,
        "balance": balance,
        "options": options,
        "watch": Watch(tuple(ignore_keys)),
        "reads": {"ignore_keys": list(ignore_keys), "allow_remote": allow_remote},
    }
    if hasattr(SwiftSft, "_packtrain"):
        settings["watch"] = SwiftSft._packtrain["watch"]
        settings["watch"].account.ignore = frozenset(ignore_keys)
        SwiftSft._packtrain = settings
        return
    SwiftSft._packtrain = settings
    watch_rows(settings["watch"])
    _replace_checks(BaseArguments, SftArguments, SwiftSft)
    _replace_steps(SwiftSft)


def _replace_checks(BaseArguments: Any, SftArguments: Any, SwiftSft: Any) -> None:
    """What ms-swift says of packing in its arguments; without packing they go its own way."""
    lazy, flash = BaseArguments._init_lazy_tokenize, SftArguments._check_padding_free

    def _init_lazy_tokenize(self: Any) -> None:
        """Lazy tokenising goes with packing, and is its default: rows are measured from metadata."""
        if self.packing and self.lazy_tokenize is None and not self.streaming:
            self.lazy_tokenize = not (self.cached_dataset or self.cached_val_dataset)
        packing, self.packing = self.packing, False
        try:
            lazy(self)
        finally:
            self.packing = packing

    def _check_padding_free(self: Any) -> None:
        if not self.packing:
            flash(self)
            return
        check_flags(self, SwiftSft._packtrain["samples_per_step"])
        self.padding_free = True

    BaseArguments._init_lazy_tokenize = _init_lazy_tokenize
    SftArguments._check_padding_free = _check_padding_free


def _replace_steps(SwiftSft: Any) -> None:
    """Where `swift sft` would pack rows itself, it comes to us."""
    process, show, train = SwiftSft._post_process_datasets, SwiftSft._show_dataset, SwiftSft.train

    def _post_process_datasets(self: Any, datasets: list[Any]) -> list[Any]:
        if not self.args.packing:
            return list(process(self, datasets))
        return _packed(self, datasets, SwiftSft._packtrain)

    def _show_dataset(self: Any, train_dataset: Any, val_dataset: Any) -> None:
        if isinstance(train_dataset, SwiftPacks) or not is_packs(train_dataset):
            show(self, train_dataset, val_dataset)

    def train_on_packs(self: Any, trainer: Any) -> Any:
        if is_packs(trainer.train_dataset):
            _take_over(self, trainer, SwiftSft._packtrain["balance"])
        return train(self, trainer)

    SwiftSft._post_process_datasets = _post_process_datasets
    SwiftSft._show_dataset = _show_dataset
    SwiftSft.train = train_on_packs


#: Attention for which packs are kept apart by restarting positions.
_BY_POSITIONS = ("sdpa", "eager", "flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def check_flags(args: Any, samples_per_step: int | str | None) -> None:
    """Refuse flags that cannot keep their meaning."""
    size = args.per_device_train_batch_size
    for flag, wrong, why, hint in (
        ("streaming", args.streaming and samples_per_step, "a stream has no steps of a number of samples",
         "leave samples_per_step out, or remove it"),
        ("group_by_length", getattr(args, "group_by_length", False), "packs have equal lengths", "remove it"),
        *((*setting, "remove it") for setting in never_kept(args, getattr(args, "global_world_size", 1))),
        ("sequence_parallel_size", getattr(args, "sequence_parallel_size", 1) > 1,
         "packs are not cut over ranks", "set it to 1"),
        ("truncation_strategy", args.truncation_strategy == "split", "packs hold whole rows",
         "use delete, left or right"),
        ("task_type", args.task_type not in (None, "causal_lm"), "packs are for causal language models",
         "train it unpacked"),
        ("rlhf_type", getattr(args, "rlhf_type", None), "packs are for supervised training",
         "train it unpacked"),
        ("packing_strategy", samples_per_step and args.packing_strategy == "sequential",
         "the samples of a step are spread over its packs", "remove it, or leave samples_per_step out"),
        ("attn_impl", args.attn_impl not in (None, *_BY_POSITIONS), "nobody has shown that it isolates",
         "use sdpa or flash_attention_2"),
        ("per_device_train_batch_size", size != 1 and samples_per_step is None,
         "a row is one pack, and two would exceed packing_length",
         'set it to 1, or install(samples_per_step="same")'),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"--{flag} {getattr(args, flag)} with packing: {why}", hint=hint)
    if args.packing_num_proc != 1:
        logger.warning(
            "--packing_num_proc %s has no effect: a plan is made in one process", args.packing_num_proc
        )


def _packed(pipeline: Any, datasets: list[Any], settings: Mapping[str, Any]) -> list[Any]:
    """The datasets of `swift sft` as packs; rows that are generated from in evaluation stay rows."""
    args, template = pipeline.args, pipeline.template
    template.packing = template.padding_free = True
    own = SwiftTemplate(template)
    place = World(max(0, args.rank), max(1, args.global_world_size))
    made = list(datasets)
    given = settings["source"]
    if given is not None:
        made[0] = given() if callable(given) and not is_packs(given) else given
        datasets = [None, *datasets[1:]]
    for number, (name, rows) in enumerate(zip(("train", "val"), datasets, strict=False)):
        if rows is None or (name == "val" and getattr(args, "predict_with_generate", False)):
            continue
        options = dict(settings["options"])
        steps = settings["samples_per_step"] if name == "train" else None
        if args.streaming and name == "train":
            rows.account = settings["watch"].seen  # the stream tells it
            rows.account.drain()
            made[number] = _stream(rows, own, args, template, place, options)
            continue
        if args.streaming:
            rows, options = list(rows), {}  # validation rows have an end, and each is evaluated once
        if not steps:
            options.setdefault("packer", "sequential" if args.packing_strategy == "sequential" else "auto")
        else:
            options.update(_steps(args, steps, place.size))
        lengths = _lengths_of(rows)
        ignore = settings["watch"].account.ignore
        made[number] = pack_rows(
            rows,
            own.encode,
            faults=None if lengths is None else unread_rows(rows, READS, ignore),
            name=name,
            folder=Path(args.output_dir),
            place=place,
            measure=own if lengths is None else lengths,
            reader=ChatReader(source=settings["reads"], convert=RowReader()),
            drop_last=name == "train" and bool(args.dataloader_drop_last),
            repeat_loss="keep" if name == "train" else "zero",
            kind=_kind(args, name),
            options={"pack_length": args.packing_length or template.max_length, **options},
        )
        if steps:
            accumulation = made[number].packs.block // place.size
            for held in (args, args.training_args):
                held.gradient_accumulation_steps, held.per_device_train_batch_size = accumulation, 1
    return made


def _stream(rows: Any, own: SwiftTemplate, args: Any, template: Any, place: World, options: Any) -> Any:
    """The rows of `--streaming true`, packed as they come; read again from their start where they end."""
    folder = Path(args.output_dir) / PLACE
    skip = {} if args.strict else {"on_error": "skip"}
    length = args.packing_length or template.max_length
    packer = "sequential" if args.packing_strategy == "sequential" else "auto"
    return SwiftStream(
        rows,
        own.encode,
        rank=place.rank,
        world_size=place.size,
        cyclic=True,
        ledger_file=folder / f"left_out-train.{place.rank}.jsonl",
        **{**skip, "pack_length": length, "packer": packer, "window": WINDOW, **options},
    )


def _steps(args: Any, wanted: int | str, ranks: int) -> dict[str, Any]:
    same = args.per_device_train_batch_size * args.training_args.gradient_accumulation_steps * ranks
    return {
        "samples_per_step": same if wanted == "same" else int(wanted),
        "packs_multiple": ranks,
        "seed": (args.training_args.data_seed or 0) if _shuffles(args.training_args) else None,
        "last_step": "drop" if args.dataloader_drop_last else "keep",
    }


def _shuffles(args: Any) -> bool:
    return bool(getattr(args, "train_dataloader_shuffle", True))


def _lengths_of(rows: Any) -> Lengths | None:
    """The lengths that ms-swift has written beside the rows, as in a cached dataset."""
    if "lengths" not in getattr(rows, "column_names", ()):
        return None
    held = rows["lengths"]
    return Lengths(np.array([sum(n) if isinstance(n, (list, tuple)) else n for n in held], np.int64))


def _kind(args: Any, name: str) -> Any:
    def make(*given: Any, **options: Any) -> SwiftPacks:
        if args.strict:
            return SwiftPacks(*given, **options)
        failed = Path(args.output_dir) / PLACE / f"failed-{name}.jsonl"
        return SwiftPacks(*given, on_error="zero", ledger_file=failed, **options)

    return make


class SwiftPacks(PackedDataset):
    """Packs of rows as ms-swift's template encodes them."""

    @property
    def packed_length(self) -> list[int]:
        """Tokens of every pack, for the host's statistics."""
        return [int(tokens) for tokens in self.plan.pack_tokens]

    def __getitem__(self, position: int) -> Pack:
        """The rows of a pack as the host's collator takes them: lists, each with its `length`."""
        members = super().__getitem__(position)
        return Pack(_as_rows(members), pack_id=members.pack_id)


class SwiftStream(StreamingPackedDataset):
    """Packs of a stream of rows, as ms-swift's template encodes them."""


def _as_rows(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scaled = any(member.get("loss_scale") is not None for member in members)
    return [_as_lists(member, scaled) for member in members]


def _as_lists(member: Mapping[str, Any], scaled: bool) -> dict[str, Any]:
    made = {**member, **{key: torch.as_tensor(member[key]).tolist() for key in ("input_ids", "labels")}}
    made["length"] = len(made["input_ids"])
    if scaled and made.get("loss_scale") is None:
        made["loss_scale"] = [float(label != -100) for label in made["labels"]]
    return made


class SwiftCollator:
    """The host's collator, its boundaries compared with ours.

    Where positions carry the boundaries (sdpa, eager), the restarting text row goes before mRoPE positions.
    """

    def __init__(self, template: Any, flash: bool) -> None:
        self.template, self.flash = template, flash

    def __call__(self, packs: list[Any]) -> PackBatch:
        packs = [_as_rows(pack) for pack in packs]
        batch = PackBatch.of(self.template.data_collator(packs), [one for pack in packs for one in pack])
        text = batch.get("text_position_ids")
        text = batch["position_ids"] if text is None else text
        if batch.get("attention_mask") is not None or segments_of(text[0]) != [*batch.lengths]:
            raise IsolationError(
                f"the template's collator keeps samples {batch.sample_ids} apart as {segments_of(text[0])} "
                f"tokens, the pack holds {[*batch.lengths]}",
                hint="this template cannot pack; train it unpacked",
            )
        if not self.flash and batch["position_ids"].ndim == 3 and batch["position_ids"].shape[0] == 3:
            batch["position_ids"] = torch.cat([text[None].to(batch["position_ids"]), batch["position_ids"]])
        batch.filler = all(is_filler(pack) for pack in packs)
        return batch


class SwiftMixin(HostMixin):
    """What is put before the class of ms-swift's trainer."""

    template: Any

    def packs_check(self, batch: Any) -> None:
        """The collator has compared the boundaries of the host's own rows; a hook watches the positions."""
        if not isinstance(self.packs_collator, SwiftCollator):
            super().packs_check(batch)

    def packs_watched(self, model: Any, inputs: Any) -> Any:
        """A hook watches every pass already."""
        return nullcontext()

    def packs_of_evaluation(self, eval_dataset: Any) -> PackedDataset | None:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return data if isinstance(data, SwiftPacks) else None

    def packs_check_loss(self, model: Any, inputs: Any, count: Any) -> None:
        """The host weighs the mean of each pass by its share of the tokens; its users' losses may not."""
        name, made = own_loss(self), type(self.template).__mro__
        if name is None and sum("compute_sft_loss" in vars(kind) for kind in made) > 1:
            name = f"the loss of {type(self.template).__name__}"
        if name is not None:
            base = super().compute_loss
            check_loss(self, name, lambda i, n: base(model, i, num_items_in_batch=n), inputs, count)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The host's loss; 0 where a pack has no supervised token."""
        if supervised(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)
        wants = kwargs.pop("return_outputs", args[0] if args else False)
        _, outputs = super().compute_loss(model, inputs, True, *args[1:], **kwargs)
        loss = outputs.logits.float().sum() * 0.0
        return (loss, outputs) if wants else loss


def _take_over(pipeline: Any, trainer: Any, balance: str | None) -> None:
    """Give the trainer the packs' loaders, and every forward pass its `use_cache=False`."""
    args, data = trainer.args, trainer.train_dataset
    bare = bare_model(trainer.model)
    check_isolation(bare)
    view: Any = data.packs if isinstance(data, SwiftPacks) else args
    ranks = view.world_size
    if args.world_size != ranks:
        raise ConfigError(
            f"{counted(ranks, 'processes')} were started but the trainer knows of {args.world_size}",
            hint="on CPUs set --use_cpu true",
        )
    if args.dataloader_num_workers and args.dataloader_multiprocessing_context is None:
        # As ms-swift's own loaders: its settings of pixel limits live in the process, spawned ones lack them.
        args.dataloader_multiprocessing_context = "fork"
    with unchanged_on_failure(trainer):
        trainer.__class__ = type(f"Packed{type(trainer).__name__}", (SwiftMixin, type(trainer)), {})
        trainer.packs_eval = None
        packs = trainer.packs_of(data, balance, shuffle=_shuffles(args), seed=args.data_seed or 0)
        check_source(packs, args)
        flash = str(pipeline.args.attn_impl or "").startswith("flash")
        own = isinstance(data, SwiftPacks | SwiftStream)
        collate = SwiftCollator(pipeline.template, flash) if own else None
        trainer.add_callback(_cache_off(bare))
        trainer.packs_start(packs, collate)


def _cache_off(bare: Any) -> Any:
    from transformers import TrainerCallback

    rows = getattr(family_for(bare), "packed_position_rows", 1)

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not module.training and "position_ids" not in kwargs:
            return args, kwargs
        positions = kwargs.get("position_ids")
        flash = "cu_seq_lens_q" in kwargs and str(module.config._attn_implementation).startswith("flash")
        if kwargs.get("attention_mask") is not None:
            made = "; ".join(foreign_functions(module)) or "the template"
            raise IsolationError(
                f"packed samples would read each other: the model is given an attention_mask ({made})",
                hint="take that function out of the model before training, or train it unpacked",
            )
        known = positions is not None and (positions.shape[0] == rows and (positions.ndim == 3) == (rows > 1))
        if positions is None or not (flash or known):
            raise IsolationError("the template changed the positions of a pack", hint="train it unpacked")
        return args, {**kwargs, "use_cache": False}

    class CacheOff(TrainerCallback):  # type: ignore[misc]
        """Registers the check behind the template's own hook, which makes its arguments anew."""

        handle: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.handle = bare.register_forward_pre_hook(check, with_kwargs=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.handle is not None:
                self.handle.remove()

    return CacheOff()
