"""What can be known before anything is measured, told then: also whether the processor is the model's.

    check_early(config)                 # the configuration, packages, model config, output folder
    check_template(config, template)    # the model against the processor

`run`, `train` and a dry run ask the same here, so a dry run refuses what a run would. Nothing is loaded but
the model's config; the output folder is made, and a probe file written into it and removed.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..collate.model_traits import check_packs, family_for, text_config
from ..errors import (
    ConfigError,
    IsolationError,
    MissingExtraError,
    UnknownNameError,
    counted,
    one_line,
)
from ..families import Family, family_of
from ..planning.costs import DeviceProfile
from ..testing.tiny import is_tiny
from ..world import World, world
from .arguments import check_arguments, refuse_auxiliary_loss
from .attention import choose_backend, is_installed
from .config import RunConfig, told_of, validation_prefix
from .config.sections import refuse
from .culprit import check_mask
from .model import class_for, read_config
from .reduction import reduction_of
from .varlen import SDPA
from .versions import missing_features
from .weights import check_weights, outline, position_table

logger = logging.getLogger(__name__)

#: Packages of a training -> the extra that brings them.
_PACKAGES = ("torch", "transformers", "accelerate")

_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")

#: What a run writes into its folder.
_FILES = ("run.json", "run_config.json", "report.html", "train_log.jsonl", "failed.jsonl")
_FOLDERS = ("lengths", "plan", "startup", "sample_loss", "model")

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def check_early(
    config: RunConfig,
    *,
    page: bool = False,
    needs_model: bool = True,
    place: World | None = None,
) -> list[str]:
    """Refuse what a run could not carry out, before it measures.

    Args:
        config: from `load_config`.
        page: a `report.html` will be written.
        needs_model: False (a dry run): that no model is named is a warning.
        place: rank and world size; None: from the launcher's environment.

    Returns:
        Warnings; the writing rank has logged them.

    Raises:
        MissingExtraError: a package is not installed.
        IsolationError: the model cannot run packed on `model.attn`.
        ConfigError: the model cannot be found, keys do not go together, the output folder cannot be written.
    """
    place = place or world()
    lacking = next((package for package in _PACKAGES if not _is_there(package)), None)
    if lacking or (page and (lacking := missing_of_page())):
        raise MissingExtraError(lacking, "train" if lacking in _PACKAGES else "report")
    by_epochs = config.data.kind in ("planned", "exported")
    check_arguments(config, has_eval=by_epochs and config.data.val is not None, place=place)
    warnings = missing_features()
    if needs_model or config.model.name_or_path is not None:
        warnings += _check_model(config, place)
    else:
        warnings.append("no model is named: a run would be refused; set model.name_or_path")
    check_folders(config, place)
    if config.training.device_profile is not None:
        DeviceProfile.load(config.training.device_profile)
    if place.is_writer:
        for line in warnings:
            logger.warning("%s", line)
    return warnings


def check_template(config: RunConfig, template: Any, source: Any = None) -> None:
    """The template of a run against its model; without a model or a processor there is nothing to check.

    Args:
        source: samples of the run, where keys name their parts.

    Raises:
        ConfigError: see `check_match`; a key names sources that the data do not have.
    """
    if source is not None:
        reduction_of(config.training.loss_reduction, config.training.source_weights, source)
    processor = getattr(template, "processor", None)
    found = _model_config(config, processor)
    if found is not None and processor is not None:
        check_match(found, processor, getattr(template, "family", None))


def check_planned(config: RunConfig, template: Any, plan: Any, lengths: Any) -> None:
    """The packs of a plan against the rows and the model of a run.

    Raises:
        IsolationError: samples would be trained with other rotations than alone, see `check_packs`.
        ConfigError: a sample is longer than the model's learned positions, or a pack than rows are padded to.
    """
    longest, row = int(plan.pack_tokens.max()) if len(plan) else 0, config.row_length
    if row is not None and longest > row:
        raise ConfigError(
            f"data.pad_to_length is {row}, and the longest pack has {longest} tokens",
            hint="raise it, or set data.long_samples: drop (model.max_model_len) to leave longer samples out",
        )
    found = _model_config(config, getattr(template, "processor", None))
    if found is None or not len(plan):
        return
    check_packs(found, plan, lengths.tokens)
    name = str(config.model.name_or_path)
    made = None if is_tiny(name) else outline(found)
    reach = None if made is None else position_table(made)
    most = int(lengths.tokens[plan.indices].max())
    if reach is not None and most > reach:
        raise ConfigError(
            f"a sample has {most} tokens, the learned positions of {found.model_type} end at {reach}",
            hint=f"set model.max_model_len: {reach}: longer samples go to the ledger",
        )


def _model_config(config: RunConfig, processor: Any) -> Any:
    name = config.model.name_or_path
    return None if name is None else read_config(name, processor)


def missing_of_page() -> str | None:
    """The first package that a `report.html` needs and that is not installed."""
    return next((package for package in ("jinja2", "matplotlib") if not _is_there(package)), None)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that somebody made by hand
        return True


def _check_model(config: RunConfig, place: World) -> list[str]:
    """Everything that the model's config says."""
    import torch

    name, asked = config.model_name, config.model
    tiny = is_tiny(name)
    found = read_config(name)
    dtype = "float32" if tiny and asked.dtype == "auto" else asked.dtype
    backend = choose_backend(found, asked.attn, dtype=dtype)
    no_card = backend == "flex_attention" and not torch.cuda.is_available()
    refuse(
        (not is_installed(backend), f"{backend} is not installed here", f"install it, or {SDPA}"),
        (no_card, "flex_attention trains on GPUs alone, and there is none", SDPA),
    )
    refuse_auxiliary_loss(found)
    if tiny:
        return []
    class_for(found)
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(any(folder.glob(kind)) for kind in _WEIGHTS):
        raise ConfigError(f"model folder {name} holds no weights", hint="check model.name_or_path")
    made, told = check_weights(folder, found) if folder.is_dir() else (outline(found), [])
    return [*told, *_undeclared(found, made, backend), *_check_memory(config, found, dtype, place)]


