"""ms-swift: `swift sft … --packing true --external_plugins plugin.py`, where the plugin calls `install()`.

    from packtrain.integrations.ms_swift import install
    install()

Everything else stays ms-swift's: arguments, template, collator, trainer, losses. With `--packing true`,
our plan and sampler stand in the place of its packing dataset: one plan over the whole dataset, its last
`N mod W` packs are not lost, a row that fails is never replaced by another (`--strict true` stops, else a
weightless segment takes its place and `packs/failed.jsonl` says so), and lengths come from metadata, so that
`--lazy_tokenize` and packing go together. Flags that cannot keep their meaning are refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..collate.boundaries import family_for
from ..data import PackedDataset
from ..errors import ConfigError, IsolationError
from ..planning.lengths import Lengths
from ..template import ensure_torchvision
from ..train.attention import segments_of
from ..train.loss import bare_model
from ..train.meter import supervised
from ..world import World

ensure_torchvision()

from ..train.at_begin import ProofAtBegin  # noqa: E402
from ..train.trainer import pack_loader  # noqa: E402
from ._checks import check_isolation, check_samples_per_step  # noqa: E402
from ._plan import PLACE, pack_rows  # noqa: E402
from ._swift_flags import check_flags  # noqa: E402
from ._swift_template import SwiftTemplate  # noqa: E402
from .transformers import PackingMixin  # noqa: E402

__all__ = ["SwiftCollator", "SwiftPacks", "install"]

logger = logging.getLogger(__name__)


def install(
    *, samples_per_step: int | str | None = None, balance: str | None = "step", **options: Any
) -> None:
    """Put our plan and sampler into `swift sft`. Call it in the file named by `--external_plugins`.

    Args:
        samples_per_step: as in `integrations.transformers.pack`.
        balance: as there.
        options: further keyword arguments of `packtrain.plan`.
    """
    check_samples_per_step(samples_per_step)
    from swift.arguments import SftArguments
    from swift.arguments.base_args.base_args import BaseArguments
    from swift.pipelines.train.sft import SwiftSft

    settings = {"samples_per_step": samples_per_step, "balance": balance, "options": options}
    if hasattr(SwiftSft, "_packtrain"):
        SwiftSft._packtrain = settings
        return
    SwiftSft._packtrain = settings
    lazy, flash = BaseArguments._init_lazy_tokenize, SftArguments._check_padding_free
    process, train = SwiftSft._post_process_datasets, SwiftSft.train

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

    def _post_process_datasets(self: Any, datasets: list[Any]) -> list[Any]:
        if not self.args.packing:
            return list(process(self, datasets))
        return _packed(self, datasets, SwiftSft._packtrain)

    def train_on_packs(self: Any, trainer: Any) -> Any:
        if isinstance(trainer.train_dataset, SwiftPacks):
            _take_over(self, trainer, SwiftSft._packtrain["balance"])
        return train(self, trainer)

    BaseArguments._init_lazy_tokenize = _init_lazy_tokenize
    SftArguments._check_padding_free = _check_padding_free
    SwiftSft._post_process_datasets = _post_process_datasets
    SwiftSft.train = train_on_packs


def _packed(pipeline: Any, datasets: list[Any], settings: Mapping[str, Any]) -> list[Any]:
    """The datasets of `swift sft` as packs; rows that are generated from in evaluation stay rows."""
    args, template = pipeline.args, pipeline.template
    template.packing = template.padding_free = True
    own = SwiftTemplate(template)
    place = World(max(0, args.rank), max(1, args.global_world_size))
    made = list(datasets)
    for number, (name, rows) in enumerate(zip(("train", "val"), datasets, strict=False)):
        if rows is None or (name == "val" and getattr(args, "predict_with_generate", False)):
            continue
        options = dict(settings["options"])
        steps = settings["samples_per_step"] if name == "train" else None
        if not steps:
            options.setdefault("packer", "sequential" if args.packing_strategy == "sequential" else "auto")
        else:
            options.update(_steps(args, steps, place.size))
        made[number] = pack_rows(
            rows,
            own.encode,
            name=name,
            folder=Path(args.output_dir),
            place=place,
            measure=_lengths_of(rows) or own,
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

    def __getitem__(self, position: int) -> list[dict[str, Any]]:
        """The rows of a pack as the host's collator takes them: lists, each with its `length`."""
        members = super().__getitem__(position)
        scaled = any(member.get("loss_scale") is not None for member in members)
        return [_as_lists(member, scaled) for member in members]


