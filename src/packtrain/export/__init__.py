"""Packs written for other readers: one file for each format, and the producer of growing directories."""

from .producer import PackingProducer

__all__ = ["NOT_PLUGINS", "PackingProducer"]

NOT_PLUGINS = ("producer",)  # public modules here that are no format
