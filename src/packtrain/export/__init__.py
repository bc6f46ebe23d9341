"""Packs written for other readers: one file for each format, and the producer of growing directories."""

from .producer import PackingProducer

__all__ = ["PackingProducer"]
