"""The command group, and what every verb shares: errors as one line, progress, JSON output.

Exit codes: 0 when the laws hold, 1 when a law is broken, 2 for bad input.
A verb is a module of this package with a click command named `command`; its file name is its name.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import importlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import extend
from ..errors import InputError, PacktrainError, meant, missing_package
from ..moved import THEIRS
from ..remote.places import spelled
from ..version import __version__
from ..world import world

# --------------------------------------------------------------------------------------------
# What the library says, in the words of its caller: options for a verb, keys for the YAML of a run
# --------------------------------------------------------------------------------------------
# The library names Python arguments: `overwrite=True`, `max_drop_fraction`, now and then a key:
# `ignore_keys: [KEY]`, `model.name_or_path`. Here they become `--overwrite`, `--max-drop-fraction`,
# `--ignore-key KEY` and `--model` where the verb has such an option, and keys with their section where it
# reads YAML.
_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|…|[\w.+-]*\w"
_SECTION = r"(?:(training|data|template|model|custom|export)\.)"
_ASSIGNED = re.compile(rf"(?<![\w./{{-])(?:{_SECTION}|(?=\w+=|[a-z]+_\w+: ))([a-z]\w*)(=|: )({_VALUE})")
_OPTION_BEFORE = re.compile(r"--[a-z][a-z-]* \Z")
_KEY = re.compile(rf" \({_SECTION}\w+\)")  # in brackets, for readers of YAML
_NAMED = re.compile(rf"(?<![\w./'{{-])(?:{_SECTION}([a-z]\w*)|([a-z]+(?:_[a-z]+)+))(?![\w(=/.':])")
#: A name of one word: where it begins what is wrong with its value.
_FIRST = re.compile(r"\A([a-z]+)(?= (?:is (?:[-'\"\[{]|\d|None)|names the |holds (?:[-'\"\[{]|\d|sample )))")

#: What somebody wrote, shown as it is, quoted or a path: no name in it is one of ours.
_WRITTEN = re.compile(
    r"(?<![=:,] )(?<=[ (])(?:'[^']*'|\"[^\"]*\")"
    r"|(?<![^\s(])[^\s(='\"]*=[^\s'\"]*(?:/|\.(?:jsonl?|csv|parquet|tar)\b)\S*"
)

#: Key -> the parameter of a verb that is named otherwise; the empty one: no option says that.
_OPTIONS = {"model.name_or_path": "model", "data.source": "kind", "data.kind": "", "skip": "skip_samples"}


def spoken(text: str, command: click.Command | None, keyed: bool | None = None) -> str:
    """`text` with Python arguments as options or keys of a verb; what it has no word for stays.

    Args:
        keyed: what is wrong stands in a YAML; None: where the verb reads one.

    >>> plan = click.Command("plan", params=[click.Option(["--drop-last"], is_flag=True)])
    >>> spoken("use drop_last=True, or leave drop_last out; see max_tokens", plan)
    'use --drop-last, or leave --drop-last out; see max_tokens'
    """
    if command is None:
        return text
    options = {str(param.name): param for param in command.params if isinstance(param, click.Option)}
    if keyed is None:
        keyed = bool(command.context_settings.get("ignore_unknown_options"))
    words = _Words(options, _keys() if keyed else {}, keyed)
    if not keyed:
        text = _KEY.sub("", text)
    written = iter(_WRITTEN.findall(text))
    text = _WRITTEN.sub("'\0'", text)
    text = _NAMED.sub(words.named, _ASSIGNED.sub(words.assigned, _FIRST.sub(words.first, text)))
    return re.sub("'\0'", lambda found: next(written, found[0]), text)


@dataclass(frozen=True)
class _Words:
    """What a verb calls things: options by parameter, and keys by name where it reads YAML (`keyed`)."""

    options: Mapping[str, click.Option]
    keys: Mapping[str, str]
    keyed: bool

    def option(self, section: str | None, name: str) -> click.Option | None:
        if self.keyed and (section is not None or name in self.keys):
            return None  # what a YAML says is a key
        return self.options.get(_OPTIONS.get(f"{section}.{name}", name))

    def assigned(self, found: re.Match[str]) -> str:
        section, name, sign, value = found.groups()
        if _OPTION_BEFORE.search(found.string, 0, found.start()):
            return found[0]  # the value of an option that is written out
        if (mine := self.option(section, name)) is not None:
            return _option(mine, _literal(value))
        if section is not None or name not in self.keys:
            step = _step(name) if self.keyed and section is None and sign == "=" else None
            return found[0] if step is None else f"{step[0]} {_option(step[1], _literal(value))}"
        return f"{self.keys[name]}: {_yaml(_literal(value)) if sign == '=' else value}"

    def named(self, found: re.Match[str]) -> str:
        section, name = found[1], found[2] or found[3]
        mine = self.option(section, name)
        return _long(mine) if mine is not None else found[0] if section else self.keys.get(name, name)

    def first(self, found: re.Match[str]) -> str:
        name = _OPTIONS.get(found[1], found[1])
        return self.keys.get(name) or (_long(self.options[name]) if name in self.options else name)


@functools.cache
def _keys() -> Mapping[str, str]:
    """Name of a key -> the key with its section, the first of several."""
    from ..train.config.data import KINDS
    from ..train.config.sections import ExportConfig, ModelConfig, TemplateConfig, TrainingConfig

    sections: dict[str, Iterable[Any]] = {
        "data": KINDS.values(),
        "template": [TemplateConfig],
        "training": [TrainingConfig],
        "model": [ModelConfig],
        "export": [ExportConfig],
    }
    found = {"pack_length": "template.max_length"}
    for section, held in sections.items():
        for name in (name for one in held for name in one.model_fields):
            found.setdefault(name, f"{section}.{name}")
    return found


def _step(name: str) -> tuple[str, click.Option] | None:
    """The verb, of those that do one step of a run, that has an option for this argument."""
    found = (
        (f"packtrain {verb}", one)
        for verb in ("measure", "plan")
        for one in importlib.import_module(f"{__package__}.{verb}").command.params
        if one.name == name and isinstance(one, click.Option)
    )
    return next(found, None)


def _long(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def _option(option: click.Option, value: Any) -> str:
    name = _long(option)
    if option.is_flag:
        return name if value else f"no {name}"
    if isinstance(value, Mapping):
        rows = [
            (key, one)
            for key, held in value.items()
            for one in (held if held and isinstance(held, list) else [held])
        ]
        return " ".join(f"{name} {key}={one}" for key, one in rows)
    return " ".join(f"{name} {item}" for item in (value if isinstance(value, list) else [value]))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text[1:-1].split(", ") if text.startswith("[") else text  # as YAML has lists


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).partition("\n")[0]


# --------------------------------------------------------------------------------------------
# The command group, and what every verb shares: errors as one line, progress, JSON output
# --------------------------------------------------------------------------------------------
_SPACE = "check the path, its permissions and free space"
_VERBS = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))


class NamedPath(click.Path):
    """A path that is named: the empty one would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" and param is not None:
            name = param.make_metavar(ctx) if isinstance(param, click.Argument) and ctx else param.opts[0]
            raise InputError(
                f"{name} is empty, expected a path", hint="a variable that is not set? `.` is this folder"
            )
        return super().convert(value, param, ctx)


