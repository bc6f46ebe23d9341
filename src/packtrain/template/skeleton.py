"""Fast rendering: a chat template is run once per shape of conversation, then texts are put in its gaps.

Most templates copy the texts of a conversation into fixed marks that depend on roles and kinds of parts
only. Such a template is run once for each shape with stand-ins for the texts; every later conversation of
that shape is joined from the pieces. Whether a template is of this kind is proven on its syntax tree: text
may only be joined and written out, never filtered, compared, searched or tested for emptiness. A template
that does more, and a sample with more than roles and parts (tools, tool calls), is run in full.

Trade-off: the proof is strict. A template that trims its texts gains nothing; none is rendered wrongly.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

_TEXTS = ("content", "text")  # keys whose values are texts, or lists of parts
_COUNTING = ("length", "count")
_CHOOSING = ("first", "last", "list", "reverse")
_FUNCTIONS = ("namespace", "raise_exception", "range", "strftime_now")
_KIND_TESTS = ("string", "iterable", "mapping", "sequence", "defined", "undefined", "none")

Span = tuple[int, int]


@dataclass(frozen=True)
class Skeleton:
    """A rendered conversation with gaps.

    Attributes:
        fixed: texts around the gaps, one more than these.
        gaps: number of the text in each gap.
        edges: edges of the trained ranges: (gaps before it, characters of fixed text before it).
        thinks: the template itself writes think blocks.
        owners: message of each trained range.
    """

    fixed: tuple[str, ...]
    gaps: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    thinks: bool = False
    owners: tuple[int, ...] = ()

    def fill(self, texts: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
        """The rendered text and its trained ranges for the texts of a conversation."""
        pieces = [self.fixed[0]]
        grown = [0]
        for number, after in zip(self.gaps, self.fixed[1:], strict=True):
            text = texts[number]
            pieces += (text, after)
            grown.append(grown[-1] + len(text))
        places = [grown[before] + offset for before, offset in self.edges]
        spans = zip(places[::2], places[1::2], strict=True)
        return "".join(pieces), tuple((a, b) for a, b in spans if b > a)


_SLOT = re.compile("\ue010([0-9]+)\ue011")


def slot(number: int) -> str:
    """What stands for a text in a rendering that becomes a skeleton."""
    return f"\ue010{number}\ue011"


def cut(text: str, spans: Sequence[Span], owners: tuple[int, ...] = ()) -> Skeleton | None:
    """The skeleton of a text that was rendered with slots in place of texts.

    None where an edge of a range lies inside a slot.
    """
    found = list(_SLOT.finditer(text))
    begins, ends = [0, *(one.end() for one in found)], [one.end() for one in found]
    fixed = [text[a:b] for a, b in zip(begins, [*(one.start() for one in found), len(text)], strict=True)]
    removed = [0, *accumulate(one.end() - one.start() for one in found)]
    edges: list[tuple[int, int]] = []
    for edge in (edge for span in spans for edge in span):
        before = bisect_right(ends, edge)
        if before < len(found) and found[before].start() < edge:
            return None
        edges.append((before, edge - removed[before]))
    thinks = any("</think>" in piece for piece in fixed)
    return Skeleton(tuple(fixed), tuple(int(one[1]) for one in found), tuple(edges), thinks, owners)


# --------------------------------------------------------------------------------------- the proof
def parsed(template: str) -> tuple[Any, Any]:
    """Syntax tree of a chat template (None where it cannot be compiled), and the classes of its nodes."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def read(self: Any, parser: Any) -> Any:
        """Reads the marks of trained ranges as plain blocks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)

    generation = type("Generation", (jinja2.ext.Extension,), {"tags": {"generation"}, "parse": read})
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
    )
    try:
        return environment.parse(template), jinja2.nodes
    except jinja2.TemplateSyntaxError:
        return None, jinja2.nodes


def copies_texts(template: str, *, parts: bool) -> bool:
    """Whether a chat template provably copies texts as they are and decides by roles and kinds alone.

    Args:
        template: Jinja source.
        parts: contents are lists of parts (else they are strings).
    """
    tree, nodes = parsed(template)
    if tree is None:
        return False
    walk = _Walk(nodes, parts)
    try:
        for _ in range(3):  # names may be set after they are read in a loop
            walk.body(tree.body)
    except _Refused:
        return False
    return True


class _Refused(Exception):
    """The template does something with a text that is not copying."""


def _refuse(more: Any) -> None:
    """Stop where the template does more with a text than copying it."""
    if more:
        raise _Refused


class _Walk:
    """Follows texts through a template.

    An expression is clean (""), a `box` (messages, a message, its list of parts, a part: the same for all
    conversations of a shape but for the texts inside) or a `text`. Boxes may be looked into and counted,
    texts only joined and written. `content is string` is decided beforehand, since it is known.
    """

    def __init__(self, nodes: Any, parts: bool) -> None:
        self.nodes = nodes
        self.parts = parts
        self.names: dict[str, str] = {"messages": "box"}

    def body(self, statements: Sequence[Any]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: Any) -> None:
        n = self.nodes
        if isinstance(node, n.Output):
            for child in node.nodes:
                _refuse(self.value(child) == "box")
        elif isinstance(node, n.If):
            self.branch(node)
        elif isinstance(node, n.For):
            self.loop(node)
        elif isinstance(node, n.Assign):
            self.bind(node.target, self.value(node.node))
        elif isinstance(node, n.Scope):
            self.body(node.body)
        elif not isinstance(node, (n.Continue, n.Break)):
            raise _Refused

    def loop(self, node: Any) -> None:
        kind = self.value(node.iter)
        _refuse(kind == "text" or node.recursive)
        self.bind(node.target, kind)
        if node.test is not None:
            self.decides(node.test)
        self.body(node.body)
        self.body(node.else_)

    def branch(self, node: Any) -> None:
        """An if with its elifs: only the branches that can be taken."""
        for case in (node, *node.elif_):
            known = self.known(case.test)
            if known is None:
                self.decides(case.test)
            if known is not False:
                self.body(case.body)
            if known is True:
                return
        self.body(node.else_)

    def known(self, test: Any) -> bool | None:
        """The answer of `x is string` where it is known."""
        n = self.nodes
        if isinstance(test, n.Not):
            known = self.known(test.node)
            return None if known is None else not known
        if isinstance(test, n.Test) and test.name == "string":
            return {"text": True, "box": False}.get(self.value(test.node))
        return None

    def bind(self, target: Any, kind: str) -> None:
        n = self.nodes
        if isinstance(target, n.Name):
            self.names[target.name] = max(kind, self.names.get(target.name, ""))
        elif kind or not isinstance(target, n.NSRef):
            raise _Refused

    def decides(self, node: Any) -> None:
        """An expression that something depends on: it may hold no text."""
        _refuse(self.value(node) == "text")

    def value(self, node: Any) -> str:
        """Kind of an expression; raises where it does more than copying."""
        n = self.nodes
        if isinstance(node, (n.Const, n.TemplateData)):
            return ""
        if isinstance(node, n.Name):
            return self.names.get(node.name, "")
        if isinstance(node, (n.Getattr, n.Getitem)):
            return self.member(node)
        if isinstance(node, (n.Add, n.Concat)):
            return self.joined(node.nodes if isinstance(node, n.Concat) else (node.left, node.right))
        if isinstance(node, n.CondExpr):
            self.decides(node.test)
            return max(self.value(c) for c in (node.expr1, node.expr2) if c is not None)
        if isinstance(node, n.Test):
            return self.tested(node)
        if isinstance(node, n.Compare):
            return self.compare(node)
        if isinstance(node, (n.Filter, n.Call)):
            return self.called(node)
        for child in node.iter_child_nodes():
            self.decides(child)
        return ""

    def joined(self, nodes: Sequence[Any]) -> str:
        kinds = {self.value(node) for node in nodes}
        _refuse("box" in kinds)
        return max(kinds)

    def tested(self, node: Any) -> str:
        _refuse(self.value(node.node) and node.name not in _KIND_TESTS)
        return ""

    def member(self, node: Any) -> str:
        n = self.nodes
        kind = self.value(node.node)
        loop = isinstance(node.node, n.Name) and node.node.name == "loop"
        if isinstance(node, n.Getattr) or isinstance(node.arg, n.Const):
            key: Any = node.attr if isinstance(node, n.Getattr) else node.arg.value
            if key in _TEXTS:
                return "box" if key == "content" and self.parts else "text"
            if loop:
                return "box" if key in ("previtem", "nextitem") else ""
            _refuse(kind == "text")
            return kind if isinstance(key, int) else ""
        numbers = (n.Slice, n.Neg, n.Sub, n.Add)
        _refuse(kind == "text" or not isinstance(node.arg, numbers))  # the key may be that of a text
        for child in node.arg.iter_child_nodes():
            self.decides(child)
        return kind

    def compare(self, node: Any) -> str:
        """Texts and boxes may not be compared; a box may be asked for its keys."""
        _refuse(self.value(node.expr))
        for operand in node.ops:
            kind = self.value(operand.expr)
            asks = operand.op in ("in", "notin") and isinstance(node.expr, self.nodes.Const)
            _refuse(kind and not (asks and kind == "box"))
        return ""

    def called(self, node: Any) -> str:
        """Filters and functions that see no text inside of what they get."""
        n = self.nodes
        inputs = [*node.args, *(keyword.value for keyword in node.kwargs)]
        if isinstance(node, n.Filter):
            kind = self.value(node.node) if node.node is not None else "text"
            _refuse(any(self.value(item) for item in inputs) or kind == "text")
            _refuse(kind and node.name not in (*_COUNTING, *_CHOOSING))
            return kind if node.name in _CHOOSING else ""
        _refuse(not isinstance(node.node, n.Name) or node.node.name not in _FUNCTIONS)
        _refuse(any(self.value(item) for item in inputs))
        return ""
