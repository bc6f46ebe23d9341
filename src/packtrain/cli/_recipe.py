"""Options of `run` and `train` that stand for keys, and what both tell at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import files
from ..errors import nearest
from ..world import world
from ._app import emit, end_of_training, flag
from ._show import print_run

if TYPE_CHECKING:
    from ..train.config import RunConfig

#: Context settings of a verb that takes every key of the YAML as `--section.key VALUE`.
KEYS = {"ignore_unknown_options": True, "allow_extra_args": True}

no_proof_option = flag(
    "--no-proof",
    help="Skip the isolation proof before training, with a warning (`training.proof: false`); "
    "models nobody has shown to isolate are still refused.",
)

_SECTIONS = ("model", "template", "data", "custom", "training", "train", "report", "export")


def recipe_of(options: Mapping[str, Any], further: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Options that were given, by the section of their key.

    Args:
        options: those that the verb names.
        further: `--section.key VALUE` or `--section.key=VALUE`, values as in YAML. Names that other systems
            have, and fields of transformers' TrainingArguments, need no section: `--streaming true`.

    Raises:
        click.UsageError: an argument is neither.
    """
    from ..train.config.aliases import FOREIGN

    given = {name: value for name, value in options.items() if value is not None}
    custom = {"dataset": given.pop("dataset")} if "dataset" in given else {}
    recipe: dict[str, dict[str, Any]] = {"custom": custom, "training": given}
    words = list(further)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        section, dot, key = name.removeprefix("--").replace("-", "_").partition(".")
        if not dot and word.startswith("--") and _of_training(section):
            section, dot, key = "training", ".", section
        if not (name.startswith("--") and dot and key and section in _SECTIONS):
            meant = FOREIGN.get(section) or _meant(section)
            raise click.UsageError(f"no such option or argument: {word}; {meant}")
        if not equals and not words:
            raise click.UsageError(f"{name} needs a value")
        value = files.parse_yaml(text if equals else words.pop(0), name)
        recipe.setdefault("training" if section == "train" else section, {})[key] = value
    return recipe


def _meant(word: str) -> str:
    """The key that a word without a section comes close to."""
    from ..train.config.sections import TrainingConfig
    from ..train.config.trainer_keys import trainer_fields

    close = nearest(word, [*TrainingConfig.model_fields, *trainer_fields()], 0.8)
    said = "keys of CONFIG are --section.key VALUE"
    return said if close is None else f"did you mean --training.{close}? {said}"


def _of_training(key: str) -> bool:
    """Is this a key of `training`, under any of its names, or a field of transformers' TrainingArguments?"""
    from ..train.config.aliases import IGNORED, MOVED, old_names
    from ..train.config.sections import TrainingConfig
    from ..train.config.trainer_keys import trainer_fields

    known = {*old_names("training"), *TrainingConfig.model_fields, "padding_free"} - {"trainer"}
    return key in known or f"training.{key}" in {*MOVED, *IGNORED} or key in trainer_fields()


def show_result(folder: Path, figures: Mapping[str, Any], as_json: bool, plan: Any = None) -> None:
    """What a training run came to, told by the writing rank; every rank ends here."""
    if world().is_writer:
        emit({"run": str(folder), **figures}) if as_json else print_run(folder, dict(figures), plan)
    end_of_training()


def no_page(config: RunConfig, told: list[str]) -> bool:
    """Whether the page that is wanted cannot be written; one warning, which `told` gets too."""
    from ..train.early import missing_of_page

    lacking = missing_of_page() if config.report.html else None
    if lacking is None:
        return False
    told.append(f"no report.html: it needs {lacking} (pip install 'packtrain[report]')")
    click.echo(f"warning: {told[-1]}", err=True)
    return True
