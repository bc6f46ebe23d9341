"""Measured, audited and planned inputs of a run and its validation: made by one rank, opened by others.

`prepare` makes them for training or validation; `prepare_ranks` does both for a run of any number of ranks.
In the run's own folder an artefact of another run is refused; with `data.cache.root_dir`
lengths and plans lie in a cache that runs share. A planner option never measures again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import extend, files
from ..errors import ForeignArtefactError, FormatError
from ..measuring.audit import audit
from ..measuring.eligibility import probe_static
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..planning.spec import PlanSpec
from ..store import lengths as lengths_store
from ..store import plans as plans_store
from ..store import shards
from ..version import __version__
from ..waiting.claim import PLACE, Claim
from ..waiting.poll import fresh_names
from ..world import World, world
from .inputs import Inputs
from .measure import measure
from .plan import check_drops, plan_lengths
from .publish import SERIAL, Identity, refusal_marked
from .ranks import StartUp, Tell

if TYPE_CHECKING:
    from ..sources.chat import ChatSource
    from ..template import HFTemplate
    from ..train.config import RunConfig


logger = logging.getLogger(__name__)


#: Opens a progress display for a stage and gives its callback (done, total).
Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]

#: Samples encoded for real before planning.
_AUDITED = 32


@dataclass(kw_only=True)
class Prepared:
    """Measured and planned inputs of a run."""

    source: ChatSource
    template: HFTemplate
    lengths: Lengths
    plan: PackPlan
    lengths_folder: Path
    plan_folder: Path
    audited: int

    def to_dict(self) -> dict[str, Any]:
        """What another rank needs to open the same."""
        return {
            "lengths": str(self.lengths_folder.absolute()),
            "plan": str(self.plan_folder.absolute()),
            "lengths_digest": self.lengths.digest,
            "checksum": self.plan.checksum,
            "audited": self.audited,
        }


def prepare(
    config: RunConfig,
    folder: Path,
    *,
    validation: bool = False,
    name: str = "",
    overwrite: bool = False,
    stage: Stage | None = None,
    world_size: int | None = None,
    keep_plan: bool = True,
) -> Prepared:
    """Measure, probe, audit and plan the training (or validation) samples.

    Validation drops no pack for its fill and no sample for its length; samples that cannot be used are told
    in a warning. With `data.eval_packing: false` each of its samples is a
    pack of its own, planned by the same pipeline; `name` is that of one of several sets.
    `world_size` (None: as launched) only matters to plans
    by steps of samples. Without `keep_plan` the plan is not written to the run's folder.

    Raises:
        PacktrainError: what any step raises; see `measure`, `probe_static`, `audit`, `plan_lengths`.
    """
    from ..train.config import validation_prefix

    shown = stage or silent
    prefix = validation_prefix(name) if validation else ""
    what = " ".join(["validation", *filter(None, [name])]) if validation else "training"
    data = config.data
    root = data.cache.root_dir
    cache = None if root is None else CacheRoot(root, data.wait_timeout_s)
    inputs = Inputs.of_config(config, validation=validation, name=name)
    source = inputs.open_source()
    template = inputs.open_template(source)
    trains = config.export.format is None
    if trains and not validation:
        from ..train.early import check_template

        check_template(config, template, source)
    if not validation and hasattr(template, "verify_limits"):
        template.verify_limits()
    lengths_folder, plan_folder = folder / f"{prefix}lengths", folder / f"{prefix}plan"
    with shown(f"measuring {what} samples") as report:
        options: dict[str, Any] = {
            "workers": _workers(config, len(source)),
            "persist_every": data.persist_every,
            "origin": {"inputs": inputs.to_dict()},
            "progress": report,
        }
        if cache is None:
            lengths = measure(source, template, lengths_folder, overwrite=overwrite, **options)
        else:
            lengths, lengths_folder = cache.lengths(source, template, **options)
        lengths_store.verify(lengths_folder)
    with shown("checking the samples") as report:
        probe_static(source, template.encode)
        said = getattr(template, "check_decoded", None)
        checked = audit(
            source, lengths, template.encode, count=_AUDITED, seed=config.training.seed, check=said
        )
        report(1, 1)
    with shown("planning") as report:
        wanted = _plan_options(config, validation, world_size or world().size, lengths)
        if cache is None:
            place = plan_folder if keep_plan else None
            whole = (plan_folder / plans_store.MARKER).is_file()
            if whole and not overwrite:
                wanted = _as_begun(wanted, plan_folder)
            with nullcontext() if whole else refusal_marked(lengths_folder):
                plan = plan_lengths(
                    lengths, place, lengths_folder=lengths_folder, overwrite=overwrite, **wanted
                )
        else:
            plan, plan_folder = cache.plan(lengths, lengths_folder, **wanted)
        if cache is not None or keep_plan:
            plan = plans_store.verify(plan_folder)
        report(1, 1)
    if trains:
        from ..train.early import check_planned

        check_planned(config, template, plan, lengths)
    if validation and len(plan.ledger):
        logger.warning(
            "%d of %d %s samples cannot be used, and evaluation does not see them: %s",
            len(plan.ledger), len(source), what, plan.ledger.counts(),
        )  # fmt: skip
    return Prepared(
        source=source,
        template=template,
        lengths=lengths,
        plan=plan,
        lengths_folder=lengths_folder,
        plan_folder=plan_folder,
        audited=len(checked.ids),
    )


def prepare_ranks(
    config: RunConfig,
    start: StartUp,
    *,
    trains: bool = True,
    before: Callable[[], None] | None = None,
    overwrite: bool = False,
    stage: Stage | None = None,
    world_size: int | None = None,
    keep_plan: bool = True,
) -> tuple[Prepared, dict[str, Prepared]]:
    """Training and validation inputs on every rank; one rank per disk makes them.

    Args:
        trains: False: those of validation alone.
        before: called by the rank that makes them, before it begins.
        world_size: ranks that will train; None: those that start.
        keep_plan: False: the training plan is not written (one rank only).

    Returns:
        Those of training, and those of every validation set by its name ("": of one that has none).
    """
    made: dict[str | None, Prepared] = {}  # None: of training
    names: list[str | None] = [*([None] if trains else []), *config.data.validations()]

    def make(tell: Tell) -> Mapping[str, Any]:
        if before is not None:
            before()
        for name in names:  # what cannot be opened is told before other samples are measured
            if name is not None:
                Inputs.of_config(config, validation=True, name=name).open_source()
        for name in names:
            made[name] = prepare(
                config,
                start.folder,
                validation=name is not None,
                name=name or "",
                overwrite=overwrite,
                stage=partial(_shown_and_told, stage or silent, tell),
                world_size=world_size or start.place.size,
                keep_plan=keep_plan or name is not None,
            )
        return {_key(name): made[name].to_dict() for name in names}

    result = start.share(make)
    for name in names:
        if name not in made:
            made[name] = _open(config, result[_key(name)], name, check=start.leads)
    training: Any = made.pop(None, None)
    return training, {name: found for name, found in made.items() if name is not None}


def _key(name: str | None) -> str:
    """What stands for a set in what rank 0 tells the others."""
    return "train" if name is None else f"val {name}"


def as_validation(made: Mapping[str, Prepared]) -> Any:
    """What `train(val=…)` takes: one set, several by name, or None."""
    sets = {name: (one.plan, one.source, one.lengths) for name, one in made.items()}
    return sets.get("", sets or None)


def silent(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """A stage that shows nothing."""
    return nullcontext(lambda done, total: None)


def _open(config: RunConfig, told: Mapping[str, Any], name: str | None, *, check: bool) -> Prepared:
    """What another rank made, memory-mapped; one process per machine hashes the plan's bytes."""
    inputs = Inputs.of_config(config, validation=name is not None, name=name or "")
    folder = Path(told["plan"])
    plan, lengths = PackPlan.load(folder), Lengths.load(told["lengths"])
    for name, mine, theirs in (
        ("plan", plan.checksum, told["checksum"]),
        ("lengths", lengths.digest, told["lengths_digest"]),
    ):
        if mine != theirs:
            raise FormatError(
                f"{told[name]} holds {name} {mine[:12]}…, rank 0 made {str(theirs)[:12]}…",
                hint="the ranks see different files; check the mounts of the output folder",
            )
    if check:
        plan = plans_store.verify(folder)
    source = inputs.open_source()
    return Prepared(
        source=source,
        template=inputs.open_template(source),
        lengths=lengths,
        plan=plan,
        lengths_folder=Path(told["lengths"]),
        plan_folder=folder,
        audited=int(told["audited"]),
    )


