"""Lengths and costs from metadata: image sizes, rendered text, id ranges, and the audit of all of it."""
