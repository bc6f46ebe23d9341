"""LLaMA-Factory: `packtrain llamafactory train.yaml` trains the YAML file of `llamafactory-cli train` packed.

Arguments, `dataset_info.json`, templates, collator, trainer and losses stay LLaMA-Factory's; the trainer of
its SFT workflow is given packs when it begins to train. `packtrain:` in the file holds options of `pack`; its
own `packing` is not done. Lengths are those of its tokenised rows. What its reading loses is told: rows that
are dropped or cut to `cutoff_len`; a row that is cut inside of a picture is left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..collate import PaddingFreeCollator
from ..errors import ConfigError, InputError, PacktrainError, SampleError, one_line
from ..train.loss import bare_model
from ._encode import HostEncoder
from ._rows import tell_cut, token_counts
from .transformers import HostMixin
from .transformers import pack as pack_trainer

logger = logging.getLogger(__name__)
_MEDIA = ("images", "videos", "audios")
_TEXT = ("input_ids", "labels", "attention_mask")
#: Settings under which another trainer than that of its SFT workflow would run, or a loss of whole rows.
_OTHER = ("use_mca", "use_hyper_parallel", "use_kt", "use_ray", "use_asft_loss")


def launch(config: str, overrides: Sequence[str] = ()) -> None:
    """Run `llamafactory-cli train` in this process, packed.

    Args:
        config: its YAML or JSON file.
        overrides: `key=value`, as LLaMA-Factory takes them.

    Raises:
        ConfigError: a setting that packs cannot keep.
    """
    if not config.endswith((".yaml", ".yml", ".json")):
        raise InputError(f"{config} is no YAML file", hint="packtrain llamafactory train.yaml")
    from llamafactory.data import loader
    from llamafactory.extras.misc import use_kt, use_ray
    from llamafactory.hparams import DataArguments
    from llamafactory.hparams.parser import read_args
    from llamafactory.train.sft import workflow
    from llamafactory.train.tuner import run_exp

    sys.argv = ["llamafactory", config, *overrides]
    settings: dict[str, Any] = dict(read_args())
    options = dict(settings.pop("packtrain", None) or {})
    settings = {name: value for name, value in settings.items() if name not in ("packing", "neat_packing")}
    if settings.get("stage", "sft") != "sft":
        named = f"stage={settings['stage']}"
        raise ConfigError(f"{named} cannot be kept: packs are for supervised training", hint="stage: sft")
    found = [n for n in _OTHER if settings.get(n)] + ["USE_RAY"] * use_ray() + ["USE_KT"] * use_kt()
    if found:
        raise ConfigError(f"{found[0]} cannot be kept: it has a trainer or loss of its own", hint="unset it")
    cutoff = int(settings.get("cutoff_len") or DataArguments.cutoff_len)
    trainer, prepare = workflow.CustomSeq2SeqTrainer, loader._get_preprocessed_dataset

    class Packs(trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, HostMixin):
                return super().train(*args, **kwargs)
            return pack(self, cutoff=cutoff, **options).train(*args, **kwargs)

    def prepared(rows: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(rows, *args, **kwargs)
        if hasattr(made, "__len__") and len(made) != len(rows):
            lost = f"{len(rows) - len(made):,} of {len(rows):,}"
            logger.warning("LLaMA-Factory dropped %s rows: turns that do not alternate, or no answer", lost)
        return made

    workflow.CustomSeq2SeqTrainer, loader._get_preprocessed_dataset = Packs, prepared
    try:
        run_exp(settings)
    finally:
        workflow.CustomSeq2SeqTrainer, loader._get_preprocessed_dataset = trainer, prepare


def pack(trainer: Any, pack_length: int | None = None, *, cutoff: int | None = None, **options: Any) -> Any:
    """Let a trainer of LLaMA-Factory's SFT workflow train on packs.

    Args:
        trainer: a `CustomSeq2SeqTrainer`, complete, not yet trained.
        pack_length: cap of a pack in tokens; None: `cutoff`.
        cutoff: `cutoff_len`, to which LLaMA-Factory has cut rows.
        options: as in `hosts.transformers.pack`; `samples_per_step` is "same" where it is not given.

    Raises:
        ConfigError: a setting of the trainer that packs cannot keep, with the reason.
    """
    if {"position_ids", "packing_params"} & set(getattr(trainer.train_dataset, "column_names", None) or ()):
        raise ConfigError("the rows are packed already, by LLaMA-Factory", hint="tokenize them unpacked")
    if getattr(trainer.data_collator.template.mm_plugin, "audio_token", None) is not None:
        raise ConfigError("its templates with sound cannot be kept: nobody has shown them packed")
    if getattr(trainer.finetuning_args, "disable_shuffling", False):
        trainer.args.train_sampling_strategy = "sequential"
    if options.get("source") is None:
        options.setdefault("samples_per_step", "same")
        pack_length = pack_length or (None if options.get("plan") is not None else cutoff)
    trainer.packs_cutoff = cutoff
    return pack_trainer(trainer, pack_length, mixin=FactoryMixin, **options)


class FactoryMixin(HostMixin):
    """What `pack` puts before the class of LLaMA-Factory's trainer."""

    packs_cutoff: int | None = None

    def packs_rows(self, rows: Any, what: str, bare: Any) -> tuple[Any, HostEncoder]:
        """Its rows as they are: its collator takes paths of media."""
        host: Any = self
        return rows, HostEncoder(_Alone(host.data_collator), bare)

    def packs_unread(self, rows: Any, own: Any, encode: Any) -> dict[int, SampleError]:
        """Rows cut to `cutoff_len` are told; those that were cut inside of their media are left out."""
        most = self.packs_cutoff or float("inf")
        cut, faults, collate = [], {}, PaddingFreeCollator(bare_model(self.model))
        for index in [index for index, size in enumerate(token_counts(rows)) if size >= most]:
            try:
                if any(rows[index].get(name) for name in _MEDIA):
                    collate([[encode(rows[index])]])
                cut.append((index, f"it holds cutoff_len={most} tokens: what was longer was cut"))
            except PacktrainError as error:
                told = f"row {index} is cut inside of its media: {error.message}"
                faults[index] = SampleError("cut_media", told, hint="raise cutoff_len")
        tell_cut(cut)
        return faults


class _Alone:
    """LLaMA-Factory's collator on one row, without the picture that it adds to a row that has none."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        media = any(rows[0].get(name) for name in _MEDIA)
        try:
            batch = self.collate([dict(row) for row in rows])
        except (RuntimeError, ValueError, IndexError) as error:  # placeholders that its media do not fill
            raise SampleError("unreadable_row", f"its collator: {one_line(error)}") from error
        return {key: value for key, value in batch.items() if media or key in _TEXT}
