"""`packtrain doctor`: will packed samples stay apart on this model and attention backend?"""

from __future__ import annotations

from dataclasses import asdict

import click

from ._app import completed, emit
from ._show import table

__all__ = ["command"]

_EXIT = {"safe": 0, "unsafe": 1, "unknown": 2}


@click.command("doctor")
@click.option(
    "--model",
    required=True,
    help="Folder, hub name or `tiny:…`.",
    shell_complete=completed("families", "tiny:"),
)
@click.option("--attn", default="auto", show_default=True, help="Backend, as `model.attn`.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="As `model.dtype`; `auto` attention depends on it.",
)
@click.option("--prove", is_flag=True, help="Load the model and run the isolation proof on random text.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(model: str, attn: str, dtype: str, prove: bool, as_json: bool) -> int:
    """Say before any training whether packed samples stay apart, why, and what to do.

    Exit code 0: safe; 1: unsafe; 2: unknown (or bad input).

    \b
    Example:
      packtrain doctor --model tiny:qwen2_5_vl --attn varlen
      packtrain doctor --model tiny:qwen3 --prove
    """
    from ..train.config import ATTENTIONS
    from ..train.doctor import diagnose

    if attn not in ATTENTIONS:
        raise click.BadParameter(f"{attn!r} is none of {', '.join(ATTENTIONS)}", param_hint="--attn")
    found = diagnose(model, attn, dtype=dtype, prove=prove)
    if as_json:
        emit({**asdict(found), "exit_code": _EXIT[found.verdict]})
    else:
        rows = {
            "verdict": found.verdict,
            "model type": found.model_type,
            "attention": found.backend,
            "family": found.family or "none",
            "versions": "; ".join(found.versions),
            "why": "; ".join(found.reasons),
        }
        table(f"Packing {model}", {**rows, "fix": found.fix} if found.fix else rows)
    return _EXIT[found.verdict]
