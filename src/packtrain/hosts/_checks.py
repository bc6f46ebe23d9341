"""What packs cannot keep in a host's trainer, told before anything is planned; and what may leak."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from ..errors import ConfigError, counted
from ..packs._readers import is_indexed
from ..packs.source import is_sized
from ..train.arguments import refuse_auxiliary_loss
from ..train.culprit import eagerly
from ..train.loss import bare_model, first_of, plain_head, shift_labels

logger = logging.getLogger(__name__)

_HOSTS = frozenset({"transformers", "trl", "swift", "llamafactory", "axolotl", "packtrain", "functools"})

#: Methods that get rows of an evaluation, or say what they are.
_EVALUATES = ("get_eval_dataloader", "evaluate", "evaluation_loop", "prediction_step", "prediction_loop")


def own(trainer: Any, name: str) -> bool:
    """Whether a method of `trainer` is the user's: defined in no class of a host library, nor here."""
    homes = [part.__module__.partition(".")[0] for part in type(trainer).__mro__ if name in vars(part)]
    return next((home not in _HOSTS for home in homes if home != "packtrain"), False)


def own_evaluation(trainer: Any) -> str | None:
    """What makes evaluation expect its own rows: its metrics, a method of the user, generating; or None."""
    if trainer.compute_metrics is not None:
        return "compute_metrics"
    if getattr(trainer.args, "predict_with_generate", False):
        return "predict_with_generate"
    sets = trainer.eval_dataset
    for rows in sets.values() if isinstance(sets, Mapping) else (sets,):
        if rows is not None and not indexable(rows):
            return f"a {type(rows).__name__} without length or index"
    return next((name for name in _EVALUATES if own(trainer, name)), None)


def indexable(rows: Any) -> bool:
    """Whether `rows` can be planned: a length, and an index that is a number."""
    return is_indexed(rows) and not isinstance(rows, Mapping)


@contextmanager
def unchanged_on_failure(trainer: Any) -> Iterator[None]:
    """A trainer that could not be made to pack is the one that was given, so that it can be asked again."""
    kind, held, args = type(trainer), dict(vars(trainer)), dict(vars(trainer.args))
    callbacks = list(trainer.callback_handler.callbacks)
    try:
        yield
    except BaseException:
        trainer.__class__ = kind
        for thing, before in ((trainer, held), (trainer.args, args)):
            vars(thing).clear()
            vars(thing).update(before)
        trainer.callback_handler.callbacks[:] = callbacks
        raise


def check_loss(trainer: Any, name: str, loss: Callable[[Any, Any], Any], inputs: Any, count: Any) -> None:
    """A loss that is not ours must divide by the tokens of the step; told by asking it for twice as many.

    A step holds several packs (or ranks): a mean of each alone would be summed over them.

    Args:
        name: how messages call it.
        loss: (batch, tokens of the step) -> loss; called twice, without gradients.

    Raises:
        ConfigError: it gives the same for any number of tokens.
    """
    found = []
    for items in (count, count * 2):
        with torch.no_grad(), torch.random.fork_rng(), eagerly():
            found.append(float(loss(inputs.with_values(dict(inputs)), items)))
    if found[0] and abs(found[0] - found[1]) < 1e-3 * abs(found[0]):
        raise ConfigError(
            f"{name} does not use num_items_in_batch, the supervised tokens of a step: over the "
            f"{counted(trainer.args.gradient_accumulation_steps, 'packs')} a "
            f"rank of a step, its values would be summed",
            hint="return the sum of the token losses divided by num_items_in_batch where it is given; a "
            "model with accepts_loss_kwargs = False gets that loss from its logits",
        )


def own_loss(trainer: Any) -> str | None:
    """Which loss of the user's trains: `compute_loss`, `compute_loss_func`, or None: the host's."""
    if own(trainer, "compute_loss"):
        return "compute_loss"
    func = trainer.compute_loss_func
    module = str(getattr(func, "__module__", type(func).__module__))
    return "compute_loss_func" if func is not None and module.partition(".")[0] not in _HOSTS else None


