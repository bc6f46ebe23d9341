"""axolotl: a plug-in packs the trainer that it builds.

    plugins: [packtrain.hosts.axolotl.PacktrainPlugin]
    sample_packing: false
    packtrain: {samples_per_step: same}        # options of `pack`; may be left out

Configuration, chat templates, label masks, collators, trainer and losses stay axolotl's. Texts are tokenised
by it: their lengths are taken, and rows that it drops (over `sequence_len`) are in its own log. Chats with
pictures are measured from the headers of the pictures, and encoded by its collator one at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ..errors import ConfigError, SampleError, counted
from ..sources._account import unread
from ..train.loss import bare_model
from ._checks import refuse_settings
from ._rows import ChatReader, Reads, unread_rows
from .transformers import HostMixin
from .transformers import pack as pack_trainer

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:
    BasePlugin = object


_PICTURES = ("images", "image")
_OWN = "the rows are packed already, by axolotl"
#: Settings that packs cannot keep, and why.
_REFUSED = {
    **dict.fromkeys(("sample_packing", "eval_sample_packing", "batch_flattening"), _OWN),
    **dict.fromkeys(("rl", "reward_model", "process_reward_model"), "packs are for supervised training"),
    **dict.fromkeys(("pretraining_dataset", "streaming"), "it cannot be planned"),
    **dict.fromkeys(("orpo_alpha", "do_bench_eval", "do_causal_lm_eval"), "its loss is of whole rows"),
}


class PacktrainArgs(BaseModel):
    """What the plug-in adds to axolotl's configuration."""

    packtrain: dict[str, Any] | None = None


class PacktrainPlugin(BasePlugin):  # type: ignore[misc]
    """Name it under `plugins:`."""

    def get_input_args(self) -> str:
        """The model of `packtrain:`."""
        return f"{__name__}.PacktrainArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """The trainer is complete: it gets its packs."""
        pack(trainer, cfg, **dict(cfg.packtrain or {}))


def pack(trainer: Any, cfg: Any, pack_length: int | None = None, **options: Any) -> Any:
    """Let axolotl's trainer train on packs.

    Args:
        trainer, cfg: as axolotl has built them, not yet trained.
        pack_length: cap of a pack in tokens; None: `sequence_len`.
        options: as in `hosts.transformers.pack`; `samples_per_step` is "same" where it is not given.

    Raises:
        ConfigError: a setting that packs cannot keep, with the reason.
    """
    refuse_settings(cfg, ((name, cfg.get(name), why) for name, why in _REFUSED.items()), "set {name}: false")
    if (cfg.get("context_parallel_size") or 1) > 1:
        raise ConfigError(
            "context_parallel_size cannot be kept: packs are not cut over ranks", hint="set it to 1"
        )
    if cfg.get("curriculum_sampling"):
        trainer.args.train_sampling_strategy = "sequential"
    if options.get("source") is None:
        options.setdefault("samples_per_step", "same")
        pack_length = pack_length or (None if options.get("plan") is not None else cfg.get("sequence_len"))
    strategy = getattr(trainer.data_collator, "processing_strategy", None)
    if getattr(strategy, "image_size", None) is not None:
        options.setdefault("measure", "encode")  # pictures are resized before the processor sees them
    bare = bare_model(trainer.model)
    kinds = {parameter.kind for parameter in inspect.signature(bare.forward).parameters.values()}
    takes = getattr(bare, "accepts_loss_kwargs", inspect.Parameter.VAR_KEYWORD in kinds)
    trainer.model_accepts_loss_kwargs = takes  # axolotl says no where it is among the keywords
    return pack_trainer(trainer, pack_length, mixin=AxolotlMixin, **options)


class AxolotlMixin(HostMixin):
    """What `pack` puts before the class of axolotl's trainer."""

    @property
    def packs_strategy(self) -> Any:
        """How its collator reads chats with pictures; None where the rows are tokenised."""
        host: Any = self
        return getattr(host.data_collator, "processing_strategy", None)

    def packs_reader(self) -> ChatReader:
        """Chats as axolotl's collator makes them."""
        held = self.packs_strategy
        if held is None:
            return super().packs_reader()
        own = {} if held.chat_template is None else {"chat_template": held.chat_template}
        return ChatReader(processor=held.processor, template=own, convert=_Chat(held.field_messages))

    def packs_unread(self, rows: Any, own: Any, encode: Any) -> dict[int, SampleError]:
        """Rows with a key that axolotl's collator does not read."""
        held = self.packs_strategy
        if held is None:
            return super().packs_unread(rows, own, encode)
        chats = [*dict.fromkeys((*held.field_messages, "messages", "conversations"))]
        says, parts = {"role", "content", "from", "value"}, {"text", "image", "url", "path", "base64"}
        reads = Reads(columns={*chats, *_PICTURES}, chats=chats, says=says, parts=parts, media=_PICTURES)
        return unread_rows(rows, reads, self.packs_ignore)


class _Chat:
    """A row as the chat that axolotl's collator makes of it; where its picture stands changes no length."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = (*names, "messages", "conversations")

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        turns = []
        for turn in next(row[name] for name in self.names if row.get(name)):
            said = turn.get("content", turn.get("value"))
            parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
            turns.append({"role": turn.get("role", turn.get("from")), "content": [*map(dict, parts)]})
        listed = next((row[name] for name in _PICTURES if row.get(name)), ())
        if len(listed) > 1:
            raise unread(
                "images", f"lists {counted(len(listed), 'pictures')}, of which axolotl trains the first"
            )
        empty = [part for turn in turns for part in turn["content"] if _is_empty(part)]
        if listed and not empty:
            asked = next((turn for turn in turns if turn["role"] in ("user", "human")), turns[0])
            asked["content"] += (empty := [{"type": "image"}])
        for part, picture in zip(empty, listed, strict=False):
            part["image"] = picture
        return {"messages": turns}


def _is_empty(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" and not any(part.get(k) for k in ("image", "url", "path", "base64"))