def _undeclared(model_config: Any, made: Any, backend: str) -> list[str]:
    """What is known of a model that no family declares."""
    if family_for(model_config) is not None:
        return []
    check_mask(made, backend, model_config.model_type)
    return [
        f"no family declares {model_config.model_type}: the proof when training begins decides whether it "
        "runs packed; packtrain doctor --model … --prove tells before anything is measured"
    ]


# ---------------------------------------------------------------------------------------- memory
def memory_floor(model_config: Any, tokens: int, *, size: int, states: int = 4) -> int:
    """Bytes that training the language layers on one pack takes at least.

    Weights with gradients and optimizer states, and what every layer got as its input. Towers, kernels,
    and logits (the chunked loss has none) come on top.

    Args:
        tokens: of a pack.
        size: bytes of a number.
        states: numbers a parameter: weight, gradient, two moments.
    """
    text = text_config(model_config)
    wide, layers = _whole(text, "hidden_size"), _whole(text, "num_hidden_layers")
    heads = _whole(text, "num_attention_heads")
    grouped = _whole(text, "num_key_value_heads") or heads
    head = _whole(text, "head_dim") or (wide // heads if heads else 0)
    matrices = 3 if getattr(text, "hidden_act", "") == "silu" else 2
    inner = _whole(text, "intermediate_size")
    layer = wide * head * (2 * heads + 2 * grouped) + matrices * wide * inner
    tied = bool(getattr(model_config, "tie_word_embeddings", True))
    weights = layers * layer + _whole(text, "vocab_size") * wide * (1 if tied else 2)
    return size * (states * weights + layers * tokens * wide)


def _whole(thing: Any, name: str) -> int:
    value = getattr(thing, name, None)
    return value if isinstance(value, int) else 0


def _check_memory(config: RunConfig, model_config: Any, dtype: str, place: World) -> list[str]:
    import torch

    if family_for(model_config) is None:
        return []
    length = config.template.max_length or config.model.max_model_len or 0
    named = str(getattr(model_config, "dtype", None) if dtype == "auto" else dtype).removeprefix("torch.")
    trainer = config.training.trainer
    plain = str(trainer.get("optim") or "adamw_torch").startswith("adamw_torch")
    sharded = bool(trainer.get("fsdp") or trainer.get("deepspeed"))
    least = memory_floor(model_config, length, size=_BYTES.get(named, 4), states=4 if plain else 2)
    least = least // place.size if sharded else least
    if torch.cuda.is_available():
        there, where = torch.cuda.get_device_properties(0).total_memory, "the GPU"
    else:
        there, where = _main_memory(), "this machine"
    if there is None or least <= there:
        return []
    return [
        f"one pack of {length} tokens takes at least {least / 2**30:.1f} GiB to train ({named}, weights, "
        f"gradients, optimizer), {where} has {there / 2**30:.1f}: use a smaller model, 16 bit, or FSDP"
    ]


def _main_memory() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().total)


# ---------------------------------------------------------------------------------------- the folder
def check_folders(config: RunConfig, place: World) -> None:
    """Every folder that the run writes to can be written.

    Raises:
        ConfigError: names the key and the folder.
    """
    named: dict[str, str | None] = {
        "training.output_dir": config.training.output_dir,
        "data.cache.root_dir": config.data.cache.root_dir,
        "data.encode_cache": getattr(config.data, "encode_cache", None),
        "export.out": None if config.export.format is None else config.export.out,
    }
    for key, folder in named.items():
        if folder is not None:
            _check_folder(key, Path(folder), place)
    _check_names(Path(config.training.output_dir), config.data.validations())


def _check_names(folder: Path, sets: Iterable[str]) -> None:
    """What a run writes under a name of its own finds no folder there, or no file."""
    of_sets = [f"{validation_prefix(name)}{kind}" for name in sets for kind in ("lengths", "plan")]
    names = (*_FILES, *_FOLDERS, *of_sets)
    for path in [*map(folder.joinpath, names), *folder.glob("checkpoint-*")]:
        kind = "file" if path.name in _FILES else "folder"
        if path.exists() and path.is_dir() != (kind == "folder"):
            other = "folder" if kind == "file" else "file"
            raise ConfigError(
                f"training.output_dir: {path} is a {other}, and a run writes a {kind} there",
                hint="move it away, or choose another folder",
            )


