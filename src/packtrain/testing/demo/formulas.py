"""Formulas from a seeded grammar, drawn by matplotlib's own math typesetting (no LaTeX needed).

A formula is a pair: the LaTeX a person would write (the answer), and the subset of it that
`matplotlib.mathtext` can draw. They differ only where mathtext has no word, as for matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...errors import optional
from .talks import Draws, Talk

if TYPE_CHECKING:
    from PIL.Image import Image


_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "lambda", "mu", "rho", "sigma", "phi")
_LETTERS = ("a", "b", "c", "k", "m", "n", "p", "q", "t", "u", "v", "x", "y", "z")
_FONTS = ("cm", "stix", "dejavusans", "dejavuserif")
_PAPERS = ((255, 255, 255), (255, 253, 245), (244, 247, 251), (236, 240, 236), (28, 31, 38), (22, 44, 38))
_INKS = ((17, 17, 17), (24, 32, 72), (74, 20, 30))
_CHALK = (238, 236, 228)
_REQUESTS = (
    "Write the formula in this image as LaTeX.",
    "Transcribe the formula to LaTeX.",
    "What is the LaTeX of this expression?",
    "Convert the picture to LaTeX source.",
    "Give only the LaTeX code for this equation.",
)


@dataclass(frozen=True, slots=True)
class Formula:
    """`latex` is the answer; `drawn` is what mathtext is given; `greek` are the letters in it."""

    latex: str
    drawn: str

    @property
    def greek(self) -> list[str]:
        return [name for name in _GREEK if f"\\{name}" in self.latex]


def _same(text: str) -> Formula:
    return Formula(text, text)


def _join(pattern: str, *parts: Formula) -> Formula:
    """Fill `@` of the pattern with the parts, in both writings."""
    pieces = pattern.split("@")
    latex, drawn = pieces[0], pieces[0]
    for part, piece in zip(parts, pieces[1:], strict=True):
        latex += part.latex + piece
        drawn += part.drawn + piece
    return Formula(latex, drawn)


def _atom(d: Draws) -> Formula:
    roll = d.integer(0, 9)
    if roll < 3:
        return _same(f"\\{d.choice(_GREEK)}")
    if roll < 5:
        return _same(f"{d.choice(_LETTERS)}_{{{d.choice(('0', '1', '2', 'i', 'j', 'n'))}}}")
    if roll < 7:
        return _same(f"{d.choice(_LETTERS)}^{{{d.integer(2, 9)}}}")
    if roll == 7:
        return _same(str(d.integer(2, 99)))
    return _same(d.choice(_LETTERS))


def _term(d: Draws, depth: int) -> Formula:
    """A factor: an atom, or one construction whose parts are one level simpler."""
    if depth <= 0:
        return _atom(d)
    a, b = _expression(d, depth - 1), _expression(d, depth - 1)
    roll = d.integer(0, 7)
    if roll <= 1:
        return _join("\\frac{@}{@}", a, b)
    if roll == 2:
        return _join("\\sqrt{@}", a)
    if roll == 3:
        return _join("\\left( @ \\right)^{@}", a, _same(str(d.integer(2, 5))))
    if roll == 4:
        name = d.choice(("sin", "cos", "tan", "log", "exp", "ln"))
        return _join(f"\\{name} \\left( @ \\right)", a)
    if roll == 5:
        return _join("\\binom{@}{@}", _atom(d), _atom(d))
    if roll == 6:
        hat = d.choice(("hat", "vec", "bar", "dot"))
        return _same(f"\\{hat}{{{d.choice(_LETTERS)}}}")
    return _join("@ @", _atom(d), _atom(d))


def _expression(d: Draws, depth: int) -> Formula:
    left = _term(d, depth)
    if d.chance(0.45):
        return left
    sign = d.choice(("+", "-", "\\cdot"))
    return _join(f"@ {sign} @", left, _term(d, max(0, depth - 1)))


def _matrix(d: Draws) -> Formula:
    columns = d.integer(2, 3)
    top = [_atom(d) for _ in range(columns)]
    low = [_atom(d) for _ in range(columns)]
    rows = " \\\\ ".join(" & ".join(cell.latex for cell in row) for row in (top, low))
    cells = "\\;".join(
        f"\\genfrac{{}}{{}}{{0}}{{0}}{{{a.drawn}}}{{{b.drawn}}}" for a, b in zip(top, low, strict=True)
    )
    latex, drawn = f"\\begin{{bmatrix}} {rows} \\end{{bmatrix}}", f"\\left[ {cells} \\right]"
    return Formula(latex, drawn)


def formula(d: Draws, depth: int = 1) -> Formula:
    """One formula: an equation, sum, integral, limit, product, matrix or derivative."""
    left, right = _same(d.choice(_LETTERS)), _expression(d, depth)
    i = d.choice(("i", "j", "k", "n"))
    roll = d.integer(0, 8)
    if roll <= 1:
        return _join("@ = @", left, right)
    if roll == 2:
        top = d.choice(("N", "n", "\\infty", str(d.integer(5, 50))))
        return _join(f"\\sum_{{{i}=1}}^{{{top}}} @", right)
    if roll == 3:
        low, high = str(d.integer(0, 3)), d.choice(("\\infty", "\\pi", "1", "T"))
        return _join(f"\\int_{{{low}}}^{{{high}}} @ \\, d{d.choice(('x', 't', 'u'))}", right)
    if roll == 4:
        goal = d.choice(("0", "\\infty", "1"))
        return _join(f"\\lim_{{x \\to {goal}}} @ = @", right, _atom(d))
    if roll == 5:
        return _join(f"\\prod_{{{i}=1}}^{{{d.integer(3, 20)}}} @", right)
    if roll == 6:
        return _join("@ = @", _same(d.choice(("A", "B", "M", "X"))), _matrix(d))
    if roll == 7:
        by = d.choice(("r", "s", "w"))  # never the letter that is derived
        return _join(f"\\frac{{\\partial @}}{{\\partial {by}}} = @", left, right)
    relation = d.choice(("\\leq", "\\geq", "\\neq", "\\approx"))
    return _join(f"@ {relation} @", _expression(d, 0), right)


@lru_cache(maxsize=1)
def _typesetter() -> tuple[Any, Any]:
    optional("matplotlib.mathtext", "matplotlib", "report")
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    return MathTextParser("agg"), FontProperties


def draw_formula(d: Draws, drawn: str) -> Image:
    """The formula in a drawn font, ink and paper, with margins of a drawn size: RGB."""
    import numpy as np
    from PIL import Image

    parser, properties = _typesetter()
    prop = properties(size=d.integer(14, 24), math_fontfamily=d.choice(_FONTS))
    mask = Image.fromarray(np.array(parser.parse(f"${drawn}$", dpi=100, prop=prop).image), "L")
    paper = d.choice(_PAPERS)
    ink = _CHALK if sum(paper) < 300 else d.choice(_INKS)
    left, top = d.integer(8, 48), d.integer(8, 40)
    size = (mask.width + left + d.integer(8, 48), mask.height + top + d.integer(8, 40))
    canvas = Image.new("RGB", size, paper)
    canvas.paste(Image.new("RGB", mask.size, ink), (left, top), mask)
    return canvas


def formula_talk(d: Draws) -> Talk:
    """One formula image and its LaTeX."""
    found = formula(d, depth=d.choice((1, 1, 2)))
    talk = Talk("formula")
    picture, request = draw_formula(d, found.drawn), d.choice(_REQUESTS)
    if d.chance(0.8):
        talk.ask(picture, request)
    else:
        talk.ask(request, picture)
    talk.answer(f"$${found.latex}$$" if d.chance(0.2) else found.latex)
    return talk


def formula_chat(d: Draws) -> Talk:
    """Several turns about one formula."""
    found = formula(d, depth=1)
    talk = Talk("formula_chat")
    talk.ask(draw_formula(d, found.drawn), "Please read this formula to me as LaTeX.")
    talk.answer(f"It says: {found.latex}")
    talk.ask("Which Greek letters are in it?")
    greek = found.greek
    talk.answer(f"It has {_listed(greek)}." if greek else "It has no Greek letter.")
    talk.ask("And does it have a fraction?")
    talk.answer("Yes, it does." if "\\frac" in found.latex else "No, it does not.")
    return talk


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
