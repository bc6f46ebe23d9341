"""VeOmni's batches of packs: its own `MainCollator` makes them, from samples as packs hold them.

Samples stay in the form of every other trainer, media placeholders among their ids; VeOmni's form (ids of 0
there, a mask for each medium) is made here and undone by `Samples`.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..collate import IGNORE, SAMPLE_FIELDS, PackBatch, attention_of
from ..collate.boundaries import config_of
from ..collate.pack_batch import offsets
from ..collate.rows import members_of
from ..errors import InputError, SampleError, counted
from ..train.start_up import prove

__all__ = ["MainBatch", "Samples", "StepLoader", "placeholders", "watch"]

logger = logging.getLogger(__name__)


def placeholders(model: Any) -> dict[str, int]:
    """Mask of a medium -> its id; of the models that VeOmni gives such masks."""
    if not hasattr(model, "get_position_id_func"):
        return {}
    ids = {f"{kind}_mask": getattr(config_of(model), f"{kind}_token_id", None) for kind in ("image", "video")}
    return {name: int(token) for name, token in ids.items() if token is not None}


class Samples:
    """The samples that VeOmni makes of its rows: one each, or (`several`) the chunks of a long text."""

    def __init__(self, rows: Any, media: Mapping[str, int], several: bool) -> None:
        self.rows, self.media, self.places = rows, media, None
        if several:
            counts = [len(rows[row]) for row in range(len(rows))]
            self.places = [(row, part) for row, count in enumerate(counts) for part in range(count)]

    def __len__(self) -> int:
        return len(self.rows if self.places is None else self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, part = (index, 0) if self.places is None else self.places[index]
        made = self.rows[row]
        if self.places is None and len(made) != 1:
            raise SampleError(
                "several_samples", f"row {row} makes {counted(len(made), 'samples')}, expected one"
            )
        return _as_sample(made[part], self.media)


def _as_sample(row: Mapping[str, Any], media: Mapping[str, int]) -> dict[str, Any]:
    """What VeOmni's transform makes of a row, in the form of packs."""
    sample = {k: v for k, v in row.items() if k not in ("attention_mask", "mm_token_type_ids", *media)}
    sample["input_ids"] = row["input_ids"].clone()
    for name, token in media.items():
        sample["input_ids"][row[name]] = token
    return sample


class MainBatch:
    """A list of packs -> the batch that VeOmni makes of their samples, with the boundaries of the packs.

    Without flash attention it holds what transformers finds boundaries in: no mask (one of ones hides where
    samples begin), and with t, h, w positions also those of the text ([4,1,T]).

    Args:
        collate: VeOmni's `MainCollator`.
        model: the transformers model inside.
    """

    def __init__(self, collate: Any, model: Any) -> None:
        self.collate, self.media = collate, placeholders(model)
        self.flash = "flash" in str(attention_of(model))

    def __call__(self, packs: Sequence[Any]) -> PackBatch:
        members = [one for given in members_of(packs) for one in given]
        batch = PackBatch(self.collate([self._row(one) for one in members]))
        lengths = [len(one["input_ids"]) for one in members]
        tail = int(batch["cu_seq_lens_q"][-1]) - sum(lengths)
        batch.lengths, batch.tail = (*lengths, *([tail] if tail else [])), tail
        batch.sample_ids = tuple(one["sample_id"] for one in members if "sample_id" in one)
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
        for name in ("loss_scale", "weight"):
            if name in sample and not bool((torch.as_tensor(sample[name]) == 1).all()):
                raise InputError(f"sample {sample.get('sample_id')} has a {name}, which VeOmni does not read")
        row = {
            k: v for k, v in sample.items() if k not in (*SAMPLE_FIELDS, "loss_scale", "mm_token_type_ids")
        }
        ids = row["input_ids"] = torch.as_tensor(row["input_ids"]).clone()
        row["labels"] = torch.as_tensor(row["labels"]).clone()
        row["labels"][:1] = IGNORE  # VeOmni counts it among the tokens of the loss, and trains it nowhere
        row["attention_mask"] = torch.ones_like(ids)
        for name, token in self.media.items():
            row[name] = ids == token
            ids[row[name]] = 0
        places = torch.as_tensor(row.get("position_ids", torch.arange(len(ids))))
        row["position_ids"] = places.expand(3, -1) if self.media else places.reshape(-1)
        return row


class StepLoader:
    """Lists of the micro batches of a step, with the state of the packs: what VeOmni reads and saves.

    Args:
        packs: a `PackSource`.
        collate: list of one pack -> batch.
        accum: packs of a step on this rank.
        settings: VeOmni's `data.dataloader`.
    """

    def __init__(self, packs: Any, collate: Any, accum: int, settings: Any) -> None:
        options: dict[str, Any] = {"pin_memory": settings.pin_memory and torch.cuda.is_available()}
        if settings.num_workers:  # they start as VeOmni's do
            context = multiprocessing.get_start_method()
            options |= {"prefetch_factor": settings.prefetch_factor, "multiprocessing_context": context}
        self.packs, self.accum = packs, accum
        self.loader = packs.loader(collate, num_workers=settings.num_workers, **options)
        self.set_epoch = self.loader.set_epoch
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def __len__(self) -> int:
        return len(self.packs) // self.accum

    def __iter__(self) -> Iterator[list[PackBatch]]:
        batches = iter(self.loader)
        while step := list(itertools.islice(batches, self.accum)):
            yield step


def watch(base: Any, packs: Any, model: Any) -> None:
    """Prove isolation when training begins, behind VeOmni's loading of weights and checkpoint.

    Its checkpoints, once on disk, tell a growing directory what they cover.

    Args:
        base: VeOmni's `BaseTrainer`.
        packs: a `PackSource`.
        model: the transformers model inside.
    """
    from veomni.distributed.parallel_state import get_parallel_state
    from veomni.trainer.callbacks.base import Callback

    class Packs(Callback):  # type: ignore[misc]
        def on_train_begin(self, state: Any, **kwargs: Any) -> None:
            if get_parallel_state().sp_enabled:
                logger.warning("sequence parallel: the isolation proof is not run, nothing is proven")
                return
            own = MainBatch(replace(base.collate_fn, pad_to_length=False), model)  # short rows are compared
            prove(base.model, packs, collate=lambda given: PackBatch(own(given), use_cache=False))

    save = base.checkpointer_callback._save_checkpoint

    def saved(state: Any) -> None:
        held = base.data_iterator.state_dict()
        save(state)
        base.checkpointer.wait_for_pending_save()
        packs.acknowledge(held)

    base._callbacks.append(Packs(base))
    if packs.kind == "growing":
        base.checkpointer_callback._save_checkpoint = saved
