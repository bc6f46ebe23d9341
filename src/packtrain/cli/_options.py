"""Options that verbs share: of reading and rendering, and those of `run` and `train` that stand for keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import files
from ..errors import InputError, nearest
from ..world import world
from ._app import completed, emit, end_of_training, flag, option, without_effect
from ._show import print_run

if TYPE_CHECKING:
    from ..train.config import RunConfig


# --------------------------------------------------------------------------------------------
# Options of reading and rendering that `measure` and `produce` share, and the inputs they make
# --------------------------------------------------------------------------------------------
_OPTIONS = (
    option(
        "--shape", default="auto", help="Chat shape: `auto`, `messages`, `sharegpt`, `alpaca`, `columns`."
    ),
    option(
        "--column",
        "columns",
        multiple=True,
        metavar="NAME=FIELD",
        help="`NAME=FIELD`, for plain pairs; names: prompt, response, images, system; repeatable.",
    ),
    option(
        "--placeholder",
        "placeholders",
        multiple=True,
        help="Text that stands for an image, such as `<ImageHere>`, or `video=TEXT`, `audio=TEXT`; "
        "repeatable.",
    ),
    option(
        "--kind",
        help="Kind of source; default: by name, then by content.",
        shell_complete=completed("sources"),
    ),
    option(
        "--option",
        "source_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="`NAME=VALUE`, an option of that kind; repeatable.",
    ),
    option("--media-root", help="Folder of relative media paths; default the source's folder."),
    option("--media-prefix", help="Cut from the front of relative media paths."),
    flag("--allow-outside", help="Let media paths and links leave the media root."),
    flag("--allow-remote", help="Fetch media that records name by a URL."),
    option(
        "--media-without-placeholder",
        default="error",
        help="Images listed without any placeholder in the text: `error`, or `prepend`.",
    ),
    option(
        "--ignore-key",
        "ignore_keys",
        multiple=True,
        metavar="KEY",
        help="Leave a key of the records out that changes training and is not read; repeatable.",
    ),
    option("--frame-rate", type=float, help="Frames a second of lists of frames that do not say theirs."),
    option("--long-audio", default="error", help="Clips that the model would cut: `error`, `cut` or `drop`."),
    option("--prompt", help="What the user says beside the media of a caption, for sources that take one."),
    option(
        "--task", default="chat", help="`chat`, or `text`: documents as they are, without a chat template."
    ),
    option("--system", help="System turn for samples that have none."),
    option(
        "--chat-template",
        metavar="FILE",
        help="Another chat template (a file), or `trl`: TRL's training template.",
    ),
    option(
        "--allow-dropped",
        multiple=True,
        metavar="KIND",
        help="What the chat template may drop: `text`, `system`, `reasoning`, `tools`, `tool_calls`, "
        "`tool_results`; repeatable.",
    ),
    option(
        "--train-on", type=click.Choice(["all", "last"]), help="`all` answers, or the `last` [default: all]."
    ),
    option(
        "--reasoning",
        type=click.Choice(["keep", "mask", "drop_history"]),
        help="`keep`, `mask` or `drop_history` [default: keep].",
    ),
    option(
        "--answer-end",
        type=click.Choice(["mark", "line"]),
        help="Answers are trained up to their end `mark`, or with the `line` break behind it "
        "[default: mark].",
    ),
    option("--min-pixels", type=int, help="Smallest area of an image."),
    option("--max-pixels", type=int, help="Largest area of an image."),
    option("--fps", type=float, help="Frames taken of a second of video."),
    option("--max-frames", type=int, help="The most frames taken of a video."),
    option("--max-aspect-ratio", type=float, help="Samples with a longer or narrower picture are left out."),
)


#: Option of pairs -> the form of one, and an example.
_FORMS = {
    "--column": ("NAME=FIELD", "prompt=question"),
    "--option": ("NAME=VALUE", "split=train"),
    "--limit": ("NAME=NUMBER", "images=64"),
}


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options on a command; `inputs_of` takes what they gave."""
    for added in reversed(_OPTIONS):
        command = added(command)
    return command


def inputs_of(source: str, options: dict[str, Any]) -> Any:
    """The `Inputs` that the options ask for; what they name is taken out of `options`."""
    from ..pipeline.inputs import Inputs
    from ..train.config.sections import TEMPLATE_OPTIONS

    _check_values(options)
    given: dict[str, Any] = {
        **options,
        "columns": pairs("--column", options["columns"]),
        "source_options": pairs("--option", options["source_options"]),
        "placeholders": placeholders(options["placeholders"]),
        "ignore_keys": list(options["ignore_keys"]),
        "allow_dropped": list(options["allow_dropped"]),
    }
    if given["prompt"] is not None:
        given["source_options"]["prompt"] = given["prompt"]
    chosen = {name: given[name] for name in TEMPLATE_OPTIONS}
    given["template_options"] = {name: value for name, value in chosen.items() if value not in (None, [])}
    names = {field.name for field in dataclasses.fields(Inputs)} & given.keys()
    for name in (*names, *TEMPLATE_OPTIONS, "prompt"):
        options.pop(name, None)
    return Inputs(**{**{name: given[name] for name in names}, "source": source})


def _check_values(options: dict[str, Any]) -> None:
    """Options that are keys of a run's YAML too have its limits."""
    from ..train.config.data import Records
    from ..train.config.sections import TEMPLATE_OPTIONS, ModelConfig, Section, TemplateConfig, fault_of

    keys: dict[str, tuple[type[Section], str]] = {
        **{name: (TemplateConfig, name) for name in TEMPLATE_OPTIONS},
        "frame_rate": (Records, "frame_rate"),
        "task": (Records, "task"),
        "long_audio": (Records, "long_audio"),
        "model_limit": (ModelConfig, "max_model_len"),
    }
    for name, (section, key) in keys.items():
        value = options.get(name)
        value = list(value) if isinstance(value, tuple) else value
        if value is not None and (fault := fault_of(section, key, value)):
            raise InputError(f"--{name.replace('_', '-')} is {value!r}: {fault}")


def pairs(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=FIELD texts as a mapping."""
    out: dict[str, str] = {}
    for value in values:
        name, equals, field = value.partition("=")
        numeric = option != "--limit" or (field.isascii() and field.isdecimal())
        if not (equals and name and field and numeric):
            form, example = _FORMS[option]
            raise InputError(f"{option} {value!r} is not {form}", hint=f"for example {option} {example}")
        out[name] = field
    return out


def limits_of(values: tuple[str, ...]) -> dict[str, int]:
    """What `--limit COST=N` says."""
    return {name: int(cap) for name, cap in pairs("--limit", values).items()}


def of_cluster(executor: str, address: str | None) -> dict[str, str]:
    """Options of an executor."""
    if executor == "local":
        without_effect("with --executor local", "address")
    return {} if address is None or executor == "local" else {"address": address}


def shard_of(text: str | None) -> tuple[int, int] | None:
    """What `--shard I/N` says."""
    if text is None:
        return None
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise InputError(f"--shard {text!r} is not I/N", hint="for example --shard 0/8")
    return int(number), int(of)


def placeholders(values: tuple[str, ...]) -> dict[str, list[str]] | None:
    """Texts by modality; a text without one stands for an image."""
    out: dict[str, list[str]] = {}
    for value in values:
        modality, equals, text = value.partition("=")
        if not equals or modality not in ("image", "video", "audio"):
            modality, text = "image", value
        out.setdefault(modality, []).append(text)
    return out or None


# --------------------------------------------------------------------------------------------
# Options of `run` and `train` that stand for keys, and what both tell at the end
# --------------------------------------------------------------------------------------------
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
