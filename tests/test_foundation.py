"""Errors travel and explain themselves; names are found; rank and size are resolved in order."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import pickle
import re
import sys
import tomllib
from pathlib import Path

import pytest

from packtrain import errors, extend, world
from packtrain.errors import InputError, SampleError, UnknownNameError


def every_error() -> list[type[errors.PacktrainError]]:
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.PacktrainError)]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for kind in every_error():
        assert kind.__name__ in errors.__doc__


def test_every_extra_that_a_hint_names_is_there_and_holds_the_package() -> None:
    """None: no extra does, and the hint names the package."""
    root = Path(errors.__file__).parent
    extras = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    extras.pop("dev")
    named = re.compile(r'(?:MissingExtraError\(|optional(?:\(|, )(?:"[\w.]+", ))"([\w.-]+)", ("?[\w-]+"?)')
    found = [match for path in root.rglob("*.py") for match in named.findall(path.read_text())]
    assert len(found) > 15 and ("ms-swift", "None") in found
    for package, extra in found:
        if extra == "None":
            assert not any(re.match(rf"{package}\b", one) for held in extras.values() for one in held), (
                package
            )
        else:
            held = [*extras[extra.strip('"')], "tokenizers"]  # of transformers
            assert any(re.match(rf"{package}\b", one) for one in held), (package, extra)
    assert errors.MissingExtraError("ms-swift", None).hint == "pip install ms-swift"


def test_exit_codes() -> None:
    assert {c.exit_code for c in every_error() if issubclass(c, InputError)} == {2}
    assert {c.exit_code for c in every_error() if issubclass(c, errors.LawError)} == {1}


@pytest.mark.parametrize(
    "error",
    [
        InputError("what", hint="do"),
        SampleError("missing_media", "a.jpg", hint="look"),
        UnknownNameError("packer", "bdf", ["bfd", "ffd"]),
        errors.MissingExtraError("torch", "train"),
    ],
)
def test_errors_cross_process_borders(error: errors.PacktrainError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error) and str(twin) == str(error) and twin.__dict__ == error.__dict__
        assert twin.args == (error.message,)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown packer 'bdf'.*did you mean 'bfd'"):
        extend.lookup("packers", "bdf")
    with pytest.raises(UnknownNameError, match=r"unknown packer '_kernels'"):
        extend.lookup("packers", "_kernels")
    with pytest.raises(UnknownNameError):
        extend.lookup("packers", "os.path")
    with pytest.raises(InputError, match="no plug-ins of kind"):
        extend.lookup("gizmos", "x")


@pytest.mark.parametrize("kind", sorted(extend.HOOKS))
def test_every_listed_name_can_be_looked_up(kind: str) -> None:
    listed = extend.names(kind)
    assert listed == sorted(listed)
    for name in listed:
        assert hasattr(extend.lookup(kind, name), extend.HOOKS[kind])


def test_a_new_file_is_a_plugin_and_its_names_are_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module("packtrain.packers")
    (tmp_path / "newest.py").write_text("VERSION = 1\ndef pack(problem): return problem.costs * 0\n")
    (tmp_path / "hookless.py").write_text("raise_on_import = 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "_part.py").write_text("def pack(problem): ...\n")
    (tmp_path / "beside.py").write_text("def pack(problem): ...\n")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package, "NOT_PLUGINS", ("beside",), raising=False)
    extend._names.cache_clear()
    try:
        assert {"newest", "hookless", "broken", "bfd"} <= set(extend.names("packers"))
        assert not {"_part", "beside"} & set(extend.names("packers"))
        assert extend.lookup("packers", "newest").VERSION == 1
        with pytest.raises(InputError, match="hookless does not define pack"):
            extend.lookup("packers", "hookless")
        for name in ("_part", "beside"):
            with pytest.raises(UnknownNameError):
                extend.lookup("packers", name)
    finally:
        extend._names.cache_clear()
        for name in ("newest", "hookless"):
            sys.modules.pop(f"packtrain.packers.{name}", None)
            vars(package).pop(name, None)


@pytest.mark.parametrize("kind", sorted(extend.HOOKS))
def test_what_is_named_as_no_plugin_is_there(kind: str) -> None:
    package = importlib.import_module(f"packtrain.{kind}")
    for name in getattr(package, "NOT_PLUGINS", ()):
        assert importlib.util.find_spec(f"packtrain.{kind}.{name}") is not None, f"{kind}/{name}.py"


def test_measured_is_an_int_that_travels() -> None:
    twin = pickle.loads(pickle.dumps(extend.Measured(195, images=2)))
    assert twin == 195 and isinstance(twin, int) and twin.costs == {"images": 2}


def test_world_resolves_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world.world() == world.World(rank=0, size=1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world.world() == world.World(rank=3, size=8)
    assert world.world(rank=1, size=2) == world.World(rank=1, size=2)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(InputError, match="RANK='x' is not an integer"):
        world.world()
    with pytest.raises(InputError, match="not a position"):
        world.World(rank=2, size=2)


def test_threads_of_planning_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.world import plan_threads

    monkeypatch.delenv("PACKTRAIN_THREADS", raising=False)
    assert 1 <= plan_threads() <= 8
    monkeypatch.setenv("PACKTRAIN_THREADS", "3")
    assert plan_threads() == 3
    for wrong in ("0", "two"):
        monkeypatch.setenv("PACKTRAIN_THREADS", wrong)
        with pytest.raises(InputError, match="PACKTRAIN_THREADS"):
            plan_threads()
