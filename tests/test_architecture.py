"""The laws of the source tree, each checked on the tree and on a small made-up one that breaks it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import packtrain
from pages import script

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "packtrain"

# A package imports only what stands on a line above its own; packages on one line never import each other.
LAYERS = [
    ["version", "errors"],
    ["checks"],
    ["moved"],
    ["extend", "world", "files"],
    ["remote"],
    ["waiting"],
    ["workers"],
    ["packers"],
    ["planning"],
    ["media"],
    ["families"],
    ["sources", "measuring", "execute"],
    ["store"],
    ["template", "collate"],
    ["packs"],
    ["data"],
    ["testing", "export", "report"],
    ["train"],
    ["pipeline"],
    ["hosts"],
    ["cli"],
]
# Third-party modules that load only at the edge, inside the function that needs them or above `store`.
HEAVY = {
    "torch",
    "transformers",
    "accelerate",
    "numba",
    "pyarrow",
    "ray",
    "matplotlib",
    "tokenizers",
    "torchvision",
}
TORCH_LAYERS = {"testing", "template", "collate", "packs", "data", "train", "hosts"}


DRAWERS = {"utils", "util", "common", "core", "base", "helpers", "misc"}
LINES = 600


@dataclass(frozen=True)
class Import:
    """One imported name: `from .a import b` is `a.b` where that is a module of the tree, else `a`."""

    dotted: str
    line: int
    deferred: bool  # inside a function or under TYPE_CHECKING


@dataclass(frozen=True)
class File:
    """A file of the tree, parsed once."""

    root: Path
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def unit(self) -> str:
        """The package or module below the root: what stands in the layer table."""
        return self.path.relative_to(self.root).parts[0].removesuffix(".py")

    @property
    def module(self) -> str:
        parts = ("packtrain", *self.path.relative_to(self.root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> list[Import]:
        package = ("packtrain", *self.path.relative_to(self.root).parts[:-1])
        found: list[Import] = []
        for node, deferred in _import_statements(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno, deferred) for alias in node.names]
            else:
                base = package[: len(package) - node.level + 1] if node.level else ()
                dotted = ".".join([*base, *(node.module or "").split(".")]).strip(".")
                for alias in node.names:
                    below = self.root.parent.joinpath(*dotted.split("."), alias.name)
                    is_module = below.with_suffix(".py").is_file() or (below / "__init__.py").is_file()
                    name = f"{dotted}.{alias.name}" if is_module else dotted
                    found.append(Import(name, node.lineno, deferred))
        return found


def _import_statements(
    node: ast.AST, deferred: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Those below a node, and whether a function is called, or types are checked, before they run."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield inner, deferred
        elif not isinstance(inner, ast.expr):
            function = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _import_statements(inner, deferred or function or _only_for_types(inner))


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@lru_cache
def files(root: Path) -> list[File]:
    return [File(root, path) for path in sorted(root.rglob("*.py"))]


def made_up(root: Path, texts: Mapping[str, str]) -> list[File]:
    """A tree of these files, as a control: a check must name what is wrong in it."""
    for name, text in texts.items():
        path = root / "packtrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return files(root / "packtrain")


# --------------------------------------------------------------------------------------------
# imports
# --------------------------------------------------------------------------------------------
def against_the_layers(tree: list[File], layers: list[list[str]]) -> Iterator[str]:
    """Imports that point down the table or along a line, and heavy libraries away from the edge."""
    level = {name: row for row, names in enumerate(layers) for name in names}
    for file in tree:
        if file.unit in ("__init__", "__main__"):
            continue
        if file.unit not in level:
            yield f"{file.name} is not in the layer table"
            continue
        for one in file.imports:
            first, _, rest = one.dotted.partition(".")
            other = rest.partition(".")[0]
            if first == "packtrain" and other and other != file.unit:
                if level.get(other, len(layers)) >= level[file.unit]:
                    yield f"{file.name}:{one.line} imports {one.dotted}: against the layer order"
            elif first in HEAVY and not one.deferred and file.unit not in TORCH_LAYERS:
                yield f"{file.name}:{one.line} imports {one.dotted} at module level"


def test_imports_point_upward_and_heavy_libraries_load_at_the_edge(tmp_path: Path) -> None:
    assert list(against_the_layers(files(SOURCE), LAYERS)) == []
    control = made_up(
        tmp_path,
        {
            "errors.py": "def late():\n    from .planning import plan\n",
            "planning/__init__.py": "from .. import errors\nimport numba\n",
            "planning/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
            "media/__init__.py": "from ..planning import plan\ndef late():\n    import torch\n",
            "elsewhere.py": "",
        },
    )
    assert list(against_the_layers(control, [["errors"], ["planning", "media"]])) == [
        "elsewhere.py is not in the layer table",
        "errors.py:2 imports packtrain.planning: against the layer order",
        "media/__init__.py:1 imports packtrain.planning: against the layer order",
        "planning/__init__.py:2 imports numba at module level",
    ]


def cycles(tree: list[File]) -> list[list[str]]:
    """Modules that import each other in a ring; imports in functions and for types count."""
    known = {file.module: file for file in tree}
    edges = {
        name: sorted({one.dotted for one in file.imports if one.dotted in known and one.dotted != name})
        for name, file in known.items()
    }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:  # strongly connected components
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            ring = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in edges:
        if name not in order:
            visit(name)
    return sorted(found)


def test_no_modules_import_each_other_in_a_ring(tmp_path: Path) -> None:
    assert cycles(files(SOURCE)) == []
    control = made_up(
        tmp_path,
        {
            "planning/__init__.py": "from .one import x\n",
            "planning/one.py": "def late():\n    from .two import x\n",
            "planning/two.py": "if typing.TYPE_CHECKING:\n    from . import three\n",
            "planning/three.py": "from .one import x\nfrom . import four\n",
            "planning/four.py": "",
        },
    )
    assert cycles(control) == [
        ["packtrain.planning.one", "packtrain.planning.three", "packtrain.planning.two"]
    ]


# --------------------------------------------------------------------------------------------
# one writer, one reader of the environment
# --------------------------------------------------------------------------------------------
def beside_the_one_place(tree: list[File]) -> Iterator[str]:
    """Writes to disk outside `files.py`, and reads of the environment outside `world.py`."""
    for file in tree:
        for node in file.nodes:
            line = getattr(node, "lineno", 0)
            if file.name != "files.py" and isinstance(node, ast.Call) and _writes(node):
                yield f"{file.name}:{line} writes to disk"
            if file.name != "world.py" and _reads_environment(node):
                yield f"{file.name}:{line} reads the environment"


def _writes(call: ast.Call) -> bool:
    owner = getattr(call.func, "value", None)
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if name in ("write_text", "write_bytes"):
        return True
    if name == "save":
        return getattr(owner, "id", "") in ("np", "numpy")
    if name not in ("open", "fdopen"):
        return False
    words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(re.fullmatch(r"[rwaxbt+]{1,4}", mode) and set(mode) & set("wax+") for mode in modes)


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "getenv", "environb") and getattr(node.value, "id", "") == "os"
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in ("environ", "getenv", "environb") for alias in node.names)
    )


def test_only_files_py_writes_and_only_world_py_reads_the_environment(tmp_path: Path) -> None:
    assert list(beside_the_one_place(files(SOURCE))) == []
    bad = {
        "a.py": "import os\nx = os.environ['A']\n",
        "b.py": "from os import getenv\n",
        "c.py": "path.write_text('x')\n",
        "d.py": "import numpy as np\nnp.save(path, x)\n",
        "e.py": "with open(path, 'ab') as file: pass\n",
        "f.py": "path.open(mode='r+')\n",
        "g.py": "os.fdopen(3, 'wb')\n",
    }
    good = {
        "files.py": "open(path, 'wb')\n",
        "world.py": "import os\nos.getenv('A')\n",
        "h.py": "open(path)\nopen(path, 'rb')\npath.open('w.txt')\nenvironment = os.sep\n",
    }
    told = list(beside_the_one_place(made_up(tmp_path, {**bad, **good})))
    assert [line.partition(":")[0] for line in told] == sorted(bad)


# --------------------------------------------------------------------------------------------
# sorts, sizes and names
# --------------------------------------------------------------------------------------------
def unstable_sorts(tree: list[File]) -> Iterator[str]:
    """Sorts of arrays that give other orders of ties on other CPUs: all but those with kind="stable"."""
    for file in tree:
        for node in file.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            on_numpy = getattr(node.func.value, "id", "") in ("np", "numpy")
            name = node.func.attr
            if name == "argsort" or (name == "sort" and on_numpy):
                kinds = [getattr(word.value, "value", None) for word in node.keywords if word.arg == "kind"]
                if kinds != ["stable"] and not any(word.arg == "stable" for word in node.keywords):
                    yield f"{file.name}:{node.lineno} sorts without kind='stable'"
            elif name in ("partition", "argpartition") and on_numpy:
                yield f"{file.name}:{node.lineno} uses np.{name}: not stable"


def test_sorts_are_stable(tmp_path: Path) -> None:
    assert list(unstable_sorts(files(SOURCE))) == []
    bad = ["np.argsort(x)", "x.argsort()", "np.sort(x, kind='quicksort')", "np.argpartition(x, 3)"]
    good = [
        "np.argsort(x, kind='stable')",
        "x.sort()",
        "torch.argsort(x, stable=True)",
        "'a-b'.partition('-')",
    ]
    control = made_up(tmp_path, {"a.py": "\n".join([*bad, *good])})
    assert [line.partition(" ")[0] for line in unstable_sorts(control)] == [f"a.py:{n}" for n in (1, 2, 3, 4)]


def large_or_badly_named(tree: list[File]) -> Iterator[str]:
    """Files over the limit of lines, and names that say nothing."""
    for file in tree:
        lines = len(file.text.splitlines())
        if lines > LINES:
            yield f"{file.name} has {lines} lines"
        parts = file.path.relative_to(file.root).with_suffix("").parts
        if DRAWERS & {part.strip("_") for part in parts}:
            yield f"{file.name} is a drawer"


def test_files_stay_small_and_are_named_for_what_they_hold(tmp_path: Path) -> None:
    assert list(large_or_badly_named(files(SOURCE))) == []
    control = made_up(
        tmp_path, {"long.py": "#\n" * 601, "whole.py": "#\n" * 600, "_utils.py": "", "core/one.py": ""}
    )
    assert list(large_or_badly_named(control)) == [
        "_utils.py is a drawer",
        "core/one.py is a drawer",
        "long.py has 601 lines",
    ]


# --------------------------------------------------------------------------------------------
# the package as a whole
# --------------------------------------------------------------------------------------------
def test_import_is_light() -> None:
    code = (
        "import sys, packtrain, packtrain.cli, packtrain.store.plans, packtrain.store.lengths\n"
        "assert callable(packtrain.plan)\n"
        f"heavy = sorted(set(sys.modules) & {HEAVY!r})\n"
        "print(','.join(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_reading_an_export_and_naming_a_host_load_no_more_than_they_need() -> None:
    for module, heavy in (("packtrain.hosts.energon", "torch"), ("packtrain.hosts.veomni", "transformers")):
        code = f"import sys, {module}; print({heavy!r} in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False", module


def test_public_names_survive_importing_every_module() -> None:
    code = (
        "import importlib, pkgutil, packtrain\n"
        "for m in pkgutil.walk_packages(packtrain.__path__, 'packtrain.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert callable(packtrain.plan) and callable(packtrain.measure)\n"
        "for name in packtrain.__all__: getattr(packtrain, name)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)


def test_version_agrees_with_the_changelog() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.M)
    assert newest is not None and newest.group(1) == packtrain.__version__


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[<>=\[]", name)[0] for group in groups for name in group} - {"packtrain"}
    told = (REPOSITORY / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert [name for name in sorted(wanted) if f"`{name}`" not in told] == []


def test_the_annotated_tree_is_up_to_date() -> None:
    """`python scripts/tree.py` writes it from the docstrings."""
    module = script("tree")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python scripts/tree.py"
