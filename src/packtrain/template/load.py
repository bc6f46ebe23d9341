"""Load a Hugging Face processor or tokenizer, and what it is as plain values: a part of the cache key.

A folder that describes a processor never falls back to its bare tokenizer: a vision model measured
as text would be planned with lengths that are far too small, without any sign. Failures become one
line with a hint instead of a traceback of the library.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError, MissingExtraError, PacktrainError, first_line, one_line
from ..files import canonical_json
from ._torchvision_shim import ensure_torchvision

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "image_processor_config.json")

#: Files that name classes of transformers, and the key that does.
_NAMED_CLASSES = (
    ("tokenizer_config.json", "tokenizer_class"),
    *((file, "processor_class") for file in _PROCESSOR_FILES),
)

#: What a tokenizer is made of; without any, the library asks for packages that convert one.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")
_CONVERTERS = ("protobuf", "sentencepiece", "tiktoken")


def load_processor(
    name_or_path: str | Path,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The processor of a model, or its tokenizer when the model is text only.

    Args:
        name_or_path: folder with the processor's files, or a hub name such as `Qwen/Qwen3-VL-4B-Instruct`.
        min_pixels: smallest image area in pixels; set on the loaded object, so that it takes effect.
        max_pixels: largest image area in pixels, likewise.
        trust_remote_code: run Python code that comes with the processor.

    Raises:
        InputError: not found, not readable, or not a processor.
        MissingExtraError: transformers, or a package the processor needs, is not installed.
        ConfigError: a pixel limit for something without an image processor, or an impossible one.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    is_folder = folder.is_dir()
    _check_name(name, folder)
    processor = _load(str(folder) if is_folder else name, folder if is_folder else None, trust_remote_code)
    if min_pixels is not None or max_pixels is not None:
        _set_pixel_limits(processor, name, min_pixels, max_pixels)
    return processor


def _check_name(name: str, folder: Path) -> None:
    """A hub name has at most one slash and none of a path's marks."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    hint = "give a folder with processor_config.json or tokenizer_config.json, or a hub name"
    if not name.strip():
        fault, hint = "no processor is named", "processor=NAME, a folder or a hub name"
    elif folder.is_file():
        fault, hint = f"processor {name} is a file", "give the folder that holds processor_config.json"
    elif name.startswith("demo:"):
        made = "from packtrain.testing.demo.resolve import resolve_demo"
        fault, hint = f"{name} is made on first use", f"load_processor(resolve_demo({name!r})), {made}"
    elif name.startswith("tiny:"):
        fault, hint = f"{name} is a network alone", "set template.processor, a folder or a hub name"
    elif is_path and not folder.is_dir():
        fault = f"processor folder {name} does not exist"
    else:
        return
    raise InputError(fault, hint=hint)


def _load(name: str, folder: Path | None, trust_remote_code: bool) -> Any:
    ensure_torchvision()
    try:
        from transformers import AutoProcessor, AutoTokenizer
    except ImportError as error:
        raise _import_failure(error, "transformers") from error
    options = {"trust_remote_code": trust_remote_code}
    try:
        loaded = AutoProcessor.from_pretrained(name, **options)
    except Exception as error:
        if _describes_processor(name) or not isinstance(error, (ValueError, OSError, KeyError, TypeError)):
            raise _explain(name, folder, error) from error
        first = error
    else:
        if not hasattr(loaded, "tokenizer") and _describes_processor(name):
            raise InputError(
                f"{name} describes a processor, but only {type(loaded).__name__} could be loaded from it",
                hint="this transformers release may not know its processor class; upgrade it, or repair "
                "processor_config.json",
            )
        return loaded
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        raise _explain(name, folder, error) from first


def _file_of(name: str, file: str) -> Path | None:
    """A file of a folder or (downloaded) hub repository; None: it is not there, or cannot be had."""
    from transformers.utils import cached_file

    try:
        found = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError:
        return None
    return None if found is None else Path(found)


def _describes_processor(name: str) -> bool:
    """Whether a folder or repository holds the settings of a processor."""
    return any(_file_of(name, file) is not None for file in _PROCESSOR_FILES)


