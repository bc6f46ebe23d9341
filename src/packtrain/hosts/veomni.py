"""VeOmni: `pack(trainer)` and its TextTrainer or VLMTrainer trains on packs.

    from packtrain.hosts.veomni import pack
    trainer = TextTrainer(args)
    pack(trainer)                                     # rows of its mapping dataset: measured and planned
    pack(trainer, source=TokenBudgetDataset(…))       # packs of any kind
    trainer.train()

Arguments, templates, transforms, collator, model and losses stay VeOmni's. What is replaced is its loader: a
step is a list of micro batches, each of one pack, made by its own `MainCollator` (`_veomni_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..packs.source import pack_source
from ..planning.balance import Balance
from ..train.loss import bare_model
from ..train.passes import is_sized
from ..world import World
from ._plan import pack_rows, say
from ._rows import tell_cut
from ._unread import Reads, unread_rows
from ._veomni_batch import MainBatch, Samples, StepLoader, placeholders, watch

__all__ = ["pack"]


def pack(
    trainer: Any,
    pack_length: int | None = None,
    *,
    source: Any = None,
    plan: Any = None,
    measure: Any = "encode",
    balance: str = "step",
    ignore_keys: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Let a trainer of VeOmni train on packs.

    Args:
        trainer: a `TextTrainer`, `VLMTrainer` or `BaseTrainer`, complete, not yet trained.
        pack_length: cap of a pack in tokens; None: `micro_batch_size` x `max_seq_len`.
        source: packs that are made already; None: the rows of `train_dataset`.
        plan, measure: as in `hosts.transformers.pack`.
        balance: how packs are spread over ranks inside a step; see `PackSampler`.
        ignore_keys: keys of rows that do not matter.
        options: further keyword arguments of `packtrain.plan`.

    Raises:
        ConfigError: a setting that packs cannot keep, with the reason.
        IsolationError (when training begins): packed samples would read each other in this model.
    """
    from veomni.distributed.parallel_state import get_parallel_state

    base = getattr(trainer, "base", trainer)
    args, state = base.args, get_parallel_state()
    train, data = args.train, args.data
    if data.data_type in ("classification", "dpo", "diffusion"):
        raise ConfigError(f"data_type={data.data_type} cannot be kept: packs are for supervised training")
    if state.cp_size > 1:
        raise ConfigError("cp_size cannot be kept: nobody has shown packs under it", hint="set it to 1")
    accum = train.global_batch_size // (train.micro_batch_size * state.dp_size)
    if source is None:
        cap = pack_length or train.micro_batch_size * data.max_seq_len
        options = {**options, **({} if plan is not None else {"pack_length": cap})}
        if base.collate_fn.pad_to_length:
            options.setdefault("long_samples", "error")
        if not train.dyn_bsz:  # a step holds the samples that it held before
            same = {"samples_per_step": train.global_batch_size, "packs_multiple": state.dp_size}
            last = "drop" if data.dataloader.drop_last else "keep"
            options = {**same, "last_step": last, "seed": train.seed, **options}
        source, accum = _planned(base, state.dp_size, accum, plan, measure, ignore_keys, options)
    order: dict[str, Any] = {"rank": state.dp_rank, "world_size": state.dp_size, "seed": train.seed}
    order["balance"] = None if accum == 1 else Balance(grad_accum=accum, mode=balance)
    packs: Any = pack_source(source, grad_accum=accum, **order)
    bare = bare_model(base.model)
    watch(base, packs, bare)
    base.train_dataloader = StepLoader(packs, MainBatch(base.collate_fn, bare), accum, data.dataloader)
    if is_sized(packs):
        args._train_steps = len(packs) // accum
        base.train_steps = args.train_steps
        base._build_lr_scheduler()
    if args.train.global_rank == 0:
        say("a step: %d micro batches of one pack a rank, %s steps a pass", accum, args.train_steps)
    return trainer


def _planned(
    base: Any, ranks: int, accum: int, plan: Any, measure: Any, ignore: Sequence[str], options: Any
) -> tuple[Any, int]:
    """The packs of the trainer's rows, and how many a rank trains in a step."""
    args, rows = base.args, base.train_dataset
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise ConfigError(
            f"train_dataset is a {type(rows).__name__} without length or index: it cannot be planned",
            hint="data.datasets_type: mapping, or pack(trainer, source=TokenBudgetDataset(…))",
        )
    media, place = placeholders(bare_model(base.model)), World(args.train.global_rank, args.train.world_size)
    held: Any = getattr(rows, "_data", None)
    chats = args.data.data_type == "conversation"
    faults = {}
    if chats and plan is None and hasattr(held, "column_names"):
        faults = unread_rows(held, _reads(args.data, bool(media), held.column_names), ignore)
    made = pack_rows(
        Samples(rows, media, several=args.data.data_type == "plaintext"),
        dict,
        name="train",
        folder=Path(args.train.checkpoint.output_dir),
        place=place,
        measure=(lambda row: len(row["input_ids"])) if measure == "encode" else measure,
        plan=plan,
        faults=faults,
        options=options,
    )
    if made.lengths is not None and chats and not media and place.is_writer:
        most = args.data.max_seq_len
        full = [i for i, tokens in enumerate(made.lengths) if tokens >= most]
        tell_cut([(i, f"it holds max_seq_len={most} tokens: what came before was cut") for i in full])
    stepped = made.plan.spec.samples_per_step is not None
    more = {} if stepped else {"grad_accum": accum}
    view = made.plan.align(ranks, drop_last=not stepped and args.data.dataloader.drop_last, **more)
    return made.over(view), view.block // ranks if stepped else accum


def _reads(data: Any, pictures: bool, columns: Sequence[str]) -> Reads:
    """What VeOmni reads of a row of a chat."""
    if pictures:  # what a preprocessor reads of a message is its own matter; without the column, of a row too
        own = {"conversations", "images", "videos", "source", "source_name"}
        return Reads(columns=own if "conversations" in columns else columns, media=("images", "videos"))
    keys = [data.text_keys] if isinstance(data.text_keys, str) else data.text_keys
    first = [key for key in keys if key in columns][:1]
    rendered = data.chat_template in ("tokenizer", "gpt_oss")  # a jinja template may read any key
    says = {"role", "content", "loss_mask"}
    return Reads(columns=first, chats=() if rendered else first, says=says)