PATH = NamedPath(path_type=Path)

argument, option = click.argument, click.option
#: An option without a value.
flag = functools.partial(option, is_flag=True)


def verb(name: str, **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """The command of a verb; the last option of every one is `--json`."""

    def made(function: Callable[..., Any]) -> click.Command:
        command = click.command(name, cls=click.Command, **settings)(function)
        said = "One JSON object on standard output."
        command.params.append(click.Option(["--json", "as_json"], is_flag=True, help=said))
        return command

    return made


class _Verbs(click.Group):
    """Loads a verb's module when it is asked for, so that `packtrain plan` never imports torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f".{cmd_name}", __package__)
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "help":  # `help VERB` is `VERB --help`
            args = [*args[1:2], "--help"] if args[1:] else ["--help"]
            if not args[0].startswith("-"):
                return self.resolve_command(ctx, args)
            click.echo(ctx.get_help())
            ctx.exit()
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            hint = meant(args[0], _VERBS, f"verbs: {', '.join(_VERBS)}")
            raise InputError(f"no such verb: {args[0]}", hint=hint)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="packtrain")
@flag("-v", "--verbose", help="Log what is done, in detail.")
@click.pass_context
def app(ctx: click.Context, verbose: bool) -> None:
    """Measure, plan, pack and train: sequence packing that proves what it did.

    \b
    Example:
      packtrain run examples/demo.yaml
      packtrain help plan
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(_Spoken(ctx.command, ctx.invoked_subcommand))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[shown])


