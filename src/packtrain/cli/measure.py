"""`packtrain measure`: the length of every sample, from metadata, into a lengths folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from ._app import emit, progress
from ._show import print_lengths

__all__ = ["command"]


def _pairs(option: str, values: tuple[str, ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    for value in values:
        name, equals, field = value.partition("=")
        if not equals or not name or not field:
            raise InputError(
                f"{option} {value!r} is not NAME=FIELD", hint="for example --column prompt=question"
            )
        out[name] = field
    return out


def _placeholders(values: tuple[str, ...]) -> dict[str, list[str]] | None:
    """Texts by modality; a text without one stands for an image."""
    out: dict[str, list[str]] = {}
    for value in values:
        modality, equals, text = value.partition("=")
        if not equals or modality not in ("image", "video", "audio"):
            modality, text = "image", value
        out.setdefault(modality, []).append(text)
    return out or None


@click.command("measure")
@click.argument("source", metavar="SOURCE")
@click.option("--processor", "-p", default="", help="Folder or hub name of the processor or tokenizer.")
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Lengths folder to write.")
@click.option(
    "--shape", default="auto", show_default=True, help="Chat shape: auto messages sharegpt alpaca columns."
)
@click.option(
    "--column", "columns", multiple=True, metavar="NAME=FIELD", help="Field of plain pairs; repeatable."
)
@click.option("--placeholder", "placeholders", multiple=True, help="[image=|video=|audio=]TEXT; repeatable.")
@click.option("--kind", help="Kind of source [default: by name, then by content].")
@click.option("--option", "source_options", multiple=True, metavar="NAME=VALUE", help="Option of the kind.")
@click.option("--media-root", help="Folder of relative media paths [default: the source's folder].")
@click.option("--media-prefix", help="Cut from the front of relative media paths.")
@click.option("--allow-outside", is_flag=True, help="Let media paths leave the media root.")
@click.option("--media-without-placeholder", default="error", show_default=True, help="error or prepend.")
@click.option("--system", help="System turn for samples that have none.")
@click.option("--model-limit", type=int, help="Longest sample the model takes, in tokens.")
@click.option("--workers", type=int, help="Processes [default: one per core for more than 2,048 samples].")
@click.option(
    "--audit", default=32, show_default=True, help="Samples to encode for real and compare; 0 = none."
)
@click.option("--verify-content", is_flag=True, help="Hash media again instead of trusting size and time.")
@click.option("--overwrite", is_flag=True, help="Replace other lengths in --out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(out: Path, as_json: bool, workers: int | None, audit: int, **options: Any) -> None:
    """Measure every sample of SOURCE (.jsonl or .json) without decoding media.

    \b
    Example:
      packtrain measure train.jsonl --processor Qwen/Qwen2.5-VL-3B-Instruct --out lengths
      packtrain measure qa.jsonl -p ./tokenizer -o lengths --column prompt=question --column response=answer
    """
    from ..measuring.audit import audit as run_audit
    from ..pipeline.inputs import Inputs
    from ..pipeline.measure import measure

    overwrite, verify_content = options.pop("overwrite"), options.pop("verify_content")
    options["columns"] = _pairs("--column", options["columns"])
    options["source_options"] = _pairs("--option", options["source_options"])
    options["placeholders"] = _placeholders(options["placeholders"])
    inputs = Inputs(**{f.name: options[f.name] for f in dataclasses.fields(Inputs) if f.name in options})
    source = inputs.open_source()
    template = inputs.open_template(source)
    with progress("measuring", quiet=as_json) as report:
        lengths = measure(
            source,
            template,
            out,
            workers=workers,
            overwrite=overwrite,
            verify_content=verify_content,
            origin={"inputs": inputs.to_dict()},
            progress=report,
        )
    checked = run_audit(source, lengths, template.encode, count=audit) if audit else None
    audited = 0 if checked is None else len(checked.ids)
    if as_json:
        counts = {reason: 0 for reason in sorted(set(lengths.reasons.values()))}
        for reason in lengths.reasons.values():
            counts[reason] += 1
        emit(
            {
                "lengths": str(out),
                "samples": len(lengths),
                "tokens": int(lengths.tokens.sum(dtype="int64")),
                "digest": lengths.digest,
                "unusable": counts,
                "audited": audited,
            }
        )
        return
    print_lengths(out, lengths, audited=audited)
