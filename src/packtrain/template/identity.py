"""What a processor is, as plain values: the part of the cache key that its files and code decide.

The digest is taken over the tokenizer's serialised content, not over file names, so the same
tokenizer from another folder or host is the same, and one added token, a flipped bos flag or a
changed normaliser is not. Settings that a call leaves behind on the object (padding, truncation)
are left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ..files import canonical_json

__all__ = ["SCHEMA", "processor_identity", "tokenizer_digest"]

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
