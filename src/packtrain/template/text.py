"""TextTemplate: documents as they are (`task: text`), every token but the first trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of
from ..errors import ConfigError, SampleError
from ..extend import Measured
from ..families import Family
from ..measuring.encoding import good, tried
from ..measuring.text import check_text, tokenize
from .binding import choose_family
from .conversation import control_tokens as written
from .load import processor_identity
from .processor import positive

IGNORED = -100


class TextTemplate:
    """Template of raw text (`extend.Template`), over samples `{"text": str}`.

    Args:
        processor: loaded processor or tokenizer; only its tokenizer is used.
        bos: put the tokenizer's begin-of-text token in front; None: where the tokenizer does so by itself.
        eos: put its end-of-text token behind.
        control_tokens: what becomes of a document that holds a control token (of the chat template, begin or
            end of text) in writing: `error` leaves it out, `keep` trains it as that token.
        family: as for `HFTemplate`.
        model_limit: longest document the model takes; longer ones are "beyond model".

    Raises:
        ConfigError: the tokenizer has no such token.
    """

    cost_names = ("supervised",)
    media = None

    def __init__(
        self,
        processor: Any,
        *,
        bos: bool | None = None,
        eos: bool = True,
        control_tokens: str = "error",
        family: Family | str | None = None,
        model_limit: int | None = None,
    ) -> None:
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.family = choose_family(family, processor)
        self.model_limit = positive("model_limit", model_limit)
        if bos is None:
            first = self.tokenizer("a")["input_ids"][:1]
            bos = self.tokenizer.bos_token_id is not None and first == [self.tokenizer.bos_token_id]
        self.bos, self.eos = bool(bos), bool(eos)
        one_of("control_tokens", control_tokens, ("error", "keep"))
        self.control_tokens = control_tokens
        templates = [getattr(one, "chat_template", None) for one in (processor, self.tokenizer)]
        held = [text for one in templates for text in (one.values() if isinstance(one, dict) else [one])]
        self._control = written(self.tokenizer, [text for text in held if isinstance(text, str)], None)
        for name, wanted in (("bos", self.bos), ("eos", self.eos)):
            if wanted and getattr(self.tokenizer, f"{name}_token_id") is None:
                raise ConfigError(
                    f"the tokenizer has no {name} token", hint=f"set text_options: {{{name}: false}}"
                )

    def measure(self, sample: Mapping[str, Any]) -> Measured:
        """Tokens of a document.

        Raises:
            SampleError: malformed_record, control_token.
        """
        return good(self.measure_batch([sample])[0])

    def measure_batch(self, samples: Sequence[Mapping[str, Any]]) -> list[Measured | SampleError]:
        """`measure` of several documents; one that cannot be used gives its `SampleError`."""
        out = [tried(self._checked, sample) for sample in samples]
        counted = iter(self._ids([text for text in out if isinstance(text, str)]))
        return [self._measured(next(counted)) if isinstance(text, str) else text for text in out]

    def _measured(self, ids: NDArray[np.int64]) -> Measured:
        return Measured(len(ids), supervised=max(len(ids) - 1, 0))

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """torch tensors `input_ids` int64[T], `labels` int64[T] (the first -100), `position_ids` int64[T], or
        int64[3,T] for mRoPE families.

        Raises:
            SampleError: malformed_record.
        """
        import torch

        (ids,) = self._ids([self._checked(sample)])
        labels = ids.copy()
        labels[:1] = IGNORED
        positions = np.arange(len(ids), dtype=np.int64)
        if self.family.position_rows > 1:
            positions = np.tile(positions, (self.family.position_rows, 1))
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def config(self) -> dict[str, Any]:
        """Everything that affects a length, as plain JSON values."""
        return {
            **processor_identity(self.processor, self.tokenizer),
            "task": "text",
            "family": self.family.name,
            "bos": self.bos,
            "eos": self.eos,
            "control_tokens": self.control_tokens,
            "model_limit": self.model_limit,
        }

    def _checked(self, sample: Mapping[str, Any]) -> str:
        """The text of a sample, which can be trained."""
        text: str = sample["text"]
        check_text(text)
        found = None if self._control is None or self.control_tokens == "keep" else self._control.search(text)
        if found is not None:
            raise SampleError(
                "control_token",
                f"the text holds the control token {found.group()!r}, which the model would read as such",
                hint="take it out of the data, or train it as it is: text_options: {control_tokens: keep}",
            )
        return text

    def _ids(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        begin = [self.tokenizer.bos_token_id] if self.bos else []
        end = [self.tokenizer.eos_token_id] if self.eos else []
        found = tokenize(self.tokenizer, texts, add_special_tokens=False) if texts else []
        return [np.concatenate([begin, tokens.ids, end]).astype(np.int64) for tokens in found]
