"""Folders on disk: lengths, plans, and the parts of an unfinished measurement."""
