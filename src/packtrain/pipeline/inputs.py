"""How a run's samples, packs and template are opened: from a configuration, options, or an artefact.

`Inputs` is plain data. It is stored as `origin.json` beside the lengths, so that later verbs need only the
artefact: `Inputs.of_artefact(folder)` finds it again through plan -> lengths -> origin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from glob import has_magic
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import ConfigError, FormatError, SourceError, UnknownNameError
from ..remote.copies import opened
from ..sources import open_source
from ..sources.chat import ChatSource
from ..sources.encoded import EncodedTemplate
from ..sources.text import TextSource
from ..store import shards

if TYPE_CHECKING:
    from ..train.config import Exported, RunConfig


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A source of chat samples and the processor that encodes them. Fields as the YAML names them.

    Attributes:
        model_limit: the longest sample the model takes; longer ones get status 3.
        tokens_per_second: time scale of video positions, from the model's config; None: the family's.
        trust_hints: take sizes from the data where they give them, after an audit of a sample.
        kind: file name of the source plug-in; None: by name, then by content.
        source_options: options of that plug-in, such as `split` or `rows`.
        ignore_keys: keys of the data that are left out.
        frame_rate: frames a second of lists of frames that do not say theirs.
        long_audio: what becomes of a sample with a clip that the processor would cut: `error` stops the
            measurement, `cut` trains what is left of it, `drop` leaves the sample out.
        task: `chat`, or `text`: documents are trained as they are, without a chat template.
        text_options: options of the task `text`: bos, eos.
        template_options: options of the template that are not at their default: chat_template,
            allow_dropped, train_on, reasoning, answer_end, min_pixels, max_pixels, fps, max_frames.
    """

    source: str
    processor: str
    shape: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    placeholders: dict[str, list[str]] | list[str] | None = None
    media_root: str | None = None
    media_prefix: str | None = None
    allow_outside: bool = False
    allow_remote: bool = False
    media_without_placeholder: str = "error"
    system: str | None = None
    max_length: int | None = None
    truncation: str = "error"
    model_limit: int | None = None
    tokens_per_second: int | None = None
    trust_hints: bool = False
    kind: str | None = None
    source_options: dict[str, Any] = field(default_factory=dict)
    ignore_keys: list[str] = field(default_factory=list)
    frame_rate: float | None = None
    long_audio: str = "error"
    task: str = "chat"
    text_options: dict[str, Any] = field(default_factory=dict)
    template_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: RunConfig, *, validation: bool = False, name: str = "") -> Inputs:
        """The training inputs of a run, or its validation inputs.

        Args:
            name: of the validation set, where there are several.

        Raises:
            ConfigError: the file is not named.
        """
        data, model = config.data, config.model
        source = data.validations().get(name) if validation else data.path or getattr(data, "mixture", None)
        if source is None:
            key = "custom.val_jsonl (data.val)" if validation else "custom.train_jsonl (data.path)"
            raise ConfigError(f"{key} is not set", hint="name a file of samples, or a mixture of them")
        given = model.max_model_len
        separate = given is not None and config.template.max_length is not None
        same = {name: getattr(data, name) for name in (*OF_CHAT, *_OF_DATA)}
        same |= {name: getattr(config.template, name) for name in _OF_TEMPLATE}
        if isinstance(data.placeholders, Mapping):
            same["placeholders"] = {
                kind: [texts] if isinstance(texts, str) else list(texts)
                for kind, texts in data.placeholders.items()
            }
        same["media_without_placeholder"] = data.media_without_placeholder or "error"
        return cls(
            source=source,
            processor=config.processor,
            model_limit=given if separate and given != config.global_max_length else None,
            tokens_per_second=_tokens_per_second(model.name_or_path),
            kind=data.source,
            template_options=config.template.options(),
            **same,
        )

    @classmethod
    def of_artefact(cls, folder: str | Path) -> Inputs:
        """The inputs that a lengths or plan folder was made from.

        Raises:
            FormatError: the folder does not say, for example because it was made from an array.
        """
        place = opened(folder)
        if (place / "plan.json").is_file():
            place = lengths_of_plan(place)
        origin = read_origin(place)
        if "inputs" not in origin:
            hosted = "a trainer's own plan is proven before it trains: its log says so"
            raise FormatError(
                f"{folder} does not say which samples it was made from",
                hint=hosted if "rows" in origin else "measure a source",
            )
        return cls.told(origin["inputs"], place / "origin.json")

    @classmethod
    def told(cls, values: Any, path: str | Path) -> Inputs:
        """Inputs as `to_dict` gave them, read from `path`; FormatError where they were edited."""
        from pydantic import TypeAdapter

        with files.reading(path, "an account of the samples", "measure the source again"):
            return TypeAdapter(cls).validate_python(asdict(cls(**values)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; paths absolute, so that the artefact can be used from another folder."""
        values = asdict(self)
        for name in ("source", "processor", "media_root"):
            path = values[name]
            if path is not None and os.path.exists(path):
                values[name] = str(Path(path).resolve())
            elif (
                path is not None
                and name == "source"
                and "://" not in path
                and (has_magic(path) or "{" in path)
            ):
                values[name] = os.path.abspath(path)
        chosen = values["template_options"]
        if chosen.get("chat_template") not in (None, "trl"):
            chosen["chat_template"] = str(Path(chosen["chat_template"]).resolve())
        if not chosen:
            del values["template_options"]
        return values

    def open_source(self) -> Any:
        """The samples, as chats (encoded rows as they are). Demo spellings are made on the way."""
        options = dict(self.source_options)
        if self.kind == "encoded" and self.ignore_keys:
            options.setdefault("ignore_keys", self.ignore_keys)
        opened = open_source(_path(self.source), kind=self.kind, **options)
        if getattr(opened, "encoded", False):
            return opened
        if self.task == "text":
            return TextSource(opened, columns=self.columns or None, ignore_keys=self.ignore_keys)
        if self.task != "chat":
            raise UnknownNameError("task", self.task, ("chat", "text"))
        return ChatSource(opened, **{name: getattr(self, name) for name in OF_CHAT})

    def open_template(self, source: Any = None) -> Any:
        """The template around the real processor (imports torch and transformers).

        Encoded rows need none: for such a `source` it is theirs.
        """
        if getattr(source, "encoded", False):
            return EncodedTemplate()
        from ..template import load_processor
        from ..template.processor import open_template

        place = _path(self.processor)
        if self.task == "text":
            from ..template.text import TextTemplate

            return TextTemplate(load_processor(place), model_limit=self.model_limit, **self.text_options)
        same = {name: getattr(self, name) for name in (*_OF_TEMPLATE, *_OF_MEASURING)}
        return open_template(place, **self.template_options, **same)


#: Options of `ChatSource`, by their names there.
OF_CHAT = tuple(
    one.name
    for one in fields(Inputs)
    if one.name in signature(ChatSource).parameters and one.name != "source"
)

#: What `data` and `template` of a YAML and the template itself call the same.
_OF_DATA = ("trust_hints", "source_options", "long_audio", "task", "text_options")
_OF_TEMPLATE = ("system", "max_length", "truncation")
_OF_MEASURING = ("model_limit", "tokens_per_second", "trust_hints", "long_audio")


def read_origin(folder: Path) -> dict[str, Any]:
    """What `origin.json` of a folder says; empty where there is none, or nothing in it."""
    path = folder / "origin.json"
    told = files.read_json(path) if path.is_file() else {}
    return told if isinstance(told, dict) else {}


def lengths_of_plan(folder: str | Path) -> Path:
    """The lengths folder a plan was made from.

    Raises:
        FormatError: the plan does not name one, or it is gone.
    """
    folder = opened(folder)
    name = read_origin(folder).get("lengths")
    if not isinstance(name, str):
        raise FormatError(f"{folder} does not name the lengths it was made from")
    for named in (name, folder.parent / Path(name).name):
        with suppress(OSError, SourceError):  # a name that no file can have, a URL that nothing is behind
            if ((place := opened(named)) / "lengths.json").is_file():
                return place
    why, hint = f"the lengths of {folder} are gone: {name}", "keep the lengths folder beside the plan"
    if os.path.isfile(name):
        why, hint = f"{folder} was planned from token counts: {name} names no samples", "measure a source"
    raise FormatError(why, hint=hint)


def _path(name: str) -> str:
    from ..testing.demo.resolve import resolve_demo

    return str(resolve_demo(name)) if name.startswith("demo:") else name


def _tokens_per_second(model: str | None) -> int | None:
    """The model folder's own time scale of video positions (Qwen2.5-VL), where its config says one."""
    path = Path(model or "") / "config.json"
    if not path.is_file():
        return None
    config = files.read_json(path)
    vision = config.get("vision_config") if isinstance(config, Mapping) else None
    value = vision.get("tokens_per_second") if isinstance(vision, Mapping) else None
    return value if isinstance(value, int) else None


# --------------------------------------------------------------------------------------------
# Packs of an export as a configuration names them (`data: {kind: exported, path: …}`), and their template
# --------------------------------------------------------------------------------------------
# The samples of raw, webdataset and energon exports are encoded while training, with the template that
# measured them: the export says which. Chunks hold encoded samples; they need a template only where they hold
# media as bytes, for `tiny:` models, and for validation samples, and then `template.processor` names it.
def open_exported(config: RunConfig, data: Exported) -> tuple[Any, Any]:
    """The dataset of an export, and the template of its samples or None.

    Raises:
        ConfigError: its samples have to be encoded, and nothing says by what.
        FormatError: the folder holds no finished export.
    """
    from ..data import open_packs
    from ..train.opened import left_out_file
    from ..train.runtime import skipped_samples

    folder = shards.at(data.path)
    chunks = shards.export_of(folder)["key"]["format"] == "chunks"
    template = _template(config, folder, chunks)
    options: dict[str, Any] = {
        "skip": skipped_samples(config),
        "ledger_file": left_out_file(config),
        "on_error": data.on_error,
        "max_skip_fraction": data.max_skip_fraction,
        **({"verify": data.verify} if chunks else {}),
    }
    return open_packs(folder, None if template is None else template.encode, **options), template


def _template(config: RunConfig, folder: Path, chunks: bool) -> Any:
    named = config.template.processor
    if chunks and named is None:
        return None
    told = read_origin(shards.hidden(folder))
    if "inputs" in told:
        inputs = Inputs.told(told["inputs"], shards.hidden(folder, "origin.json"))
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
