"""Packers: lengths to packs. One file per strategy; its file name is its option name."""
