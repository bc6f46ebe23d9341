"""Single runs of a model for the isolation proof: forward, gradients, tampered samples, layers.

Runs leave the model as it was: mode, backend, gradients and hooks are put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..collate import IGNORE, SAMPLE_FIELDS, TOKEN_FIELDS, PackBatch, PaddingFreeCollator, attention_of
from ..collate.media import placeholders_of
from ..errors import IsolationError, first_line
from .loss import first_of, shift_labels
from .varlen import VARLEN, use_varlen

Sample = dict[str, Any]
Alter = Callable[[PackBatch], Mapping[str, Any]]


@dataclass
class Run:
    """One pass over a row: logits [T,V], loss sum, supervised tokens, gradients of the sum by name."""

    logits: torch.Tensor
    loss: float
    tokens: int
    gradients: dict[str, torch.Tensor]


class Probe:
    """Runs packs through a model on one backend.

    Args:
        model: transformers model.
        alter: applied to every collated batch; None leaves it.
        gradients: take gradients in `run`.
    """

    def __init__(self, model: Any, alter: Alter | None, gradients: bool) -> None:
        self.model, self.alter, self.gradients = model, alter, gradients

    def run(self, pack: Sequence[Sample], *, pad_to_length: int | None = None) -> Run:
        """Logits, loss and (where wanted) gradients of a pack."""
        batch = self._collate(pack, pad_to_length)
        with torch.set_grad_enabled(self.gradients):
            logits = self._logits(batch)
            targets = shift_labels(batch["labels"])[0].to(logits.device)
            wide = logits if logits.dtype is torch.float64 else logits.float()
            loss = functional.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")
        made = self._gradients(loss) if self.gradients else {}
        return Run(logits.detach(), float(loss.detach()), int((targets != IGNORE).sum()), made)

    def logits(self, pack: Sequence[Sample]) -> torch.Tensor:
        """Logits [T,V] of a pack."""
        with torch.no_grad():
            return self._logits(self._collate(pack, None))

    def first_layer(
        self,
        one: Sequence[Sample],
        two: Sequence[Sample],
        part: slice,
        *,
        alone: bool = False,
        limit: float = 0.0,
    ) -> str | None:
        """The first decoder layer whose output on the tokens `part` differs between two packs.

        Args:
            one: a pack.
            two: another of the same lengths; with `alone` just the sample that is `part` of the first.
            part: tokens of the first pack.
            alone: compare with all tokens of the second pack.
            limit: difference that is none.
        """
        first = self._layers(one, part)
        second = self._layers(two, slice(None) if alone else part)
        for name, output in first.items():
            if not largest_gap(output, second[name]) <= limit:  # also NaN
                return name
        return None

    def _collate(self, pack: Sequence[Sample], pad_to_length: int | None) -> dict[str, Any]:
        batch = PaddingFreeCollator(self.model, pad_to_length=pad_to_length)([pack])
        made: dict[str, Any] = moved(
            batch if self.alter is None else self.alter(batch), next(self.model.parameters()).device
        )
        return made

    def _logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key not in ("labels", "loss_scale")}
        return first_of(self.model(**inputs), "logits")[0]

    def _gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not loss.requires_grad:
            return {}
        grads = torch.autograd.grad(loss, [p for _, p in wanted], allow_unused=True)
        return {name: grad for (name, _), grad in zip(wanted, grads, strict=True) if grad is not None}

    def _layers(self, pack: Sequence[Sample], part: slice) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str, module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen[name] = hidden[0, part].detach().clone()

        layers = [(n, m) for n, m in self.model.named_modules() if type(m).__name__.endswith("DecoderLayer")]
        with contextlib.ExitStack() as stack:
            for name, module in layers:
                stack.enter_context(module.register_forward_hook(partial(keep, name)))
            self.logits(pack)
        return seen


def moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on a device, also inside of mappings and lists."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(part, device) for key, part in value.items()}
    return [moved(part, device) for part in value] if isinstance(value, list) else value


def gap_size(gap: float) -> float:
    """No number is the largest difference."""
    return math.inf if math.isnan(gap) else gap


def largest_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; logits are wide, so no copy is made where the bits are equal.

    Equal infinities do not differ: heads of a padded vocabulary have -inf for the tokens that nobody has.
    """
    if torch.equal(one, other):
        return 0.0
    wide = [part if part.dtype is torch.float64 else part.float() for part in (one, other)]
    gaps = wide[0].sub(wide[1]).abs_()
    largest = float(gaps.max())
    return float(gaps.masked_fill_(wide[0] == wide[1], 0).max()) if math.isnan(largest) else largest


