"""Executors: an ordered map over shards of sample ids. One file per way to run it."""

NOT_PLUGINS = ("pool",)  # the worker processes under `local`, and under streams and the producer
