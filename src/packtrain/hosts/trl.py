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

import re
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import SampleError
from ..sources._memory import InMemory
from ..sources.chat import ChatSource
from ..template import HFTemplate
from ._checks import need_trainer, refuse_settings, unchanged_on_failure
from ._rows import ChatReader, Reads, columns_of, tell_cut, token_counts, unread_rows
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
    need_trainer(trainer, "TRL", "max_length")
    args = trainer.args
    settings = (
        ("packing", getattr(args, "packing", False), "the rows are packed already, by TRL"),
        ("eval_packing", getattr(args, "eval_packing", None), "the rows are packed already, by TRL"),
        ("padding_free", getattr(args, "padding_free", False), "packs bring their own boundaries"),
    )
    refuse_settings(args, settings, "set {name}=False")
    packs = options.get("source") is not None or options.get("plan") is not None
    if pack_length is None and not packs:
        pack_length = args.max_length
    with unchanged_on_failure(trainer):
        # TRL's own loss divides by the tokens of the step; models that say otherwise speak of their own loss.
        trainer.model_accepts_loss_kwargs = True
        return pack_trainer(trainer, pack_length, mixin=TRLMixin, **options)


#: What TRL reads of a row of chats, and what it makes of it.
_CHAT = {"messages", "prompt", "completion", "tools"}
_READS = {*_CHAT, "chat_template_kwargs", "chat_template"}
_READS |= {"input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks", "seq_lengths"}
_PICTURES = {"image", "images"}

#: Keys that a chat template looks up: `message.name`, `message["name"]`, `message.get("name")`.
_NAMED = re.compile(r"""\.([A-Za-z_]\w*)|[\[(]\s*['"](\w+)['"]\s*[\]),]""")

_UNKNOWN = "it holds max_length tokens: what was longer TRL has cut"


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

    def packs_unread(self, rows: Any, own: Any, encode: Any) -> dict[int, SampleError]:
        """Rows with a key that TRL does not read; and rows of which it cut answers are told."""
        host: Any = self
        columns = columns_of(rows)
        text = getattr(host.args, "dataset_text_field", "text")
        chats = sorted(columns & {"messages", "prompt", "completion"})
        theirs = type(host.data_collator).__module__.startswith("trl.")
        given = getattr(host, "_skip_prepare_dataset", False) and not theirs  # another collator reads them
        if given or (not chats and text not in columns):
            return super().packs_unread(rows, own, encode)
        holders = (host, self.packs_made["reader"].processor)
        template = next((held for one in holders if (held := getattr(one, "chat_template", None))), "")
        pictures = _PICTURES if getattr(host, "_is_vision_dataset", False) else set()
        named = {a or b for a, b in _NAMED.findall(str(template))}
        reads = Reads(
            columns=_READS | pictures | (set() if chats else {text}),
            chats=chats,
            says={"role", "content", *named},
            parts={"text", "image", "url", "path", *named},
            media=columns & pictures,
        )
        faults = unread_rows(rows, reads, self.packs_ignore)
        if "input_ids" in columns:
            tell_cut(self._cut_by_trl(rows))
        return faults

    def _cut_by_trl(self, rows: Any) -> list[tuple[int, str]]:
        """Rows that TRL has cut to `max_length` while it prepared them, with the answers that went."""
        host: Any = self
        most, reader = host.args.max_length, self.packs_made["reader"]
        if most is None or getattr(rows, "column_names", None) is None:
            return []
        full = [index for index, size in enumerate(token_counts(rows)) if size == most]
        if not full:
            return []
        side = {"keep_end": "left"}.get(str(host.args.truncation_mode), "right")
        template = HFTemplate(reader.processor, truncation=side, max_length=most)
        cut: list[tuple[int, str]] = []
        for index in full:
            row = _as_messages({name: value for name, value in rows[index].items() if name in _CHAT})
            try:
                chat = isinstance(row.get("messages"), list)
                note = template.measure(ChatSource(InMemory([row]))[0]).note if chat else _UNKNOWN
            except SampleError:
                note = _UNKNOWN
            cut += [(index, note)] if note else []
        return cut

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
