"""`packtrain init`: from a file of samples to a launch script of a host, checked on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import files
from ..errors import DriftError, ForeignArtefactError, InputError, MissingExtraError, SampleError
from ..measuring.run import drained
from ..pipeline.unread import refuse_unread, told
from ._app import emit

__all__ = ["command"]

HOSTS = ("hf", "trl", "swift")

_NAME_IT = "give a model folder with its config.json, and name the type: --template qwen2_5_vl"

_OTHER_LIMITS = (
    "unset MAX_PIXELS and IMAGE_MAX_TOKEN_NUM (only ms-swift reads them), or try another --template"
)

#: Samples measured for the figures; the first that encodes is compared with the host.
LOOKED = 64


@click.command("init")
@click.argument("data", metavar="DATA", type=click.Path(path_type=Path))
@click.option("--model", "-m", required=True, metavar="M", help="Model folder or hub name.")
@click.option("--host", type=click.Choice(HOSTS), required=True, help="The trainer that will train.")
@click.option("--template", metavar="NAME", help="Template type of ms-swift, where a folder's is not clear.")
@click.option("--out", "-o", default=".", type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--media-root", help="Folder of relative media paths [default: the folder of DATA].")
@click.option("--ignore-key", "ignore_keys", multiple=True, metavar="KEY", help="Leave KEY out; repeatable.")
@click.option("--pack-length", type=int, help="Cap of a pack in tokens; by default from the data.")
@click.option("--overwrite", is_flag=True, help="Replace files that differ.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(
    data: Path,
    model: str,
    host: str,
    template: str | None,
    out: Path,
    media_root: str | None,
    ignore_keys: tuple[str, ...],
    pack_length: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Look at DATA, compare the host's template with ours, write a YAML and a launch script.

    \b
    Example:
      packtrain init train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --host hf
    """
    if pack_length is not None and pack_length < 1:
        raise InputError(f"--pack-length {pack_length}, expected >= 1", hint="for example 4096")
    if template is not None and host != "swift":
        raise InputError(f"--template has no effect with --host {host}", hint="remove it")
    from ..hosts._scaffold import files_for
    from ..sources import open_source
    from ..sources.chat import ChatSource

    options: dict[str, Any] = {"ignore_keys": list(ignore_keys)} if ignore_keys else {}
    if media_root is not None:
        options["media_root"] = str(Path(media_root).resolve()) if Path(media_root).exists() else media_root
    source = ChatSource(open_source(data), **options)
    seen = _look(source, model)
    if host == "trl" and seen["beyond"]:
        raise InputError(
            f"the samples hold {' and '.join(seen['beyond'])}, which rows of TRL's script do not",
            hint="--host hf trains all of it",
        )
    lengths = seen["lengths"]
    longest = max(lengths)
    values = {
        "data": str(data.resolve()),
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "out": str((out / "runs").resolve()),
        "pack_length": pack_length or _cap(lengths),
        "samples": len(source),
        "kinds": seen["kinds"],
        "looked": len(lengths),
        "mean": round(sum(lengths) / len(lengths)),
        "longest": longest,
        "template": template,
        "options": options,
        "sees": seen["template"].media is not None,
    }
    agreed = _agree(host, values["model"], seen, template)
    written = []
    for path, text in files_for(host, out, values).items():
        if path.exists() and path.read_text(encoding="utf-8") != text and not overwrite:
            raise ForeignArtefactError(f"{path} is there and differs", hint="--overwrite, or another --out")
        files.publish_text(path, text)
        written.append(str(path))
    found = {"failed": seen["failed"], "keys": seen["keys"], "written": written}
    figures = {**values, "host": host, "agreed_tokens": agreed, **found}
    if as_json:
        emit(figures)
        return
    click.echo(
        f"{len(source):,} samples, {values['kinds']}; mean {values['mean']:,} tokens of {len(lengths)}"
    )
    failed = seen["failed"]
    if failed:
        named = ", ".join(f"{where} ({reason})" for where, reason in failed[:3])
        more = ", …" if len(failed) > 3 else ""
        click.echo(f"cannot be used: {len(failed)} of the {seen['of']} samples looked at: {named}{more}")
    if keys := told(seen["keys"]):
        click.echo(f"keys: {keys}")
    click.echo(f"{host} and packtrain agree: {agreed:,} tokens in {seen['where']}")
    click.echo(f"pack length {values['pack_length']:,}")
    for name in written:
        click.echo(f"wrote {name}")


