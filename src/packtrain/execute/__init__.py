"""Executors: an ordered map over shards of sample ids. One file per way to run it."""
