"""The isolation proof before the first step: on the object that trains, at every entrance.

    report = prove_before_training(model, packs)        # raises IsolationError on a leak
    report = prove(model, loader)                       # the same for users of PackLoader

Three short samples of the first packs (A, B, C) make one row, with more of them cut short behind (D, E, …):

    logits       of A, B and C in the row against themselves alone
    tamper       A, D, … are changed (text and media), then B, E, …, then C, F, …: the others stay the same
                 bit for bit
    gradients    of a few parameters, packed against summed up alone; the loss of B, D, … reaches no token
                 of A, C, …
    control      the row as if it were one sample must leak, or the proof says that it has no power here

Where samples have media, two of a kind stand side by side: a tower may mix them, whatever the text does.

Whatever the model is by then (patched, compiled, with adapters, quantised, sharded) is what is proven: no
name and no version stands in for it. Weights, gradients, buffers and random states are left as they were. All
ranks call it together and make the same passes; a leak on one rank is refused on all. A proof that held is
remembered with the code it ran, so asking again for the same object costs nothing.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..collate import IGNORE, PaddingFreeCollator, is_filler
from ..collate.model_traits import state_layers, text_config
from ..collate.pack_batch import members_of
from ..errors import InputError, IsolationError, first_line
from .culprit import BlindMask, Culprit, blind_mask, eagerly, find_culprit, foreign_functions
from .live import (
    COMPARED,
    Live,
    Passes,
    any_row,
    backend_of,
    base_tolerance,
    is_sharded,
    is_wrapper,
    proof_row,
    untouched,
    unwrapped,
)
from .loss import bare_model, logits_loss, plain_head
from .probe import Sample, changed, gap_size, largest_gap, moved, name_of, ordinary_tokens, size_of
from .proof import IsolationReport, ProofRow, one_segment
from .segments import states_isolated
from .versions import told

logger = logging.getLogger(__name__)

Pack = Sequence[Mapping[str, Any]]
Packs = Sequence[Pack] | Callable[[], Sequence[Pack]]

#: Largest relative difference that counts as rounding, however coarse the pass; leaks are larger.
_ROUNDING = 0.1

#: Relative difference of gradients, by whether the pass has 16-bit parts.
_GRADIENT = (1e-2, 0.25)

#: Relative size of a gradient at the tokens of another sample that is none; every backend tried gives zero.
_REACH = 1e-6

#: Objects whose proof held in this process, with what ran then.
_HELD: weakref.WeakKeyDictionary[Any, tuple[Any, StartUpReport]] = weakref.WeakKeyDictionary()


class _StoppedElsewhere(Exception):
    """Another rank has an error: it has been heard of already."""


@dataclass
class StartUpReport(IsolationReport):
    """What the proof found.

    Attributes:
        control: what the negative control did.
        moved: for each sample that was tampered with, the other one that differs most.
        culprit: where a leak begins.
        blind: the mask that was made without the boundaries, where the leak is nobody's patch.
        mode: "training", or "evaluation" where training mode stays random with dropout off.
        fused: the loss may skip the logits (`plain_head`).
        seconds: it took.
    """

    control: str = ""
    moved: list[int] = field(default_factory=list)
    culprit: Culprit | None = None
    blind: BlindMask | None = None
    mode: str = "training"
    fused: bool = False
    seconds: float = 0.0


def prove_before_training(
    model: Any,
    packs: Packs,
    *,
    collate: Callable[[list[list[Any]]], Any] | None = None,
    gradients: bool = True,
    proof: bool = True,
    known: bool = True,
) -> StartUpReport | None:
    """Prove isolation on the object that trains; every rank calls it at the same place.

    Args:
        model: the live object, wrapped or not, where it trains.
        packs: the first packs of this rank (lists of encoded samples), or a function that gives them; called
            with the random states guarded.
        collate: a list of packs -> a batch, as training makes it. None: `PaddingFreeCollator(model)`.
        gradients: False leaves them out.
        proof: False: nothing is proven, said loudly (`training.proof: false`).
        known: is the setup listed (`check_attention(model).proven`)? Only read where `proof` is False.

    Returns:
        The report, with `fused`; None where nothing was proven.

    Raises:
        IsolationError: samples of a pack read each other, with layer, function and what to set.
    """
    bare = bare_model(model)
    if not proof:
        logger.warning("the isolation proof is OFF (training.proof: false, --no-proof): nothing is proven")
        if not known:
            raise IsolationError(
                f"nobody has shown that {bare.config.model_type} isolates packed samples on "
                f"{backend_of(bare)}, and training.proof is off",
                hint="set training.proof: true",
            )
        return None
    ran = _fingerprint(model, bare, collate)
    held = _HELD.get(model)
    (again,) = _any_rank(bare, held is None or held[0] != ran)  # ranks prove together
    if held is not None and not again:
        return held[1]
    if told():
        logger.warning("%s", told())
    report = _proven(model, bare, packs, collate, gradients)
    if report is not None:
        _HELD[model] = (ran, report)
    return report


def prove(
    model: Any, packs: Any, *, collate: Callable[[list[list[Any]]], Any] | None = None
) -> StartUpReport:
    """The start-up proof for your own training loop.

        loader = PackLoader(data, sampler, collate_fn=PaddingFreeCollator(model))
        prove(model, loader)            # every rank, after wrapping, before the first step

    Args:
        model: the object that trains, wrapped or not.
        packs: a `PackLoader`, a dataset of packs, or packs (lists of encoded samples). Nothing moves in it.
        collate: a list of packs -> a batch; None: the loader's, else `PaddingFreeCollator(model)`.

    Raises:
        IsolationError: samples of a pack read each other.
        InputError: there is no sample to prove it on.
    """
    made = collate or getattr(packs, "collate_fn", None)
    made = None if made is list else made  # a loader without one gives the packs themselves
    report = _proven(model, bare_model(model), lambda: first_packs(packs), made, True)
    if report is None:
        raise InputError("there is no pack to prove isolation on", hint="give packs with samples")
    return report


def first_packs(packs: Any) -> list[list[Any]]:
    """Members of the first packs of a loader, source, dataset or list, fillers left out; nothing moves."""
    data = getattr(packs, "dataset", packs)
    if hasattr(data, "peek"):
        found = data.peek(2)
    elif hasattr(data, "__getitem__"):
        found = [data[position] for position in range(min(2, len(data)))]
    else:
        raise InputError(
            f"a {type(data).__name__} cannot be looked into without moving it",
            hint="give its first packs: prove(model, [pack, …])",
        )
    return [list(pack) for pack in members_of(found) if not is_filler(pack)]


def _proven(model: Any, bare: Any, packs: Packs, collate: Any, gradients: bool) -> StartUpReport | None:
    began = time.perf_counter()
    inner = unwrapped(bare)
    report = StartUpReport()
    with untouched(model):
        given = [list(pack) for pack in (packs() if callable(packs) else packs)]
        own = collate or PaddingFreeCollator(inner if backend_of(inner) else None)
        failure: BaseException | None = None
        try:
            row = proof_row(given, inner)
            if row is None:
                if _ranks() == 1:
                    return None
                row, own = any_row(inner), PaddingFreeCollator(inner)
            live = Live(model, inner, own)
            _compare(live, row, report, gradients)
        except _StoppedElsewhere:
            raise _elsewhere() from None
        except Exception as error:  # every rank must hear of it
            failure = error
        stopped, leaking = _any_rank(inner, failure is not None, failure is None and not report.ok)
        if failure is not None:
            raise failure
        if stopped or row is None:
            raise _elsewhere()
        if leaking and _looks_at_the_row(inner):
            _excuse(live, row, report)
            (leaking,) = _any_rank(inner, not report.ok)
        if leaking:
            _find_culprit(live, row, report)
        else:
            report.fused = _fused(live, row)
    report.seconds = time.perf_counter() - began
    if leaking:
        raise IsolationError(_told(inner, report), hint=_hint(inner, report))
    logger.info(
        "start-up proof: %d comparisons on %s hold (%s mode, %.1f s); control: %s",
        len(report.rows), backend_of(inner) or type(inner).__name__, report.mode, report.seconds,
        report.control,
    )  # fmt: skip
    return report


def _find_culprit(live: Live, row: list[Sample], report: StartUpReport) -> None:
    report.culprit = _traced(live, row, report)
    report.leaking_layer = report.culprit.path if report.culprit is not None else None
    with eagerly():
        blind = blind_mask(live.eager(row), backend_of(live.bare))
    if report.culprit is None or not report.culprit.foreign:
        report.blind = blind


def _compare(live: Live, row: list[Sample], report: StartUpReport, gradients: bool) -> None:
    """Fills the report."""
    ordinary = ordinary_tokens(live.bare, row)
    tampered = [_tampered(row, number, ordinary) for number in range(COMPARED)]
    found = live.passes(row, gradients)
    report.rows = _held(live, row, found, tampered, report)
    if _ranks() > 1 or not report.ok:  # every rank makes the same passes
        noise = largest_gap(found.packed, live.logits(row, seed=1, graph=found.graph))
        stopped, noisy = _any_rank(live.bare, False, noise > live.base * found.scale)
        if stopped:
            raise _StoppedElsewhere
        shown, moved = [one for one in report.rows if one.check == "tamper"], report.moved
        if noisy:  # the same numbers give the same noise: tampering is shown in training mode too
            report.mode = "evaluation"
            if largest_gap(found.packed, live.logits(row, graph=found.graph)) > 0:
                shown = []
            live.model.eval()
            found = live.passes(row, gradients)
            noise = largest_gap(found.packed, live.logits(row, seed=1, graph=found.graph))
        if noisy or noise:
            report.rows = _held(live, row, found, tampered, report, repeats=noise == 0)
        if noisy and not all(one.ok for one in shown):
            report.rows, report.moved, report.mode = shown, moved, "training"
    _control(live, row, tampered[0], report)
    if gradients:
        _compare_gradients(live, row, found.gradients, report)
        _compare_reach(live, row, report)
    if report.mode == "training":  # a leak is traced where it showed
        live.model.train()


def _tampered(row: list[Sample], number: int, ordinary: Sequence[int]) -> list[Sample]:
    """The row with every third sample changed, from `number` on."""
    return [
        (changed(member, ordinary) or member) if place % COMPARED == number else member
        for place, member in enumerate(row)
    ]


def _held(
    live: Live,
    row: list[Sample],
    found: Passes,
    tampered: list[list[Sample]],
    report: StartUpReport,
    *,
    repeats: bool = True,
) -> list[ProofRow]:
    """Logits against alone, and the tampered rows.

    Args:
        repeats: False: a pass over the same row gives other bits, so rounding is allowed in tampered rows.
    """
    sizes, scale = [size_of(member) for member in row], found.scale
    live.base = base_tolerance(live.model, found.packed)
    parts = found.packed.split(sizes)
    gaps = [largest_gap(a, b) for a, b in zip(parts, found.alone, strict=False)]
    names = [name_of(member, number) for number, member in enumerate(row)]
    rows: list[ProofRow] = []
    has_power, first_reads, report.moved = False, False, []
    for number, other in enumerate(tampered):
        after = live.logits(other, graph=found.graph).split(sizes)
        changes = [largest_gap(one, two) for one, two in zip(parts, after, strict=True)]
        has_power = has_power or changes[number] > 0
        first_reads = first_reads or (number > 0 and changes[0] != 0)
        beside = [place for place in range(len(row)) if place % COMPARED != number]
        worst = max(beside, key=lambda place: gap_size(changes[place]))
        where = f"{names[worst]} reads {names[number]} and"
        rows.append(_row_of(live, "tamper", changes[worst], 0.0, where))
        report.moved.append(worst)
    if not has_power:
        logger.warning("start-up proof: changing a token changed nothing, so the tamper test has no power")
    # Activations that torchao quantises by token take another step by chance: tampering decides there.
    steps = any(type(p).__module__.startswith("torchao") for p in live.bare.parameters())
    rounded = max(gaps) if steps else min(gaps[:2]) if first_reads else gaps[0]
    limit = scale * relative_limit(live.base, rounded / scale)
    # Quantised activations round by their own steps, experts by those of the type.
    fine = 16 * torch.finfo(found.packed.dtype).eps * scale
    live.rounding = limit if _is_quantised(live.bare) else min(limit, max(8 * rounded, fine))
    if not repeats:
        rows = [replace(one, limit=limit) for one in rows]
    pairs = zip(names, gaps, strict=False)
    return [*(_row_of(live, "logits", gap, limit, name) for name, gap in pairs), *rows]


def _row_of(live: Live, check: str, worst: float, limit: float, where: str) -> ProofRow:
    return ProofRow(backend_of(live.bare) or "its attention", "in order", check, worst, limit, where)


def relative_limit(base: float, rounded: float) -> float:
    """Largest difference of logits between packed and alone that is rounding, relative to their size.

    In 16 bit a clean model was seen at 0.026 where the first sample had no difference at all: other lengths
    choose other kernels. What shifts positions or reads across is far above, and tampering is bitwise.

    Args:
        base: of `base_tolerance`.
        rounded: relative difference of a sample that reads no other: the first one of a causal row.
    """
    return min(_ROUNDING, max(2.5 * base if base > 1e-3 else base, 8 * rounded))


def _control(live: Live, row: list[Sample], tampered: list[Sample], report: StartUpReport) -> None:
    """The first two samples as one segment: the second must then read the first."""
    second = slice(size_of(row[0]), None)
    try:
        spoiled = live.logits(row[:2], one_segment)[second]
        after = live.logits(tampered[:2], one_segment)[second]
    except (ValueError, TypeError, RuntimeError, IndexError, IsolationError) as error:
        report.control = f"refused by the model ({first_line(error)})"
        return
    gap = largest_gap(spoiled, after)
    if gap > 0:
        report.control = f"caught (a row without boundaries leaks {gap:.2g})"
        return
    report.control = "not caught: a row without boundaries leaks nothing here"
    logger.warning("start-up proof: a row without boundaries does not leak either on this model")


def _compare_gradients(
    live: Live, row: list[Sample], made: list[dict[str, torch.Tensor]], report: StartUpReport
) -> None:
    whole = not is_sharded(live.model)
    packed, *alone = made or [live.gradients(p, whole)[1] for p in (row, *([one] for one in row[:COMPARED]))]
    if not whole:  # without the tails of rows that are padded
        alone = [{n: g[:, : size_of(o)] for n, g in one.items()} for one, o in zip(alone, row, strict=False)]
    limit = _GRADIENT[live.base > 1e-3]
    worst, where = 0.0, "no parameter"
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in dict.fromkeys(name for one in (packed, *alone) for name in one):
        parts = [one[name].double() for one in alone if name in one]
        one = packed[name].double() if name in packed else torch.zeros_like(parts[0])
        parts = parts or [torch.zeros_like(one)]
        # A sharded model's are of the embedded tokens [1, T, H]; a pad tail is left out.
        reference = sum(parts[1:], parts[0]) if whole else torch.cat(parts, 1)
        pairs[name] = (one if whole else one[:, : reference.shape[1]], reference)
    # Some gradients are nothing but rounding (softmax does not see the bias of keys): these are held against
    # what rounding makes of the largest ones.
    floor = max([_size(reference) for _, reference in pairs.values()], default=0.0) * max(1e-4, live.base)
    for name, (one, reference) in pairs.items():
        gap = _size(one - reference) / max(_size(reference), floor, 1e-300)
        if not gap <= worst:
            worst, where = gap, f"the gradient of {name}"
    report.rows.append(_row_of(live, "gradients", worst, limit, where))


def _compare_reach(live: Live, row: list[Sample], report: StartUpReport) -> None:
    """The loss of every second sample has no gradient at a token of the others, however small a leak is."""
    with eagerly():
        made = live.reach(row)
    if made is None:
        return
    parts = made[: sum(map(size_of, row))].double().split([size_of(member) for member in row])
    found = [float(part.abs().max()) for part in parts]
    place = max(range(0, len(row), 2), key=lambda number: gap_size(found[number]))
    worst = found[place] / max(*found[1::2], 1e-300)
    where = f"the gradient of other samples at {name_of(row[place], place)}"
    report.rows.append(_row_of(live, "gradients", worst, _REACH, where))


def _size(values: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(values.norm()) / math.sqrt(max(1, values.numel()))


def _looks_at_the_row(model: Any) -> bool:
    """Experts and quantised layers work on all tokens of a row together, and round with them."""
    text = text_config(model.config) if hasattr(model, "config") else None
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) for name in names) or _is_quantised(model)


def _is_quantised(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None)


def _excuse(live: Live, row: list[Sample], report: StartUpReport) -> None:
    """Tampering that moved the other sample by rounding alone, and first in such a layer, is no leak.

    A layer that somebody patched is never excused, nor is attention. Every rank makes the same passes.
    """
    rows: list[ProofRow | None] = [r for r in report.rows if r.check == "tamper"]
    for number, found in enumerate(rows or [None] * COMPARED):
        culprit = _trace(live, row, report.moved[number] if report.moved else 1, number)
        if found is None or found.ok or culprit is None or culprit.patched or culprit.attends:
            continue
        report.rows[report.rows.index(found)] = replace(found, limit=live.rounding)


def _traced(live: Live, row: list[Sample], report: StartUpReport) -> Culprit | None:
    """The layer and function where the leak begins; every rank makes the same passes."""
    failed = next((r for r in report.rows if not r.ok), None)
    told, shown = ([r.ok for r in report.rows if r.check == check] for check in ("tamper", "logits"))
    beside, number = 0, 1
    if False in told:
        beside = told.index(False)
        number = report.moved[beside]
    elif False in shown:
        number = shown.index(False)
    alone = failed is not None and False not in told
    first = _trace(live, row, number, beside, live.base if alone else 0.0, alone=alone)
    if not _looks_at_the_row(live.bare):
        return first
    limit = max(live.base if alone else 0.0, live.rounding)
    return _trace(live, row, number, beside, limit, alone=alone) or first


def _trace(
    live: Live, row: list[Sample], number: int, beside: int, limit: float = 0.0, *, alone: bool = False
) -> Culprit | None:
    """Where sample `number` begins to differ: from itself alone, or `beside` another that was changed."""
    sizes = [size_of(member) for member in row]
    total, size, begin = sum(sizes), sizes[number], sum(sizes[:number])
    tampered = _tampered(row, beside, ordinary_tokens(live.bare, row))
    part = slice(begin, begin + size)
    return find_culprit(
        live.bare,
        live.eager(row),
        live.eager([row[number]] if alone else tampered),
        (total, size if alone else total),
        (part, slice(0, size) if alone else part),
        limit,
    )


def _fused(live: Live, row: list[Sample]) -> bool:
    """May the head alone compute the loss? Logits must be what it makes, bit for bit, and the loss its loss.

    Every token of two samples is trained for it: the loss of few trained ones, or of none, shows nothing.
    """
    bare = live.bare
    head = plain_head(bare) if hasattr(bare, "config") else None
    if head is None:
        return False
    with torch.no_grad(), eagerly():
        logits, own = live.through(head, row[:2])
        batch = moved(live.collate([row[:2]]), logits.device)
        batch.pop("loss_scale", None)
        labels = batch["input_ids"].clamp(min=0) % head.out_features
        labels.view(-1)[len(logits) :] = IGNORE  # what pads the row
        full = float(logits_loss(logits[None], labels.reshape(1, -1)[:, : len(logits)], None))
        limit = min(5e-3, live.base) * max(1.0, abs(full))
        gap = abs(live.loss(batch, labels) - full)
        (again,) = _any_rank(bare, not gap <= limit)
        if again:  # without what a model adds to its loss, trained or not (of routers)
            rest = live.loss(batch, torch.full_like(labels, IGNORE))
            gap = abs(live.loss(batch, labels) - rest - full)
    if own and gap <= limit:
        return True
    logger.warning("the loss of %s takes all logits of a row: its head is not plain", bare.config.model_type)
    return False


# ------------------------------------------------------------------------------------------- ranks
def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _elsewhere() -> IsolationError:
    return IsolationError("the isolation proof stopped on another rank", hint="its message says why")


def _any_rank(model: Any, *mine: bool) -> list[bool]:
    """Each of some facts: is it so on any rank?"""
    if _ranks() == 1:
        return list(mine)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    if torch.distributed.get_backend() == "gloo":
        device = torch.device("cpu")
    elif torch.cuda.is_available():  # where the model still is does not matter
        device = torch.device("cuda", torch.cuda.current_device())
    flags = torch.tensor([int(one) for one in mine], device=device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return [bool(one) for one in flags.tolist()]


def _told(bare: Any, report: StartUpReport) -> str:
    if report.ok:
        return "packed samples read each other on another rank"
    kind = getattr(getattr(bare, "config", None), "model_type", type(bare).__name__)
    failed = next(row for row in report.rows if not row.ok)
    told = f"packed samples read each other in {kind}"
    culprit = report.culprit
    if report.blind is not None:
        told += f": {report.blind}"
    elif culprit is not None:
        told += f", first in {culprit.path or 'its own forward'}"
        told += f": {'; '.join(culprit.functions[:2])}" if culprit.functions else ""
    return (
        f"{told} ({failed.check} on {failed.backend}: {failed.where} differs by {failed.worst:.2g}, "
        f"limit {failed.limit:.2g})"
    )


def _hint(bare: Any, report: StartUpReport) -> str:
    if report.ok:
        return "its message says where"
    backend = backend_of(bare)
    if report.culprit is not None and "BatchNorm" in report.culprit.kind:
        return (
            "keep it in evaluation mode (its eval(), after every train()), or train unpacked (packing: false)"
        )
    if report.culprit is not None and report.culprit.foreign:
        return "take that function out of the model before training, or train unpacked (packing: false)"
    if report.blind is not None:
        return report.blind.hint
    if hasattr(bare, "config") and state_layers(bare) and not states_isolated(bare):
        return (
            "its layers carry a state along the row: call packtrain.train.isolate_states(model), which runs "
            "them sample by sample or says why it cannot; else train unpacked (packing: false)"
        )
    if backend not in (None, "sdpa"):
        return "set model.attn: sdpa (attn_implementation='sdpa'), or train unpacked (packing: false)"
    return "train it unpacked (packing: false), or choose a model with attention layers only"


def _fingerprint(model: Any, bare: Any, collate: Any) -> tuple[Any, ...]:
    """What could change the answer: the code of every module, its file's functions, hooks and attention.

    Functions are held as weak references: an address may be that of another one later. Not in it: whether a
    module trains, and accelerate's mark on a model that it prepared (what it replaced there, is).
    """
    owner = getattr(collate, "__self__", collate)  # a bound method is made anew at every look
    parts: list[Any] = [_reference(owner), getattr(collate, "__name__", ""), backend_of(bare)]
    for module in model.modules():
        held = vars(module)
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        parts += [type(module), type(module).forward, *map(_reference, (held.get("forward"), *hooks))]
        parts.append(held.get("_compiled_call_impl") is not None)
        if not is_wrapper(module):
            plain = [item for item in held.items() if isinstance(item[1], (bool, int, float, str))]
            parts.append([item for item in plain if item[0] not in ("training", "_is_accelerate_prepared")])
    kinds = {type(module) for module in model.modules()}
    homes = {sys.modules.get(kind.__module__) for kind in kinds} - {None}
    for home in sorted((*kinds, *homes), key=id):
        parts += [(name, _reference(value)) for name, value in vars(home).items() if callable(value)]
    first = next(iter(model.parameters()), None)
    parts += [
        None if first is None else (first.dtype, str(first.device)),
        *foreign_functions(unwrapped(bare)),
    ]
    return tuple(parts)


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # what no reference can be made to lives as long as its owner
        return id(value)
