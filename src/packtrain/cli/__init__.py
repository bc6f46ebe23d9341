"""The command line: one module per verb, loaded when it is called. The only package that prints."""

from ._app import main

__all__ = ["main"]
