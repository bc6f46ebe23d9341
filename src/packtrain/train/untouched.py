"""A model inside a block as it trains, without its randomness; outside as if nothing had run.

Inside: training mode as the model's own `train()` sets it, dropout and router noise off. Afterwards every
module has its own mode, attributes (caches of a forward pass among them: values, tensors, lists, dicts, sets,
random generators) and buffers again, and the random states of Python, numpy and torch are those of before.
Nothing here writes weights or gradients.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), torch.Tensor)

#: Attributes of modules and configs that make a forward pass random.
_RANDOM = re.compile(r"drop|jitter", re.IGNORECASE)

#: Buffers with more elements than this hold weights (quantised ones), not what a forward pass updates.
_SMALL = 1 << 22

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
    held = [(module, _plain(module)) for module in modules]
    inside = [back for module in modules for back in _contents(module)]
    buffers = [(module, dict(module._buffers), _copies(module)) for module in modules]
    steps = [(m, m.require_forward_param_sync) for m in model.modules() if _ddp(m)]
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


def _ddp(module: Any) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


def _plain(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


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
    return bool(value.device.type != "meta" and value.numel() <= _SMALL)


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
