"""`packtrain verify`: check the laws of an artefact, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from .. import files
from ..errors import FormatError, InputError, LawError, counted
from ..measuring.run import CUT
from ..store.chunk_folder import View, chunk_name
from ._app import PATH, argument, emit, flag, option, progress, verb, without_effect
from ._show import artefact_kind, folder_of_run, ledger_of, of_host, stream_of, table, validation_folders

Progress = Callable[[int, int], None]

#: Tokens of the proof's row; of longer samples the shortest, or their first text, are taken.
_PROOF_TOKENS = 4096


@verb("verify")
@argument("artefact", type=PATH, metavar="ARTEFACT")
@option("--model", help="Also prove on this model that packed samples do not read each other.")
@option("--samples", type=click.IntRange(min=2), default=8, help="Samples of the proof.")
@option(
    "--attn",
    "backends",
    multiple=True,
    help="Attention backends of the proof; default `sdpa` and `eager`; repeatable.",
)
@option(
    "--encode",
    default=32,
    help="Packs of an export whose samples are encoded and compared with their planned lengths.",
)
@flag(
    "--energon",
    help="Read an energon export through Megatron-Energon too, or fail where that is not "
    "installed; without it: where it is installed.",
)
@option(
    "--dtype",
    type=click.Choice(["float32", "float64", "bfloat16", "float16", "auto"]),
    default="float32",
    help="Number type of the proof; 16-bit types are compared loosely.",
)
def command(
    artefact: Path, model: str | None, encode: int, energon: bool, as_json: bool, **proof: Any
) -> None:
    """Check digests, partition, capacity and order of a lengths, plan, run or chunk folder, or an export.
    Exit 1: a broken law.

    \b
    Example:
      packtrain verify runs/demo/plan
      packtrain verify runs/demo/plan --model tiny:qwen2_5_vl
      packtrain verify runs/demo --model runs/demo/model --attn sdpa
      packtrain verify shards
      packtrain verify shards --energon
    """
    artefact = of_host(artefact)
    kind = artefact_kind(artefact)
    if energon and kind != "export":
        raise InputError("--energon is for exports", hint="name the OUT of packtrain export --format energon")
    _tell_idle(kind, model)
    with progress("verifying", quiet=as_json) as report:
        if kind == "stream":
            done = verify_stream(artefact, report)
        elif kind == "export":
            done = _verify_export(artefact, encode, energon, report)
        else:
            done = _verify_folders(artefact, kind, report)
    if kind == "export":
        done |= _through_energon(artefact, energon, as_json)
    elif model is not None and kind == "lengths":
        raise InputError("a proof needs packs, this is a lengths folder", hint="name a plan or run folder")
    elif model is not None and kind != "stream":
        plan_folder = folder_of_run(artefact, "plan") if kind == "run" else artefact
        done |= _prove(plan_folder, model, quiet=as_json, **proof)
    figures = {"artefact": str(artefact), "ok": True, "checks": done}
    emit(figures) if as_json else table(f"Verified {artefact}", done)


def _tell_idle(kind: str, model: str | None) -> None:
    if kind != "export":
        without_effect(f"on a {kind} folder", "encode")
    if model is None or kind in ("stream", "export"):
        without_effect("without a proof (--model, on a plan or run)", "samples", "backends", "dtype")
    if kind in ("stream", "export"):
        without_effect(f"on a {kind} folder", "model")


def _verify_folders(artefact: Path, kind: str, report: Progress) -> dict[str, str]:
    """Of a lengths or plan folder, or all of a run, those of its validation sets too."""
    if kind == "lengths":
        return _verify_lengths(artefact)
    if kind == "plan":
        return _verify_plan(artefact)
    places = {"": (folder_of_run(artefact, "lengths"), folder_of_run(artefact, "plan"))}
    done: dict[str, str] = {}
    for name, *held in validation_folders(artefact):
        what = f"validation {name}".rstrip()
        if held[0] is None or held[1] is None:
            done[what] = "not checked: it lies in the cache, and run.json does not say where"
        else:
            places[f"{what} "] = (held[0], held[1])
    checked: dict[str, str] = {}
    for place, (what, (lengths, plan)) in enumerate(places.items()):
        report(2 * place, 2 * len(places))
        found = _verify_lengths(lengths)
        report(2 * place + 1, 2 * len(places))
        found |= _verify_plan(plan)
        checked |= {f"{what}{law}": told for law, told in found.items()}
    return checked | done


def _verify_export(out: Path, encode: int, energon: bool, report: Progress) -> dict[str, str]:
    from ..hosts.energon import check_readable
    from ..pipeline.verify_export import verify_export

    if energon:
        check_readable(out)
    return verify_export(out, encode=encode, progress=report)


def _through_energon(out: Path, asked: bool, quiet: bool) -> dict[str, str]:
    """What Megatron-Energon itself makes of an export in its format."""
    from ..hosts.energon import has_energon, read_through_energon
    from ..store.shards import export_of

    key = export_of(out)["key"]
    if not asked and key["format"] != "energon":
        return {}
    if not asked and key["options"].get("layout") == "llava":
        return {"energon": "not read through the library: LLaVA-OneVision's code builds these samples"}
    if not asked and not has_energon():
        return {"energon": "not read through the library: megatron-energon is not installed here"}
    with progress("reading through energon", quiet=quiet) as report:
        return {"energon": read_through_energon(out, progress=report)}


def _verify_lengths(folder: Path) -> dict[str, str]:
    from ..store import lengths

    found = lengths.verify(folder)
    return {"lengths digest": f"equal over {counted(len(found), 'samples')}"}


def _verify_plan(folder: Path) -> dict[str, str]:
    from ..pipeline.length_files import lengths_of
    from ..planning.laws import check_laws, check_sums
    from ..store import plans

    plan = plans.verify(folder)
    done = {"plan checksum": f"equal over {counted(len(plan), 'packs')}", "partition and order": "hold"}
    try:
        lengths = lengths_of(folder)
    except FormatError as error:
        check_laws(plan)
        check_sums(plan)
        done["capacity"] = f"holds by the plan's own sums; {error.message}"
        return done
    if lengths.digest != plan.lengths_digest:
        raise LawError(
            f"{folder} was planned from lengths {plan.lengths_digest[:12]}…, not {lengths.digest[:12]}…",
            hint="plan again",
        )
    check_laws(plan, lengths)
    longer = np.asarray(plan.pack_tokens) > plan.spec.pack_length
    done["capacity"] = "holds for every pack"
    if longer.any():
        done["capacity"] += (
            f" of several samples; {counted(int(longer.sum()), 'packs')} of one sample longer than "
            f"{plan.spec.pack_length:,} tokens, the longest {int(np.asarray(plan.pack_tokens).max()):,}"
        )
    return done


def _prove(
    folder: Path, model: str, samples: int, backends: tuple[str, ...], dtype: str, quiet: bool
) -> dict[str, str]:
    """The proof and its negative controls, on samples of the plan's first packs."""
    from ..pipeline.inputs import Inputs
    from ..planning.packplan import PackPlan
    from ..train import prove_isolation, run_controls
    from ..train.model import load_model
    from ..train.probe import size_of
    from ..train.proof import proof_samples

    backends = backends or ("sdpa", "eager")
    inputs = Inputs.of_artefact(folder)
    source = inputs.open_source()
    template = inputs.open_template(source)
    ids = sorted(PackPlan.load(folder).indices[:samples].tolist())
    encoded = []
    with progress("encoding samples", quiet=quiet) as report:
        for place, i in enumerate(ids):
            report(place, len(ids))
            encoded.append({**template.encode(source[i]), "sample_id": i})
    network = load_model(model, dtype=dtype, processor=getattr(template, "processor", None))
    if sum(map(size_of, encoded)) > _PROOF_TOKENS:
        encoded = proof_samples([encoded], network, _PROOF_TOKENS)
    done: dict[str, str] = {}
    if len(encoded) < samples:
        why = f"the shortest, in a row of at most {_PROOF_TOKENS:,} tokens"
        why = "the plan holds no more" if len(ids) < samples and len(encoded) == len(ids) else why
        done["samples of the proof"] = f"{len(encoded)} of {samples}: {why}"
    controls: list[Any] = []
    parts = 2 * len(backends)
    with progress("proving", quiet=quiet) as tell:
        tell(0, parts)
        for place, backend in enumerate(backends):
            found = prove_isolation(network, encoded, backends=(backend,))
            if not found.ok:
                raise LawError(
                    f"packed samples read each other: {found.first_leak}", hint="use another --attn"
                )
            tell(2 * place + 1, parts)
            done |= _proof_rows(backend, len(encoded), found.rows)
            controls += run_controls(network, encoded, (backend,))
            tell(2 * place + 2, parts)
    told = {True: "caught", False: "not caught", None: "refused"}
    done |= {f"control {c.name} ({c.backend})": f"{told[c.caught]}: {c.what}" for c in controls}
    for backend in backends:
        if not any(control.caught for control in controls if control.backend == backend):
            raise LawError(
                f"no leaking set-up was caught on {backend}: the proof shows nothing there",
                hint="give it more samples with --samples, or another --attn",
            )
    return done