class _Spoken(logging.Formatter):
    """Lines of the log; warnings in the words of the verb, as errors are."""

    def __init__(self, group: click.Command, verb: str) -> None:
        super().__init__("%(levelname).1s %(name)s: %(message)s")
        self.command = group.get_command(click.Context(group), verb) if isinstance(group, _Verbs) else None

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return spoken(line, self.command) if record.levelno >= logging.WARNING else line


def main(args: list[str] | None = None) -> None:
    """Entry point; turns every expected failure into one line, a hint and an exit code."""
    arguments = sys.argv[1:] if args is None else args
    if args is None:  # the process is ours: a scheduler's SIGTERM ends it as Ctrl-C does
        signal.signal(signal.SIGTERM, _terminated(os.getpid()))
    try:
        code = app.main(args=arguments, prog_name="packtrain", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except BrokenPipeError:
        raise SystemExit(0) from None
    except (KeyboardInterrupt, click.Abort) as stop:
        terminated = _Terminated in (type(stop), type(stop.__cause__))
        told, code = ("stopped by SIGTERM", 143) if terminated else ("stopped", 130)
        _fail(told, "run the same command again: it goes on where it was", code, False)
    except (click.ClickException, PacktrainError) as error:
        message, hint, code = _refused(error, arguments)
        _fail(message, hint, code, "--json" in arguments)
    except RecursionError:
        _fail("the input is nested too deeply", "check the file", 2, "--json" in arguments)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}", _SPACE, 2, False)
    except Exception as error:
        _fail(*_unexpected(error), "--json" in arguments)


def _refused(error: click.ClickException | PacktrainError, arguments: list[str]) -> tuple[str, str, int]:
    """Message, hint and exit code of bad input, in the words of the verb."""
    if isinstance(error, PacktrainError):
        said = (spelled(text or "") for text in (error.message, error.hint))
        message, advice = (spoken(text, _verb(arguments), _keyed(arguments)) for text in said)
        if not advice and error.exit_code == 2:
            advice = f"see `{_path(_verb(arguments))} --help`"
        return message, advice, error.exit_code
    context = getattr(error, "ctx", None)
    hint = f"see `{_path(_verb(arguments)) if context is None else context.command_path} --help`"
    if isinstance(error, click.NoSuchOption) and context is not None:
        hint = _named_elsewhere(error.option_name, context) or hint
    return error.format_message(), hint, 2


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def _terminated(pid: int) -> Callable[..., None]:
    """The handler of SIGTERM of process `pid`; processes that are forked from it end as they would."""

    def handle(number: int, frame: object) -> None:
        if os.getpid() == pid:
            raise _Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return handle


def _verb(arguments: list[str]) -> click.Command | None:
    """The verb that was called."""
    name = next((word for word in arguments if word in _VERBS), None)
    return None if name is None else app.get_command(click.Context(app), name)


def _keyed(arguments: list[str]) -> bool | None:
    """Whether a verb that takes a YAML or options was given a YAML: doctor is the one."""
    return None if "doctor" not in arguments else not any(word.startswith("--model") for word in arguments)


def _path(verb: click.Command | None) -> str:
    return "packtrain" if verb is None else f"packtrain {verb.name}"


