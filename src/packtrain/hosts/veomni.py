"""VeOmni: `pack(trainer)` and its TextTrainer or VLMTrainer trains on packs.

Its loader is replaced: a step is a list of micro batches of one pack, made by its own `MainCollator`.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..collate import IGNORE, SAMPLE_FIELDS, PackBatch, attention_of
from ..collate.model_traits import config_of
from ..collate.pack_batch import members_of, offsets
from ..errors import ConfigError, InputError
from ..packs.source import is_sized
from ..train.loss import bare_model
from ..train.start_up import prove
from ..world import World
from ._plan import Steps, pack_rows, rank_packs, say
from ._rows import Parts, Reads, tell_cut, unread_rows

logger = logging.getLogger(__name__)


def pack(trainer: Any, pack_length: int | None = None, *, source: Any = None, **options: Any) -> Any:
    """Let a trainer of VeOmni train on packs.

    Args:
        trainer: a `TextTrainer`, `VLMTrainer` or `BaseTrainer`, complete, not yet trained.
        pack_length: cap of a pack in tokens; None: `micro_batch_size` x `max_seq_len`.
        source: packs that are made already, of any kind; None: the rows of `train_dataset`.
        options: `plan`, `measure` ("encode"), `balance` ("step") and `ignore_keys` of
            `hosts.transformers.pack`, and keyword arguments of `packtrain.plan`.

    Raises:
        ConfigError: a setting that packs cannot keep, with the reason.
        IsolationError (when training begins): packed samples would read each other in this model.
    """
    from veomni.distributed.parallel_state import get_parallel_state

    base, state = getattr(trainer, "base", trainer), get_parallel_state()
    train, data, balance = base.args.train, base.args.data, options.pop("balance", "step")
    if data.data_type in ("classification", "dpo", "diffusion"):
        raise ConfigError(f"data_type={data.data_type} cannot be kept: packs are for supervised training")
    if state.cp_size > 1:
        raise ConfigError("cp_size cannot be kept: nobody has shown packs under it", hint="set it to 1")
    if source is None:
        options.setdefault("pack_length", pack_length or train.micro_batch_size * data.max_seq_len)
        source = _planned(base, state.dp_size, options)
    count = train.global_batch_size // (train.micro_batch_size * state.dp_size)
    told, bare = data.dataloader, bare_model(base.model)
    order = {"count": count, "seed": train.seed, "balance": balance, "drop_last": told.drop_last}
    packs, count = rank_packs(source, rank=state.dp_rank, ranks=state.dp_size, **order)
    collate = MainBatch(base.collate_fn, bare)
    short = MainBatch(replace(base.collate_fn, pad_to_length=False), bare)

    def first() -> None:
        if state.sp_enabled:
            logger.warning("sequence parallel: the isolation proof is not run, nothing is proven")
        else:
            prove(base.model, packs, collate=lambda given: PackBatch(short(given), use_cache=False))

    base.train_dataloader = Steps(
        *(packs, collate, count, first),
        num_workers=told.num_workers,
        prefetch_factor=told.prefetch_factor,
        pin_memory=told.pin_memory and torch.cuda.is_available(),
        multiprocessing_context=multiprocessing.get_start_method(),  # workers start as VeOmni's do
    )
    if packs.kind == "growing":
        _acknowledge(base, packs)
    if is_sized(packs):
        base.args._train_steps = base.train_steps = len(base.train_dataloader)
        base._build_lr_scheduler()
    if train.global_rank == 0:
        say("a step: %d micro batches of one pack a rank, %s steps a pass", count, base.args.train_steps)
    return trainer


def _planned(base: Any, ranks: int, options: dict[str, Any]) -> Any:
    """The packs of the trainer's rows."""
    train, data, rows = base.args.train, base.args.data, base.train_dataset
    plan, measure, ignore = (options.pop(name, None) for name in ("plan", "measure", "ignore_keys"))
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise ConfigError(
            f"train_dataset is a {type(rows).__name__} without length or index: it cannot be planned",
            hint="data.datasets_type: mapping, or pack(trainer, source=TokenBudgetDataset(…))",
        )
    if base.collate_fn.pad_to_length:
        options.setdefault("long_samples", "error")
    if not train.dyn_bsz:  # a step holds the samples that it held before
        last = "drop" if data.dataloader.drop_last else "keep"
        same = {"samples_per_step": train.global_batch_size, "packs_multiple": ranks, "last_step": last}
        options = {**same, "seed": train.seed, **options}
    place, chats = World(train.global_rank, train.world_size), data.data_type == "conversation"
    held: Any = getattr(rows, "_data", None)
    pictures = bool(_media(bare_model(base.model)))
    looks = chats and plan is None and hasattr(held, "column_names")
    faults = unread_rows(held, _reads(data, pictures, held.column_names), ignore or ()) if looks else {}
    made = pack_rows(
        Parts(rows, several=data.data_type == "plaintext"),
        dict,
        name="train",
        folder=Path(train.checkpoint.output_dir),
        place=place,
        measure="encode" if measure is None else measure,
        plan=plan,
        faults=faults,
        options=options,
    )
    if made.lengths is not None and chats and not pictures and place.is_writer:
        told = f"it holds max_seq_len={data.max_seq_len} tokens: what came before was cut"
        tell_cut([(row, told) for row, tokens in enumerate(made.lengths) if tokens >= data.max_seq_len])
    return made


