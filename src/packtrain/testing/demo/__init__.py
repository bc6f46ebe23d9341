"""The demo set: data and processor made by the project itself, with faults planted."""

from .make import DemoSet, make_demo
from .resolve import demo_config, is_demo, resolve_demo

__all__ = ["DemoSet", "demo_config", "is_demo", "make_demo", "resolve_demo"]
