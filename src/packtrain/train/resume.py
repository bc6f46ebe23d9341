"""What a Trainer iterates, and where a run stands in it: saved with checkpoints, read back on resume.

A checkpoint folder gets the state file of the source (`packs.json`, `stream.json`, or `stream.<rank>.json` of
every rank), and what the run found so far (`consumed`). A resume loads them before anything is trained, and
refuses packs that are not those of the saved run. Trainer then skips placeholders (`Passes`).
"""

from __future__ import annotations

import itertools
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .. import files
from ..errors import ConfigError, ForeignArtefactError, FormatError, counted
from ..packs.source import is_sized
from ..remote.copies import bring
from ..template import ensure_torchvision
from .config import RunConfig
from .consumed import FOUND, found_of

# --------------------------------------------------------------------------------------------
# What a Trainer iterates: the packs of a `PackSource`, batch by batch, from where the source stands.
# --------------------------------------------------------------------------------------------
# Trainer resumes by skipping batches of a new pass. The batches it skips are placeholders here: a source goes
# on by its own state, so nothing is read or computed for what was trained before.
logger = logging.getLogger(__name__)


class Passes(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of one pack each.

    Args:
        source: a `PackSource`.
        collate: list of one pack -> batch.
        options: further arguments of the source's loader (`num_workers`, `pin_memory`, …).

    Attributes:
        skipped: placeholders that the next pass begins with.
    """

    def __init__(self, source: Any, collate: Any, options: dict[str, Any]) -> None:
        self.source, self.collate, self.options = source, collate, options
        self.skipped = 0
        self._loader: Any = None

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        if self._loader is None:
            self._loader = self.source.loader(self.collate, **self.options)
        return itertools.chain(itertools.repeat(None, skipped), self._loader)


class SizedPasses(Passes):
    """Passes of a source that knows how many micro steps each has."""

    def __len__(self) -> int:
        return len(self.source)


def pass_loader(source: Any, collate: Any, options: dict[str, Any]) -> DataLoader[Any]:
    """`Passes` as the DataLoader that Trainer wants; it reads nothing ahead, the source's own loader may."""
    made = (SizedPasses if is_sized(source) else Passes)(source, collate, options)
    own_numbers = torch.Generator()  # else each pass would draw from the run's random state
    return DataLoader(made, batch_size=None, collate_fn=_as_it_is, generator=own_numbers)


def replans(source: Any) -> bool:
    """Is every epoch planned anew?"""
    return getattr(getattr(source, "data", None), "replan", None) is not None


#: Settings of TrainingArguments that have no effect beside packs: the value they have then, and why.
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "dataloader_persistent_workers": (False, "workers of every pass start anew, and see its epoch"),
    "group_by_length": (False, "packs have equal lengths"),
    "ignore_data_skip": (False, "a saved position is restored without reading data"),
}


def tell_without_effect(source: Any, args: Any) -> None:
    """One warning line for the settings of `args` that packs of this source leave without effect."""
    without = dict(_WITHOUT_EFFECT)
    if is_sized(source):
        without.pop("ignore_data_skip")  # refused there: Trainer would begin the epoch again
    found = [
        f"{name}={getattr(args, name)!r} ({why})"
        for name, (value, why) in without.items()
        if getattr(args, name, value) != value
    ]
    if found:
        logger.warning("no effect beside packs: %s", "; ".join(found))


def loader_options(args: Any, start: str) -> dict[str, Any]:
    """Arguments of a loader of packs, from `TrainingArguments`; its workers are started for each pass.

    Args:
        start: how workers start where `args` do not say. Ours are spawned: tokenizers do not survive a fork.
    """
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
    }
    if workers:
        context = getattr(args, "dataloader_multiprocessing_context", None)  # since transformers 5
        options["multiprocessing_context"] = context or start
        options["prefetch_factor"] = args.dataloader_prefetch_factor
    return options


def _as_it_is(batch: Any) -> Any:
    return batch


