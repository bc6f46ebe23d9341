"""Folders on disk: lengths, plans, and the parts of an unfinished measurement."""

# Public modules here that save and load no artefact as one value.
NOT_PLUGINS = ("chunk_folder", "chunks", "pack_records", "parts", "shards")
