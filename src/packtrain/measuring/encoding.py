"""A sample encoded, or what it is told as where it cannot be: the same in every kind of data."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..errors import ConfigError, PacktrainError, SampleError, described

T = TypeVar("T")

#: Errors of the machine, not of the sample: no memory, files, space or disk.
_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)

#: Reason of a sample on which a template or library raised what is no SampleError.
FAILED = "encode_failed"


def encoder_of(template: Any) -> Any:
    """What encodes a sample: the `encode` of a template, or a function; None where samples are encoded.

    Raises:
        ConfigError: neither, such as a processor or its name, which know no samples.
    """
    encode = getattr(template, "encode", template)
    makes = isinstance(template, str | bytes) or (
        hasattr(template, "apply_chat_template") and not hasattr(template, "measure")
    )
    if makes or isinstance(template, type) or not (encode is None or callable(encode)):
        raise no_template(template)
    return encode


def no_template(given: Any) -> ConfigError:
    """The refusal of what is in the place of a template."""
    what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    return ConfigError(
        f"{what} is no template",
        hint="packtrain.template.HFTemplate(…) makes one of a processor, its folder or its name",
    )


def encoded(encode: Callable[[Any], Mapping[str, Any] | None] | None, sample: Any) -> dict[str, Any]:
    """The encoded sample.

    Args:
        encode: sample -> encoded sample; None: it is encoded.

    Raises:
        SampleError: `empty`: None or nothing came of it.
    """
    made = sample if encode is None else encode(sample)
    if not made:
        raise SampleError("empty", "it was encoded to nothing")
    return dict(made)


def fault_of(error: Exception) -> SampleError:
    """What a sample is told as whose reading or encoding raised `error`.

    Raises:
        Exception: `error` itself, where it is no fault of the sample: one of the run, of a law, or of the
            machine (no memory, no free file handles, an I/O error), by which the sample is as good as before.
    """
    if isinstance(error, SampleError):
        return error
    if isinstance(error, PacktrainError | MemoryError) or getattr(error, "errno", None) in _MACHINE:
        raise error
    return SampleError(FAILED, f"cannot be encoded: {described(error)}")


def tried(work: Callable[..., Any], *given: Any) -> Any:
    """What `work` makes of these, or the `SampleError` that it raises."""
    try:
        return work(*given)
    except SampleError as error:
        return error


def good(outcome: T | SampleError) -> T:
    """What `tried` gave; a `SampleError` is raised."""
    if isinstance(outcome, SampleError):
        raise outcome
    return outcome