def _look(source: Any, model: str) -> dict[str, Any]:
    """What all samples hold, the lengths of some of them, evenly spread, and the template of the model.

    What a script must carry is decided by every row, in one pass; a row or medium that cannot be read is a
    failure, and what it declares counts all the same.
    """
    from ..template import HFTemplate, load_processor

    template = HFTemplate(load_processor(model))
    lengths: list[int] = []
    failed: list[tuple[str, str]] = []
    unread: list[tuple[int, str, str]] = []
    kinds: set[str] = set()
    beyond: set[str] = set()
    chosen: Any = None
    count = len(source)
    spread = {place * count // min(count, LOOKED) for place in range(min(count, LOOKED))}
    drained(source)
    for index in range(len(source)):
        try:
            sample = source[index]
        except SampleError as error:
            failed.append((source.where(index), error.reason))
            unread.append((index, error.reason, error.message))
            continue
        media = {part["type"] for turn in sample["messages"] for part in turn["content"]} - {"text"}
        kinds |= media
        beyond |= _beyond(sample, media)
        if index not in spread and (chosen is None or chosen[2] or not media):
            continue
        try:
            length = int(template.measure(sample))
        except SampleError as error:
            failed.append((source.where(index), error.reason))
            continue
        lengths.append(length)
        if chosen is None or (media and not chosen[2]):
            chosen = index, sample, media
    refuse_unread(unread, len(source))
    if chosen is None:
        raise InputError(
            f"none of the {len(failed)} samples looked at can be used: {failed[0][1]} at {failed[0][0]}"
            if failed
            else "the data hold no sample",
            hint="`packtrain measure` tells each reason; its --column and --placeholder name other fields",
        )
    return {
        "template": template,
        "lengths": lengths,
        "failed": failed,
        "of": len(source) if len(failed) + len(lengths) > LOOKED else len(failed) + len(lengths),
        "keys": drained(source),
        "beyond": sorted(beyond),
        "kinds": " and ".join(sorted(kinds)) or "text",
        "sample": chosen[1],
        "where": source.where(chosen[0]),
    }


def _beyond(sample: Any, media: set[str]) -> set[str]:
    """What a sample holds besides pictures, a conversation, and the one answer that ends it."""
    found = media - {"image"}
    if sample.get("tools") or any(turn.get("tool_calls") for turn in sample["messages"]):
        found.add("tools")
    if sample.get("objects"):
        found.add("boxes")
    if any("loss" in turn for turn in sample["messages"]):
        found.add("loss flags")
    if any("reasoning_content" in turn for turn in sample["messages"]):
        found.add("reasoning")
    if any(turn["role"] == "assistant" for turn in sample["messages"][:-1]):
        found.add("answers before the last turn")
    if "image" in media and not _pictures_first(sample["messages"]):
        found.add("pictures inside of texts")
    return found


def _pictures_first(turns: Any) -> bool:
    """Whether all pictures stand before the text of the first question, where TRL puts them."""
    first = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), 0)
    for place, turn in enumerate(turns):
        kinds = [part["type"] for part in turn["content"]]
        count = kinds.count("image")
        if count and (place != first or kinds[:count] != ["image"] * count):
            return False
    return True


def _cap(lengths: list[int]) -> int:
    """A power of two over the longest sample seen, eight times the mean, and 1,024."""
    need = max(max(lengths), 8 * sum(lengths) // len(lengths), 1024)
    return 1 << (need - 1).bit_length()


def _agree(host: str, model: str, seen: dict[str, Any], kind: str | None) -> int:
    """Tokens of one sample, by us and by the host.

    Raises:
        DriftError: they differ.
    """
    ours = len(seen["template"].encode(seen["sample"])["input_ids"])
    theirs = _swift(model, seen["sample"], kind) if host == "swift" else _by_processor(seen)
    if ours != theirs:
        raise DriftError(
            f"{seen['where']} has {ours} tokens by packtrain's template, {theirs} by that of {host}",
            hint=_OTHER_LIMITS if host == "swift" else 'pack with the host\'s own lengths: measure="encode"',
        )
    return theirs


def _by_processor(seen: dict[str, Any]) -> int:
    """What transformers (and TRL, which calls it) makes of the chat."""
    template = seen["template"]
    from ..media.image import open_image

    chat = [
        {
            **turn,
            "content": [
                {"type": "image", "image": open_image(part["image"])} if part["type"] == "image" else part
                for part in turn["content"]
            ],
        }
        for turn in seen["sample"]["messages"]
    ]
    if template.media is None:
        chat = [
            {**turn, "content": "".join(part["text"] for part in turn["content"])}
            for turn in seen["sample"]["messages"]
        ]
    for turn, given in zip(chat, seen["sample"]["messages"], strict=True):
        turn.update({key: value for key, value in given.items() if key not in ("content", "loss")})
    more = {"tools": seen["sample"]["tools"]} if seen["sample"].get("tools") else {}
    made = template.processor.apply_chat_template(chat, tokenize=True, return_dict=True, **more)
    ids = made["input_ids"]
    return len(ids[0]) if len(ids) and isinstance(ids[0], (list, tuple)) else len(ids)


def _swift(model: str, sample: Any, kind: str | None) -> int:
    """Tokens of a sample by ms-swift's template.

    Raises:
        InputError: ms-swift cannot tell which template a model folder has.
    """
    try:
        from swift.model import get_processor
        from swift.template import get_template
    except ImportError:
        raise MissingExtraError("ms-swift", "train") from None
    try:
        own = get_template(get_processor(model), **({} if kind is None else {"template_type": kind}))
    except (ValueError, KeyError, OSError) as error:
        said = " ".join(str(error).split("See documentation")[0].split())
        raise InputError(f"ms-swift cannot load a template for {model}: {said}", hint=_NAME_IT) from None
    own.set_mode("train")
    messages: list[dict[str, Any]] = []
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for turn in sample["messages"]:
        texts = []
        for part in turn["content"]:
            texts.append(part["text"] if part["type"] == "text" else f"<{part['type']}>")
            if part["type"] != "text":
                media[part["type"]].append(part[part["type"]])
        messages.append({"role": turn["role"], "content": "".join(texts)})
    given = {"messages": messages, **{f"{kind}s": held for kind, held in media.items() if held}}
    given.update({name: sample[name] for name in ("tools", "objects") if sample.get(name)})
    return len(own.encode(given)["input_ids"])
