"""The one place that holds the version; CHANGELOG.md must agree (checked by a test)."""

__version__ = "0.1.0"
