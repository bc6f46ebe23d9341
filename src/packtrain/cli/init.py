"""`packtrain init`: from a file of samples to a launch script of a host, checked on the data."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from .. import files
from ..checks import whole
from ..errors import (
    ConfigError,
    DriftError,
    ForeignArtefactError,
    InputError,
    MissingExtraError,
    PacktrainError,
    SampleError,
    counted,
)
from ..measuring.run import drained
from ..pipeline.plan import MISSING
from ..pipeline.publish import refuse_unread, told
from ._app import PATH, argument, emit, flag, option, verb, without_effect

HOSTS = ("hf", "trl", "swift")

_NAME_IT = "give a model folder with its config.json, and name the type: --template qwen2_5_vl"

_OTHER_LIMITS = (
    "unset MAX_PIXELS and IMAGE_MAX_TOKEN_NUM (only ms-swift reads them), or try another --template"
)

#: The file of a tiny model that is written last.
_LAST = "model.safetensors"

_ASK_MEASURE = "`packtrain measure` tells each reason; its --column and --placeholder name other fields"

#: Samples measured for the figures.
_LOOKED = 64

#: Samples of them that are compared with the host's own template, the one named among them.
_COMPARED = 8


@verb("init")
@argument("data", metavar="DATA", type=PATH)
@option("--model", "-m", required=True, metavar="M", help="Model folder or hub name.")
@option(
    "--host",
    type=click.Choice(HOSTS),
    required=True,
    help="`hf` (transformers Trainer), `trl` or `swift` (ms-swift; run it in its environment).",
)
@option(
    "--template",
    metavar="NAME",
    help="Template type of ms-swift, where it cannot tell it from a model folder (`qwen2_5_vl`); "
    "stands in `train.sh` too.",
)
@option(
    "--out", "-o", default=".", show_default=False, type=PATH, help="Folder to write to, by default this one."
)
@option("--media-root", help="Folder of relative media paths; default the folder of DATA.")
@flag("--allow-remote", help="Fetch media that records name by a URL.")
@option(
    "--ignore-key",
    "ignore_keys",
    multiple=True,
    metavar="KEY",
    help="Leave a key of the records out that changes training and is not read; repeatable.",
)
@option(
    "--allow-dropped",
    multiple=True,
    metavar="KIND",
    help="What the chat template may drop, as for `measure`; repeatable.",
)
@option(
    "--pack-length",
    type=int,
    help="Cap of a pack; by default a power of two over the longest sample seen and eight times the mean.",
)
@flag("--overwrite", help="Replace files that differ.")
def command(data: Path, model: str, host: str, out: Path, as_json: bool, **options: Any) -> None:
    """Look at DATA, compare the host's template with ours, write a YAML and a launch script.

    M may be a tiny model, such as tiny:qwen2_5_vl or tiny:qwen3: small, random, made in the folder of --out.

    \b
    Example:
      packtrain init train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --host hf
    """
    asked = SimpleNamespace(**options)
    if asked.pack_length is not None:
        whole("--pack-length", asked.pack_length, 1, hint="for example 4096")
    if host != "swift":
        without_effect(f"with --host {host}", "template")
    from ..hosts._scaffold import command_line, files_for, places_of
    from ..sources import open_source
    from ..sources.chat import ChatSource

    by = command_line(str(data.resolve()), "--model", model, "--host", host, *_given(asked))
    if not asked.overwrite:
        _refuse_others(places_of(host, out), by)
    if host == "swift":
        _swift_library()

    reads = _reads(asked)
    source = ChatSource(open_source(data), **reads)
    with _model(model, out) as (folder, model):
        seen = _look(source, folder, model, asked.allow_dropped)
        lengths = seen.lengths
        values = {
            "data": str(data.resolve()),
            "model": str(Path(model).resolve()) if folder != model or Path(model).exists() else model,
            "out": str((out / "runs").resolve()),
            "pack_length": asked.pack_length or _cap(lengths),
            "samples": len(source),
            "kinds": " and ".join(sorted(seen.kinds)) or "text",
            "looked": len(lengths),
            "mean": round(sum(lengths) / len(lengths)),
            "longest": max(lengths),
            "template": asked.template,
            "options": reads,
            "allow_dropped": list(asked.allow_dropped),
            "sees": seen.template.media is not None,
            "by": by,
        }
        _warn_of_processor(Path(folder), str(values["model"]))
        agreed, values["answer_end"] = _agree(host, folder, seen, asked.template)
        texts = files_for(host, out, values)
        if not asked.overwrite:
            _refuse_edited(texts)
        if folder != model:
            _keep(Path(folder), Path(model))
    for path, text in texts.items():
        files.publish_text(path, text)
    found = {"failed": seen.failed, "keys": seen.keys, "written": list(map(str, texts))}
    figures = {**values, "host": host, "agreed_tokens": agreed, **found}
    if as_json:
        emit(figures)
        return
    for line in _lines(figures, seen):
        click.echo(line)


def _given(asked: Any) -> list[str]:
    """The options as words."""
    one = {"template": asked.template, "media-root": asked.media_root, "pack-length": asked.pack_length}
    many = {"ignore-key": asked.ignore_keys, "allow-dropped": asked.allow_dropped}
    return [
        *(word for name, held in one.items() if held is not None for word in (f"--{name}", str(held))),
        *["--allow-remote"] * asked.allow_remote,
        *(word for name, held in many.items() for value in held for word in (f"--{name}", value)),
    ]


def _reads(asked: Any) -> dict[str, Any]:
    """How the source reads records; the script carries what is not the default."""
    root = asked.media_root
    if root is not None and Path(root).exists():
        root = str(Path(root).resolve())
    chosen = {
        "ignore_keys": list(asked.ignore_keys) or None,
        "allow_remote": asked.allow_remote or None,
        "media_root": root,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _lines(figures: dict[str, Any], seen: _Seen) -> Iterator[str]:
    """What was looked at, what agreed, and what was written."""
    yield (
        f"{counted(figures['samples'], 'samples')}, {figures['kinds']}; {figures['looked']:,} of them, "
        f"evenly spread, measured: mean {figures['mean']:,} tokens, longest {figures['longest']:,}"
    )
    if failed := seen.failed:
        named = ", ".join(f"{where} ({reason})" for where, reason in failed[:3])
        yield f"cannot be used: {seen.unusable}: {named}{', …' if len(failed) > 3 else ''}"
    if rest := figures["samples"] - seen.measured:
        yield f"all samples were read and {seen.measured:,} tried; the run measures the other {rest:,}"
    if keys := told(seen.keys):
        yield f"keys: {keys}"
    yield f"{figures['host']} and packtrain agree: {figures['agreed_tokens']:,} tokens in {seen.where}"
    if figures["answer_end"] == "line":
        yield "swift also trains the line break behind an answer: template.answer_end: line in the YAML"
    yield f"pack length {figures['pack_length']:,}"
    for name in figures["written"]:
        yield f"wrote {name}"


def _refuse_others(places: list[Path], by: str) -> None:
    """Refuse to write over files that other words, or another hand, have written, before anything is read."""
    from ..hosts._scaffold import command_line

    for path in places:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else [by]
        if by in lines:
            continue
        before = next((line for line in lines if line.startswith(command_line())), None)
        told = f": it was not written by {by.removeprefix('# ')}"
        raise _differs(path, told if before is None else f": it was written {_unlike(before, by)}")


def _differs(path: Path, told: str = "") -> ForeignArtefactError:
    return ForeignArtefactError(f"{path} is there and differs{told}", hint="--overwrite, or another --out")


def _refuse_edited(texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        if path.exists() and path.read_text("utf-8") != text:
            raise _differs(path)


def _warn_of_processor(folder: Path, model: str) -> None:
    if folder.is_dir() and not (folder / "config.json").is_file():
        lacks = "it is a processor alone, and the script loads a model"
        click.echo(f"warning: {model} holds no config.json, {lacks}", err=True)


def _unlike(before: str, now: str) -> str:
    """What one command has and the other has not."""
    old, new = (re.findall(r"--\S+(?: (?!--)\S+)?|\S+", line) for line in (before, now))
    gone = [word for word in old if word not in new]
    more = [word for word in new if word not in old]
    told = [f"{how} {' '.join(words)}" for how, words in (("with", gone), ("without", more)) if words]
    return " and ".join(told) or "with the same options in another order"


@contextmanager
def _model(name: str, out: Path) -> Iterator[tuple[str, str]]:
    """(where a model is to be read, where the script finds it): a tiny one is made, and kept by `_keep`."""
    kept = out / name.replace(":", "-")
    if not name.startswith("tiny:"):
        yield name, name
    elif (kept / _LAST).is_file():
        yield str(kept), str(kept)
    else:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / kept.name
            _tiny(name, folder)
            try:
                yield str(folder), str(kept)
            except PacktrainError as error:  # neither folder is there when it is told
                for path in (folder, kept):
                    error.message = error.message.replace(str(path), name)
                    error.hint = error.hint and error.hint.replace(str(path), name)
                raise


def _tiny(name: str, folder: Path) -> None:
    """A tiny model and its processor or tokenizer, as a user has one on disk."""
    from ..template import load_processor
    from ..testing.demo.resolve import resolve_demo
    from ..testing.tiny import tiny_model

    processor = load_processor(str(resolve_demo("demo:qwen2_5_vl")))
    made = tiny_model(name, processor)
    kept = processor
    if not hasattr(made.config, "vision_config"):
        kept = processor.tokenizer
        kept._processor_class = None  # of the folder that it came from: this one holds no processor
        kept.init_kwargs.pop("processor_class", None)
    kept.save_pretrained(folder)
    made.save_pretrained(folder)


def _keep(folder: Path, kept: Path) -> None:
    """The files of a folder go into another, the weights last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _LAST):
        with files.publish(kept / path.name) as handle, path.open("rb") as made:
            shutil.copyfileobj(made, handle)