# --------------------------------------------------------------------------------------------
# Where a run stands in its packs: saved with checkpoints, acknowledged, and read back on resume.
# --------------------------------------------------------------------------------------------
ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

#: File in the output folder that holds the configuration of the run.
CONFIG = "run_config.json"


def state_file(source: Any, rank: int | None = None) -> str:
    """Name of the file in a checkpoint that holds where `source` stands.

    Args:
        rank: None: the source's own.
    """
    name: str = source.state_file
    return name.format(rank=source.rank if rank is None else rank)


#: `resume_from_checkpoint` of `training.resume: auto`: the last whole checkpoint, or a run that begins.
AUTO = "auto"


def asks_for_last(asked: Any) -> bool:
    return asked is True or str(asked).lower() in ("true", AUTO)


def named_checkpoint(asked: Any, output_dir: str, last: Callable[[Path], Any]) -> Path | None:
    """The folder that `resume_from_checkpoint` means; None: that a run begins.

    Args:
        last: finds the last checkpoint of a folder.

    Raises:
        ConfigError: it is not there.
    """
    if asks_for_last(asked):
        begins, asked = asked == AUTO, last(Path(output_dir))
        if asked is None and begins:
            logger.warning("%s holds no whole checkpoint: the run begins anew", output_dir)
        elif asked is None:
            raise ConfigError(
                f"resume_from_checkpoint is true, {output_dir} holds no checkpoint",
                hint="leave it out to begin, or name a checkpoint folder",
            )
    if not asked:
        return None
    folder = Path(bring(str(asked)))
    if not folder.is_dir():
        raise ConfigError(
            f"there is no checkpoint folder {folder}",
            hint=f"name one, or set it to true for the last one in {output_dir}",
        )
    return folder


def checkpoint_of(source: Any, asked: Any, output_dir: str) -> str | None:
    """The checkpoint folder to go on from.

    Args:
        asked: as Trainer's `resume_from_checkpoint`, or a URL; True: the last one in `output_dir` that was
            finished.

    Raises:
        ConfigError: there is no such checkpoint, or it holds no state of such packs.
    """
    folder = named_checkpoint(asked, output_dir, lambda place: _last_whole(source, place))
    if folder is None:
        return None
    names = {state_file(source), *([state_file(source, 0)] if source.per_rank_state else [])}
    if not any((folder / name).is_file() for name in names):
        _without_state(source, folder)
    return str(folder)