def _plan_options(config: RunConfig, validation: bool, world_size: int, lengths: Lengths) -> dict[str, Any]:
    from ..train.config import Planned
    from ..train.runtime import step_plan_options

    data = config.data
    options: dict[str, Any] = {
        "pack_length": config.pack_length,
        "packer": getattr(data, "packer", "auto"),
        "long_samples": getattr(data, "long_samples", "single"),
        "long_rule": ">=",
        "max_samples": 1 if validation and not data.eval_packing else getattr(data, "max_samples", None),
        "min_fill_ratio": None,
        "max_drop_fraction": getattr(data, "max_drop_fraction", None),
    }
    if isinstance(data, Planned) and data.packer_options:
        options["packer_options"] = data.packer_options
    if isinstance(data, Planned) and data.limits:
        options["limits"] = data.limits
    if validation:
        options["long_samples"] = "single"  # evaluation drops nothing
    if not isinstance(data, Planned):
        return options
    if not data.packing:
        rows = data.samples_per_row
        options["max_samples"] = rows
        if rows > 1:  # so many of any length fit
            options["pack_length"] = rows * max(config.pack_length, lengths.max_tokens)
            options["packer"] = "random_fit" if data.shuffle and not validation else "sequential"
    if validation:
        return options
    if data.drop_under_filled:
        options["min_fill_ratio"] = data.min_fill_ratio
    return {**options, **step_plan_options(config, world_size)}