@dataclass
class _Seen:
    """What all samples hold, the lengths of some of them, and the template of the model.

    Attributes:
        failed: where and why of the samples that cannot be used.
        unmeasured: how many of them could be read.
        why: the first of their messages.
        sample: the one that is compared with the host's template, with media, if there is one; None: none.
        where: where it stands.
        usable: further ones, by where they stand.
        forms: `_form` of the samples so far; the first of each is measured: a template may refuse it.
    """

    source: Any
    template: Any
    lengths: list[int] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    unread: list[tuple[int, str, str]] = field(default_factory=list)
    unmeasured: int = 0
    why: str = ""
    kinds: set[str] = field(default_factory=set)
    has_media: bool = False
    sample: Any = None
    where: str = ""
    usable: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    forms: set[Any] = field(default_factory=set)

    def row(self, index: int, measured: bool) -> None:
        """Read one row; measure it where it is asked for, or where it could be the one that is compared."""
        try:
            sample = self.source[index]
        except SampleError as error:
            self._fail(index, error)
            self.unread.append((index, error.reason, error.message))
            return
        media = {part["type"] for turn in sample["messages"] for part in turn["content"]} - {"text"}
        self.kinds |= media
        if media and self.template.media is None:
            self.failed.append((self.source.where(index), "unsupported_media"))
            return
        better = self.sample is None or (bool(media) and not self.has_media)
        known, form = len(self.forms), _form(sample)
        self.forms.add(form)
        if not (measured or len(self.forms) > known or (self.sample is not None and better)):
            return
        where = str(self.source.where(index))
        try:
            self.lengths.append(int(self.template.measure(sample)))
        except ConfigError as error:
            raise error.at(where) from None
        except SampleError as error:
            self._fail(index, error)
            self.unmeasured += 1
            return
        if len(self.usable) < _COMPARED:
            self.usable[where] = sample
        if better:
            self.sample, self.where, self.has_media = sample, where, bool(media)

    def _fail(self, index: int, error: SampleError) -> None:
        self.failed.append((self.source.where(index), error.reason))
        self.why = self.why or error.message

    def check(self, model: str) -> None:
        """Refuse data that no script could train on.

        Raises:
            InputError: of media that the model does not take or that are not there, or no sample can be used.
        """
        count = len(self.source)
        refuse_unread(self.unread, count)
        blind = [where for where, reason in self.failed if reason == "unsupported_media"]
        absent = [where for where, reason in self.failed if reason == "missing_media"]
        root = "--media-root names the folder of relative media paths"
        if len(blind) > MISSING * count:
            told = (
                f"{len(blind):,} of {counted(count, 'samples')} hold {' and '.join(sorted(self.kinds))} that "
                f"{model} does not take, the first {blind[0]}"
            )
            hint = "name a model that takes them, or leave these rows out"
        elif self.sample is not None and len(absent) > MISSING * self.measured:
            told = f"media of {len(absent):,} of {_looked(self.measured, count)} are not there, the first at "
            told, hint = f"{told}{absent[0]}: {self.why}", root
        elif self.sample is not None:
            return
        elif self.failed:
            where, reason = self.failed[0]
            why = str(self.why).removeprefix(f"{where}: ")
            told = f"none of {_looked(len(self.failed), count)} can be used: {reason} at {where}: {why}"
            hint = root if len(absent) == len(self.failed) else _ASK_MEASURE
        else:
            told, hint = "the data hold no sample", _ASK_MEASURE
        raise InputError(told, hint=hint)

    @property
    def measured(self) -> int:
        """How many rows were measured, with or without success."""
        return self.unmeasured + len(self.lengths)

    @property
    def unusable(self) -> str:
        """How many of the rows read, and of those that were to be measured."""
        shares = (
            (len(self.failed) - self.unmeasured, f"the {counted(len(self.source), 'samples')} read"),
            (self.unmeasured, f"the {self.measured:,} tried"),
        )
        return ", ".join(f"{number:,} of {of}" for number, of in shares if number)


