"""Measure many samples together: rendered one by one, media and texts counted in bulk.

Texts go to a fast counter where one is proven equal (`measuring.counter`), the others to the Hugging Face
tokenizer. The first texts always go there: a counter takes about a second to build and prove, which a handful
of samples would not earn back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SampleError
from ..extend import Measured
from ..measuring.counter import TextCounter, open_counter
from ..measuring.encoding import good, tried
from ..measuring.expansion import Expansion, Spliced
from .layout import check_supervised, cut_answers, runs_mismatch
from .render import Rendered

logger = logging.getLogger(__name__)

#: Characters after which a fast counter is worth building.
_WORTH = 300_000

#: Costs of each modality; always there, so that a store has them as whole columns.
_COSTS = {
    "image": ("images", "patches"),
    "video": ("video_frames", "patches"),
    "audio": ("audio_frames", "audio_cut"),
}

#: Costs under truncation: is the sample cut, answers of which nothing is left, answers of which a part is.
_CUT = ("truncated", "answers_removed", "answers_cut")


class Measurer:
    """Measures samples of one `HFTemplate`; holds its fast counter once there is one."""

    def __init__(self, template: Any) -> None:
        self.template, self._seen = template, 0
        self._counter: TextCounter | None = None
        self._opened = self._warned = False

    @property
    def cost_names(self) -> tuple[str, ...]:
        """Names of the costs that every sample gets."""
        template = self.template
        names = {name for kind in template.family.modalities for name in _COSTS[kind]} | {"supervised"}
        return tuple(sorted(names | (set(_CUT) if template.truncation != "error" else set())))

    def measure(self, samples: Sequence[Mapping[str, Any]]) -> list[Measured | SampleError]:
        """A `Measured` or the `SampleError` of each sample."""
        template = self.template
        out = {place: tried(template.rendered, sample) for place, sample in enumerate(samples)}
        rendered = _good(out)
        expansions = template.expansions({place: item.media for place, item in rendered.items()})
        out |= {place: tried(template.spliced, item, expansions[place]) for place, item in rendered.items()}
        spliced = _good(out)
        quick = self._quick(spliced)
        out |= self._count(quick, spliced, expansions)
        slow = [place for place in spliced if place not in quick]
        for place, layout in zip(slow, template.layouts([spliced[p] for p in slow]), strict=True):
            out[place] = tried(self._measured, rendered[place], layout, expansions[place])
        return [out[place] for place in range(len(samples))]

    # ------------------------------------------------------------------------------------------
    def _quick(self, spliced: Mapping[int, Spliced]) -> set[int]:
        """Samples whose texts the fast counter takes."""
        counter = self._open(spliced)
        if counter is None or self.template.truncation != "error" or self.template.by_encoding:
            return set()
        return {
            place
            for place, item in spliced.items()
            if not _inside(item)
            and counter.takes(item.text)
            and not self.template.adds_special_tokens(item.text)
        }

    def _open(self, spliced: Mapping[int, Spliced]) -> TextCounter | None:
        if self._opened:
            return self._counter
        name = self.template.text_counter
        self._seen += sum(len(item.text) for item in spliced.values())
        if name == "hf" or not spliced or (name == "auto" and self._seen < _WORTH):
            return None
        self._opened = True
        texts = [item.text for item in spliced.values()]
        self._counter = open_counter(name, self.template.tokenizer, texts)
        if self._counter is not None:
            logger.info("%s counts texts", self._counter.name)
        return self._counter

    def _count(
        self, quick: set[int], spliced: Mapping[int, Spliced], expansions: Mapping[int, Any]
    ) -> dict[int, Measured | SampleError]:
        if not quick or self._counter is None:
            return {}
        places = sorted(quick)
        items = [spliced[place] for place in places]
        counts = self._counter.count(
            [item.text for item in items], [item.spans for item in items], self.template.media_ids
        )
        out: dict[int, Measured | SampleError] = {}
        rows = zip(counts.tokens.tolist(), counts.trained.tolist(), counts.runs.tolist(), strict=True)
        for place, item, (tokens, trained, runs) in zip(places, items, rows, strict=True):
            if item.widths or runs:
                if self.template.media is not None and runs != len(item.widths):
                    out[place] = runs_mismatch(runs, len(item.widths))
                    continue
                tokens += sum(item.widths) - runs
            costs = self._costs(expansions[place])
            costs["supervised"] = trained
            out[place] = Measured(tokens, **costs)
        return out

    def _measured(self, rendered: Rendered, layout: Any, expansions: Any) -> Measured:
        layout = good(layout)
        if self.template.by_encoding and rendered.media:
            layout, _ = self.template.run(rendered, layout, expansions)
        begin, end = self.template.cut(layout)
        costs = self._costs(expansions)
        costs["supervised"] = int(layout.expand(layout.trained)[begin:end][1:].sum())
        check_supervised(layout, costs["supervised"], begin, end)
        if self.template.truncation == "error":
            return Measured(end - begin, **costs)
        removed, short = layout.answers(begin, end)
        costs |= zip(_CUT, (int(end - begin < layout.total), len(removed), len(short)), strict=True)
        measured = Measured(end - begin, **costs)
        measured.note = cut_answers(removed, short)
        return measured

    def _costs(self, expansions: Mapping[str, Sequence[Expansion]]) -> dict[str, int]:
        """Costs of a sample's media; all costs of the family, 0 where it has none."""
        costs = {name: 0 for kind in self.template.family.modalities for name in _COSTS[kind]}
        for items in expansions.values():
            for item in items:
                for name, value in item.costs.items():
                    costs[name] = costs.get(name, 0) + value
        if costs.get("audio_cut") and not self._warned:
            self._warned = True
            logger.warning(
                "some audio is longer than the processor takes and gets cut (cost audio_cut counts the clips)"
            )
        return costs


def _good(outcomes: Mapping[int, Any]) -> dict[int, Any]:
    return {place: one for place, one in outcomes.items() if not isinstance(one, SampleError)}


def _inside(item: Spliced) -> bool:
    """Whether text that comes from media lies in a trained range (its tokens are not trained)."""
    return any(a < end and b > first for first, end in item.inserted for a, b in item.spans)