def _as_lists(member: Mapping[str, Any], scaled: bool) -> dict[str, Any]:
    made = dict(member)
    for key in ("input_ids", "labels"):
        made[key] = torch.as_tensor(made[key]).tolist()
    made["length"] = len(made["input_ids"])
    if scaled and made.get("loss_scale") is None:
        made["loss_scale"] = [0.0] * made["length"]
    return made


class SwiftCollator:
    """The host's collator, its boundaries compared with ours.

    Where positions carry the boundaries (sdpa, eager), the restarting text row goes before mRoPE positions.
    """

    def __init__(self, template: Any, flash: bool) -> None:
        self.template, self.flash = template, flash

    def __call__(self, packs: list[Any]) -> dict[str, Any]:
        lengths = [member["length"] for pack in packs for member in pack]
        ids = tuple(member.get("sample_id") for pack in packs for member in pack)
        batch = dict(self.template.data_collator([[dict(member) for member in pack] for pack in packs]))
        text = batch.get("text_position_ids")
        text = batch["position_ids"] if text is None else text
        if batch.get("attention_mask") is not None or segments_of(text[0]) != lengths:
            raise IsolationError(
                f"the template's collator keeps samples {ids} apart as {segments_of(text[0])} tokens, "
                f"the pack holds {lengths}",
                hint="this template cannot pack; train it unpacked",
            )
        if not self.flash and batch["position_ids"].ndim == 3 and batch["position_ids"].shape[0] == 3:
            batch["position_ids"] = torch.cat([text[None].to(batch["position_ids"]), batch["position_ids"]])
        return batch


class SwiftMixin(PackingMixin):
    """What is put before the class of ms-swift's trainer."""

    template: Any
    train_dataset: SwiftPacks
    eval_dataset: Any

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        return super().get_train_dataloader()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return super(PackingMixin, self).get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def packs_first(self) -> list[Any]:
        """Two packs for the proof."""
        data = self.train_dataset
        return [data[position] for position in range(min(2, len(data)))]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(data, SwiftPacks):
            return super(PackingMixin, self).get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return pack_loader(data, self.packs_order(data), self.packs_collator, self.args, start=None)

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
    bare = bare_model(trainer.model)
    check_isolation(bare)
    ranks = trainer.train_dataset.packs.world_size
    if trainer.args.world_size != ranks:
        raise ConfigError(
            f"{ranks} processes were started but the trainer knows of {trainer.args.world_size}",
            hint="on CPUs set --use_cpu true",
        )
    if trainer.args.n_gpu > 1:
        raise ConfigError(
            f"n_gpu={trainer.args.n_gpu} cannot be kept: one process would split packs over GPUs",
            hint="start it with NPROC_PER_NODE",
        )
    if trainer.args.dataloader_num_workers and trainer.args.dataloader_multiprocessing_context is None:
        # As ms-swift's own loaders: its settings of pixel limits live in the process, spawned ones lack them.
        trainer.args.dataloader_multiprocessing_context = "fork"
    trainer.__class__ = type(f"Packed{type(trainer).__name__}", (SwiftMixin, type(trainer)), {})
    flash = str(pipeline.args.attn_impl or "").startswith("flash")
    trainer.packs_eval = None
    seed = trainer.args.data_seed or 0
    trainer.packs_start(trainer.train_dataset, bare, balance, shuffle=_shuffles(trainer.args), seed=seed)
    trainer.packs_collator = SwiftCollator(pipeline.template, flash)
    trainer.add_callback(_cache_off(bare))
    trainer.add_callback(ProofAtBegin(trainer, trainer.packs_first, collate=trainer.packs_collator))


def _cache_off(bare: Any) -> Any:
    from transformers import TrainerCallback

    rows = getattr(family_for(bare), "packed_position_rows", 1)

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not module.training and "position_ids" not in kwargs:
            return args, kwargs
        positions = kwargs.get("position_ids")
        flash = "cu_seq_lens_q" in kwargs and str(module.config._attn_implementation).startswith("flash")
        if kwargs.get("attention_mask") is not None or positions is None or (
            not flash and (positions.shape[0] != rows or (positions.ndim == 3) != (rows > 1))
        ):  # fmt: skip
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
