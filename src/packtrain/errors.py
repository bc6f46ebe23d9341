"""Every error packtrain raises, as one tree.

    PacktrainError                 root; carries `hint` (what to do) and `exit_code`
    ├── InputError (ValueError)    bad input or configuration: exit code 2, one line and a hint
    │   ├── ConfigError            a YAML or keyword that cannot hold
    │   ├── UnknownNameError (LookupError)   an option value nobody provides; names the nearest
    │   ├── LengthError            an array of lengths or costs that is not one
    │   ├── SourceError            a source that cannot be opened or read
    │   ├── PlanError              a plan that cannot be built or aligned
    │   ├── FormatError            an artefact that is absent, torn or of another schema
    │   ├── ForeignArtefactError   a folder that holds another run's artefact
    │   ├── IsolationError         a setup in which packed samples would read each other
    │   ├── MissingExtraError (ImportError)  an optional dependency that is not installed
    │   └── WaitTimeoutError (TimeoutError)  a file or rank that did not come in time
    ├── SampleError (ValueError)   one sample that cannot be used; `reason` goes to the ledger
    └── LawError (AssertionError)  a law of packtrain is broken: exit code 1
        ├── DriftError             encoded length differs from the measured length
        └── ChecksumError          stored bytes differ from their digest

A message says what, the value seen and the limit; the hint says what to set.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any, Self, cast


def nearest(name: str, known: Iterable[str], close: float = 0.51) -> str | None:
    """The known name closest to `name`, or None when nothing is close: less than half of it is another."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=close)), None)


