"""Sources: indexable collections of samples with stable ids and a fingerprint. One file per kind."""

from ._open import open_source

__all__ = ["NOT_PLUGINS", "open_source"]

NOT_PLUGINS = ("chat", "keys", "text")  # public modules here that open no files