def _reads(data: Any, pictures: bool, columns: Sequence[str]) -> Reads:
    """What VeOmni reads of a row of a chat."""
    if pictures:  # what a preprocessor reads of a message is its own matter; without the column, of a row too
        own = {"conversations", "images", "videos", "source", "source_name"}
        return Reads(columns=own if "conversations" in columns else columns, media=("images", "videos"))
    keys = [data.text_keys] if isinstance(data.text_keys, str) else data.text_keys
    first = [key for key in keys if key in columns][:1]
    rendered = data.chat_template in ("tokenizer", "gpt_oss")  # a jinja template may read any key
    return Reads(columns=first, chats=() if rendered else first, says={"role", "content", "loss_mask"})


def _acknowledge(base: Any, packs: Any) -> None:
    """Checkpoints, once on disk, tell a growing directory what they cover."""
    save = base.checkpointer_callback._save_checkpoint

    def saved(state: Any) -> None:
        held = base.data_iterator.state_dict()
        save(state)
        base.checkpointer.wait_for_pending_save()
        packs.acknowledge(held)

    base.checkpointer_callback._save_checkpoint = saved


def _media(model: Any) -> dict[str, int]:
    """Mask of a medium -> its id; of the models that VeOmni gives such masks."""
    if not hasattr(model, "get_position_id_func"):
        return {}
    ids = {f"{kind}_mask": getattr(config_of(model), f"{kind}_token_id", None) for kind in ("image", "video")}
    return {name: int(token) for name, token in ids.items() if token is not None}


class MainBatch:
    """A list of packs -> the batch that VeOmni's `MainCollator` makes of them, with their boundaries.

    Without flash attention it holds what transformers finds boundaries in: no mask (one of ones hides where
    samples begin), and with t, h, w positions also those of the text ([4,1,T]).
    """

    def __init__(self, collate: Any, model: Any) -> None:
        self.collate, self.media, self.flash = collate, _media(model), "flash" in str(attention_of(model))

    def __call__(self, packs: Sequence[Any]) -> PackBatch:
        members = [one for given in members_of(packs) for one in given]
        made = self.collate([self._row(one) for one in members])
        batch = PackBatch.of(made, members, int(made["cu_seq_lens_q"][-1]))
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "linear_attn_cu_seq_lens_q"):
            batch[name] = offsets(batch.lengths)
        batch["max_length_q"] = batch["max_length_k"] = max(batch.lengths)
        if not self.flash:
            del batch["attention_mask"]
            if self.media:  # transformers asks for a row of text positions, and then no longer for [1, 3, T]
                text = torch.cat([torch.arange(length) for length in batch.lengths])
                batch["position_ids"] = torch.cat([text[None], batch["position_ids"][0]])[:, None]
        return batch

    def _row(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A sample in VeOmni's form, which has ids of 0 and a mask for the placeholders of media."""
        for name in ("loss_scale", "weight"):
            if bool((torch.as_tensor(sample.get(name, 1)) != 1).any()):
                raise InputError(f"sample {sample.get('sample_id')} has a {name}, which VeOmni does not read")
        left = (*SAMPLE_FIELDS, "loss_scale", "mm_token_type_ids")
        row = {name: value for name, value in sample.items() if name not in left}
        ids, labels = (torch.as_tensor(row[name]).clone() for name in ("input_ids", "labels"))
        labels[:1] = IGNORE  # VeOmni counts it among the tokens of the loss, and trains it nowhere
        for name, token in self.media.items():
            row.setdefault(name, ids == token)
            ids[row[name]] = 0
        places = torch.as_tensor(row.get("position_ids", torch.arange(len(ids))))
        row["position_ids"] = places.expand(3, -1) if self.media else places.reshape(-1)
        return {**row, "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
