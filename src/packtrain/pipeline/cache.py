"""The shared cache: lengths and plans under names made from what they depend on.

    <root>/lengths/<key>-0 …   key: source fingerprint, samples, template settings, library versions
           plans/<key>         key: lengths digest, plan settings, packer and its version
           claims/<name>       who is making what (see `waiting.claim`)

Nothing here is ever overwritten by other content, so any number of runs may share a root. A run that needs
what another is making waits for it and uses it. Media are known only when they have been read: where the
media of `<key>-0` have changed, `<key>-1` is made beside it, and runs that read the old ones keep them.
A torn folder (its disk was full, or it was copied in part) is made again in its place.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import extend, files
from ..errors import ForeignArtefactError, FormatError
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..planning.spec import PlanSpec
from ..store import lengths as lengths_store
from ..store import plans as plans_store
from ..version import __version__
from ..waiting.claim import PLACE, Claim
from ..waiting.poll import fresh_names
from .measure import measure
from .plan import check_drops, plan_lengths
from .publish import Identity

_log = logging.getLogger(__name__)


class CacheRoot:
    """A content-addressed folder of lengths and plans.

    Args:
        root: made when absent.
        timeout_s: longest wait for another run that makes what is needed; 0 = for ever.
    """

    def __init__(self, root: str | Path, timeout_s: float = 0.0) -> None:
        self.root = Path(root).absolute()
        self.timeout_s = timeout_s

    def lengths(
        self, source: extend.Source, template: extend.Template, **options: Any
    ) -> tuple[Lengths, Path]:
        """Lengths of `source` under `template`, and their folder; `options` go to `measure`."""
        key = files.digest_json(Identity.of(source, template).key)[:32]
        for variant in itertools.count():
            folder = self.root / "lengths" / f"{key}-{variant}"

            def make(again: bool, folder: Path = folder) -> Lengths:
                return measure(source, template, folder, overwrite=again, **options)

            try:
                return self._once(folder, lengths_store.MARKER, make), folder
            except ForeignArtefactError as error:
                _log.info("%s: %s", folder, error.message)
        raise AssertionError("variants never end")

    def plan(
        self,
        lengths: Lengths,
        lengths_folder: Path,
        *,
        min_fill_ratio: float | None,
        max_drop_fraction: float | None,
        **options: Any,
    ) -> tuple[PackPlan, Path]:
        """The plan of `lengths` under `options` (those of `packtrain.plan`), and its folder."""
        spec = PlanSpec.from_dict(options)
        packer = extend.lookup("packers", spec.packer)
        parts = {
            "lengths": lengths.digest,
            "spec": spec.to_dict(),
            "min_fill_ratio": min_fill_ratio,
            "packer": int(packer.VERSION),
            "packtrain": __version__,
        }
        folder = self.root / "plans" / files.digest_json(parts)[:32]

        def make(again: bool) -> PackPlan:
            if not again and (folder / plans_store.MARKER).is_file():
                return PackPlan.load(folder)
            return plan_lengths(
                lengths,
                folder,
                lengths_folder=lengths_folder,
                min_fill_ratio=min_fill_ratio,
                max_drop_fraction=max_drop_fraction,
                overwrite=again,
                **options,
            )

        made = self._once(folder, plans_store.MARKER, make)
        check_drops(made, lengths_folder, max_drop_fraction)
        return made, folder

    def _once(self, folder: Path, marker: str, make: Callable[[bool], Any]) -> Any:
        """What `make` gives: called under a claim while `marker` is absent, or once more when it is torn.

        Args:
            make: called with True when what lies in the folder must be replaced.
        """

        def there() -> bool:
            names = fresh_names(folder)
            return marker in names and PLACE not in names  # who made it may still be in the folder

        claims = self.root / "claims" / f"{folder.parent.name}-{folder.name}"
        options: dict[str, Any] = {"what": f"{folder.parent.name} {folder.name}", "timeout_s": self.timeout_s}
        claim = Claim.take_unless(there, claims, **options)
        if claim is not None:
            with claim:
                return make(False)
        try:
            return make(False)
        except FormatError as error:
            _log.warning("%s is made again: %s", folder, error.message)
        with Claim.take(claims, **options):
            try:
                return make(False)  # another run may have mended it meanwhile
            except FormatError:
                return make(True)
