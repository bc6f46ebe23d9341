"""The support matrix says what tests show and what the code refuses."""

from __future__ import annotations

import re

import pytest
from matrix import BEGIN, END, HOSTS, PAGE, REPOSITORY, cells, rendered


@pytest.mark.parametrize(("feature", "host", "cell"), cells())
def test_every_cell_has_its_test_or_its_reason(feature: str, host: str, cell: str) -> None:
    if cell.startswith("!"):
        sources = "".join(
            path.read_text(encoding="utf-8")
            for path in sorted((REPOSITORY / "src" / "packtrain" / "integrations").glob("*.py"))
        )
        assert cell[1:] in sources
    elif cell:
        tests = (REPOSITORY / "tests" / HOSTS[host]).read_text(encoding="utf-8")
        assert re.search(rf"^def {cell}\(", tests, re.M)


def test_the_page_holds_the_table() -> None:
    held = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert held == rendered(), "run python tests/integrations/matrix.py"
