"""Where one sample begins to read another: the module and its function; and masks that know no samples.

Two passes over rows of which only one other sample differs are compared, input by input and output by
output, on the tokens of the sample that must not change. The first difference stands between two events;
the module whose own code runs there is the culprit. Its function may be anybody's: a patched forward, a
registered attention, a hook. Functions that do not come from the file of their class are named first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import IsolationError
from .probe import largest_gap, scale_of

_OURS = Path(__file__).resolve().parents[1]
_STDLIB = Path(sysconfig.get_paths()["stdlib"])

#: Functions that make a model's attention masks; a patched one lets samples read each other everywhere.
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_MASKS = (
    *(*_MAKERS, "create_masks_for_generate", "find_packed_sequence_indices"),
    *("packed_sequence_mask_function", "_preprocess_mask_arguments"),
)

#: Tables of transformers that hold functions by the name of an attention implementation.
_REGISTRIES = (
    ("the attention function", "modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("the mask function", "masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)

#: Names that wrappers put into a module path.
_WRAPPERS = re.compile(r"_(fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod)\.")

#: Tokens of the sample that are followed: its last ones.
_FOLLOWED = 16

#: Packages whose functions are expected in a pass.
_EXPECTED = ("transformers", "torch", "accelerate", "peft", "packtrain")


@dataclass
class Culprit:
    """What a leak was traced to.

    Attributes:
        path: module path; "" for the model itself.
        kind: its class.
        functions: functions with their place, the likeliest first.
        foreign: some of them do not come from the file of their class.
        patched: the module itself has a forward or a hook of somebody, or its class is of another place than
            the model's and of no library.
        attends: it is an attention.
    """

    path: str
    kind: str
    functions: list[str] = field(default_factory=list)
    foreign: bool = False
    patched: bool = False
    attends: bool = False

    def __str__(self) -> str:
        where = self.path or "the model's own forward"
        return f"{where} ({self.functions[0]})" if self.functions else f"{where} ({self.kind})"


#: The module whose own code ran before, and what is followed of its input or output.
_Event = tuple[str, torch.Tensor | None]


def find_culprit(
    model: Any,
    one: Callable[[], Any],
    two: Callable[[], Any],
    tokens: tuple[int, int],
    parts: tuple[slice, slice],
    limit: float = 0.0,
) -> Culprit | None:
    """Compare two passes.

    Args:
        model: the transformers model, not wrapped; hooks are put on its modules.
        one, two: run the model on a row each.
        tokens: tokens of either row.
        parts: where the sample that must not change stands in either row.
        limit: difference that is none.

    Returns:
        None where no difference was seen on any module.
    """
    with eagerly():
        first = _events(model, one, tokens[0], parts[0])
        second = _events(model, two, tokens[1], parts[1])
        number = _first_difference(first, second, limit)
        called = _called(model, one, -1 if number is None else number)  # as many passes on every rank
    if number is None:
        return None
    path = first[number][0]
    module = dict(model.named_modules()).get(path, model)
    patched = _patched(model, path, module)
    others = [place_of(code) for code in called if not _expected(code.co_filename)]
    attends = re.search("attn|attention", f"{path.rpartition('.')[2]} {type(module).__name__}", re.IGNORECASE)
    usual = [_registered(model, *_REGISTRIES[0][1:])] if attends else []
    usual.append(getattr(type(module), "forward", None))
    told = [*patched, *others] or [place_of(f) for f in usual if f is not None]
    return Culprit(
        _WRAPPERS.sub("", path),
        type(module).__name__,
        list(dict.fromkeys(told)),
        foreign=bool(patched or others),
        patched=bool(_own_patches(module)) or _is_of_somebody(type(module), type(model)),
        attends=attends is not None,
    )


def foreign_functions(model: Any) -> list[str]:
    """Functions that run in a pass and do not come from the file of their class, with their place."""
    found = [name for module in model.modules() for name in _own_patches(module)]
    return list(dict.fromkeys([*found, *_patched_masks(model)]))


def foreign_methods(thing: Any, names: Sequence[str]) -> list[str]:
    """Methods of these names that no library defines, with their place."""
    held = (vars(part).get(name) for part in type(thing).__mro__ for name in names)
    return [place_of(code) for function in held for code in _foreign(function)]


def place_of(function: Any) -> str:
    """`name in file:line`, the file as people know it."""
    code = function if inspect.iscode(function) else next(iter(_codes(function)), None)
    if code is None:
        return f"{getattr(function, '__qualname__', type(function).__qualname__)}, compiled"
    return f"{code.co_qualname} in {_short(code.co_filename)}:{code.co_firstlineno}"


# ------------------------------------------------------------------------------------------- passes
@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Compiled models run as plain Python inside, so that hooks see their modules."""
    stance = getattr(torch.compiler, "set_stance", None)
    with stance("force_eager") if stance is not None else contextlib.nullcontext():
        yield


