"""Packs: where they come from, in which order, and where a run stands in them (torch)."""
