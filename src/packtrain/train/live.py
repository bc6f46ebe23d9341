"""Rows of a few samples through the very object that trains, which is left untouched: passes of the proof.

Every pass goes through the object as it is called in training (compiled, wrapped, sharded), in training mode
with dropout off, with the batches of its own collator. All ranks make the same passes in the same order, so
that a sharded model can gather its weights.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..collate import attention_of
from ..collate.model_traits import family_for, rotations_of
from ..errors import InputError, IsolationError, PacktrainError, one_line
from .loss import token_loss_sum
from .probe import Sample, media_fields, moved, opening, other_media, scale_of, size_of

Alter = Callable[[Any], Mapping[str, Any]]

#: Samples of a row that are compared with themselves alone: the first ones.
COMPARED = 3

#: Parameters whose gradients are compared; larger ones are passed over. Those that are zero hide what they
#: multiply (gates, adapters): more of them, each smaller.
_FEW, _LARGEST = 6, 1 << 23
_ZEROS, _SMALL = 64, 1 << 16

_EMBEDDED = "the embedded tokens"

#: Relative difference that another row length may make, by the coarsest type of a pass.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass
class Passes:
    """A row and its samples alone.

    Attributes:
        packed: logits [T, V] of the row.
        alone: of each of its first samples.
        gradients: of the row and of each of these, where they come from the same passes; else empty.
        graph: the passes recorded one, as others must do to have the same bits.
    """

    packed: torch.Tensor
    alone: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    graph: bool

    @property
    def scale(self) -> float:
        """Size of the logits, without those that no token moves (a padded vocabulary's: -inf or as large)."""
        sizes = self.packed.abs()
        largest = sizes.amax(0)
        return scale_of(largest[largest != sizes.amin(0)])


class NotReached(InputError):
    """A pass that does not go through the input embeddings."""


@dataclass
class Live:
    """The object that trains, and how its rows are made.

    Attributes:
        model: what is called in training.
        bare: the transformers model inside.
        collate: a list of packs -> a batch, as in training.
        base: relative difference that another row length may make; set by the first comparison.
        rounding: absolute difference of logits that this row's rounding makes; set with it.
    """

    model: Any
    bare: Any
    collate: Callable[[list[list[Sample]]], Any]
    base: float = 1e-3
    rounding: float = 0.0

    def passes(self, row: list[Sample], gradients: bool) -> Passes:
        """The row and its first samples alone; one pass gives logits and gradients where it can."""
        packs = (row, *([member] for member in row[:COMPARED]))
        if gradients and not self._apart():
            both = [self.gradients(pack, True) for pack in packs]
            return Passes(both[0][0], [one for one, _ in both[1:]], [made for _, made in both], True)
        packed, *alone = (self.logits(pack) for pack in packs)
        return Passes(packed, alone, [], False)

    def _apart(self) -> bool:
        """Models in parts over ranks, wrappers and checkpointing pass otherwise with gradients."""
        checkpointed = any(vars(m).get("gradient_checkpointing") is True for m in self.model.modules())
        if checkpointed or is_sharded(self.model):
            return True
        return unwrapped(self.model) is not getattr(self.model, "_orig_mod", self.model)

    def logits(
        self, pack: Sequence[Sample], alter: Alter | None = None, *, seed: int = 0, graph: bool = False
    ) -> torch.Tensor:
        """[T, V] of a pack, through the live object, without gradients.

        A compiled one makes its graphs for training: the same are used here, so that none is made twice.

        Args:
            alter: changes the batch.
            seed: of the random numbers of the pass.
            graph: record the graph nevertheless.
        """
        with torch.set_grad_enabled(graph or _is_compiled(self.model)), _without_sync(self.model):
            return self._forward(self.model, self._batch(pack, alter), pack, seed).detach()

    def through(self, head: nn.Linear, pack: Sequence[Sample]) -> tuple[torch.Tensor, bool]:
        """[T, V] of a pack, and whether they are, bit for bit, what the head makes of its hidden states."""
        made: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:  # not what hooks make of it
            made.append(functional.linear(args[0], module.weight, module.bias))

        with head.register_forward_hook(keep, prepend=True):
            logits = self.logits(pack)
        rows = [one.reshape(-1, one.shape[-1])[: len(logits)].to(logits.dtype) for one in made]
        return logits, len(rows) == 1 and torch.equal(rows[0], logits)

    def loss(self, batch: Mapping[str, Any], labels: torch.Tensor) -> float:
        """Sum of the token losses through the head alone; NaN where the forward wants more of a loss."""
        try:
            return float(token_loss_sum(self.model, {**batch, "labels": labels}))
        except (TypeError, ValueError, IndexError):
            return math.nan

    def eager(self, pack: Sequence[Sample]) -> Callable[[], Any]:
        """One pass to be watched by hooks."""
        return lambda: self.logits(pack)

    def gradients(
        self, pack: Sequence[Sample], whole: bool, places: Sequence[int] = range(COMPARED)
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits, and gradients of the token losses of the samples at `places`, summed; `.grad` stays.

        Args:
            whole: True: of a few parameters. False (sharded models): of the embeddings of the row.
        """
        batch = self._batch(pack, None)
        model = self.model
        if isinstance(model, nn.parallel.DistributedDataParallel):  # its reducer expects backward passes
            model = model.module
        with torch.enable_grad(), _no_reentrant(self.bare), _embedded(self.bare, not whole) as rows:
            logits = self._forward(model, batch, pack, 0)
            loss = _loss(logits, pack, places)
            if not whole and not rows:
                raise NotReached(
                    f"{type(self.bare).__name__} is sharded and does not use its input embeddings, at which "
                    "the gradients of sharded models are compared",
                    hint="prove it unsharded, then train with training.proof: false (--no-proof)",
                )
            wanted = dict(_few(self.bare)) if whole else {_EMBEDDED: rows[0]}
            if not loss.requires_grad or not wanted:  # what trains may stand beside the model (a prompt)
                return logits.detach(), {}
            made = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        kept = {n: g.detach() for n, g in zip(wanted, made, strict=True) if g is not None}
        return logits.detach(), kept

    def reach(self, row: list[Sample]) -> torch.Tensor | None:
        """Gradients of the loss of every second sample at the embedded tokens, [T, H]; None: it has none."""
        if not hasattr(self.bare, "get_input_embeddings"):
            return None
        try:
            made = self.gradients(row, False, range(1, len(row), 2))[1].get(_EMBEDDED)
        except NotReached:
            return None
        return None if made is None else made.reshape(-1, made.shape[-1])

    def _batch(self, pack: Sequence[Sample], alter: Alter | None) -> dict[str, Any]:
        batch = self.collate([list(pack)])
        altered = batch if alter is None else alter(batch)
        devices = (p.device for p in self.bare.parameters() if p.device.type != "meta")
        device = next(devices, torch.device("cpu"))
        kept = {k: v for k, v in altered.items() if k not in ("labels", "loss_scale")}
        made: dict[str, Any] = moved(kept, device)
        return made

    def _forward(
        self, model: Any, batch: Mapping[str, Any], pack: Sequence[Sample], seed: int
    ) -> torch.Tensor:
        seeded(seed)
        try:
            made = _logits(model(**batch))
        except (TypeError, ValueError, AttributeError) as error:
            tuples = getattr(getattr(self.bare, "config", None), "return_dict", True) is False
            if isinstance(error, PacktrainError) or (isinstance(error, AttributeError) and not tuples):
                raise
            what = "does not take the inputs of packs"
            hint = "train it unpacked (packing: false), or with a transformers that hands them on"
            if tuples:
                what, hint = "does not run with return_dict=False", "set model.config.return_dict = True"
            told = f"{type(self.bare).__name__} {what}: {one_line(error, 160)}"
            raise IsolationError(told, hint=hint) from error
        return made.reshape(-1, made.shape[-1])[: sum(map(size_of, pack))]


def _logits(outputs: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        found = getattr(outputs, name, None)
        if isinstance(found, torch.Tensor):
            return found
    if isinstance(outputs, torch.Tensor):
        return outputs
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs
    return next(p for p in parts if isinstance(p, torch.Tensor) and p.dim() > 1)


def _loss(logits: torch.Tensor, pack: Sequence[Sample], places: Sequence[int]) -> torch.Tensor:
    """Each token but the first of the samples at `places` is predicted from those before it."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    targets = []
    for number, member in enumerate(pack):
        ids = torch.from_numpy(np.asarray(member["input_ids"]).reshape(-1).astype(np.int64))
        ahead = functional.pad(ids[1:].clamp(min=0) % wide.shape[-1], (0, 1), value=-100)
        targets.append(ahead if number in places else torch.full_like(ids, -100))
    return functional.cross_entropy(wide, torch.cat(targets).to(wide.device), reduction="sum")


def _few(model: Any) -> list[tuple[str, Any]]:
    """Trained parameters from the first and the last layers, those of attention first, and zero ones."""
    fitting = [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.numel() <= _LARGEST
    ]
    attention = [(n, p) for n, p in fitting if "attn" in n or "attention" in n]
    chosen = [*attention[:2], *attention[-2:], *fitting[:1], *fitting[-1:]]
    zeros = [(n, p) for n, p in fitting if p.numel() <= _SMALL and not p.any()]
    few = list({id(p): (name, p) for name, p in chosen}.values())[:_FEW]
    return list({id(p): (name, p) for name, p in (*few, *zeros[:_ZEROS])}.values())


@contextlib.contextmanager
def _embedded(model: Any, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """The embeddings of the row as a tensor that gets a gradient."""
    rows: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        rows.append(kept)
        return kept

    if not wanted:
        yield rows
        return
    with model.get_input_embeddings().register_forward_hook(keep):
        yield rows


def _without_sync(model: Any) -> contextlib.AbstractContextManager[Any]:
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return model.no_sync() if is_ddp else contextlib.nullcontext()


@contextlib.contextmanager
def _no_reentrant(model: Any) -> Iterator[None]:
    """Reentrant checkpointing knows no gradients of chosen tensors: it is off for these passes."""
    switched = []
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if vars(module).get("gradient_checkpointing") is True and _is_reentrant(function):
            vars(module)["gradient_checkpointing"] = False
            switched.append(module)
    try:
        yield
    finally:
        for module in switched:
            vars(module)["gradient_checkpointing"] = True


def _is_reentrant(function: Any) -> bool:
    """Tried out: a host may put another function behind torch's name than the one it is asked for."""
    value = torch.zeros((), requires_grad=True)
    try:
        with torch.enable_grad():
            torch.autograd.grad(function(torch.clone, value), value)
    except Exception:
        return True
    return False


def unwrapped(model: Any) -> Any:
    """The module whose parameters and submodules are those that run, without compile and rank wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and is_wrapper(model):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner


def _is_compiled(model: Any) -> bool:
    """Is it, or a part of it, run by torch.compile?"""
    return any(
        hasattr(m, "_orig_mod") or vars(m).get("_compiled_call_impl") is not None for m in model.modules()
    )


def is_sharded(model: Any) -> bool:
    """Are the parameters held in parts over ranks (FSDP, DTensor, ZeRO-3)?"""
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        return True
    return any(
        type(p).__name__ in ("DTensor", "FlatParameter") or hasattr(p, "ds_id") for p in model.parameters()
    )


def base_tolerance(model: Any, output: torch.Tensor) -> float:
    """Relative difference that rounding may make between rows of different lengths."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} | {output.dtype}
    parts = list(model.modules())
    device = output.device.type
    mixed = (
        any(hasattr(m, "_original_forward") or getattr(m, "mixed_precision", None) for m in parts)
        or any(not p.is_floating_point() for p in model.parameters())
        or torch.is_autocast_enabled(device)
        or bool(getattr(unwrapped(model), "is_quantized", False))
    )
    coarse = max((_TOLERANCE.get(kind, 2e-2) for kind in kinds), default=1e-4)
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        coarse = max(coarse, 5e-3)
    return max(coarse, 2e-2) if mixed else coarse


# --------------------------------------------------------------------------------------------
# The row of the start-up proof: three short samples that stand for those of training, and more behind
# --------------------------------------------------------------------------------------------
#: Tokens of the third sample.
_LAST = 16

#: Samples behind the third, at most, and their tokens together, at least.
_MORE, _MORE_TOKENS = 16, 10


def backend_of(model: Any) -> str | None:
    """Attention implementation; None for a model without a transformers config."""
    return attention_of(model) if hasattr(getattr(model, "config", None), "model_type") else None


def _budget(model: Any) -> int:
    """Tokens of the row: as many as take seconds on this device."""
    first = next(iter(model.parameters()), None)
    if first is None or first.device.type != "cpu":
        return 2048
    count = sum(p.numel() for p in model.parameters())
    floor = 320 if backend_of(model) == "flex_attention" else 48
    return int(min(512, max(floor, 2e10 / max(1, count))))


def proof_row(packs: Sequence[Sequence[Mapping[str, Any]]], model: Any) -> list[Sample] | None:
    """Three short samples, two with media where there are any, and more cut short. None: no sample."""
    tokens = _budget(model)
    true = (dict(one) for pack in packs for one in pack if not (one.get("stand_in") or one.get("filler")))
    every = sorted(true, key=size_of)
    every = [sample for sample in every if size_of(sample) > 1] or every
    if not every:
        return None
    most = tokens // 2
    if backend_of(model) is not None and (rotations := rotations_of(model)) is not None:
        most = min(most, rotations.limit)
    fitting = [sample for sample in every if size_of(sample) <= most]
    kinds: dict[tuple[str, ...], list[Sample]] = {}
    for sample in fitting:
        kinds.setdefault(media_fields(sample), []).append(sample)
    chosen, *pairs = [
        [first, *(others or [other_media(first)])[:1]] for kind, (first, *others) in kinds.items() if kind
    ] or [fitting[:2]]
    taken = {id(sample) for sample in chosen}
    for sample in every:
        if len(chosen) < 2 and id(sample) not in taken:
            cut = opening(sample, model, most)
            chosen += [] if cut is None else [cut]
    chosen = chosen or every[:1]
    last = [one for one in (opening(sample, model, min(_LAST, most)) for sample in every) if one is not None]
    row = [chosen[0], dict(chosen[-1]), dict((last or chosen)[0])]
    for pair in pairs:
        row += pair if sum(map(size_of, (*row, *pair))) <= tokens else []
    room = max(_MORE_TOKENS, tokens // 2 - sum(map(size_of, row)))
    texts = itertools.cycle(reversed(every))
    for sample in itertools.islice(texts, _MORE):
        cut = opening(sample, model, max(2, min(room, most, 2 * room // _MORE)))
        if cut is not None and size_of(cut) <= room:
            row, room = [*row, cut], room - size_of(cut)
    return row


def any_row(model: Any) -> list[Sample]:
    """Three samples of any text, for where there is no pack."""
    family = family_for(model)
    rows = 1 if family is None else family.position_rows
    made = []
    for number, length in enumerate((9, 7, 8)):
        ids = torch.arange(1, length + 1) + number
        places = torch.arange(length)
        positions = places if rows == 1 else places.expand(rows, -1)
        made.append({"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "sample_id": number})
    return made


# --------------------------------------------------------------------------------------------
# A model inside a block as it trains, without its randomness; outside as if nothing had run.
# --------------------------------------------------------------------------------------------
# Inside: training mode as the model's own `train()` sets it, dropout and router noise off. Afterwards every
# module has its own mode, attributes (caches of a forward pass among them: values, tensors, lists, dicts,
# sets, random generators) and buffers again, and the random states of Python, numpy and torch are those of
# before. Nothing here writes weights or gradients.
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)

#: Attributes of modules and configs that make a forward pass random.
_RANDOM = re.compile(r"drop|jitter", re.IGNORECASE)

#: Buffers with more elements than this hold weights (quantised ones), not what a forward pass updates.
_UPDATED = 1 << 22

#: Attributes that every module has.
_OF_TORCH = frozenset(vars(nn.Module()))

_DROPOUT = nn.modules.dropout._DropoutNd


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """See above.

    Args:
        model: an `nn.Module`, wrapped or not.
    """
    modules = [module for module in model.modules() if not is_wrapper(module)]
    modes = [(module, module.training) for module in model.modules()]
    held = [(m, {n: v for n, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in modules]
    inside = [back for module in modules for back in _contents(module)]
    buffers = [(module, dict(module._buffers), _copies(module)) for module in modules]
    ranks = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    steps = [(module, module.require_forward_param_sync) for module in ranks]
    quiet: list[tuple[dict[str, Any], str, float]] = []
    with _own_randomness(model):
        try:
            model.train()
            quiet += _quieten(modules)
            yield
        finally:
            for owner, name, value in quiet:
                owner[name] = value
            for module, before in held:
                _put_back(module, before)
            for back in inside:
                back()
            for module, before, copies in buffers:
                module._buffers.clear()
                module._buffers.update(before)
                for name, copy in copies.items():
                    with torch.no_grad():
                        before[name].copy_(copy)
            for module, training in modes:
                module.training = training
            for module, synced in steps:
                module.require_forward_param_sync = synced


@contextlib.contextmanager
def _own_randomness(model: Any) -> Iterator[None]:
    """Random states of Python, numpy and torch come back; of the GPUs those that hold the model."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    state, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(sorted(i for i in devices if i is not None)):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)  # noqa: NPY002


def seeded(seed: int) -> None:
    """The same random numbers for every pass over a row; only inside `_own_randomness`."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.random.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def is_wrapper(module: Any) -> bool:
    """Wrappers keep their own books of forward passes: they are left alone."""
    return type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed", "deepspeed"))


def _put_back(module: Any, before: dict[str, Any]) -> None:
    own = vars(module)
    for name in [n for n, value in own.items() if isinstance(value, _PLAIN) and n not in before]:
        del own[name]
    for name, value in before.items():
        if name not in own or own[name] is not value:
            own[name] = value


def _contents(module: Any) -> list[Callable[[], Any]]:
    """What puts back the contents of a module's attributes: containers, generators, tensors written to."""
    made: list[Callable[[], Any]] = []
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        if type(value) is list:
            made.append(partial(value.__setitem__, slice(None), value.copy()))
        elif type(value) in (dict, set):
            made += [value.clear, partial(value.update, value.copy())]
        elif isinstance(value, torch.Generator):
            made.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            made.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            made.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and _is_small(value):
            made.append(partial(value.detach().copy_, value.detach().clone()))
    return made


def _is_small(value: torch.Tensor) -> bool:
    return bool(value.device.type != "meta" and value.numel() <= _UPDATED)


def _copies(module: Any) -> dict[str, torch.Tensor]:
    held = module._buffers.items()
    return {name: value.detach().clone() for name, value in held if value is not None and _is_small(value)}


def _quieten(modules: list[Any]) -> list[tuple[dict[str, Any], str, float]]:
    """Switch off what is random; (owner, name, value) of what was changed."""
    owners: dict[int, dict[str, Any]] = {}
    for module in modules:
        own = vars(module)
        owners[id(own)] = own
        for value in list(own.values()):
            if hasattr(value, "model_type") and hasattr(value, "to_dict"):
                owners[id(vars(value))] = vars(value)
    changed = []
    for own in owners.values():
        names = [n for n, v in own.items() if type(v) is float and v and _RANDOM.search(n)]
        changed += [(own, name, own[name]) for name in names]
    changed += [(vars(m), "p", m.p) for m in modules if isinstance(m, _DROPOUT) and m.p]
    for own, name, _ in changed:
        own[name] = 0.0
    return changed
