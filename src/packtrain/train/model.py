"""Load the network of a run: a folder, a hub name, or tiny:….

The class follows the config: a language model for text configs, the image-text class for
vision-language ones. The cache is switched off in every sub-config: transformers builds one by
default, and with it packed samples read each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, IsolationError, MissingExtraError, first_line
from ..template import ensure_torchvision
from ..testing.tiny import is_tiny, tiny_config, tiny_model
from .attention import choose_backend
from .segments import isolate_states
from .varlen import VARLEN, use_varlen


def load_model(
    name_or_path: str, *, attn: str = "auto", dtype: str = "auto", processor: Any = None, seed: int = 0
) -> Any:
    """The model, cache off, with an attention backend that isolates packed samples.

    Args:
        name_or_path: folder, hub name or `tiny:…`.
        attn: "auto", or a name of `config.ATTENTIONS`.
        dtype: "auto" (what the checkpoint holds), "float32", "bfloat16", "float16".
        processor: tokenizer or processor; needed for `tiny:…` only.
        seed: seed of random weights (`tiny:…`).

    Raises:
        IsolationError: the model cannot run packed on this backend.
        ConfigError: the model cannot be found or loaded.
    """
    if is_tiny(name_or_path):
        model = tiny_model(name_or_path, processor, seed)
        model = model if dtype == "auto" else model.to(getattr(torch, dtype))
        backend = choose_backend(model, attn, dtype=str(model.dtype))
        if backend not in ("sdpa", VARLEN):
            try:
                model.set_attn_implementation(backend)
            except (ImportError, ValueError) as error:
                raise ConfigError(
                    f"{backend} is not available here: {first_line(error)}", hint="use model.attn: sdpa"
                ) from error
        return _prepared(model, backend)
    ensure_torchvision()
    config = read_config(name_or_path)
    config.return_dict = True  # with False, transformers' own models stop at the tuple of their inner one
    backend = choose_backend(config, attn, dtype=dtype)
    loads = None if attn == "auto" or backend == VARLEN else backend  # models without sdpa get eager
    try:
        with no_progress_bars():
            model = class_for(config).from_pretrained(
                name_or_path, config=config, dtype=dtype, attn_implementation=loads
            )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        lacks = isinstance(error, ImportError)
        raise ConfigError(
            f"model {name_or_path} cannot be loaded{f' on {backend}' if lacks else ''}: {first_line(error)}",
            hint="install what it names, or use model.attn: sdpa" if lacks else "check model.name_or_path",
        ) from error
    switch_cache_off(model)
    return _prepared(model, backend)


def _prepared(model: Any, backend: str) -> Any:
    """State layers run per segment; varlen takes over where it was chosen."""
    isolate_states(model)
    return use_varlen(model) if backend == VARLEN else model


def switch_cache_off(model: Any) -> None:
    """`use_cache=False` in the config and every sub-config of the model."""
    config = model.config
    parts = [config, config.get_text_config()]
    parts += [value for value in vars(config).values() if hasattr(value, "use_cache")]
    for part in parts:
        part.use_cache = False


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers prints no progress bars inside; the caller's setting comes back."""
    from transformers.utils import logging as settings

    before = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            settings.enable_progress_bar()


def read_config(name: str, processor: Any = None) -> Any:
    """The config of a folder, hub name or `tiny:…` (for a processor); a ConfigError says what is missing."""
    if is_tiny(name):
        return tiny_config(name, processor)
    import transformers

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigError(f"model folder {name} does not exist", hint="set model.name_or_path")
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {name} cannot be found: {first_line(error)}",
            hint="give a folder with config.json, a hub name that can be reached, or tiny:qwen3",
        ) from error
    except ImportError as error:
        raise MissingExtraError(error.name or "transformers", "train") from error


def class_for(config: Any) -> Any:
    """AutoModelForImageTextToText for configs with a tower, else AutoModelForCausalLM."""
    import transformers

    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise IsolationError(
        f"model type {config.model_type!r} is not a language model",
        hint="packtrain trains causal language models and image-text models",
    )
