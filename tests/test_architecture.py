"""The laws of the source tree: import direction, light import, stable sorts, file sizes, one writer."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import packtrain

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "packtrain"
FILES = sorted(SOURCE.rglob("*.py"))

# A package imports only what stands on a line above its own; packages on one line never import each other.
LAYERS = [
    ["version", "errors"],
    ["moved"],
    ["extend", "world", "files"],
    ["waiting"],
    ["packers"],
    ["planning"],
    ["media"],
    ["families"],
    ["sources", "measuring", "execute"],
    ["store"],
    ["template", "collate"],
    ["data"],
    ["testing", "export", "report"],
    ["train"],
    ["pipeline"],
    ["hosts"],
    ["cli"],
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
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
TORCH_LAYERS = {"testing", "template", "collate", "data", "train", "hosts"}


def unit(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted module, at module level) of every import; relative names made absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("packtrain", *path.relative_to(SOURCE).parts[:-1])
    top = {id(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)} - {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            dotted = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            if dotted == "packtrain":
                found += [(f"packtrain.{alias.name}", id(node) in top) for alias in node.names]
            else:
                found.append((dotted, id(node) in top))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_point_upward(path: Path) -> None:
    mine = unit(path)
    if mine in ("__init__", "__main__"):
        return
    assert mine in LEVEL, f"{mine} is not in the layer table"
    for dotted, _ in imports(path):
        parts = dotted.split(".")
        if parts[0] != "packtrain" or len(parts) == 1:
            continue
        other = parts[1]
        if other == mine:
            continue
        assert LEVEL.get(other, -1) < LEVEL[mine], f"{mine} imports {dotted}: against the layer order"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_heavy_libraries_load_at_the_edge(path: Path) -> None:
    for dotted, at_top in imports(path):
        heavy = dotted.split(".")[0]
        if heavy in HEAVY and at_top and unit(path) not in TORCH_LAYERS:
            tree_guarded = "TYPE_CHECKING" in path.read_text(encoding="utf-8")
            assert tree_guarded, f"{path.name} imports {dotted} at module level"


def test_import_is_light() -> None:
    code = (
        "import sys, packtrain, packtrain.cli, packtrain.store.plans, packtrain.store.lengths\n"
        "assert callable(packtrain.plan)\n"
        f"heavy = sorted(set(sys.modules) & {HEAVY!r})\n"
        "print(','.join(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_names_survive_importing_every_module() -> None:
    code = (
        "import importlib, pkgutil, packtrain\n"
        "for m in pkgutil.walk_packages(packtrain.__path__, 'packtrain.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert callable(packtrain.plan) and callable(packtrain.measure)\n"
        "for name in packtrain.__all__: getattr(packtrain, name)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_sorts_are_stable(path: Path) -> None:
    """A plain np.argsort gives other orders on other CPUs, so every array sort names kind="stable"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        on_numpy = isinstance(owner, ast.Name) and owner.id in ("np", "numpy")
        if node.func.attr == "argsort" or (node.func.attr == "sort" and on_numpy):
            kinds = [
                k.value.value for k in node.keywords if k.arg == "kind" and isinstance(k.value, ast.Constant)
            ]
            stable = kinds == ["stable"] or any(k.arg == "stable" for k in node.keywords)
            assert stable, f"{path.name}:{node.lineno} sorts without kind='stable'"
        if node.func.attr in ("partition", "argpartition") and on_numpy:
            pytest.fail(f"{path.name}:{node.lineno} uses np.{node.func.attr}: not stable")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_only_files_py_writes_and_only_world_py_reads_the_environment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name != "world.py":
        assert not re.search(r"os\.environ|os\.getenv", text), f"{path.name} reads the environment"
    if path.name not in ("files.py",):
        assert not re.search(r"\.write_text\(|\.write_bytes\(|np\.save\((?!z)", text), (
            f"{path.name} writes to disk"
        )
        assert not re.search(r"\bopen\([^)]*[\"'][wax]b?\+?[\"']", text), (
            f"{path.name} opens a file for writing"
        )


def test_no_drawer_modules() -> None:
    drawers = {"utils", "util", "common", "core", "base", "helpers", "misc"}
    assert not [p for p in FILES if p.stem in drawers or drawers & set(p.relative_to(SOURCE).parts)]


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
    spec = importlib.util.spec_from_file_location("tree", REPOSITORY / "scripts" / "tree.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python scripts/tree.py"
