"""Chat template rendering: one sample -> text, trained character ranges, media in order.

Which characters are trained comes from the template's own `{% generation %}` marks where it has
them. Otherwise each assistant turn is found by rendering the conversation up to it: without the
turn (plus the generation prompt) and with it. That needs both to be beginnings of the whole text; a
template that writes earlier turns anew (drops their reasoning, say) is trained as it renders the whole
conversation, each turn located in that text (`turns`).

Everything that the sample says has to appear in the rendering (`account`). The check of single texts runs
for every sample that is rendered in full; where they stand exactly is asked once for all conversations that
the template cannot tell apart (`marked`).

Rendering never reads the clock: `strftime_now("…")` in a template is replaced by a fixed date, so a
sample has the same length tomorrow.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, SampleError, one_line
from .account import Piece, dropped, missing, pieces_of
from .conversation import Conversation, Message, read_conversation, with_text_arguments, without_history
from .marked import Placed, placed, traits, with_marks
from .skeleton import Skeleton, copies_texts, cut, slot
from .turns import (
    Span,
    blank,
    check_spans,
    chosen,
    common,
    locate,
    owners_of,
    shows,
    speaks,
    spoken,
    without_media,
    without_reasoning,
)

logger = logging.getLogger(__name__)

#: The day a template sees when it asks for today's date.
FROZEN_DATE = datetime.datetime(2024, 7, 26)

#: Roles of the messages and kinds of their parts.
Shape = tuple[tuple[str, Any], ...]

_SHAPES = 4096  # remembered

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"\n]*)(?P=quote)\s*\)""")
_CLOCK_CALL = re.compile(r"strftime_now\s*\(")


