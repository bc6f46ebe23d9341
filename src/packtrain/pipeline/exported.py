"""Packs of an export as a configuration names them (`data: {kind: exported, path: …}`), and their template.

The samples of raw, webdataset and energon exports are encoded while training, with the template that measured
them: the export says which. Chunks hold encoded samples; they need a template only where they hold media as
bytes, for `tiny:` models, and for validation samples, and then `template.processor` names it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import ConfigError
from ..store import shards
from .inputs import Inputs

if TYPE_CHECKING:
    from ..train.config import Exported, RunConfig

__all__ = ["open_exported"]


def open_exported(config: RunConfig, data: Exported) -> tuple[Any, Any]:
    """The dataset of an export, and the template of its samples or None.

    Raises:
        ConfigError: its samples have to be encoded, and nothing says by what.
        FormatError: the folder holds no finished export.
    """
    from ..data import open_packs
    from ..train.opened import left_out_file
    from ..train.steps import skipped_samples

    folder = shards.at(data.path)
    chunks = shards.export_of(folder)["key"]["format"] == "chunks"
    template = _template(config, folder, chunks)
    options: dict[str, Any] = {"verify": data.verify} if chunks else {}
    options |= {"skip": skipped_samples(config), "ledger_file": left_out_file(config)}
    options |= {"on_error": data.on_error, "max_skip_fraction": data.max_skip_fraction}
    return open_packs(folder, None if template is None else template.encode, **options), template


def _template(config: RunConfig, folder: Path, chunks: bool) -> Any:
    named = config.template.processor
    if chunks and named is None:
        return None
    origin = shards.hidden(folder, "origin.json")
    told = files.read_json(origin) if origin.is_file() else {}
    if "inputs" in told:
        inputs = Inputs.told(told["inputs"], origin)
    elif named or config.model.name_or_path:
        inputs = Inputs(source=str(folder), processor=config.processor, max_length=config.template.max_length)
    else:
        raise ConfigError(
            f"{folder} holds samples that are not encoded, and no processor is named",
            hint="set template.processor to what they were measured with",
        )
    system = config.template.system
    return replace(
        inputs, processor=named or inputs.processor, system=inputs.system if system is None else system
    ).open_template()
