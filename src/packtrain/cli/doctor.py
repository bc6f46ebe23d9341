"""`packtrain doctor`: will packed samples stay apart on this model and backend? What do packs cost here?"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InputError
from ..files import make_folder, publish_json
from ..planning.costs import DeviceProfile
from ._app import PATH, argument, completed, emit, flag, option, stages, verb, without_effect
from ._show import table

if TYPE_CHECKING:
    from ..train.calibrate import Calibration


#: Above this error of the time the machine was busy, or its steps too short to tell.
_NOISY = 0.25

_EXIT = {"safe": 0, "unsafe": 1, "unknown": 2}


@verb("doctor")
@argument("config", type=PATH, metavar="[CONFIG]", required=False)
@option(
    "--model",
    help="Folder, hub name or `tiny:…`; without CONFIG.",
    shell_complete=completed("families", "tiny:"),
)
@option("--attn", help="Backend, as `model.attn`; default: auto, or what CONFIG says.")
@option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="As `model.dtype`; `auto` attention depends on it. Default: auto, or what CONFIG says.",
)
@flag("--prove", help="Load the model and run the isolation proof on random text.")
@option(
    "--calibrate",
    type=PATH,
    metavar="FILE",
    help="Train some packs of CONFIG on this device, fit what they cost in time and memory, and write the "
    "device profile that `forecast --profile` and `training.device_profile` read.",
)
@flag(
    "--overwrite",
    help="With `--calibrate`: replace what the output folder holds of another run, and what FILE holds.",
)
def command(
    config: Path | None,
    model: str | None,
    attn: str | None,
    dtype: str | None,
    prove: bool,
    calibrate: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Say before any training whether packed samples stay apart, why, and what to do.

    CONFIG is a run's YAML: its model, attention and type are looked at. Exit code 0: safe; 1: unsafe;
    2: unknown (or bad input).

    \b
    Example:
      packtrain doctor --model tiny:qwen2_5_vl --attn varlen
      packtrain doctor --model tiny:qwen3 --prove
      packtrain doctor examples/demo.yaml --calibrate device.json
    """
    from ..train.config import ATTENTIONS, load_config

    if calibrate is None:
        without_effect("without --calibrate", "overwrite")
    else:
        _check_target(calibrate, config, overwrite)
    if (config is None) == (model is None):
        raise click.UsageError("give CONFIG or --model" + (", not both" if config else ""))
    settings = None if config is None else load_config(config)
    if settings is not None:
        model, attn = settings.model.name_or_path, attn or settings.model.attn
        dtype = dtype or settings.model.dtype
        if model is None:
            raise InputError(f"{config} names no model", hint="set model.name_or_path")
    attn, dtype = attn or "auto", dtype or "auto"
    if attn not in ATTENTIONS:
        raise click.BadParameter(f"{attn!r} is none of {', '.join(ATTENTIONS)}", param_hint="--attn")
    from ..train.doctor import diagnose  # loads torch: what was given is checked

    found = diagnose(str(model), attn, dtype=dtype, prove=prove)
    figures = {**asdict(found), "exit_code": _EXIT[found.verdict]}
    made = None
    if calibrate is not None and settings is not None and found.verdict != "unsafe":
        from ..pipeline.run import calibrate_run

        made = calibrate_run(settings, overwrite=overwrite, stage=stages(as_json))
        publish_json(calibrate, made.profile.to_dict())
        figures["calibration"] = {"profile": str(calibrate), **asdict(made)}
    if as_json:
        emit(figures)
        return _EXIT[found.verdict]
    rows = {
        "verdict": found.verdict,
        "model type": found.model_type,
        "attention": found.backend,
        "family": found.family or "none",
        "versions": "; ".join(found.versions),
        "why": "; ".join(found.reasons),
        "fix": found.fix or None,
    }
    table(f"Packing {model}", rows)
    if made is not None:
        table(f"{made.profile.name}: {calibrate}", _fitted_rows(made))
    return _EXIT[found.verdict]


def _check_target(path: Path, config: Path | None, overwrite: bool) -> None:
    """A profile can be made and written there, and nothing else is lost.

    Raises:
        InputError: there is no run, or `path` is a URL, a folder, another file or cannot be written.
    """
    fault, hint = "", "name another file, or --overwrite"
    if config is None:
        fault = " trains packs of a run, and no CONFIG is given"
        hint = "packtrain doctor run.yaml --calibrate device.json"
    elif ":/" in str(path) or not path.name:  # a Path makes one slash of two
        fault, hint = f" {str(path)!r} is no file", "for example device.json"
    elif path.is_dir():
        fault, hint = f" {path} is a folder", f"for example {path / 'device.json'}"
    elif path.exists() and not overwrite and not _is_profile(path):
        fault = f" {path} is there and holds no device profile"
    else:
        make_folder(path.parent)
        if not os.access(path.parent, os.W_OK):
            fault, hint = f" {path}: {path.parent} cannot be written", "name another file"
    if fault:
        raise InputError(f"--calibrate{fault}", hint=hint)


def _is_profile(path: Path) -> bool:
    try:
        return bool(DeviceProfile.load(path))
    except InputError:
        return False


def _fitted_rows(made: Calibration) -> dict[str, str]:
    """What was fitted, and how far it is off on packs that the fit has not seen."""
    profile, unseen = made.profile, "of packs that the fit has not seen"
    seen = any(row["patches"] for row in made.rows)
    rows = {
        "micro step": f"{profile.seconds_per_token * 1e6:.3g} us a token, "
        f"{profile.fixed_seconds * 1e3:.3g} ms fixed",
        "attention": f"doubles a sample of {profile.l_star:,} tokens",
        **({"patches": f"{profile.patch / 1000:.3g} tokens each"} if seen else {}),
        "optimizer": f"{profile.step_seconds * 1e3:.3g} ms a step",
    }
    if profile.base_bytes is not None and profile.bytes_per_token is not None:
        rows["memory"] = (
            f"{profile.base_bytes / 2**30:.1f} GiB, and {profile.bytes_per_token * 1e-6:.3g} MB a token"
            + (f", {profile.bytes_per_patch * 1e-6:.3g} MB a patch" if profile.bytes_per_patch else "")
        )
    for name, error in (("time", made.time_error), ("memory", made.memory_error)):
        if error is not None:
            rows[f"{name} off by"] = f"{error:.1%} at most {unseen}"
    if (made.time_error or 0.0) > _NOISY:
        rows["note"] = "steps of one cost took different times: calibrate again when nothing else runs here"
    return rows