@dataclass(frozen=True)
class Rendered:
    """A rendered sample.

    Attributes:
        text: the whole conversation, media as one placeholder each.
        spans: ascending character ranges that are trained (assistant turns with their end mark).
        media: parts of the media with their references and hints, in order of appearance.
        weights: weight of each span in the loss; empty: all weigh 1.
        owners: message of each span, its system turn counted; below 0: not known.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    media: tuple[Mapping[str, Any], ...]
    weights: tuple[float, ...] = ()
    owners: tuple[int, ...] = ()


class ChatRenderer:
    """Renders samples with the chat template of one processor or tokenizer.

    Args:
        template: an `HFTemplate`, whose options say how (see there). Its processor or tokenizer holds the
            chat template, unless `chat_template` replaces that; special tokens are variables of it.
            Chat templates of families without media expect plain string contents.
    """

    def __init__(self, template: Any) -> None:
        processor, tokenizer = template.processor, template.tokenizer
        self.templates = _templates(processor, tokenizer, template.chat_template)
        self.takes: tuple[str, ...] = tuple(template.family.modalities)
        self.system, self.variables = template.system, template.variables
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(processor).__name__)
        self.allow_dropped = frozenset(template.allow_dropped)
        self.train_on, self.reasoning = template.train_on, template.reasoning
        self.answer_end = template.answer_end
        self._copies = copies_texts(self.templates["plain"], parts=bool(self.takes))
        self._marked = _MARKS.search(self.templates["plain"]) is not None
        self._skeletons: dict[Shape, Skeleton | None] = {}
        self._vouched: set[Any] = set()
        self._media_marks: re.Pattern[str] | None = None
        self._tokens = {str(k): v for k, v in tokenizer.special_tokens_map.items()}
        self._end_marks = tuple(token for token in tokenizer.get_added_vocab() if token.strip())

    def render(self, sample: Mapping[str, Any]) -> Rendered:
        """Render one sample.

        Raises:
            SampleError: `malformed_record`, `empty`, `no_assistant_turn`, `unsupported_media`,
                `template_error` (the template refuses the conversation), `prefix_mismatch`,
                `unsupervised` (no answer is left to train).
            ConfigError: the template drops something that `allow_dropped` does not name, or its marks
                are not those of the assistant's texts.
        """
        return self._quick(sample) or self._whole(sample)

    def said(self, sample: Mapping[str, Any]) -> tuple[list[Piece], set[int]]:
        """(what has to appear of a sample, messages of it that are trained)."""
        talk = read_conversation(sample, self.takes, self.system)
        messages = self._kept(talk)
        pieces = [p for p in pieces_of(messages, talk.tools) if p.kind not in self.allow_dropped]
        spoke = spoken([message["role"] for message in messages], self.train_on)
        weights = self._weights(talk, messages, spoke, pieces, ())
        trained = {place for place, one in enumerate(spoke) if one and weights.get(place, 1.0) > 0}
        return pieces, trained

    # ------------------------------------------------------------------------------------ in full
    def _whole(self, sample: Mapping[str, Any]) -> Rendered:
        """Run the template on the sample."""
        talk = read_conversation(sample, self.takes, self.system)
        tools = talk.tools
        template = self._template(tools)
        marked = _MARKS.search(template) is not None
        messages, text, ranges = self._written(talk, marked)
        pieces = pieces_of(messages, tools)
        lost = missing(text, pieces)
        self._refuse(lost)
        said = spoken([message["role"] for message in messages], self.train_on)
        weights = self._weights(talk, messages, said, pieces, lost)
        others = any(w > 0 and messages[place]["role"] != "assistant" for place, w in weights.items())
        key = traits(template).key(messages, bool(tools))
        found: Placed | None = None
        if others or key is None or key not in self._vouched or self.reasoning == "mask":
            found = self._located(messages, tools, text)
        if marked:
            spans = owners_of(ranges, messages, found)
            if any(span.owner < 0 for span in spans):
                found = found or self._located(messages, tools, text)
                spans = owners_of(ranges, messages, found)
        else:
            spans = self._turns(messages, tools, text)
        if found is not None:
            self._refuse([p for p in _unplaced(found) if p not in lost])
            check_spans(spans, found, {place for place, one in enumerate(said) if one}, self.name)
            if key is not None and len(self._vouched) < _SHAPES:
                self._vouched.add(key)
        if self.answer_end == "line":
            spans = [self._with_line(span, text) for span in spans]
        spans = without_reasoning(spans, text, messages, found, mask=self.reasoning == "mask")
        if any(message["role"] == "assistant" and shows(message) for message in messages):
            spans = without_media(spans, text, self._around_media())
        return self._finished(talk, messages, text, spans, weights, found)

    def _template(self, tools: Any) -> str:
        return self.templates["tools" if tools else "plain"]

    def _kept(self, talk: Conversation) -> list[Message]:
        """The messages that are rendered."""
        return without_history(talk.messages) if self.reasoning == "drop_history" else talk.messages

    def _written(self, talk: Conversation, marks: bool) -> tuple[list[Message], str, list[tuple[int, int]]]:
        """(messages as the template takes them, their text, its marked ranges)."""
        messages = self._kept(talk)
        try:
            return messages, *self._run(messages, talk.tools, marks=marks)
        except SampleError:
            if not any(message.get("tool_calls") for message in messages):
                raise
        messages = with_text_arguments(messages)
        return messages, *self._run(messages, talk.tools, marks=marks)

    def _finished(
        self,
        talk: Conversation,
        messages: Sequence[Message],
        text: str,
        spans: list[Span],
        weights: Mapping[int, float],
        found: Placed | None,
    ) -> Rendered:
        """The rendering with the spans that are trained."""
        if any(span.owner < 0 for span in spans) and any(w != 1 for w in weights.values()):
            raise SampleError(
                "prefix_mismatch",
                "the marks of the chat template cannot be dealt out to the messages, whose weights differ",
                hint="mark each assistant turn with one pair of {% generation %} … {% endgeneration %}",
            )
        for place, weight in weights.items():
            if weight > 0 and messages[place]["role"] != "assistant":
                spans += _texts_at(place, found)
        kept, scale = chosen(sorted(spans, key=lambda span: span.first), weights)
        if not kept and not all(blank(m) for m in messages if m["role"] == "assistant"):
            raise SampleError(
                "unsupervised",
                "no answer is left to train: all are masked by loss flags or template options",
                hint="drop the record, or change its loss flags",
            )
        owners = tuple(span.owner if span.owner >= 0 else -2 - k for k, span in enumerate(kept))
        return Rendered(text, tuple((span.first, span.last) for span in kept), talk.media, scale, owners)

    def _weights(
        self,
        talk: Conversation,
        messages: Sequence[Message],
        said: Sequence[bool],
        pieces: Sequence[Piece],
        lost: Sequence[Piece],
    ) -> dict[int, float]:
        """Weights of messages other than 1 for an answer and 0 for all else."""
        weights = dict(talk.losses)
        kept = {piece.place for piece in pieces if piece not in lost} if lost else set()
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                if not weights.get(place):
                    weights.pop(place, None)
                continue
            gone = bool(lost) and place not in kept and any(piece.place == place for piece in lost)
            if not said[place] or not speaks(message) or gone:
                weights[place] = 0.0
        return weights

    def _with_line(self, span: Span, text: str) -> Span:
        """A span that ends at an end mark, with the line break that the template writes behind it."""
        if not text.startswith("\n", span.last) or not text.endswith(self._end_marks, 0, span.last):
            return span
        return Span(span.first, span.last + 1, span.owner)

    def _around_media(self) -> re.Pattern[str]:
        """What the template writes for a medium of an answer: its placeholder and the marks around it.

        Found by rendering an answer with a medium between two texts, and without it.
        """
        if self._media_marks is None:
            written: list[str] = []
            for kind in self.takes:
                texts = [{"type": "text", "text": mark} for mark in ("\ue010", "\ue011")]
                question = {"role": "user", "content": texts[:1]}
                try:
                    plain, held = (
                        self._run([question, {"role": "assistant", "content": parts}], None)[0]
                        for parts in (texts, [texts[0], {"type": kind, kind: kind}, texts[1]])
                    )
                except SampleError:
                    continue  # so does every answer with this kind
                same = common(plain, held)
                behind = len(held) - (len(plain) - same)
                if same < behind and held[:same] + held[behind:] == plain:
                    written.append(re.sub(r"\d+", r"\\d+", re.escape(held[same:behind])))
            self._media_marks = re.compile("|".join(written) or r"(?!)")
        return self._media_marks

    def _refuse(self, lost: Sequence[Piece]) -> None:
        refused = [piece for piece in lost if piece.kind not in self.allow_dropped]
        if refused:
            raise dropped(self.name, refused)

    def _located(
        self, messages: Sequence[Message], tools: Any, text: str | None = None, *, prompt: bool = False
    ) -> Placed | None:
        """The rendering of messages located; None where marks would change it.

        Args:
            text: their plain rendering; None: not known yet.
        """
        marked = with_marks(messages)
        if marked is None:
            return None
        try:
            if text is None:
                text, _ = self._run(messages, tools, prompt=prompt)
            rendered, _ = self._run(marked[0], tools, prompt=prompt)
        except SampleError:
            return None
        found = placed(rendered, marked[1])
        return found if found is not None and found.text == text else None

    def _turns(self, messages: list[Message], tools: Any, text: str) -> list[Span]:
        """Ranges of the assistant turns of a template without marks."""
        spans = self._by_beginnings(messages, tools, text)
        if spans is not None:
            return spans
        return locate(
            lambda count, prompt: self._located(messages[:count], tools, prompt=prompt),
            messages,
            self._located(messages, tools, text),
            self._end_marks,
        )

    def _by_beginnings(self, messages: list[Message], tools: Any, text: str) -> list[Span] | None:
        """The turns by rendering the conversation up to each; None where it is then rendered otherwise."""
        spans: list[Span] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._run(messages[:place], tools, prompt=True)
            through = text
            if place + 1 < len(messages):
                through, _ = self._run(messages[: place + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                return None
            end = len(through)
            trimmed = through.rstrip()
            if trimmed.endswith(self._end_marks) and len(trimmed) > len(before):
                end = len(trimmed)  # the separator after the end-of-turn token is not the model's to say
            if end > len(before):
                spans.append(Span(len(before), end, place))
        return spans

    # --------------------------------------------------------------------------------- by skeletons
    def _quick(self, sample: Mapping[str, Any]) -> Rendered | None:
        """The sample joined from the skeleton of its shape; None where it has to be rendered in full."""
        if not self._copies or not isinstance(sample, Mapping) or sample.get("tools"):
            return None
        taken = self._shape(sample.get("messages"))
        if taken is None:
            return None
        shape, texts, media, odd = taken
        skeleton = self._skeletons.get(shape)
        if skeleton is None:
            if shape in self._skeletons:
                return None
            if len(self._skeletons) >= _SHAPES:
                self._skeletons.clear()
            skeleton = self._skeletons[shape] = self._skeleton(shape)
            if skeleton is None:
                return None
        if odd or ((skeleton.thinks or self.reasoning != "keep") and any("</think>" in t for t in texts)):
            return self._whole(sample)
        text, spans = skeleton.fill(texts)
        if len(spans) != len(skeleton.owners):  # a range without a text
            return self._whole(sample)
        return Rendered(text, spans, tuple(media), owners=skeleton.owners)

    def _shape(self, messages: Any) -> tuple[Shape, list[str], list[Mapping[str, Any]], bool] | None:
        """Roles and kinds of parts, the texts, the media, and whether the loss is not by roles alone; None
        for anything out of the ordinary."""
        if type(messages) is not list or not messages:
            return None
        shape: list[tuple[str, Any]] = []
        texts: list[str] = []
        media: list[Mapping[str, Any]] = []
        takes = self.takes
        odd = False
        for message in messages:
            role = _plain_role(message)
            said: list[str] = []
            kinds = None if role is None else _kinds(message["content"], takes, said, media)
            if role is None or kinds is None:
                return None
            joined = said[0] if len(said) == 1 else "".join(said)
            if len(message) != 2:
                loss = message["loss"]
                odd = odd or (loss is not None and loss != (role == "assistant"))
            if role == "assistant" and (not joined or joined.isspace()):
                odd = True
            if takes:
                texts += said
                shape.append((role, kinds))
            else:
                texts.append(joined)
                shape.append((role, ()))
        return tuple(shape), texts, media, odd

    def _skeleton(self, shape: Shape) -> Skeleton | None:
        """Render a conversation of this shape with a slot in place of every text."""
        numbers = itertools.count()
        messages = []
        for role, kinds in shape:
            parts = [
                {"type": "text", "text": slot(next(numbers))}
                if kind == "text"
                else {"type": kind, kind: kind}
                for kind in kinds or (() if self.takes else ("text",))
            ]
            messages.append({"role": role, "content": parts})
        try:
            whole = self._whole({"messages": messages})
        except SampleError:
            return None  # it is raised again, in full, for each such sample
        if any(whole.text[:end].rstrip().endswith("\ue011") for _, end in whole.spans) and not self._marked:
            return None  # where a turn ends would depend on the text itself
        return cut(whole.text, whole.spans, whole.owners)

    def _run(
        self, messages: Sequence[Message], tools: Any, *, marks: bool = False, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self._tokens, **self.variables},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template cannot be compiled: line {error.lineno}: {error.message}",
                hint="repair chat_template.jinja",
            ) from error
        except Exception as error:
            said = one_line(error, 200)
            raise SampleError(
                "template_error",
                f"the chat template refuses the conversation: {type(error).__name__}: {said}",
            ) from error
        return texts[0], [(int(a), int(b)) for a, b in ranges[0]] if marks else []


def _plain_role(message: Any) -> str | None:
    """The role of a message that is role and content, perhaps with its loss; None for any other."""
    if type(message) is not dict or not (len(message) == 2 or (len(message) == 3 and "loss" in message)):
        return None
    role = message.get("role")
    return role if type(role) is str and type(message.get("content")) is list else None


def _kinds(
    content: list[Any], takes: tuple[str, ...], texts: list[str], media: list[Mapping[str, Any]]
) -> tuple[str, ...] | None:
    """Kinds of parts, whose texts and media are added to these; None for anything out of the ordinary."""
    kinds: list[str] = []
    for part in content:
        if type(part) is not dict:
            return None
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if type(text) is not str:
                return None
            texts.append(text)
        elif kind in takes and part.get(kind) is not None:
            media.append(part)
        else:
            return None
        kinds.append(kind)
    return tuple(kinds)


def _unplaced(found: Placed) -> list[Piece]:
    """What was marked and stands nowhere."""
    there = {number for _, _, number in found.where}
    return [leaf for number, leaf in enumerate(found.leaves) if number not in there]


def _texts_at(place: int, found: Placed | None) -> list[Span]:
    """Where the texts of a message that is not the assistant's stand."""
    spans = [Span(a, b, place) for a, b, n in found.where if found.leaves[n].place == place] if found else []
    if not spans:
        raise SampleError(
            "prefix_mismatch",
            f"message {place} is to be trained by its loss flag, and its text cannot be located",
            hint="train assistant messages only",
        )
    return spans


def _templates(processor: Any, tokenizer: Any, given: str | None) -> dict[str, str]:
    """The template for samples without and with tools, the clock frozen."""
    found = given or getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(found, list):  # older files: [{"name": …, "template": …}]
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, Mapping):
        plain = found.get("default") or (next(iter(found.values())) if len(found) == 1 else None)
        tools = found.get("tool_use", plain)
    else:
        plain = tools = found
    if not plain:
        raise ConfigError(
            f"{type(processor).__name__} has no chat template, so chats cannot be turned into text",
            hint="put a chat_template.jinja beside tokenizer.json, or set processor.chat_template",
        )
    return {"plain": _freeze_clock(plain), "tools": _freeze_clock(tools)}


def _freeze_clock(template: str) -> str:
    frozen = _CLOCK.sub(lambda call: repr(FROZEN_DATE.strftime(call["format"])), template)
    if frozen != template:
        logger.warning("the chat template prints today's date; it gets %s instead", FROZEN_DATE.date())
    if _CLOCK_CALL.search(frozen):
        raise ConfigError(
            "the chat template reads the clock in a way that cannot be frozen, so lengths would change",
            hint="write the date into the chat template",
        )
    return frozen