def _events(model: Any, run: Callable[[], Any], tokens: int, part: slice) -> list[_Event]:
    seen: list[_Event] = []
    stack = [""]

    def before(name: str, module: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("hidden_states", args[0] if args else None)
        seen.append((stack[-1], _followed(given, tokens, part)))
        stack.append(name)

    def after(name: str, module: Any, args: Any, output: Any) -> None:
        made = output[0] if isinstance(output, tuple) and output else output
        seen.append((name, _followed(made, tokens, part)))
        stack.pop()

    with _hooks(model, before, after):
        run()
    return seen


def _called(model: Any, run: Callable[[], Any], number: int) -> list[Any]:
    """Code objects of the Python functions that run between two events: `number` and the one before."""
    codes: dict[Any, None] = {}
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes[frame.f_code] = None

    def tick(*ignored: Any) -> None:
        nonlocal count
        if count == number - 1:
            sys.setprofile(watch)
        elif count == number:
            sys.setprofile(None)
        count += 1

    before = sys.getprofile()
    try:
        with _hooks(model, tick, tick):
            run()
    finally:
        sys.setprofile(before)
    return [code for code in codes if code.co_filename != __file__]


@contextlib.contextmanager
def _hooks(model: Any, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            enter = functools.partial(before, name)
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(functools.partial(after, name)))
        yield


def _followed(value: Any, tokens: int, part: slice) -> torch.Tensor | None:
    """The last tokens of `part`, of a tensor with an axis of `tokens`."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    axis = next((a for a in (1, 0, 2) if value.dim() > a and value.shape[a] == tokens), None)
    if axis is None:
        return None
    stop = part.stop if part.stop is not None else tokens
    start = max(part.start or 0, stop - _FOLLOWED)
    return value.narrow(axis, start, stop - start).detach().clone()


def _first_difference(one: list[_Event], two: list[_Event], limit: float) -> int | None:
    for number, ((_, a), (_, b)) in enumerate(zip(one, two, strict=False)):
        if a is None or b is None or a.shape != b.shape or not a.numel():
            continue
        if not largest_gap(a, b) <= limit * scale_of(a):  # also NaN
            return number
    return None


# ---------------------------------------------------------------------------------------- functions
def _patched(model: Any, path: str, module: Any) -> list[str]:
    """Foreign functions on the way to a module, its own first, then masks and attention functions."""
    names = dict(model.named_modules())
    chain = [module]
    while path:
        path = path.rpartition(".")[0]
        chain.append(names.get(path, model))
    found = [name for one in chain for name in _own_patches(one)]
    return list(dict.fromkeys([*found, *_patched_masks(model)]))


def _own_patches(module: Any) -> list[str]:
    """Functions of a module that stand in no file of its classes, and hooks that are somebody's."""
    homes = {getattr(sys.modules.get(part.__module__), "__file__", None) for part in type(module).__mro__}
    found = []
    for held in (vars(module).get("forward"), getattr(type(module), "forward", None)):
        for code in _codes(held):
            if code.co_filename not in homes and not _expected(code.co_filename, typed=True):
                found.append(f"forward of {type(module).__name__} is {place_of(code)}")
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        found += [f"a forward hook is {place_of(c)}" for h in hooks.values() for c in _foreign(h)]
    return found


def _is_of_somebody(kind: type, model: type) -> bool:
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>")
    of_library = _package_of(Path(file)) or _expected(file, typed=True)
    return kind.__module__ != model.__module__ and not of_library


def _patched_masks(model: Any) -> list[str]:
    found = []
    modules = {sys.modules.get(type(m).__module__) for m in model.modules()} - {None}
    modules.add(sys.modules.get("transformers.masking_utils"))
    for home in modules:
        for name in _MASKS:
            found += [f"{name} is {place_of(c)}" for c in _foreign(vars(home or sys).get(name))]
    for what, table, name in _REGISTRIES:
        found += [f"{what} is {place_of(c)}" for c in _foreign(_registered(model, table, name))]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found += [f"scaled_dot_product_attention is {place_of(c)}" for c in _foreign(sdpa)]
    return found


def _registered(model: Any, home: str, name: str) -> Any:
    """The function that transformers calls for the model's attention implementation."""
    functions = getattr(sys.modules.get(f"transformers.{home}"), name, None)
    config = getattr(model, "config", None)
    if functions is None or config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        return functions[getattr(text, "_attn_implementation", None)]
    except (KeyError, TypeError):
        return getattr(sys.modules.get(type(model).__module__), "eager_attention_forward", None)


def _foreign(function: Any) -> list[Any]:
    return [code for code in _codes(function) if not _expected(code.co_filename, typed=True)]


def _codes(function: Any) -> list[Any]:
    """Code objects of a function and of what partials, methods and decorators hide, outermost first."""
    found: list[Any] = []
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        code = getattr(function, "__code__", None)
        found += [] if code is None else [code]
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif code is None and not inspect.isclass(function):
            function = vars(type(function)).get("__call__")
        else:
            function = None
    return found


def _expected(file: str, typed: bool = False) -> bool:
    """Does a function of this file belong into a pass?

    Args:
        typed: code without a file counts as somebody's (a notebook, `python -c`), not as made by a library.
    """
    path = Path(file)
    if file.startswith(("<frozen", "<eval_with") if typed else "<") or path.is_relative_to(_OURS):
        return True
    package = _package_of(path)
    return package in _EXPECTED if package else path.is_relative_to(_STDLIB)


def _package_of(path: Path) -> str:
    """The installed package that a file belongs to; "" for none."""
    for number, part in enumerate(path.parts):
        if part in ("site-packages", "dist-packages"):
            return path.parts[number + 1]
    return ""


def _short(file: str) -> str:
    parts = Path(file).parts
    found = [number for number, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return str(Path(*parts[found[-1] + 1 :])) if found else file


# --------------------------------------------------------------------------------------------
# Models whose mask does not know the samples: transformers parts a row only where it is told the positions.
# --------------------------------------------------------------------------------------------
# Some models call transformers' mask functions without `position_ids` (OPT, BLOOM, MPT, XGLM, BioGPT on
# 5.24), or with a mask of ones. Which do is seen by watching a pass, not by name: a release that passes them
# on is no longer refused.

#: Backends that part samples by the mask.
_MASKED = ("sdpa", "eager", "flex_attention")


@dataclass(frozen=True)
class BlindMask:
    """A mask that was made without the boundaries.

    Attributes:
        where: the function that asked for it, with its file.
        what: what it did.
        attends: the attention itself is told the positions, so that varlen can part the samples.
    """

    where: str
    what: str
    attends: bool

    @property
    def hint(self) -> str:
        """What to set."""
        unpacked = "train it unpacked (packing: false)"
        return (
            f"set model.attn: varlen, whose attention reads the positions, or {unpacked}"
            if self.attends
            else unpacked
        )

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def blind_mask(run: Callable[[], Any], backend: str | None) -> BlindMask | None:
    """Watch a pass for masks that were made without the boundaries; None: there are none, or none is used."""
    if backend not in _MASKED:
        return None
    found: list[tuple[str, str]] = []
    attends = False

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal attends
        name, held = frame.f_code.co_name, frame.f_locals
        if event != "call":
            return
        if name in _MAKERS and frame.f_code.co_filename.endswith("masking_utils.py"):
            if held.get("position_ids") is None:
                found.append((_asker(frame), f"makes its mask without position_ids ({name})"))
            elif held.get("attention_mask") is not None:
                found.append((_asker(frame), f"gives {name} a mask of its own"))
        elif name.endswith("_attention_forward"):
            attends = attends or held.get("kwargs", {}).get("position_ids") is not None

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return BlindMask(*found[0], attends) if found else None


def blind_mask_of(outline: Any, backend: str) -> BlindMask | None:
    """The same of a network without memory (`weights.outline`), as far as its pass runs."""
    ids = torch.ones(1, 4, dtype=torch.int64, device="meta")
    places = torch.ones(1, 4, dtype=torch.int64, device="meta")

    def run() -> None:
        # what wants numbers stops: what was asked before it is seen
        with contextlib.suppress(Exception), torch.no_grad():
            outline.eval()(input_ids=ids, position_ids=places, use_cache=False)

    return blind_mask(run, backend)


def check_mask(outline: Any, backend: str, kind: str) -> None:
    """Refuse a model of type `kind` whose mask does not know the samples.

    Args:
        outline: as of `blind_mask_of`; None: there is none.

    Raises:
        IsolationError: names the function that asked for the mask.
    """
    blind = None if outline is None else blind_mask_of(outline, backend)
    if blind is not None:
        raise IsolationError(f"packed samples would read each other in {kind}: {blind}", hint=blind.hint)


def _asker(frame: FrameType) -> str:
    asked: FrameType | None = frame.f_back
    while asked is not None and "/utils/" in asked.f_code.co_filename and asked.f_back is not None:
        asked = asked.f_back
    return place_of(asked.f_code) if asked is not None else "the model"
