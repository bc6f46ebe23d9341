"""Opening artefacts and printing them as tables; shared by several verbs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import FormatError
from ..pipeline.length_files import read_lengths
from ..pipeline.truncated import told_truncated, truncated_figures, truncated_rows
from ..pipeline.unread import read_keys, told
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..store.shards import is_export

__all__ = [
    "artefact_kind",
    "folder_of_run",
    "lengths_figures",
    "open_lengths",
    "print_lengths",
    "print_plan",
    "table",
]

_ROWS = 100  # samples named in figures; details.jsonl names all


def artefact_kind(folder: Path) -> str:
    """`lengths`, `plan`, `run`, `stream` or `export`, by the marker that lies in `folder`.

    Raises:
        FormatError: it holds none.
    """
    for marker in ("run", "plan", "lengths", "stream"):
        if (folder / f"{marker}.json").is_file():
            return marker
    if is_export(folder):
        return "export"
    if not folder.exists():
        raise FormatError(f"{folder} does not exist", hint="name a lengths, plan or run folder")
    if (folder / "partial").is_dir():
        raise FormatError(f"{folder} is an unfinished measurement", hint="run the same measure command again")
    if any(folder.glob("shard_*_of_*/partial")):
        raise FormatError(f"{folder} holds shards that are not merged", hint=f"run packtrain merge {folder}")
    raise FormatError(
        f"{folder} holds no lengths, plan or run, and no stream", hint="name the folder given as --out"
    )


def folder_of_run(run: Path, name: str) -> Path:
    """Where a run's `lengths` or `plan` lie: in its own folder, or in the cache that `run.json` names."""
    if (run / name).is_dir():
        return run / name
    named = files.read_json(run / "run.json").get("result", {}).get(f"{name}_folder")
    if named is None:
        raise FormatError(f"{run} holds no {name}, and its run.json names none")
    return Path(named)


def open_lengths(path: Path) -> Lengths:
    """A lengths folder, or the token counts in a file of one of `pipeline.length_files.SUFFIXES`."""
    if path.is_dir():
        if artefact_kind(path) == "run":
            path = folder_of_run(path, "lengths")
        return Lengths.load(path)
    return read_lengths(path)


def table(title: str, rows: Mapping[str, Any]) -> None:
    """Two columns on standard output."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    grid.add_column(style="cyan")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, str(value))
    Console().print(grid)


def print_lengths(folder: Path, lengths: Lengths, *, audited: int | None = None) -> None:
    usable = np.asarray(lengths.tokens)[np.asarray(lengths.status) == 0]
    rows: dict[str, Any] = {"samples": f"{len(lengths):,}", "usable": f"{len(usable):,}"}
    counts: dict[str, int] = {}
    for index in np.flatnonzero(np.asarray(lengths.status) != 0).tolist():
        reason = lengths.reason(index)
        counts[reason] = counts.get(reason, 0) + 1
    rows.update({f"  {reason}": f"{count:,}" for reason, count in sorted(counts.items())})
    if len(usable):
        p50, p95 = np.percentile(usable, [50, 95])
        rows["tokens"] = f"{int(usable.sum(dtype=np.int64)):,}"
        rows["length"] = f"mean {usable.mean():.0f}, p50 {p50:.0f}, p95 {p95:.0f}, max {int(usable.max())}"
    for name, values in lengths.costs.items():
        rows[name] = f"{int(np.asarray(values).sum(dtype=np.int64)):,}"
    if audited is not None:
        rows["audit"] = f"{audited} samples encoded for real: 0 mismatches" if audited else "not run"
    if keys := told(read_keys(folder)):
        rows["keys"] = keys
    if cut := told_truncated(folder, lengths):
        rows["truncation"] = cut
    rows["digest"] = lengths.digest[:16]
    table(f"Lengths in {folder}", rows)


def lengths_figures(folder: Path, lengths: Lengths) -> dict[str, Any]:
    """What machines are told of a lengths folder."""
    counts = {reason: 0 for reason in sorted(set(lengths.reasons.values()))}
    for reason in lengths.reasons.values():
        counts[reason] += 1
    cut = truncated_rows(folder, lengths)
    return {
        "lengths": str(folder),
        "samples": len(lengths),
        "tokens": int(lengths.tokens.sum(dtype=np.int64)),
        "digest": lengths.digest,
        "unusable": counts,
        "keys": read_keys(folder),
        "truncation": {**truncated_figures(cut, lengths), "rows": cut[:_ROWS]},
    }


def print_plan(folder: Path, plan: PackPlan) -> None:
    table(f"Plan in {folder}", plan_rows(plan))


def plan_rows(plan: PackPlan) -> dict[str, str]:
    """The figures of a plan, as text."""
    stats = plan.stats()
    proven = "proven optimal" if stats["optimal"] else f"gap {stats['gap']:.4%}"
    rows = {}
    if stats["over_long_packs"]:
        rows["over-long"] = (
            f"{stats['over_long_packs']:,} of {stats['packs']:,} packs exceed "
            f"{plan.spec.pack_length:,} tokens, longest {stats['longest_pack']:,}"
        )
    rows |= {
        "samples": f"{stats['samples']:,} of {stats['read']:,} read",
        "packs": f"{stats['packs']:,} of {plan.spec.pack_length:,} tokens",
        "efficiency": f"{stats['efficiency']:.2%} of slots are real tokens",
        "samples per pack": f"{stats['samples_per_pack']:.2f}",
        "length and order": f"correlation {stats['length_order_correlation']:+.2f}",
        "lower bound": f"{stats['bound']:,} packs ({stats['bound_name']}), {proven}",
        "packer": stats["packer"],
        "checksum": plan.checksum[:16],
        "ledger": f"{stats['dropped']:,} samples",
    }
    rows.update({f"  {reason}": f"{count:,}" for reason, count in stats["dropped_by_reason"].items()})
    if stats.get("sources"):
        rows["sources per pack"] = (
            f"{stats['sources_per_pack']:.2f} of {stats['sources']:,} "
            f"({stats['sources_per_pack_at_random']:.2f} if drawn at random)"
        )
    if "steps" in stats:
        rows["steps"] = (
            f"{stats['steps']:,} of {stats['samples_per_step']:,} samples, "
            f"{stats['packs_per_step']:,} packs each"
            + (f", {stats['fillers']:,} fillers" if stats["fillers"] else "")
        )
        rows["slowest rank"] = (
            f"{stats['step_imbalance']:.3f} x the mean on {plan.spec.packs_multiple} ranks (predicted)"
        )
    return rows