def _check_folder(key: str, folder: Path, place: World) -> None:
    probe = folder / f".writable-{place.rank}"
    try:
        with told_of(key), files.tidied(folder, unless=place.size > 1):
            files.make_folder(folder)
            files.publish_text(probe, "")
            files.remove(probe)
    except OSError as error:
        raise ConfigError(
            f"{key} {folder} cannot be written: {one_line(error, 120)}",
            hint="choose a folder on a disk with space that you may write",
        ) from None


# --------------------------------------------------------------------------------------------
# Is this processor one of this model? From the model's config alone, no weights.
# --------------------------------------------------------------------------------------------
#     check_match(config, processor)      # transformers config, processor or tokenizer
#
# Checked: every token id has a row in the embedding; placeholders of media have the ids that the model looks
# for; patches are of one size; positions have as many rows. A sample of one that differs would train
# something else, or stop the run at the first pack that holds it. A tokenizer alone fits a model with towers:
# its samples are text.

_HINT = "take the processor of the model (template.processor, or processing_class of a Trainer)"

_KINDS = ("image", "video", "audio")

#: Setting of an image processor -> the same of a vision config.
_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


def check_match(config: Any, processor: Any, family: Family | None = None) -> None:
    """Refuse a processor that makes samples this model cannot take.

    Args:
        config: transformers config of the model.
        processor: loaded processor or tokenizer; None is not checked.
        family: the template's; None: found from the processor's class.

    Raises:
        ConfigError: says what differs, with both values.
    """
    if processor is None:
        return
    tokenizer = getattr(processor, "tokenizer", processor)
    told = next(
        itertools.chain(
            _other_family(config, processor, family),
            _other_placeholders(config, processor, tokenizer),
            _other_sizes(config, getattr(processor, "image_processor", None)),
        ),
        None,
    )
    if told is not None:
        raise ConfigError(told, hint=_HINT)
    _check_vocabulary(config, tokenizer)


def _other_family(config: Any, processor: Any, family: Family | None) -> Iterator[str]:
    ours = family_for(config)
    try:
        theirs = family or family_of(processor=processor)
    except (UnknownNameError, IsolationError):
        return
    if ours is None or not theirs.modalities:
        return
    kind, told = config.model_type, f"the processor is of {theirs.name}"
    if not ours.modalities:
        yield f"{told}, and {kind} takes no media"
    if theirs.position_rows != ours.position_rows:
        rows = counted(theirs.position_rows, "rows")
        yield f"{told} ({rows} of positions), {kind} takes {ours.position_rows}"
    if dict(theirs.media_keys) != dict(ours.media_keys):
        yield f"{told}, whose media {kind} does not take"
    rules = ("image_rule", "video_rule", "audio_rule", "time_unit")
    if any(getattr(theirs, rule) != getattr(ours, rule) for rule in rules):
        line = "the processor is of %s, the model of %s: times of videos are counted as %s does"
        logger.warning(line, theirs.name, ours.name, theirs.name)


def _other_placeholders(config: Any, processor: Any, tokenizer: Any) -> Iterator[str]:
    for kind in _KINDS:
        wanted = _first(config, f"{kind}_token_id", f"{kind}_token_index")
        given = _first(processor, f"{kind}_token_id")
        token = getattr(processor, f"{kind}_token", None)
        if given is None and isinstance(token, str) and hasattr(tokenizer, "convert_tokens_to_ids"):
            given = tokenizer.convert_tokens_to_ids(token)
        if isinstance(wanted, int) and isinstance(given, int) and wanted != given:
            told = f"the {kind} token of the processor is {given} ({token})"
            yield f"{told}, {config.model_type} looks for {wanted}"


def _first(thing: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)


def _other_sizes(config: Any, images: Any) -> Iterator[str]:
    vision = getattr(config, "vision_config", None)
    for ours, theirs in _SIZES.items():
        given, wanted = getattr(images, ours, None), getattr(vision, theirs, None)
        if isinstance(given, int) and isinstance(wanted, int) and given != wanted:
            yield f"{ours} of the processor is {given}, {theirs} of {config.model_type} is {wanted}"


def _check_vocabulary(config: Any, tokenizer: Any) -> None:
    """A pad token beyond the embedding is allowed: packs have none of it."""
    size = getattr(text_config(config), "vocab_size", None)
    if not isinstance(size, int) or not hasattr(tokenizer, "get_vocab"):
        return
    pad = getattr(tokenizer, "pad_token", None)
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= size and token != pad}
    if beyond:
        token = max(beyond, key=lambda one: beyond[one])
        raise ConfigError(
            f"the tokenizer gives ids up to {beyond[token]} ({token}), {config.model_type} has {size} "
            f"embeddings: {len(beyond)} tokens are beyond",
            hint=f"{_HINT}, or enlarge the model with resize_token_embeddings",
        )
