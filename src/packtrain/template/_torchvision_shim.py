"""Make `import torchvision` work beside a torch build it was not compiled for.

The torchvision wheel on the package index is built for CUDA. Next to a CPU build of the same torch
version its compiled extension cannot be loaded, and `import torchvision` then stops at
"operator torchvision::nms does not exist", although Hugging Face processors only need its Python
part (resizing tensors). `transformers` imports torchvision from most of its model modules, so
without it neither a vision processor nor even a plain causal model can be imported.

`ensure_torchvision()` declares the signatures of the operators that torchvision describes at import
(`nms` and its quantised twin `qnms`), without an implementation. It acts only when torchvision is
installed, not yet imported, and its extension really cannot be loaded; a working torchvision is left
alone. What stays unavailable then: detection operators (nms, roi_align …) and torchvision's own
image decoding. packtrain uses neither: images are opened with Pillow.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

# torch unregisters a library's operators when the object is collected, so it is kept here.
_library: Any = None


def ensure_torchvision() -> bool:
    """Declare torchvision's operators if its extension cannot be loaded.

    Call it before the first import of a `transformers` model or processor module. Cheap when
    repeated.

    Returns:
        True when operators were declared (now or earlier), False when nothing was needed.
    """
    global _library
    if _library is not None:
        return True
    if "torchvision" in sys.modules:
        return False
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("torch") is None:
        return False
    if _library is not None:  # scripts/torchvision_beside_cpu_torch.py did it while it was looked for
        return True  # type: ignore[unreachable]
    import torch

    if _extension_loads(torch, Path(next(iter(spec.submodule_search_locations)))):
        return False
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return False
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(name + _SIGNATURE)
    logger.info("torchvision's extension does not fit this torch; declared %s", ", ".join(missing))
    return True


def _extension_loads(torch: Any, folder: Path) -> bool:
    for path in sorted(one for end in (".so", ".pyd", ".dylib") for one in folder.glob(f"_C*{end}")):
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError):
            continue
        return True
    return False
