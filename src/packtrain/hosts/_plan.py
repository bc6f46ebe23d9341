"""From rows to packs on every rank: rank 0 measures, audits and plans, the others open what it wrote.

No collective waits meanwhile, so long measuring meets no timeout of a process group.
"""

from __future__ import annotations

import atexit
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data import PackedDataset
from ..errors import ConfigError, SampleError, counted
from ..measuring.audit import audit
from ..measuring.eligibility import probe_static
from ..packs.source import PackSource, pack_source
from ..pipeline.plan import plan_lengths
from ..pipeline.publish import publish_details
from ..pipeline.ranks import StartUp
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..remote.places import typed
from ..sources._memory import InMemory
from ..world import World
from ._rows import ChatReader, measure_rows

logger = logging.getLogger(__name__)

#: Folder in the host's output folder that holds lengths and plans.
PLACE = "packs"
_NAMED = 5  # samples named that are in no pack


def pack_rows(
    rows: Any,
    encode: Callable[[Any], Mapping[str, Any]],
    *,
    name: str,
    folder: Path,
    place: World,
    measure: Any = None,
    plan: Any = None,
    reader: ChatReader | None = None,
    faults: Mapping[int, SampleError] | None = None,
    audited: int = 32,
    drop_last: bool = False,
    timeout_s: float = 7200,
    repeat_loss: str = "keep",
    kind: Callable[..., PackedDataset] = PackedDataset,
    options: Mapping[str, Any],
) -> PackedDataset:
    """The packs of `rows`, aligned to the ranks.

    Args:
        name: "train" or the name of an evaluation set: lengths and plans lie under it in `folder`.
        plan: a plan or its folder, made before; None: planned here.
        faults: rows that are left out, and why.
        kind: makes the dataset; arguments as of `PackedDataset`.
        audited: rows that are encoded for real and compared with their measured length; 0 also leaves out
            the look at whether rows move with order or epoch.
        options: keyword arguments of `packtrain.plan`.

    Raises:
        DriftError: a measured length is not the encoded one.
        InputError: rows change with the order of reading, or are others in the next epoch.
    """
    if isinstance(plan, (str, Path)):
        plan = PackPlan.load(plan)
    if plan is not None:
        made, lengths = plan, None
        if len(made.indices) + len(made.ledger) != len(rows):
            raise ConfigError(
                f"the plan is of {counted(len(made.indices) + len(made.ledger), 'samples')}, "
                f"the dataset has {len(rows)}",
                hint="plan these samples",
            )
    else:
        place_of_set, samples = folder / PLACE / name, InMemory(rows, name)
        with ExitStack() as stack:
            start = stack.enter_context(StartUp(place_of_set, place=place, timeout_s=timeout_s))

            def make(tell: Callable[[str, int, int], None]) -> Mapping[str, Any]:
                measured, words = measure_rows(
                    rows,
                    encode,
                    measure,
                    reader=reader or ChatReader(),
                    faults=faults,
                    progress=partial(tell, "measuring"),
                )
                if audited:
                    audit(samples, measured, encode, count=audited)
                    probe_static(samples, encode)
                held = (place_of_set / f"lengths-{measured.digest[:12]}").resolve()
                if not (held / "lengths.json").is_file():
                    measured.save(held)
                publish_details(held, words)
                planned = plan_lengths(measured, None, **options)
                kept = (place_of_set / f"plan-{planned.checksum[:12]}").resolve()
                if not (kept / "plan.json").is_file():
                    planned.save(kept, origin={"lengths": str(held), "rows": name})
                return {"lengths": str(held), "plan": str(kept)}

            told = start.share(make)
            made, lengths = PackPlan.load(told["plan"]), Lengths.load(told["lengths"])
            if not _read_by_all(place):
                atexit.register(stack.pop_all().close)
    if place.is_writer:
        _tell(name, made, None if lengths is None else told["plan"])
    aligned: AlignedPlan = made.align(place.size, drop_last=drop_last)
    return kind(aligned, InMemory(rows, name), encode, lengths=lengths, repeat_loss=repeat_loss)