def _form(sample: Mapping[str, Any]) -> Any:
    """What a sample holds that a chat template may leave out: who speaks, with which fields, and tools."""
    turns = {
        (turn["role"], *sorted(name for name, value in turn.items() if value)) for turn in sample["messages"]
    }
    return frozenset(turns), bool(sample.get("tools"))


def _look(source: Any, folder: str, model: str, allow_dropped: Sequence[str]) -> _Seen:
    """Read all samples, and measure some of them, evenly spread.

    What a script must carry is decided by every row, in one pass; a row or medium that cannot be read is a
    failure, and what it declares counts all the same.
    """
    from ..template import HFTemplate, load_processor

    seen = _Seen(source, HFTemplate(load_processor(folder), allow_dropped=allow_dropped))
    count, some = len(source), min(len(source), _LOOKED)
    spread = {place * count // some for place in range(some)}
    drained(source)
    for index in range(count):
        seen.row(index, index in spread)
    seen.check(model)
    seen.keys = drained(source)
    return seen


def _looked(number: int, count: int) -> str:
    """`the 64 samples looked at (of 200)`: rows are all read, and so many measured."""
    return f"the {counted(number, 'samples')} looked at" + (f" (of {count:,})" if number < count else "")


def _cap(lengths: list[int]) -> int:
    """A power of two over the longest sample seen, eight times the mean, and 1,024."""
    need = max(max(lengths), 8 * sum(lengths) // len(lengths), 1024)
    return 1 << (need - 1).bit_length()


def _agree(host: str, model: str, seen: _Seen, kind: str | None) -> tuple[int, str]:
    """Tokens of one sample by us and by the host, and where an answer has to end for equal labels.

    Scripts of the other hosts encode with our template; ms-swift has one of its own, so the labels of some
    samples are compared, with and without the line break behind an answer.

    Raises:
        DriftError: they differ.
    """
    ours = len(seen.template.encode(seen.sample)["input_ids"])
    if host != "swift":
        theirs = _by_processor(seen)
        if ours != theirs:
            raise _apart(seen.where, ours, theirs, host)
        return theirs, "mark"
    from ..template import HFTemplate

    compared = {seen.where: seen.sample} | seen.usable
    held = _swift(model, list(compared.values()), kind)
    faults: list[DriftError] = []
    for end in ("mark", "line"):
        template = HFTemplate(
            seen.template.processor, answer_end=end, allow_dropped=seen.template.allow_dropped
        )
        fault = None
        for (where, sample), (count, labels) in zip(compared.items(), held, strict=True):
            fault = fault or _difference(template, where, sample, count, labels)
        if fault is None:
            return ours, end
        faults.append(fault)
    raise faults[-1]


def _apart(where: str, ours: int, theirs: int, host: str) -> DriftError:
    return DriftError(
        f"{where} has {ours} tokens by packtrain's template, {theirs} by that of {host}",
        hint=_OTHER_LIMITS if host == "swift" else 'pack with the host\'s own lengths: measure="encode"',
    )


def _difference(template: Any, where: str, sample: Any, count: int, labels: list[int]) -> DriftError | None:
    """The first token that only one of both trains; None: the same labels."""
    made = template.encode(sample)
    ids, own = made["input_ids"].tolist(), made["labels"].tolist()
    if len(ids) != count:
        return _apart(where, len(ids), count, "swift")
    at = next((at for at, label in enumerate(own) if label != labels[at]), None)
    if at is None:
        return None
    return DriftError(
        f"{where}: token {at} ({template.tokenizer.decode([ids[at]])!r}) is trained by "
        f"{'packtrain' if own[at] != -100 else 'swift'} alone",
        hint="try another --template, or train from a YAML of your own",
    )


def _by_processor(seen: _Seen) -> int:
    """What transformers (and TRL, which calls it) makes of the chat."""
    from ..media.image import open_image

    def content(parts: Sequence[Any]) -> Any:
        if template.media is None:
            return "".join(part["text"] for part in parts)
        return [
            {"type": "image", "image": open_image(part["image"])} if part["type"] == "image" else part
            for part in parts
        ]

    template = seen.template
    chat = [{**turn, "content": content(turn["content"])} for turn in seen.sample["messages"]]
    more = {"tools": seen.sample["tools"]} if seen.sample.get("tools") else {}
    made = template.processor.apply_chat_template(chat, tokenize=True, return_dict=True, **more)
    ids = made["input_ids"]
    return len(ids[0]) if len(ids) and isinstance(ids[0], (list, tuple)) else len(ids)


def _swift_library() -> tuple[Any, Any]:
    """What `_swift` calls.

    Raises:
        MissingExtraError: ms-swift is not installed.
    """
    try:
        from swift.model import get_processor
        from swift.template import get_template
    except ImportError:
        raise MissingExtraError("ms-swift", None) from None
    return get_processor, get_template


def _swift(model: str, samples: list[Any], kind: str | None) -> list[tuple[int, list[int]]]:
    """Tokens of samples by ms-swift's template, and their labels.

    Raises:
        InputError: ms-swift cannot tell which template a model folder has.
    """
    get_processor, get_template = _swift_library()
    try:
        own = get_template(get_processor(model), **({} if kind is None else {"template_type": kind}))
    except (ValueError, KeyError, OSError) as error:
        said = " ".join(str(error).split("See documentation")[0].split())
        raise InputError(f"ms-swift cannot load a template for {model}: {said}", hint=_NAME_IT) from None
    own.set_mode("train")
    made = [own.encode(_row(sample)) for sample in samples]
    return [(len(one["input_ids"]), [int(label) for label in one["labels"]]) for one in made]


def _row(sample: Any) -> dict[str, Any]:
    """A sample as a row of ms-swift."""
    messages: list[dict[str, Any]] = []
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for turn in sample["messages"]:
        texts = []
        for part in turn["content"]:
            texts.append(part["text"] if part["type"] == "text" else f"<{part['type']}>")
            if part["type"] != "text":
                media[part["type"]].append(part[part["type"]])
        loss = {"loss": turn["loss"]} if turn.get("loss") is not None else {}
        messages.append({"role": turn["role"], "content": "".join(texts), **loss})
    row = {"messages": messages, **{f"{kind}s": held for kind, held in media.items() if held}}
    return row | {name: sample[name] for name in ("tools", "objects") if sample.get(name)}