def changed_settings(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Name what is configured otherwise than before in a run that goes on in `folder`.

    Args:
        values: the configuration as plain JSON, by section.

    Returns:
        The dotted keys that are not as they were.
    """
    path = folder / CONFIG
    if not path.is_file():
        return []
    now = _dotted(values)
    with files.reading(path, "a configuration", f"remove {path}"):
        before = _dotted(files.read_json(path))
    plain = _dotted(RunConfig().to_dict())
    before |= {key: plain.get(key) for key in now.keys() - before.keys()}  # an older version wrote fewer
    changed = sorted(key for key in {*before, *now} - _OF_RESUME if before.get(key) != now.get(key))
    told = [f"{key} {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}" for key in changed]
    if changed:
        logger.warning("the run goes on with another configuration than before: %s", ", ".join(told))
    return changed


#: Keys that say whether a run goes on.
_OF_RESUME = {"training.resume", "training.resume_from_checkpoint", "training.output_dir"}


def _dotted(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _dotted(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def _without_state(source: Any, folder: Path) -> None:
    lacking, packs = f"{state_file(source)}: it is no checkpoint of such packs", "these packs were"
    if source.per_rank_state:
        lacking, packs = "state of a stream", "a stream was"
    if source.per_rank_state or not is_sized(source):
        hint = f"name a checkpoint that was saved while {packs} trained on"
        raise ConfigError(f"{folder} holds no {lacking}", hint=hint)
    told = "%s has no %s: it cannot be checked that these are the packs of the saved run"
    logger.warning(told, folder, state_file(source))


def _last_whole(source: Any, folder: Path) -> str | None:
    """The last checkpoint that every rank finished: a run that was killed, or found its disk full, in the
    middle of one leaves a part of it. The positions are written last."""
    found = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    names = ["trainer_state.json"]
    for path in sorted(found, key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        needed = names + (_of_ranks(source, path) if source.per_rank_state else [])
        torn = [name for name in needed if not (path / name).is_file()]
        torn += [*_lacking(path), *(one.name for one in sorted(path.iterdir()) if not _is_whole(one))]
        if not torn:
            return str(path)
        logger.warning("%s has no whole %s: it was not finished, and is passed over", path, ", ".join(torn))
    return None


def _of_ranks(source: Any, folder: Path) -> list[str]:
    """The state files of all ranks that saved a checkpoint, which may be other than these."""
    first = folder / state_file(source, 0)
    told = files.read_json(first) if first.is_file() and _is_whole(first) else None
    return [state_file(source, rank) for rank in range(source.ranks_of(told) or source.world_size)]


def _lacking(folder: Path) -> list[str]:
    """Weights that a checkpoint has to have and has not, and the optimizer beside its schedule. What folders
    in it hold is of DeepSpeed and FSDP, which see to it themselves."""
    held = {one.name: one for one in folder.iterdir()}
    if any(map(Path.is_dir, held.values())):
        return []
    tensors = [name for name in held if name.endswith((".safetensors", ".bin", ".pt", ".pth"))]
    lacking = [] if any(name.startswith(_WEIGHTS) for name in tensors) else ["model.safetensors"]
    for index in (one for name, one in held.items() if name.endswith(".index.json") and _is_whole(one)):
        told = files.read_json(index)
        shards = told.get("weight_map") if isinstance(told, dict) else None
        lacking += sorted({str(name) for name in dict(shards or {}).values()} - held.keys())
    if "scheduler.pt" in held and not any(name.startswith("optimizer.") for name in held):
        lacking.append("optimizer.pt")
    return lacking


#: How names of files of weights begin.
_WEIGHTS = ("model", "pytorch_model", "adapter_model")


def _is_whole(path: Path) -> bool:
    """Whether a file of a checkpoint is there to its end: by its name JSON, tensors or a pickle of torch."""
    if path.suffix == ".json":
        try:
            files.read_json(path)
        except FormatError:
            return False
    if path.suffix == ".safetensors":
        with open(path, "rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            try:
                told = json.loads(handle.read(size)) if size < files.MOST_JSON else {}
                ends = [entry["data_offsets"][1] for name, entry in told.items() if name != "__metadata__"]
                end = 8 + size + max(ends, default=0)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                return False
        return path.stat().st_size == end
    if path.suffix in (".pt", ".pth", ".bin"):
        with open(path, "rb") as handle:  # torch's are zips, or were pickles
            return zipfile.is_zipfile(path) or handle.read(1) == b"\x80"
    return True


def load_position(source: Any, checkpoint: str | None) -> bool:
    """Let the source go on where the checkpoint stands; False: nothing says where that is.

    Raises:
        ForeignArtefactError: names what differs. FormatError: the position cannot be read.
    """
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is None:
        return False
    own = folder / state_file(source)
    state: Any = _read(own) if own.is_file() else None
    if source.per_rank_state and (state is None or source.ranks_of(state) != source.world_size):
        names = _of_ranks(source, folder)
        lacking = [name for name in names if not (folder / name).is_file()]
        if lacking:
            raise ConfigError(
                f"{folder} was saved by {counted(len(names), 'ranks')} and lacks {', '.join(lacking)}, "
                f"this is rank {source.rank} of {source.world_size}",
                hint="another number of ranks needs the states of all that saved it, in one folder",
            )
        state = [_read(folder / name) for name in names]
    if state is None:
        return False
    try:
        source.check_state(state)
        source.load_state_dict(state)
    except ForeignArtefactError as error:
        if (error.hint or "").endswith("start anew"):
            error.hint = f"{error.hint}: resume=None, or another output_dir"
        raise error.at(str(folder)) from None
    return True


def _read(path: Path) -> dict[str, Any]:
    state = files.read_json(path)
    if not isinstance(state, dict):
        raise FormatError(
            f"{path} holds a {type(state).__name__}, not a position", hint="resume from another checkpoint"
        )
    return state


class Standing(TrainerCallback):  # type: ignore[misc]
    """Tells the source which pass begins, saves where it stands, and ends with what is read once.

    Args:
        trainer: a Trainer with `PackingMixin`; its `packs` and `packs_passes` are read when they are needed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._epoch: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._epoch = None
        if state.global_step and args.ignore_data_skip and is_sized(self.trainer.packs):
            raise ConfigError(
                "ignore_data_skip=True would begin the epoch again and train packs twice",
                hint="leave it out; no data are read to get to a saved position",
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        source, first = self.trainer.packs, self._epoch is None
        skipped = self._first_pass(args, state) if first else 0
        if not first:
            self._epoch = int(self._epoch or 0) + 1
        if is_sized(source):
            source.set_epoch(self._epoch)
        elif not first:
            source.set_epoch(source.epoch + 1)
        if skipped and not self.trainer.packs_loaded:
            source.load_state_dict(source.state_dict(skipped))
        if not args.ignore_data_skip:
            self.trainer.packs_passes.skipped = skipped
        if self._epoch and replans(source):
            self.trainer.packs_same()
            if state.is_world_process_zero:
                logger.info("epoch %d is planned anew: checksum %s", self._epoch, source.plan.checksum)

    def _first_pass(self, args: Any, state: Any) -> int:
        """Micro steps of the pass that Trainer skips."""
        accum, source = args.gradient_accumulation_steps, self.trainer.packs
        whole = -(-len(source) // accum) if is_sized(source) else state.max_steps
        self._epoch, steps = divmod(state.global_step, max(1, whole))
        return int(steps * accum)

    def _consumed(self, args: Any, state: Any) -> int | None:
        """Micro steps of the pass that the steps so far have consumed; None: what was handed out."""
        if not is_sized(self.trainer.packs):
            return None
        whole, accum = len(self.trainer.packs), args.gradient_accumulation_steps
        steps = state.global_step - int(self._epoch or 0) * -(-whole // accum)
        return min(whole, int(steps * accum))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        source = self.trainer.packs
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        writes = source.per_rank_state or state.is_world_process_zero
        told = source.state_dict(self._consumed(args, state))
        if state.is_world_process_zero and folder.is_dir():
            _remove_other_ranks(folder, args.world_size, source)
        if source.per_rank_state:
            files.make_folder(folder)
        if writes and folder.is_dir():
            files.publish_json(folder / state_file(source), told)
        found = found_of(self.trainer.packs_consumed(), self.trainer.packs_proven)
        if state.is_world_process_zero and folder.is_dir():
            files.publish_json(folder / FOUND, found)
        source.acknowledge(told)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.packs.kind != "growing":
            return
        if state.global_step < state.max_steps:
            told = "the stream ended after step %d of max_steps %d: training ends with it"
            logger.warning(told, state.global_step, state.max_steps)
        control.should_training_stop = True


def _remove_other_ranks(folder: Path, ranks: int, source: Any) -> None:
    """States that a run with more ranks left under the name of this checkpoint."""
    for name in ("rng_state_{rank}.pth", source.state_file if source.per_rank_state else ""):
        if not name:
            continue
        before, _, after = name.partition("{rank}")
        for path in sorted(folder.glob(f"{before}*{after}")):
            number = path.name.removeprefix(before).removesuffix(after)
            if number.isdigit() and int(number) >= ranks:
                files.remove(path)
