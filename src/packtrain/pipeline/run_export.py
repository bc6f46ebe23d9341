"""The main job with an `export` section: measure, audit, plan, and write packs as files, train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, counted
from ..world import World, world
from .export import export, format_of
from .export_guards import refuse_foreign
from .prepare import Stage, prepare, silent

if TYPE_CHECKING:
    from ..train.config import RunConfig

__all__ = ["run_export"]


def run_export(
    config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None, place: World | None = None
) -> dict[str, Any]:
    """Export what a configuration would train on; one process.

    Args:
        config: from `train.load_config`, with `export.format`.
        overwrite: replace what the folders hold of another run or export.
        stage: progress display per stage.

    Returns:
        As `export`.

    Raises:
        ConfigError: started on several ranks.
    """
    place = place or world()
    if place.size > 1:
        raise ConfigError(
            f"an export is no job for {counted(place.size, 'ranks')}",
            hint="start one process; export.workers adds others",
        )
    asked, folder = config.export, Path(config.training.output_dir)
    if asked.format is None:
        raise ConfigError("export.format is not set", hint="raw, webdataset, energon or chunks")
    from ..train.early import check_folders

    out = Path(asked.out or folder / "export")
    options = {name: getattr(asked, name) for name in ("prompts", "layout", "media")}
    format_of(asked.format, options)
    refuse_foreign(out, {"format": asked.format}, overwrite)
    check_folders(config, place)
    prepared = prepare(config, folder, overwrite=overwrite, stage=stage, world_size=1)
    with (stage or silent)("exporting") as report:
        return export(
            prepared.plan_folder,
            out,
            format=asked.format,
            task=asked.task,
            maxcount=asked.maxcount,
            maxsize=asked.maxsize,
            options=options,
            source=prepared.source,
            template=prepared.template,
            workers=asked.workers,
            overwrite=overwrite,
            progress=report,
        )
