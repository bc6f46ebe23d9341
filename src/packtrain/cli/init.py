"""`packtrain init`: from a file of samples to a launch script of a host, checked on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import files
from ..errors import DriftError, ForeignArtefactError, InputError, MissingExtraError, SampleError
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
@click.option("--pack-length", type=int, help="Cap of a pack in tokens; by default from the data.")
@click.option("--overwrite", is_flag=True, help="Replace files that differ.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(
    data: Path,
    model: str,
    host: str,
    template: str | None,
    out: Path,
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

    source = ChatSource(open_source(data))
    seen = _look(source, model)
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
    }
    agreed = _agree(host, values["model"], seen, template)
    written = []
    for path, text in files_for(host, out, values).items():
        if path.exists() and path.read_text(encoding="utf-8") != text and not overwrite:
            raise ForeignArtefactError(f"{path} is there and differs", hint="--overwrite, or another --out")
        files.publish_text(path, text)
        written.append(str(path))
    figures = {**values, "host": host, "agreed_tokens": agreed, "failed": seen["failed"], "written": written}
    if as_json:
        emit(figures)
        return
    click.echo(
        f"{len(source):,} samples, {values['kinds']}; mean {values['mean']:,} tokens of {len(lengths)}"
    )
    failed = seen["failed"]
    if failed:
        told = ", ".join(f"{where} ({reason})" for where, reason in failed[:3])
        more = ", …" if len(failed) > 3 else ""
        click.echo(
            f"cannot be used: {len(failed)} of the first {len(failed) + len(lengths)} samples: {told}{more}"
        )
    click.echo(f"{host} and packtrain agree: {agreed:,} tokens in {seen['where']}")
    click.echo(f"pack length {values['pack_length']:,}")
    for name in written:
        click.echo(f"wrote {name}")


def _look(source: Any, model: str) -> dict[str, Any]:
    """Lengths and kinds of the first samples; the template of the model."""
    from ..template import HFTemplate, load_processor

    template = HFTemplate(load_processor(model))
    lengths, failed, kinds, chosen = [], [], set(), None
    for index in range(min(len(source), LOOKED)):
        try:
            sample = source[index]
            lengths.append(int(template.measure(sample)))
        except SampleError as error:
            failed.append((source.where(index), error.reason))
            continue
        media = {part["type"] for turn in sample["messages"] for part in turn["content"]} - {"text"}
        kinds |= media
        if chosen is None or (media and not chosen[2]):
            chosen = index, sample, media
    if chosen is None:
        raise InputError(
            f"none of the first {len(failed)} samples can be used: {failed[0][1]} at {failed[0][0]}"
            if failed
            else "the data hold no sample",
            hint="`packtrain measure` tells each reason; its --column and --placeholder name other fields",
        )
    return {
        "template": template,
        "lengths": lengths,
        "failed": failed,
        "kinds": " and ".join(sorted(kinds)) or "text",
        "sample": chosen[1],
        "where": source.where(chosen[0]),
    }


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
    made = template.processor.apply_chat_template(chat, tokenize=True, return_dict=True)
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
    messages, images = [], []
    for turn in sample["messages"]:
        texts = []
        for part in turn["content"]:
            texts.append(part["text"] if part["type"] == "text" else f"<{part['type']}>")
            images += [part["image"]] if part["type"] == "image" else []
        messages.append({"role": turn["role"], "content": "".join(texts)})
    return len(own.encode({"messages": messages, "images": images})["input_ids"])
