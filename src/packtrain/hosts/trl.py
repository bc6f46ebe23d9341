"""TRL's SFTTrainer: our plan in place of its windowed packing, pictures included.

    from packtrain.hosts.trl import pack
    trainer = SFTTrainer(model, args=SFTConfig(…, packing=False), train_dataset=data)
    pack(trainer)                 # cap: the config's max_length
    pack(trainer, source=packs)   # packs of any kind: SFTTrainer's own dataset is then not read
    trainer.train()

As `hosts.transformers`, whose promises hold here too. TRL prepares and collates rows as without
packing: chat template, completion or assistant masks, truncation to `max_length`, its fused loss and metrics.
TRL refuses to pack data with pictures because that would need every picture processed first; here their
lengths come from the headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ._rows import ChatReader
from .transformers import HostMixin
from .transformers import pack as pack_trainer

__all__ = ["TRLMixin", "pack"]


def pack(trainer: Any, pack_length: int | None = None, **options: Any) -> Any:
    """Let an SFTTrainer train on packs.

    Args:
        trainer: a `trl.SFTTrainer`, complete, not yet trained.
        pack_length: cap of a pack in tokens; None: `args.max_length`.
        options: as in `hosts.transformers.pack`.

    Raises:
        ConfigError: a setting of the trainer that packs cannot keep, with the reason.
    """
    args = trainer.args
    for name, wrong, why in (
        ("packing", getattr(args, "packing", False), "the rows are packed already, by TRL"),
        ("eval_packing", getattr(args, "eval_packing", None), "the rows are packed already, by TRL"),
        ("padding_free", getattr(args, "padding_free", False), "packs bring their own boundaries"),
    ):
        if wrong:
            raise ConfigError(f"{name}={wrong} cannot be kept: {why}", hint=f"set {name}=False")
    packs = options.get("source") is not None or options.get("plan") is not None
    if pack_length is None and not packs:
        pack_length = args.max_length
    # TRL's own loss divides by the tokens of the step; models that say otherwise speak of their own loss.
    trainer.model_accepts_loss_kwargs = True
    return pack_trainer(trainer, pack_length, mixin=TRLMixin, **options)


class TRLMixin(HostMixin):
    """What `pack` puts before the class of an SFTTrainer."""

    _metrics: Any
    _total_train_tokens: Any

    def packs_reader(self) -> ChatReader:
        """TRL puts all pictures of a row before the text of its first user message."""
        host: Any = self
        cut = {} if host.args.max_length is None else {"max_length": host.args.max_length}
        return ChatReader(
            processor=host.processing_class,
            template={"truncation": "right", **cut} if cut else {},
            source={"media_without_placeholder": "prepend", "placeholders": {"image": []}},
            convert=_as_messages,
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; its token counter takes the rows of mRoPE positions for tokens, and is put right."""
        before = self._total_train_tokens
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if self._total_train_tokens != before:
            mine = torch.tensor(inputs["input_ids"].shape[-1], device=self.args.device)
            self._total_train_tokens = before + int(self.accelerator.gather(mine).sum())
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return found


def _as_messages(row: Any) -> Any:
    """Prompt and completion as one chat; a single picture as a list."""
    if not isinstance(row, Mapping):
        return row
    made = dict(row)
    if "image" in made:
        made["images"] = [made.pop("image")]
    prompt, completion = made.get("prompt"), made.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        del made["prompt"], made["completion"]
        made["messages"] = [*prompt, *completion]
    return made
