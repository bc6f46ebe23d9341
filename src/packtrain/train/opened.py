"""The packs that a configuration names, where no plan is made before: a growing directory, or a stream.

    result = train(config)                       # data of kind growing: the directory of the configuration
    result = train(config, samples, template)    # a stream: samples are encoded and packed as they come

A stream begins its next epoch where one ends and `max_steps` ends the run, so ranks take equal steps. With
`dyn_bsz` a micro batch takes `micro_batch_size * max_length` tokens.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from .. import files, moved
from ..data import LazyShardedDataset, StreamingPackedDataset, TokenBudgetDataset
from ..errors import ConfigError, SampleError
from ..measuring.run import CUT, left_out
from ..media.location import media_refs, name_of
from ..world import World
from .config import RunConfig, Stream, TokenBudget
from .runtime import skipped_samples

logger = logging.getLogger(__name__)


IGNORED = -100

#: What `data` of a stream, and of a token budget, says in the words of its dataset.
_OF_STREAMS = (
    *("long_samples", "packer", "shuffle_buffer", "splits"),
    *("encode_workers", "on_error", "max_skip_fraction"),
)
_OF_BUDGETS = (
    *("micro_batch_size", "dyn_bsz", "buffer_size", "count_mode", "overflow_ratio", "order"),
    *("pad_packed_input", "pad_to_length", "drop_last"),
)


def opened(config: RunConfig, samples: Any, template: Any, place: World) -> tuple[Any, Any]:
    """The dataset that `config.data` names, and the template of its samples.

    Args:
        samples: of a stream; sequence or iterable.
        template: encodes samples, or media where chunks hold them as bytes; None: `template.processor`.

    Raises:
        ConfigError: no pack length is set; the data are of another kind.
    """
    data = config.data
    if data.kind != "growing":
        return _stream(config, samples, template, place), template
    template = _template(config) if template is None else template
    training = config.training
    return LazyShardedDataset(
        str(config.custom.dataset),
        place.rank,
        place.size,
        training.sharded_lazy_max_wait_s,
        training.sharded_lazy_poll_s,
        start=training.sharded_lazy_start,
        run=training.output_dir,
        skip=skipped_samples(config),
        ledger_file=left_out_file(config),
        on_error=config.data.on_error,
        max_skip_fraction=config.data.max_skip_fraction,
        encode=None if template is None else template.encode,
    ), template


def left_out_file(config: RunConfig) -> Path:
    """The ledger of samples that a run without a plan of its own leaves out."""
    return Path(config.training.output_dir) / "left_out.jsonl"


def _template(config: RunConfig) -> Any:
    """The processor, where one is named: tiny models and chunks with media as bytes need it."""
    if config.template.processor is None:
        return None
    from ..template.processor import open_template
    from ..testing.demo import is_demo, resolve_demo

    name = config.template.processor
    place = str(resolve_demo(name)) if is_demo(name) else name
    return open_template(place, system=config.template.system, **config.template.options())


class Checked:
    """The encoding of a template, with what measuring would leave out: a stream measures nothing.

    Args:
        template: an `extend.Template`.
    """

    def __init__(self, template: Any) -> None:
        self.template = template

    def encode(self, sample: Any) -> Any:
        """The encoded sample; under `truncated_answers` what a cut took of it, for the stream to tell.

        Raises:
            SampleError: `long_audio` where it is dropped; `unsupervised` where truncation left nothing.
            InputError: a clip would be cut, and nobody said that it may (`long_audio: error`).
        """
        template = self.template
        if getattr(template, "long_audio", "cut") != "cut" and _has_sound(sample):
            fault = left_out(template.measure(sample), template, partial(_sounds, sample))
            if fault is not None:
                raise fault
        encoded = template.encode(sample)
        cut = getattr(template, "truncation", "error") != "error"
        if cut and "labels" in encoded and not any(int(label) != IGNORED for label in encoded["labels"][1:]):
            raise SampleError("unsupervised", "truncation leaves no token that is trained")
        if cut and len(encoded["input_ids"]) >= (getattr(template, "max_length", None) or 0):
            note = getattr(template.measure(sample), "note", "")
            return {**encoded, CUT: note} if note else encoded
        return encoded


def _has_sound(sample: Any) -> bool:
    return any(
        part.get("type") in ("audio", "video")
        for message in sample.get("messages", ())
        for part in message["content"]
    )


def _sounds(sample: Any) -> str:
    return ", ".join(name_of(ref) for ref in media_refs(sample, sounds=True))


def _stream(config: RunConfig, source: Any, template: Any, place: World) -> StreamingPackedDataset:
    data, length = config.data, config.pack_length
    assert isinstance(data, Stream | TokenBudget)
    further: dict[str, Any] = {
        **{name: getattr(data, name) for name in _OF_STREAMS},
        "seed": config.training.seed,
        "rank": place.rank,
        "world_size": place.size,
        "skip": skipped_samples(config),
        "cyclic": True,
    }
    cut = getattr(template, "truncation", "error") != "error"
    left_out = data.on_error != "raise" or data.long_samples == "drop" or bool(data.skip_samples)
    if left_out or getattr(data, "drop_last", False) or cut:
        further["ledger_file"] = left_out_file(config)
    if hasattr(template, "measure"):
        template = Checked(template)
    if isinstance(data, Stream):
        return StreamingPackedDataset(source, template, pack_length=length, window=data.window, **further)
    further |= {name: getattr(data, name) for name in _OF_BUDGETS} | _warm_up(config, data, place)
    return TokenBudgetDataset(source, template, max_seq_len=length, **further)


def _warm_up(config: RunConfig, data: TokenBudget, place: World) -> dict[str, Any]:
    """The first rows hold fewer tokens, for a share of the run's micro steps."""
    if not data.warmup_ratio:
        return {}
    micro_steps = config.training.max_steps * config.accumulation(place.size)
    if data.splits is not None:  # of one split
        micro_steps = -(-micro_steps * place.size // data.splits)
    told = {"warmup_ratio": data.warmup_ratio, "train_steps": micro_steps}
    return told if data.warmup_tokens is None else {**told, "warmup_tokens": data.warmup_tokens}


def __getattr__(name: str) -> Any:
    """Names of the openers that there was one of for each kind."""
    return moved.attribute(__name__, name)


# --------------------------------------------------------------------------------------------
# Training on a directory that may still grow: what it may begin with, and how many steps it has
# --------------------------------------------------------------------------------------------
def check_beginning(source: Any, resumed: str | None, start: str | None, folder: Any) -> int:
    """Micro steps of the stream before this run.

    Args:
        source: the growing packs, standing where the run begins.
        resumed: the checkpoint that it goes on from.
        start: `beginning` or `acknowledged`, where that was asked for.

    Raises:
        ConfigError: an earlier run used packs of this stream, and nobody said what to make of that.
    """
    state = source.state_dict()
    if state["slots"] and resumed is None and start is None:
        raise ConfigError(
            f"an earlier run has used {state['slots']:,} slots of {folder}, and this one has "
            "no checkpoint of it",
            hint="set resume_from_checkpoint: true, or sharded_lazy_start: beginning (all packs again) or "
            "acknowledged (only those behind)",
        )
    return int(state["step"])


def steps_of(source: Any, begun: int, accumulation: int, resumed: str | None) -> int:
    """Optimizer steps to the end of the stream, those before the checkpoint included.

    Raises:
        ConfigError: it has no end yet.
    """
    try:
        whole = len(source)
    except TypeError:
        raise ConfigError(
            "training.max_steps is not set, and the stream has no end yet",
            hint="set max_steps: the learning rate needs to know how long training is",
        ) from None
    done = 0 if resumed is None else int(files.read_json(Path(resumed) / "trainer_state.json")["global_step"])
    return done + -(-(whole - begun) // accumulation)


def warn_of_another_template(packs: Any, template: Any) -> None:
    """Tell when packs were made by another template than the one that encodes validation samples.

    Args:
        packs: growing ones.

    Raises:
        ConfigError: there is no template.
    """
    if template is None:
        raise ConfigError(
            "validation samples are encoded while training, and no processor is named",
            hint="set template.processor to what packtrain produce was given",
        )
    if packs.config.get("template") != files.digest_json(template.config()):
        logger.warning(
            "%s was packed with another template than that of the validation samples: their losses are of "
            "different inputs; compare template.* with the options of packtrain produce",
            packs.directory,
        )
