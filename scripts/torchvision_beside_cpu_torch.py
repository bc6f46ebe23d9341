"""Lets `import transformers` come before `import packtrain` beside a torchvision that does not fit torch.

`scripts/setup.sh` puts this file and a `.pth` line that imports it into the development environment. At the
first import of torchvision it declares the operators that torchvision describes (packtrain.template does the
same when it is imported first), then steps aside. Nothing is loaded before that.
"""

from __future__ import annotations

import sys
from typing import Any


class _Finder:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            from packtrain.template import ensure_torchvision

            ensure_torchvision()


sys.meta_path.insert(0, _Finder)