def loss_is_the_heads(trainer: Any) -> bool:
    """Whether what trains is transformers' own loss of a causal model over the logits of its head.

    Then the head may compute it without them. Not where a class or a function of the user or of another host
    stands in between, hooks may look at logits, or the model is compiled as a whole. Asked before every pass:
    callbacks may change the model.
    """
    bare = bare_model(trainer.model)
    losses = [part for part in type(trainer).__mro__ if "compute_loss" in vars(part)]
    entropy = getattr(ForCausalLMLoss, "__globals__", {}).get("fixed_cross_entropy")  # what it calls now
    layers = _down_to(bare, trainer.model_wrapped) + _down_to(bare, trainer.model)
    return (
        {part.__module__.partition(".")[0] for part in losses} <= {"packtrain", "transformers"}
        and all(_is_made_by({"packtrain", "transformers"}, vars(part)["compute_loss"]) for part in losses)
        and trainer.compute_loss_func in (None, _token_mean)
        and trainer.label_smoother is None
        and not trainer.args.torch_compile
        and (head := plain_head(bare)) is not None
        and bare.loss_function is ForCausalLMLoss
        and all(_is_made_by({"transformers"}, one) for one in (ForCausalLMLoss, entropy))
        and all(_is_plain(layer) for layer in layers)
        and not _has_hooks(head)
    )


#: What may stand around a model: it hands on what the model returns.
_WRAPPERS = {"packtrain", "transformers", "torch", "accelerate", "peft", "deepspeed"}


def _down_to(bare: Any, model: Any) -> list[Any]:
    """The wrappers of a model from the outermost on, and what is inside them."""
    layers = [model]
    while layers[-1] is not bare:
        inner = getattr(layers[-1], "module", None)
        layers.append(inner if isinstance(inner, torch.nn.Module) else bare)
    return layers


def _is_plain(layer: Any) -> bool:
    """Whether nothing but its library's own code sees what a model or a wrapper of it returns."""
    compiled = getattr(layer, "_compiled_call_impl", None) is not None or hasattr(layer, "_orig_mod")
    compiled = compiled or hasattr(layer.forward, "_torchdynamo_orig_callable")
    return not compiled and not _has_hooks(layer) and _is_made_by(_WRAPPERS, layer.forward)


def _has_hooks(layer: Any) -> bool:
    """Whether hooks see what it returns, or its gradient."""
    return any((*layer._forward_hooks, *layer._backward_hooks, *layer._backward_pre_hooks))


def _is_made_by(libraries: set[str], function: Any) -> bool:
    """Whether a function and all that it wraps are defined in these libraries."""
    while function is not None:
        function = getattr(function, "__func__", function)
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if home.partition(".")[0] not in libraries:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def refuse_settings(held: Any, settings: Iterable[tuple[str, Any, str]], hint: str) -> None:
    """Refuse the first setting of `held` that packs cannot keep.

    Args:
        settings: (name, is it so, why).
    """
    for name, wrong, why in settings:
        if wrong:
            value = held.get(name) if isinstance(held, Mapping) else getattr(held, name)
            raise ConfigError(f"{name}={value} cannot be kept: {why}", hint=hint.format(name=name))


#: Settings that packs never keep, and why.
_NEVER = {
    "label_smoothing_factor": "its loss is a mean over rows",
    "auto_find_batch_size": "a plan has its row length",
    "neftune_noise_alpha": "its noise is scaled by the length of a row, which would be that of a pack",
}
_AVERAGED = "ranks hold different numbers of tokens, and the loss would not be the mean over them"


def never_kept(args: Any, ranks: int) -> Iterator[tuple[str, Any, str]]:
    """(name, is it so, why) of settings that no host's packs can keep, of so many ranks."""
    for name, why in _NEVER.items():
        yield name, getattr(args, name, None), why
    name = "average_tokens_across_devices"
    yield name, ranks > 1 and not getattr(args, name, True), _AVERAGED