def meant(name: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """A hint with the known name closest to `name`, or `otherwise`."""
    close = nearest(name, known)
    return otherwise if close is None else f"did you mean {close!r}?"


def counted(count: int, noun: str) -> str:
    """A count with its noun, which is given in the plural.

    >>> counted(1, "packs"), counted(1, "more entries"), counted(1, "batches"), counted(4096, "tokens")
    ('1 pack', '1 more entry', '1 batch', '4,096 tokens')
    """
    if count == 1:
        for ending, single in (("ies", "y"), ("ches", "ch"), ("xes", "x"), ("sses", "ss"), ("s", "")):
            if noun.endswith(ending):
                noun = noun.removesuffix(ending) + single
                break
    return f"{count:,} {noun}"


def one_line(error: object, most: int | None = None) -> str:
    """The message of any error on one line, cut to `most` characters."""
    return " ".join(str(error).split())[:most]


def first_line(error: BaseException) -> str:
    """The first line of what any error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def without_path(error: BaseException) -> str:
    """What an error says of a file that the message names already: no number, no path."""
    return getattr(error, "strerror", None) or one_line(error)


def told_with_hint(text: str) -> tuple[str, str | None]:
    """Message and hint of an error that was kept as one line."""
    message, found, hint = text.removesuffix(")").partition(" (hint: ")
    return (message, hint) if found else (text, None)


def described(error: BaseException, most: int | None = None) -> str:
    """`KindOfError: message`, as `one_line`: for errors of other libraries."""
    return f"{type(error).__name__}: {one_line(error, most)}"


class PacktrainError(Exception):
    """Root of the tree. `hint` says what to do; `exit_code` is what the command line returns."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} (hint: {self.hint})"

    def at(self, where: str) -> Self:
        """The same fault, told with its place."""
        message = f"{where}: {self.message}"
        return cast("Self", _rebuild(type(self), message, {**self.__dict__, "message": message}))

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes with their hint and fields."""
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(kind: type[PacktrainError], message: str, fields: dict[str, object]) -> PacktrainError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class InputError(PacktrainError, ValueError):
    """Bad input or configuration."""


class ConfigError(InputError):
    """A configuration key or value that cannot hold."""


class UnknownNameError(InputError, LookupError):
    """A name (packer, source, family, key …) that nobody provides."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        hint = meant(name, names, f"known: {', '.join(names)}")
        super().__init__(f"unknown {kind} {name!r}", hint=hint)


class LengthError(InputError):
    """An array of lengths or costs that is not one."""


class SourceError(InputError):
    """A source that cannot be opened or read."""


class PlanError(InputError):
    """A plan that cannot be built or aligned."""


class FormatError(InputError):
    """An artefact on disk that is absent, torn or of another schema."""


class ForeignArtefactError(InputError):
    """A folder that already holds the artefact of another source, template or run."""


class IsolationError(InputError):
    """A model and attention setup in which packed samples would read each other."""


class MissingExtraError(InputError, ImportError):
    """An optional dependency that is not installed, or that is there and cannot be imported.

    Raised where an ImportError is handled, it tells that one's cause unless the package itself is absent.

    Args:
        package: as pip knows it.
        extra: the one of ours that holds it; None: none does.
        said: instead, what is wrong with the package that is installed. hint: what helps then.
    """

    def __init__(
        self, package: str, extra: str | None, said: str | None = None, hint: str | None = None
    ) -> None:
        if said is not None:
            super().__init__(said, hint=hint)
            return
        held = sys.exc_info()[1]
        said = f"{package} is not installed"
        if isinstance(held, ImportError) and not isinstance(held, MissingExtraError):
            root = (held.name or "").partition(".")[0]
            if not (isinstance(held, ModuleNotFoundError) and root in package):
                said = f"{package} cannot be imported ({one_line(held, 200)})"
        named = package if extra is None else f"'packtrain[{extra}]'"
        super().__init__(said, hint=f"pip install {named}")


class WaitTimeoutError(InputError, TimeoutError):
    """A file or rank that did not come within its timeout."""


class SampleError(PacktrainError, ValueError):
    """One sample that cannot be used.

    `reason` is the ledger's word for it: `empty`, `malformed_record`, `no_assistant_turn`,
    `placeholder_mismatch`, `missing_media`, `truncated_media`, `unreadable_media`,
    `unsupported_media`, `outside_media_root`, `remote_media`, `template_error` …
    """

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class LawError(PacktrainError, AssertionError):
    """One of packtrain's laws does not hold."""

    exit_code = 1


class DriftError(LawError):
    """The encoded length of a sample differs from the length it was planned with."""


class ChecksumError(LawError):
    """Stored bytes differ from the digest that vouches for them."""


#: Extras of modules that our own code imports without asking.
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "accelerate", "psutil"), "train"),
    **dict.fromkeys(("matplotlib", "jinja2"), "report"),
    "pyarrow": "arrow",
    "megatron": "energon",
}


def optional(module: str, package: str, extra: str) -> Any:
    """The library that a module is of, imported when it is used; a dotted module is imported with it.

    Args:
        package, extra: what to install, see `MissingExtraError`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return __import__(module)
    except ImportError:
        raise MissingExtraError(package, extra) from None


def causes(error: BaseException) -> list[BaseException]:
    """An error and what it came of, the last one first raised."""
    chain: list[BaseException] = []
    held: BaseException | None = error
    while held is not None and held not in chain:
        chain.append(held)
        held = held.__cause__ or held.__context__
    return chain


def missing_package(error: BaseException, what: str) -> InputError | None:
    """The fault of an environment behind an error, or None: an artefact is never blamed for it.

    Args:
        what: what could not be done, for the message: "… cannot be checked here".

    Returns:
        The MissingExtraError on the chain of causes, else an InputError that names the module of the first
        ImportError and what Python said.
    """
    faults = [one for one in causes(error) if isinstance(one, ImportError)]
    for one in faults:
        if isinstance(one, MissingExtraError):
            return one
    if not faults:
        return None
    first = faults[-1]
    name = (first.name or "").partition(".")[0]
    return InputError(
        f"{what}: {first.name or 'a package'} cannot be imported ({one_line(first, 200)})",
        hint=f"pip install 'packtrain[{_EXTRAS[name]}]'"
        if name in _EXTRAS
        else f"install {name or 'what it names'}",
    )
