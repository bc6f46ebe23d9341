"""The start of unsloth, by its example on its CPU backend: with its own packing, with ours, not packed.

That backend turns `packing` off when the arguments are read ("needs FlashAttention to keep packed examples
apart"). So the variant "unsloth, its packing" runs with that one setting put back here, in the bench: TRL's
`pack_dataset` makes its rows, as on a card; its losses on a CPU are not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .hosts_trl import start_example

__all__ = ["VARIANTS", "child"]

#: name -> (packed by us, settings)
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "unsloth, its packing (bfd)": (
        False,
        {"per_device_train_batch_size": 1, "packing": True, "packing_strategy": "bfd"},
    ),
    "unsloth, packtrain": (True, {"per_device_train_batch_size": 1}),
    "unsloth, unpacked": (False, {"per_device_train_batch_size": 8}),
}


def child(name: str, folder: Path, out: Path) -> None:
    packed, settings = VARIANTS[name]
    if settings.get("packing"):
        keep_packing()
    start_example("unsloth_sft", packed, settings, folder, out)


def keep_packing() -> None:
    """`packing` of the arguments stays as it is given."""
    import unsloth  # noqa: F401  (before unsloth_zoo)
    from unsloth_zoo.cpu import trainer

    normalize = trainer.normalize_cpu_training_arguments

    def kept(args: Any) -> Any:
        packing = getattr(args, "packing", False)
        args = normalize(args)
        if packing:
            args.packing = packing
        return args

    trainer.normalize_cpu_training_arguments = kept