def _as_begun(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The options of the plan in the folder, where its steps suit the ranks of today as well.

    A plan by steps of samples is made for ranks; a run that began on others goes on with its packs.
    """
    with suppress(FormatError):
        begun = PackPlan.load(folder).spec
        same = begun.samples_per_step is not None and begun.samples_per_step == wanted.get("samples_per_step")
        if same and begun.packs_per_step and begun.packs_per_step % wanted["packs_multiple"] == 0:
            return {**wanted, "packs_multiple": begun.packs_multiple}
    return wanted


@contextmanager
def _shown_and_told(stage: Stage, tell: Tell, name: str) -> Iterator[Callable[[int, int], None]]:
    """A stage that also tells the ranks that wait."""
    tell(name, 0, 0)
    with stage(name) as report:

        def both(done: int, total: int) -> None:
            report(done, total)
            tell(name, done, total)

        yield both


def _workers(config: RunConfig, samples: int) -> int:
    """As configured, but never more than there are cores and 2,048-sample shares."""
    from ..execute.local import available_cpus

    return max(1, min(config.data.measure_workers, available_cpus(), -(-samples // SERIAL)))


# --------------------------------------------------------------------------------------------
# Validation inputs of a run that plans nothing else: streams and growing directories
# --------------------------------------------------------------------------------------------
#     with validation(config) as val:     # {} without data.val
#         …train…
#
# A validation set is finite and small, so it is measured and planned as in a planned run: once, by one rank
# per disk, into `val_lengths` and `val_plan` (of several sets `val_NAME_lengths` …) of the output folder,
# where a resumed run finds them. The folder is claimed while the block lasts, so two runs in one folder are
# told apart.
@contextmanager
def validation(
    config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None, place: World | None = None
) -> Iterator[dict[str, Prepared]]:
    """Measure and plan the validation samples, on every rank: their inputs by the name of their set.

    Args:
        config: from `train.load_config`.
        overwrite: replace what `training.output_dir` holds of other validation samples.
        stage: progress display per stage.
        place: rank and world size; None: from the launcher's environment.

    Raises:
        PacktrainError: as `prepare`; InputError when another run takes the folder over.
    """
    if config.data.val is None:
        yield {}
        return
    place = place or world()
    folder = Path(config.training.output_dir)
    config = _with_pack_length(config, place)
    with StartUp(folder, place=place, timeout_s=config.data.wait_timeout_s) as start:
        _, made = prepare_ranks(
            config,
            start,
            trains=False,
            before=lambda: files.remove_leftovers(folder),
            overwrite=overwrite,
            stage=stage,
        )
        start.calm()
        yield made
        start.check()


def _with_pack_length(config: RunConfig, place: World) -> RunConfig:
    """The pack length of packs that were made before, where none is named; waits for the first chunk."""
    named = config.template.max_length or config.model.max_model_len
    if named is not None or config.data.kind not in ("exported", "growing"):
        return config
    data = config.data
    if data.kind == "exported":
        length = PackPlan.load(shards.hidden(shards.at(data.path), "plan")).spec.pack_length
    else:
        from ..data import LazyShardedDataset

        seconds = (data.timeout_s, data.poll_s)
        length = LazyShardedDataset(
            data.path, place.rank, place.size, *seconds, start="beginning"
        ).pack_length
    template = config.template.model_copy(update={"max_length": length})
    return config.model_copy(update={"template": template})


# --------------------------------------------------------------------------------------------
# The shared cache: lengths and plans under names made from what they depend on
# --------------------------------------------------------------------------------------------
#     <root>/lengths/<key>-0 …   key: source fingerprint, samples, template settings, library versions
#            plans/<key>         key: lengths digest, plan settings, packer and its version
#            claims/<name>       who is making what (see `waiting.claim`)
#
# Nothing here is ever overwritten by other content, so any number of runs may share a root. A run that needs
# what another is making waits for it and uses it. Media are known only when they have been read: where the
# media of `<key>-0` have changed, `<key>-1` is made beside it, and runs that read the old ones keep them.
# A torn folder (its disk was full, or it was copied in part) is made again in its place.
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