def say(line: str, *values: object) -> None:
    """A line about the packs of a trainer, which shows without logging being set up, as a trainer's own.

    A level that was set for this package stays.
    """
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logging.getLogger("packtrain").level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.info(line, *values)


def _tell(name: str, made: PackPlan, folder: str | None) -> None:
    """What became of the samples, and the folder that `packtrain show` takes."""
    stats = made.stats()
    if stats["over_long_packs"]:
        say(
            "%s: %s of %s exceed %s tokens, longest %s: each is one long sample",
            name, f"{stats['over_long_packs']:,}", counted(stats["packs"], "packs"),
            f"{made.spec.pack_length:,}", f"{stats['longest_pack']:,}",
        )  # fmt: skip
    say(
        "%s: %s of %s in %s of %s tokens, %.1f %% full, %.2f samples a pack%s",
        name, f"{stats['samples']:,}", counted(stats["read"], "samples"), counted(stats["packs"], "packs"),
        f"{made.spec.pack_length:,}", 100 * stats["efficiency"], stats["samples_per_pack"],
        f"; packtrain show {typed(folder)}" if folder else "",
    )  # fmt: skip
    if len(made.ledger):
        ids, count = made.ledger.ids[:_NAMED].tolist(), counted(len(made.ledger), "samples")
        named = ", ".join(f"{i} ({r})" for i, r in zip(ids, made.ledger.reasons[:_NAMED], strict=True))
        named += ", …" if len(made.ledger) > _NAMED else ""
        logger.warning("%s: %s in no pack, %s: %s", name, count, made.ledger.counts(), named)


def _read_by_all(place: World) -> bool:
    """Wait until every rank has read what rank 0 told; False: they cannot talk yet, so it must stay told."""
    if place.size == 1:
        return True
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    torch.distributed.barrier()
    return True


# --------------------------------------------------------------------------------------------
# Packs for trainers that know ranks and steps of their own and are no transformers Trainer.
# --------------------------------------------------------------------------------------------
# packs, count = rank_packs(data, rank=0, ranks=8, count=4, seed=0)    # a step: 4 packs of each of 8 ranks
# loader = Steps(packs, collate, count, prove_first)                   # lists of 4 batches
def rank_packs(
    data: Any,
    *,
    rank: int,
    ranks: int,
    count: int,
    seed: int,
    balance: str | None = "step",
    drop_last: bool = False,
) -> tuple[PackSource, int]:
    """The packs of a data-parallel rank, and how many of them a step is.

    Args:
        data: packs of any kind; those over a plan come in whole steps of all ranks.
        count: packs of a rank in a step; a plan of steps of samples says its own.
        seed: of the epoch orders.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        drop_last: the last packs that fill no step are left out; else some come twice.
    """
    if hasattr(data, "over"):
        stepped = data.plan.spec.samples_per_step is not None
        steps = {} if stepped else {"grad_accum": count}
        data = data.over(data.plan.align(ranks, drop_last=drop_last and not stepped, **steps))
        count = data.packs.block // ranks if stepped else count
    even = None if balance is None or count == 1 else Balance(grad_accum=count, mode=balance)
    order: dict[str, Any] = {"rank": rank, "world_size": ranks, "seed": seed, "balance": even}
    return pack_source(data, grad_accum=count, **order), count


class Steps:
    """Lists of the batches of a step, with the state of the packs.

    Args:
        packs: a `PackSource`.
        collate: list of one pack -> batch.
        count: batches of a step.
        first: called before the first pass, when weights and checkpoint are loaded.
        options: of the loader.
    """

    def __init__(
        self, packs: Any, collate: Any, count: int, first: Callable[[], None], **options: Any
    ) -> None:
        self.packs, self.count, self.first = packs, count, first
        self.loader = packs.loader(collate, **options)
        self.set_epoch = self.loader.set_epoch
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def __len__(self) -> int:
        return len(self.packs) // self.count

    def __iter__(self) -> Iterator[list[Any]]:
        first, self.first = self.first, lambda: None
        first()
        batches = iter(self.loader)
        return iter(lambda: list(itertools.islice(batches, self.count)), [])
