"""`packtrain diff`: what differs between two plans, and which samples moved. Exit 1 when they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import FormatError, counted
from ..planning.diff import PlanDiff, diff_plans
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..store.plans import undamaged
from ._app import PATH, argument, emit, option, verb
from ._show import artefact_kind, folder_of_run, of_host, table


@verb("diff")
@argument("plan_a", type=PATH, metavar="PLAN_A")
@argument("plan_b", type=PATH, metavar="PLAN_B")
@option("--ids", type=click.IntRange(0), default=10, help="Sample ids shown of each kind.")
def command(plan_a: Path, plan_b: Path, ids: int, as_json: bool) -> int:
    """Compare two plan or run folders: spec, lengths, packs. Exit 0 when equal, 1 when they differ.

    \b
    Example:
      packtrain diff runs/a/plan runs/b/plan
    """
    folders = _plan_folder(plan_a), _plan_folder(plan_b)
    plans = undamaged(folders[0]), undamaged(folders[1])
    found = diff_plans(*plans, _lengths_of(*folders, *plans))
    told = _templates(*folders) if found.lengths_digest else {}
    if as_json:
        emit({"a": str(folders[0]), "b": str(folders[1]), **found.to_dict(ids), "template": told})
    else:
        rows = {f"template {name}": f"{a} -> {b}" for name, (a, b) in told.items()}
        table(f"{folders[0]} and {folders[1]}", {**_rows(found, ids), **rows})
    return 0 if found.equal else 1


def _plan_folder(path: Path) -> Path:
    path = of_host(path)
    kind = artefact_kind(path)
    if kind == "lengths":
        raise FormatError(f"{path} holds lengths, not a plan", hint="name two plan or run folders")
    return folder_of_run(path, "plan") if kind == "run" else path


def _lengths_of(a: Path, b: Path, first: PackPlan, second: PackPlan) -> tuple[Lengths, Lengths] | None:
    """The lengths of both plans where they differ and are still there as they were."""
    from ..pipeline.length_files import lengths_of

    if first.lengths_digest == second.lengths_digest:
        return None
    try:
        pair = lengths_of(a), lengths_of(b)
    except FormatError:
        return None
    return pair if (pair[0].digest, pair[1].digest) == (first.lengths_digest, second.lengths_digest) else None


def _templates(a: Path, b: Path) -> dict[str, tuple[Any, Any]]:
    """Settings of the templates that measured both, which differ; those inside of others with dots."""
    from ..pipeline.inputs import lengths_of_plan
    from ..store.lengths import read

    try:
        pair = [_flat("", read(lengths_of_plan(plan))[1].get("template") or {}) for plan in (a, b)]
    except FormatError:
        return {}
    names = sorted({*pair[0], *pair[1]})
    held = {name: (pair[0].get(name), pair[1].get(name)) for name in names}
    return {name: values for name, values in held.items() if values[0] != values[1]}


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        key: one for k, v in value.items() for key, one in _flat(f"{name}.{k}" if name else str(k), v).items()
    }


def _rows(found: PlanDiff, ids: int) -> dict[str, str]:
    rows = {"plans": "equal" if found.equal else "differ"}
    rows.update({f"spec {name}": f"{a!r} -> {b!r}" for name, (a, b) in found.spec.items()})
    if found.packer:
        rows["packer"] = " -> ".join(found.packer)
    if found.lengths_digest:
        rows["lengths"] = " -> ".join(digest[:12] for digest in found.lengths_digest)
    differ = {name: value for name, value in (found.lengths or {}).items() if value != 0}
    rows |= {f"lengths {name}": _of_lengths(name, value) for name, value in differ.items()}
    a, b = found.packs
    rows["packs"] = f"{a:,} -> {b:,}, {found.same_packs:,} hold the same samples"
    for name, meaning in (
        ("moved", "packed with other samples"),
        ("entered", "packed only in the second"),
        ("left", "packed only in the first"),
        ("reasons", "left out for another reason"),
        ("changed_lengths", "of another length, cost or status"),
    ):
        values = getattr(found, name)
        if len(values):
            shown = [*map(str, values[:ids].tolist()), *(["…"] if len(values) > ids else [])]
            rows[meaning] = counted(len(values), "samples") + (f": {', '.join(shown)}" if ids else "")
    return rows


def _of_lengths(name: str, value: Any) -> str:
    if name == "read":
        return f"{value[0]:,} -> {counted(value[1], 'samples')}"
    return value if isinstance(value, str) else f"{counted(value, 'samples')} differ"
