"""The plan folder: `plan.json` (marker, written last), `offsets.npy`, `indices.npy`, `ledger.npy`, the sums
over each pack (`pack_tokens.npy`, `pack_sq.npy`, `pack_<cost>.npy`), and `origin.json`.

The checksum covers offsets and indices; sums and ledger have digests of their own, origin has none.
Loading memory-maps everything and checks headers and sizes, so a plan of any size opens at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ChecksumError, ForeignArtefactError, FormatError, counted
from ..planning.ledger import Ledger
from ..planning.lengths import block_digests
from ..planning.packplan import PackPlan
from ..planning.raw_plan import SCHEMA, Certificate, PackerId, Sums
from ..planning.spec import PlanSpec
from ..remote.copies import opened
from ..remote.outputs import output
from . import _folders

MARKER = "plan.json"
_LEDGER = np.dtype([("id", "<i8"), ("code", "u1")])


def save(
    plan: PackPlan, folder: str | Path, *, origin: Mapping[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Write `plan` to `folder`.

    Args:
        plan: what to write.
        folder: made when absent; may be a URL.
        origin: source paths, times, machine: kept beside the artefact, outside its digests.
        overwrite: replace another plan that is in the folder.

    Raises:
        ForeignArtefactError: the folder holds another plan and `overwrite` is False, or files of another
            kind.
        FormatError, ChecksumError: it holds a plan whose files were cut or changed, and `overwrite` is False.
    """
    arrays = _arrays(plan)
    known = plan.block_digests
    rest = {stem: array for stem, array in arrays.items() if stem not in known}
    blocks = known | {stem: [one.hex() for one in block_digests(array)] for stem, array in rest.items()}
    marker = {
        **plan.header(),
        "checksum": plan.checksum,
        "blocks": blocks,
        "arrays": {stem: _folders.describe(array) for stem, array in arrays.items()},
        "spec": plan.spec.to_dict(),
        "packer": plan.packer.to_dict(),
        "certificate": plan.certificate.to_dict(),
        "stats": plan.stats(),
        "reasons": plan.ledger.table,
        "lengths_digest": plan.lengths_digest,
        "costs": list(plan.pack_costs),
        "long_samples": plan.long_samples,
        "slots": plan.slots,
    }
    with output(folder) as place:
        _folders.refuse_other_kind(place, MARKER, ("origin.json", *(f"{stem}.npy" for stem in arrays)))
        if overwrite or not _holds_this(place, marker):
            with _folders.publishing(place, MARKER, marker, arrays, origin):
                pass


def load(folder: str | Path) -> PackPlan:
    """Open a plan folder, memory-mapped; `folder` may be a URL.

    Raises:
        FormatError: the folder is absent, torn or of another schema; names the file.
    """
    folder = opened(folder).absolute()
    marker = _folders.read_marker(folder, MARKER, SCHEMA)
    with files.reading(folder / MARKER, "a plan's marker", "make the plan again"):
        packs, samples = int(marker["packs"]), int(marker["samples"])
        stored = {name: dict(marker[name]) for name in ("blocks", "stats")}
        arrays = {
            stem: _folders.open_array(folder, stem, marker["arrays"][stem]) for stem in marker["arrays"]
        }
        costs = {name: arrays[f"pack_{name}"] for name in marker["costs"]}
        rows = arrays["ledger"]
        plan = PackPlan(
            offsets=arrays["offsets"],
            indices=arrays["indices"],
            spec=PlanSpec.from_dict(marker["spec"]),
            packer=PackerId(**marker["packer"]),
            ledger=Ledger(rows["id"], rows["code"], marker["reasons"]),
            certificate=Certificate(**marker["certificate"]),
            long_samples=int(marker["long_samples"]),
            slots=int(marker["slots"]),
            sums=Sums(arrays["pack_tokens"], arrays["pack_sq"], costs),
            lengths_digest=str(marker["lengths_digest"]),
            stored={"checksum": str(marker["checksum"]), **stored},
            folder=folder,
        )
        ends = (int(plan.offsets[0]), int(plan.offsets[-1])) if len(plan.offsets) else (-1, -1)
        if len(plan) != packs or len(plan.indices) != samples or ends != (0, samples):
            raise FormatError(
                f"{folder}: offsets {ends} and {counted(len(plan), 'packs')} do not "
                f"fit {counted(packs, 'packs')} of {counted(samples, 'samples')}",
                hint="the files belong to different plans; make the plan again",
            )
    return plan


def verify(folder: str | Path) -> PackPlan:
    """Hash every stored byte of a plan folder and check the marker against it.

    Raises:
        ChecksumError: a file differs from its digest (named), or the checksum from its parts.
    """
    folder = opened(folder)
    plan = load(folder)
    marker = _folders.check_seal(folder, MARKER)
    for stem, described in marker["arrays"].items():
        _folders.check_blocks(
            folder, stem, _folders.open_array(folder, stem, described), list(marker["blocks"].get(stem, []))
        )
    plan.verify()
    return plan


def undamaged(folder: str | Path) -> PackPlan:
    """`verify` for what reads ids: those of a damaged plan would name other samples, or none at all.

    Raises:
        FormatError: names the file that was changed.
    """
    try:
        return verify(folder)
    except ChecksumError as error:
        raise FormatError(
            f"the plan is damaged: {error.message}", hint="make it again: packtrain plan --overwrite"
        ) from None


def _arrays(plan: PackPlan) -> dict[str, NDArray[Any]]:
    rows = np.empty(len(plan.ledger), dtype=_LEDGER)
    rows["id"], rows["code"] = plan.ledger.ids, plan.ledger.codes
    sums = {"tokens": plan.pack_tokens, "sq": plan.pack_sq, **plan.pack_costs}
    whole = {"offsets": plan.offsets, "indices": plan.indices, "ledger": rows}
    return {**whole, **{f"pack_{name}": array for name, array in sums.items()}}


def _said(spec: Mapping[str, Any], key: str) -> str:
    return "not set" if spec.get(key) is None else repr(spec[key])


def _holds_this(folder: Path, marker: Mapping[str, Any]) -> bool:
    """True when the folder holds this very plan, whole; refuses to write over another or a damaged one.

    The marker is written last and removed first, so a marker beside damaged arrays is no leftover of a
    stopped writer: somebody changed them.
    """
    held = _folders.marker_there(folder, MARKER, SCHEMA)
    if held is None:
        return False
    differs = [key for key in ("lengths_digest", "spec", "checksum") if held.get(key) != marker[key]]
    if differs:
        there, here = held.get("spec") or {}, marker["spec"]
        keys = [
            f"{key} {_said(there, key)} there, {_said(here, key)} here"
            for key in sorted({*there, *here})
            if there.get(key) != here.get(key)
        ]
        what = ", ".join(keys) or " and ".join(differs) + " differ"
        raise ForeignArtefactError(
            f"{folder} holds another plan: {what}",
            hint="choose another folder (training.output_dir), or replace it with overwrite=True",
        )
    verify(folder)
    return True