def check_samples_per_step(given: int | str | None) -> None:
    """A number, "same" or None."""
    if given not in (None, "same") and (isinstance(given, (str, bool)) or int(given) < 1):
        raise ConfigError(f"samples_per_step is {given!r}", hint='pass a number >= 1 or "same"')


def check_source(packs: Any, args: Any) -> None:
    """Refuse packs that this trainer cannot read to an end.

    Raises:
        ConfigError: they are dealt to other ranks, or nobody says when training ends.
    """
    if (packs.rank, packs.world_size) != (args.process_index, args.world_size):
        raise ConfigError(
            f"the packs are those of rank {packs.rank} of {packs.world_size}, the trainer is rank "
            f"{args.process_index} of {args.world_size}",
            hint="make them for this rank, in a process that was started for it (torchrun)",
        )
    if args.max_steps <= 0 and not is_sized(packs) and packs.kind != "growing":
        raise ConfigError(
            "max_steps is not set, and nobody knows how many packs a stream has",
            hint="set max_steps: the learning rate needs to know how long training is",
        )


def need_trainer(given: Any, host: str = "transformers", *settings: str) -> None:
    """Refuse what is no trainer of the host, such as a model, before anything of it is read.

    Args:
        settings: what the configuration of this host's trainers has.
    """
    if not (hasattr(given, "args") and hasattr(given, "train_dataset")):
        raise ConfigError(
            f"a {type(given).__name__} is no trainer",
            hint="pack(trainer, …) takes the one that holds model and rows",
        )
    lacking = [name for name in settings if not hasattr(given.args, name)]
    if lacking:
        raise ConfigError(
            f"a {type(given).__name__} is no trainer of {host}: its arguments have no {lacking[0]}",
            hint="packtrain.hosts.transformers.pack takes any Trainer of transformers",
        )


def check_trainer(trainer: Any, samples_per_step: int | str | None, *, has_packs: bool = False) -> None:
    """Refuse what packs cannot keep, each with its reason.

    Args:
        has_packs: the packs are made already; no rows are planned.
    """
    args = trainer.args
    rows = trainer.train_dataset
    check_samples_per_step(samples_per_step)
    if samples_per_step is None and args.per_device_train_batch_size != 1:
        raise ConfigError(
            f"per_device_train_batch_size is {args.per_device_train_batch_size}: a row is one pack",
            hint='set it to 1, or pass samples_per_step="same" to keep the samples of a step',
        )
    if not has_packs and (rows is None or not indexable(rows)):
        raise ConfigError(
            f"train_dataset is a {type(rows).__name__} without length or index: it cannot be planned",
            hint="use a map-style dataset, or packs of a stream: pack(trainer, source=…)",
        )
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    settings = (
        *never_kept(args, args.world_size),
        ("n_gpu", args.n_gpu > 1, "one process would split packs over GPUs; start it with torchrun"),
        ("train_sampling_strategy", strategy not in ("random", "sequential"), "packs have equal lengths"),
    )
    refuse_settings(args, settings, "unset {name}")
    if own(trainer, "get_train_dataloader"):
        raise ConfigError(
            f"{type(trainer).__name__}.get_train_dataloader would not be called: packs bring their loader",
            hint="remove it, or train unpacked",
        )
    if own(trainer, "_get_train_sampler"):
        logger.warning(
            "%s._get_train_sampler orders rows and is not asked: packs have their own order",
            type(trainer).__name__,
        )
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        refuse_auxiliary_loss(bare_model(trainer.model).config)  # it is part of the loss that is replaced
        trainer.compute_loss_func = _token_mean


def _token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """For models whose own loss cannot be told the tokens of a step."""
    logits = first_of(outputs, "logits").float()
    logits = logits.reshape(-1, logits.shape[-1])
    targets = shift_labels(labels).reshape(-1).to(logits.device)
    total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(count, device=total.device).clamp(min=1)
