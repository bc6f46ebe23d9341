"""The support table holds what the tests recorded, and nothing that no test shows."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_host_proof import MAKERS

from matrix_recorder import HOSTS, KINDS, LEAK
from pages import script

REPOSITORY = Path(__file__).resolve().parents[2]


matrix = script("hosts_matrix")
CELLS = [(host, feature) for host, row in matrix.record().items() for feature in row]


@cache
def _functions(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _marked(function: ast.FunctionDef) -> set[str]:
    """The features of its `matrix` marks, those of single parameters too."""
    return {
        word.value
        for decorator in function.decorator_list
        for call in ast.walk(decorator)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.matrix"
        for word in call.args
        if isinstance(word, ast.Constant)
    }


@pytest.mark.parametrize(("host", "feature"), CELLS)
def test_every_cell_names_the_test_that_shows_it(host: str, feature: str) -> None:
    cell = matrix.record()[host][feature]
    file, _, name = cell["test"].partition("::")
    if feature.startswith("packs: "):
        named = (REPOSITORY / file).read_text(encoding="utf-8")
        assert file in KINDS and f'"{host}"' in named and name in _functions(file)
        return
    source = (REPOSITORY / file).read_text(encoding="utf-8")
    if file in HOSTS:
        assert HOSTS[file] == host
    else:  # its makers name the hosts
        assert file in KINDS and "MAKERS" in source and host in MAKERS
    function = _functions(file)[name]
    if cell["outcome"] == "works":
        assert feature in _marked(function)
    else:
        assert cell["reason"] in cell["line"] and "\n" not in cell["line"]
        recorded = ast.unparse(function)
        assert "record_property" in recorded
        assert feature in source or (feature == LEAK[0] and "leak_of(" in recorded)
        code = (REPOSITORY / "src" / "packtrain").rglob("*.py")
        assert any(cell["reason"] in path.read_text(encoding="utf-8") for path in code)


def test_the_page_holds_the_tables() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    for begin, end, table in (
        (matrix.BEGIN, matrix.END, matrix.rendered()),
        (matrix.BEGIN_KINDS, matrix.END_KINDS, matrix.rendered_kinds()),
    ):
        assert page.partition(begin)[2].partition(end)[0] == table, "run python scripts/hosts_matrix.py"


def test_every_kind_is_shown_in_every_trainer() -> None:
    held = matrix.record()
    cells = [(host, f"packs: {kind}") for host in (matrix.OWN, *matrix.TAKE_PACKS) for kind in matrix.KINDS]
    assert not [cell for cell in cells if cell[1] not in held.get(cell[0], {})]


def test_a_failing_case_takes_its_cell_out(pytester: pytest.Pytester, monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "test_trl", raising=False)  # the real one, where it was collected too
    tests = pytester.path / "tests" / "integrations"
    tests.mkdir(parents=True)
    where = tests / "test_trl.py"
    body = """
import pytest
@pytest.mark.parametrize("good", [True, {second}])
@pytest.mark.matrix("resume")
def test_a(good):
    assert good
def test_b(record_property):
    record_property("refused", ("streams", "no", "no, never"))
"""
    pytester.makeini("[pytest]\nmarkers =\n  matrix: cells")
    pytester.makeconftest(
        "from pathlib import Path\nfrom matrix_recorder import MatrixRecorder\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(MatrixRecorder(Path('record.json')))\n"
    )
    shown = []
    for second in (True, False):
        where.write_text(body.format(second=second), encoding="utf-8")
        pytester.inline_run("-q", "-p", "no:cacheprovider")
        shown.append(sorted(matrix.json.loads(Path("record.json").read_text())["TRL SFTTrainer"]))
    assert shown == [["resume", "streams"], ["streams"]]