def _proof_rows(backend: str, samples: int, rows: Sequence[Any]) -> dict[str, str]:
    """The largest difference of every check of the proof on a backend."""
    done = {f"isolation ({backend})": f"holds for {counted(samples, 'samples')}"}
    for check in ("logits", "loss", "gradients", "tamper"):
        held = [row for row in rows if row.check == check]
        if held:
            worst = max(held, key=lambda row: row.worst)
            done[f"{check} ({backend})"] = f"differ by at most {worst.worst:.2g} (limit {worst.limit:.2g})"
    return done


def verify_stream(folder: Path, progress: Progress = lambda done, total: None) -> dict[str, str]:
    """Hash every chunk and check the laws over all of them.

    Args:
        progress: called with (chunks done, chunks in all).

    Raises:
        LawError: a sample is in two packs, a pack is over its cap, or the counts do not add up.
    """
    with files.reading(folder, "a growing directory as it was written", "produce it again"):
        return _verified(folder, progress)


def _verified(folder: Path, progress: Progress) -> dict[str, str]:
    from ..export.producer import Housekeeping

    view = View(folder)
    stream = stream_of(folder, view)
    cap = int(stream["config"]["pack_length"])
    seen: set[Any] = set()
    chunks = 0
    if view.end is not None and not view.is_complete:
        raise FormatError(f"{view.fault}, though the stream has ended", hint="copy it again")
    used = Housekeeping(folder, stream["stream"], view.counts).used_up()
    for number in range(len(view.counts)):
        progress(number, len(view.counts))
        path = folder / chunk_name(number)
        if number in used and not path.exists() and not path.with_suffix(".json").exists():
            continue  # acknowledged and removed
        chunks += 1
        _verify_chunk(path, cap, seen)
    rows = [row for row in ledger_of(folder) if row["reason"] != CUT]
    left = {row["id"] for row in rows}
    if left & seen or len(left) != len(rows):
        raise LawError(f"sample {sorted(left & seen)[:1]} is in a pack and in the ledger")
    done = {"chunks": f"{chunks:,} equal to their digests", "capacity": f"holds at {cap:,} tokens"}
    if view.end is None or chunks < len(view.counts):
        done["partition"] = f"no sample of {len(seen):,} twice; the stream is not all here"
        return done
    if seen | left != set(range(int(view.end["stats"]["read"]))):
        raise LawError(
            f"{folder} holds {counted(len(seen), 'samples')} and {len(left)} in its ledger, "
            f"{view.end['stats']['read']} were read"
        )
    done["partition"] = f"{len(seen):,} packed and {len(left):,} in the ledger are all that was read"
    return done


def _verify_chunk(path: Path, cap: int, seen: set[Any]) -> None:
    """Hash a chunk and hold its packs against the cap and the samples `seen` so far; its own join them."""
    from ..store.chunks import ChunkReader

    reader = ChunkReader(path)
    reader.verify()
    for row in range(len(reader)):
        lengths = reader.lengths(row)
        if len(lengths) > 1 and int(lengths.sum()) > cap:
            raise LawError(f"pack {row} of {path.name} holds {int(lengths.sum())} tokens, the cap is {cap}")
        for one in reader.sample_ids(row):
            if one in seen:
                raise LawError(f"sample {one} is in two packs, one of them pack {row} of {path.name}")
            seen.add(one)