def _unknown_class(name: str) -> str | None:
    """A class that the files name and this transformers does not have; what it says then is about other
    things (it tries to convert the tokenizer, and asks for protobuf)."""
    import transformers

    for file, key in _NAMED_CLASSES:
        found = _file_of(name, file)
        try:
            held = {} if found is None else json.loads(found.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        named = held.get(key) if isinstance(held, dict) and "auto_map" not in held else None
        if isinstance(named, str) and not any(hasattr(transformers, n) for n in (named, f"{named}Fast")):
            return named
    return None


def _explain(name: str, folder: Path | None, error: Exception) -> PacktrainError:
    """One line for what the library said, with a hint that fits."""
    unknown = _unknown_class(name)
    if unknown is not None:
        from transformers import __version__ as version

        return MissingExtraError(
            "transformers",
            "train",
            f"transformers {version} has no {unknown}, which {name} was saved with",
            "pip install -U transformers (another release saved it), or save the processor with this one",
        )
    if isinstance(error, ImportError):
        asked = any(package in str(error).lower() for package in _CONVERTERS)
        if asked and folder is not None and not any(any(folder.glob(one)) for one in _VOCABULARIES):
            return InputError(
                f"folder {name} holds no tokenizer.json and no other vocabulary",
                hint="the folder may be incomplete; save it again with save_pretrained",
            )
        return _import_failure(error, name)
    text = str(error)
    said = f"{type(error).__name__}: {first_line(error)[:200]}"
    if "trust_remote_code" in text:
        return InputError(
            f"{name} comes with its own Python code", hint="pass trust_remote_code=True if you trust it"
        )
    if folder is not None:
        files = {path.name for path in folder.iterdir()}
        if not files & {*_PROCESSOR_FILES, "tokenizer_config.json", "tokenizer.json", "config.json"}:
            return InputError(
                f"folder {name} holds no processor or tokenizer",
                hint="it needs processor_config.json or tokenizer_config.json; save one with save_pretrained",
            )
        return InputError(
            f"cannot load the processor in {name}: {said}",
            hint="the folder may be incomplete; save it again with save_pretrained",
        )
    return InputError(
        f"cannot load processor {name!r} from the hub: {said}",
        hint="check the name and the network, or give a local folder",
    )


def _import_failure(error: ImportError, name: str) -> PacktrainError:
    """A package is missing: one of our extra, or one that this processor alone needs."""
    missing = (error.name or "").split(".")[0]
    if missing in ("transformers", "torch", "jinja2", "tokenizers"):
        return MissingExtraError(missing, "train")
    text = one_line(error)
    for package in ("torchvision", "sentencepiece", "tiktoken", "mistral_common", "timm", "av"):
        if package in text.lower():
            return InputError(
                f"{name} needs {package}, which is not installed", hint=f"pip install {package}"
            )
    return InputError(f"{name} needs a package that is not installed: {text[:200]}", hint="install it")


def _set_pixel_limits(processor: Any, name: str, low: int | None, high: int | None) -> None:
    """Write the limits where the image processor reads them (keyword names differ between releases)."""
    image_processor = getattr(processor, "image_processor", None)
    size = dict(getattr(image_processor, "size", None) or {})
    if image_processor is None or "shortest_edge" not in size or "longest_edge" not in size:
        raise ConfigError(
            f"{name} has no pixel limits to set ({type(processor).__name__})",
            hint="drop min_pixels and max_pixels, or choose a Qwen-VL processor",
        )
    size["shortest_edge"] = size["shortest_edge"] if low is None else int(low)
    size["longest_edge"] = size["longest_edge"] if high is None else int(high)
    if not 0 < size["shortest_edge"] <= size["longest_edge"]:
        own = [name for name, given in (("min_pixels", low), ("max_pixels", high)) if given is None]
        raise ConfigError(
            f"min_pixels {size['shortest_edge']} and max_pixels {size['longest_edge']} are not a range",
            hint=f"{own[0]} is the processor's own: give it too" if own else "0 < min_pixels <= max_pixels",
        )
    image_processor.size = type(image_processor.size)(**size)
    for key, value in (("min_pixels", size["shortest_edge"]), ("max_pixels", size["longest_edge"])):
        if getattr(image_processor, key, None) is not None:
            setattr(image_processor, key, value)


def chat_template_of(given: str, processor: Any) -> str:
    """A chat template as text.

    Args:
        given: Jinja text, a file of it, or `trl`: the training template that TRL publishes for the
            processor's own (it renders every turn as it was generated, and marks it).

    Raises:
        InputError: no such file.
        MissingExtraError: TRL is not installed.
        ConfigError: TRL has no training template for this one.
    """
    if given == "trl":
        return _trl_template(processor)
    if "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise InputError(f"chat template {given} is no file", hint="give a .jinja file, or trl")
    return path.read_text(encoding="utf-8")


def _trl_template(processor: Any) -> str:
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError:
        raise MissingExtraError("trl", None) from None
    try:
        found = get_training_chat_template(processor)
    except ValueError as error:
        raise ConfigError(
            f"TRL has no training template for this chat template: {one_line(error, 120)}",
            hint="leave template.chat_template out: each turn is located in the rendering",
        ) from None
    return str(found if found is not None else getattr(processor, "chat_template", None))


# --------------------------------------------------------------------------------------------
# What a processor is, as plain values: the part of the cache key that its files and code decide
# --------------------------------------------------------------------------------------------
# The digest is taken over the tokenizer's serialised content, not over file names, so the same
# tokenizer from another folder or host is the same, and one added token, a flipped bos flag or a
# changed normaliser is not. Settings that a call leaves behind on the object (padding, truncation)
# are left out.
#: Raised when packtrain's own rendering or counting changes a length.
SCHEMA = 1

_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens")


def processor_identity(processor: Any, tokenizer: Any) -> dict[str, Any]:
    """Class, tokenizer content and library versions, as plain JSON values."""
    import tokenizers
    import transformers

    return {
        "processor_class": type(processor).__name__,
        "schema": SCHEMA,
        "tokenizer": tokenizer_digest(tokenizer),
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) over everything of a tokenizer that decides token ids and template variables."""
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = type(backend).from_str(backend.to_str())  # a copy: never change the caller's
        backend.no_padding()
        backend.no_truncation()
    flags = {name: _plain(getattr(tokenizer, name, None)) for name in _FLAGS}
    special = {str(key): _plain(value) for key, value in tokenizer.special_tokens_map.items()}
    digest = hashlib.sha256(backend.to_str().encode("utf-8"))
    digest.update(canonical_json([flags, special]))
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