def end_of_training() -> None:
    """The last call of a verb that trained: a rank of a launched group ends here, successfully and at once.

    Threads of communication libraries can abort an interpreter that winds down (seen with gloo: one of nine
    finished two-rank runs ended with -6), and a launcher takes that for a failed job.
    """
    if world().size > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _named_elsewhere(option: str, context: click.Context) -> str | None:
    """What an option that a verb lacks is named here, or which verb has it."""
    key = option.lstrip("-").replace("-", "_")
    rows = [row[key] for row in THEIRS.values() if key in row]
    wanted = {f"--{str(row[0] if isinstance(row, tuple) else row).replace('_', '-')}" for row in rows}
    wanted.add(f"--{key.replace('_', '-')}")
    having: dict[str, list[str]] = {}  # option -> the verbs that have it
    for verb in _VERBS:
        command = app.get_command(context, verb)
        for name in sorted(
            wanted & {name for param in command.params for name in param.opts} if command else ()
        ):
            having.setdefault(name, []).append(verb)
    for name, verbs in having.items():
        if context.info_name in verbs:
            return f"did you mean {name}?"
        return f"{name} is an option of packtrain {', '.join(verbs)}"
    return None


def _unexpected(error: Exception) -> tuple[str, str | None, int]:
    """Message, hint and exit code of a fault nobody expected: a package that is not installed, or ours.

    The trace of ours is in the log under -v.
    """
    fault = missing_package(error, "this cannot run here") if isinstance(error, ImportError) else None
    if fault is not None and not str(getattr(error, "name", "")).startswith("packtrain"):
        return fault.message, fault.hint, fault.exit_code
    logging.getLogger(__name__).info("trace", exc_info=error)
    if os.strerror(errno.ENOSPC) in str(error):  # of a library that makes an error of its own of it
        return str(error), _SPACE, 2
    what = f"unexpected: {type(error).__name__}: {error}"
    return what, "packtrain -v shows the trace; please report it", 2


def _fail(message: str, hint: str | None, code: int, as_json: bool) -> None:
    line = " ".join(str(message).split())
    if as_json:
        click.echo(json.dumps({"error": line, "hint": hint, "exit_code": code}))
    click.echo(f"packtrain: {line}", err=True)
    if hint:
        click.echo(f"  hint: {' '.join(hint.split())}", err=True)
    raise SystemExit(code)


def completed(kind: str, prefix: str = "") -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Shell completion of an option that names a plug-in of `kind`; behind a prefix models (text is none)."""

    def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        names = (f"{prefix}{name}" for name in extend.names(kind) if not prefix or name != "text")
        return [name for name in names if name.startswith(incomplete)]

    return names


def without_effect(why: str, *params: str) -> None:
    """Say of those options of the running verb that were given that they change nothing.

    Args:
        params: names of the verb's parameters.
    """
    context = click.get_current_context()
    given = [
        next(name for name in param.opts if name.startswith("--"))
        for param in context.command.params
        if param.name in params
        and context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        click.echo(f"{', '.join(given)}: no effect {why}", err=True)


def show_runtime() -> None:
    """Show the start-up lines of a run (packs, steps, checksums) without `-v` too."""
    logging.getLogger(f"{__name__.partition('.')[0]}.train.runtime").setLevel(logging.INFO)


def emit(value: dict[str, Any]) -> None:
    """One JSON object on standard output, for machines."""
    click.echo(spelled(json.dumps(value, sort_keys=True, default=str)))


@contextlib.contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, total): a bar with rate and ETA on a terminal, a line every 10 s elsewhere."""
    if quiet:
        yield lambda done, total: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    started = last = moved = time.monotonic()
    begun, seen = 0, -1

    def line(done: int, total: int) -> None:
        nonlocal started, begun, last, moved, seen
        now = time.monotonic()
        if now - last < 10 or not done:
            return
        last = now
        if done == seen:  # nothing came meanwhile: seconds left are counted anew from here
            started, begun, told = now, done, f"no more for {now - moved:,.0f} s"
        else:
            told = f"{(now - started) * (total - done) / max(1, done - begun):,.0f} s left"
            moved, seen = now, done
        click.echo(f"{label}: {done:,} of {total:,}, {told}", err=True)

    yield line


def stages(quiet: bool) -> Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]:
    """`progress` of the named stages of a run."""
    return functools.partial(progress, quiet=quiet)
