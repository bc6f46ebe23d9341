"""Law suites for plug-in authors and our own tests, small models (`tiny:…`) and the demo set (`demo:…`).

A packer is tested by inheriting its laws:

    from packtrain.testing import PackerLaws

    class TestMine(PackerLaws):
        packer = "mine"

`crash_points` stops a verb after each of its durable steps and runs it again. Names load on first use:
only the laws need hypothesis, only the tiny models torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extend import on_first_use

if TYPE_CHECKING:
    from .crash import Stopped as Stopped
    from .crash import crash_points as crash_points
    from .crash import snapshot as snapshot
    from .crash import stopped_after as stopped_after
    from .demo import DemoSet as DemoSet
    from .demo import make_demo as make_demo
    from .laws import PackerLaws as PackerLaws
    from .laws import check_plan as check_plan
    from .laws import compiled_path as compiled_path
    from .laws import lengths_and_options as lengths_and_options
    from .laws import on_threads as on_threads
    from .laws import plain_path as plain_path
    from .laws import token_lists as token_lists
    from .tiny import TINY_MODELS as TINY_MODELS
    from .tiny import tiny_model as tiny_model

#: Module -> what it has of the public names.
_NAMES = {
    "demo": "DemoSet make_demo",
    "laws": "PackerLaws check_plan compiled_path lengths_and_options on_threads plain_path token_lists",
    "crash": "Stopped crash_points snapshot stopped_after",
    "tiny": "TINY_MODELS tiny_model",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)
__getattr__ = on_first_use(__name__, _HOMES)