def scale_of(values: torch.Tensor) -> float:
    """Largest finite size of a number among them, at least 1."""
    finite = values[values.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


@contextlib.contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def on_backend(model: Any, backend: str) -> Iterator[None]:
    """Another attention implementation inside, for all parts of the model.

    Raises:
        IsolationError: the model does not offer it here.
    """
    if attention_of(model) == backend:
        yield
        return
    before = {"": model.config._attn_implementation}
    for name in getattr(model.config, "sub_configs", {}):
        part = getattr(model.config, name, None)
        if part is not None:
            before[name] = part._attn_implementation
    try:
        use_varlen(model) if backend == VARLEN else model.set_attn_implementation(backend)
    except (ValueError, ImportError) as error:
        raise IsolationError(
            f"{model.config.model_type} does not run on {backend} here: {first_line(error)}",
            hint="prove it on sdpa or eager",
        ) from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def ordinary_tokens(model: Any, samples: Sequence[Sample]) -> list[int]:
    """Ids of the samples that are plain text to the model: no media placeholder, no vision mark."""
    config: Any = getattr(model, "config", None)
    used = {value for sample in samples for value in _ids(sample)}
    if not hasattr(config, "get_text_config"):
        return sorted(used)
    special = {
        value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))
    }
    size = int(config.get_text_config().vocab_size)
    return sorted(used - special) or [i for i in range(min(size, 64)) if i not in special]


def changed(sample: Sample, ordinary: Sequence[int]) -> Sample | None:
    """The sample with other media and every plain text token replaced; None without such a token."""
    ids, plain = _ids(sample), set(ordinary)
    places = [place for place, value in enumerate(ids) if value in plain]
    if not places:
        return None
    sample = other_media(sample)
    for place in places:
        neighbour = ids[place] - 1 if ids[place] else 1
        ids[place] = next((value for value in reversed(ordinary) if value != ids[place]), neighbour)
    return {**sample, "input_ids": torch.tensor(ids)}


def single_token(sample: Sample, ordinary: Sequence[int]) -> Sample:
    """A sample of one plain text token, with the per-token fields that `sample` has."""
    return {**_first(sample, 1), "input_ids": torch.tensor([ordinary[0]]), "sample_id": "of one token"}


def opening(sample: Sample, model: Any, tokens: int) -> Sample | None:
    """The text before the sample's first medium, at most `tokens` of it; None when there is none."""
    known = placeholders_of(model).values() if hasattr(model, "config") else ()  # else it knows no media
    marks = {token for token, _ in known}
    ids = _ids(sample)
    end = next((place for place, value in enumerate(ids) if value in marks), len(ids))
    end = min(end, tokens)
    return {**_first(sample, end), "sample_id": sample.get("sample_id")} if end else None


def _first(sample: Sample, count: int) -> Sample:
    """The first `count` tokens: per-token fields and text positions, no media."""
    cut: Sample = {
        name: torch.tensor(np.asarray(sample[name]).reshape(-1)[:count].tolist())
        for name in TOKEN_FIELDS
        if sample.get(name) is not None
    }
    if sample.get("position_ids") is not None:
        cut["position_ids"] = torch.arange(count)
    return cut


def _ids(sample: Sample) -> list[int]:
    ids: list[int] = np.asarray(sample["input_ids"]).reshape(-1).tolist()
    return ids


def size_of(sample: Sample) -> int:
    """Tokens of an encoded sample."""
    return int(np.shape(sample["input_ids"])[-1])


def media_fields(sample: Sample) -> tuple[str, ...]:
    """Names of what it carries besides per-token fields, positions and per-sample values."""
    plain = {*TOKEN_FIELDS, *SAMPLE_FIELDS, "position_ids", "attention_mask"}
    return tuple(sorted(name for name, value in sample.items() if value is not None and name not in plain))


def other_media(sample: Sample) -> Sample:
    """The sample with other values in its pixels and waves (arrays of numbers with two axes or more)."""
    return {**sample, **{name: _other(sample[name]) for name in media_fields(sample)}}


def _other(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_other(part) for part in value)
    of_numbers = isinstance(value, torch.Tensor) and value.is_floating_point()
    of_numbers = of_numbers or (isinstance(value, np.ndarray) and value.dtype.kind == "f")
    return 0.5 - 0.75 * value if of_numbers and value.ndim > 1 else value


def name_of(sample: Sample, index: int) -> str:
    """How messages call it."""
    sample_id = sample.get("sample_id")
    return f"member {index}" if sample_id is None else f"sample {sample_id}"
