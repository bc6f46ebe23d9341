"""Edited markers: whatever stands in them, a folder opens or ends in one error that names the file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain import files
from packtrain.errors import FormatError, PacktrainError
from packtrain.store import lengths as lengths_store
from packtrain.store import plans as plans_store

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        10**400,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\ud800",
        "int64",
    ),
    *([], {}, [[]], {"": []}, [1, 2, 3], "../other", "<V0", "O", "U9999999999"),
]
FOLDERS = {
    "lengths": ("lengths.json", lengths_store.load, lengths_store.verify),
    "plan": ("plan.json", plans_store.load, plans_store.verify),
}
LAWS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    lengths = pt.Lengths([5, 9, 2, 0, 7, 30], {"images": [0, 1, 0, 0, 2, 0]})
    lengths.save(root / "lengths")
    pt.plan(lengths, pack_length=16, long_samples="drop").save(root / "plan")
    return root


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, one in inner for path in ((*at, key), *places(one, (*at, key)))]


@pytest.mark.parametrize("kind", sorted(FOLDERS))
@LAWS
@given(case=st.data())
def test_an_edited_marker_opens_or_is_named(made: Path, kind: str, case: st.DataObject) -> None:
    name, *readers = FOLDERS[kind]
    path = made / kind / name
    whole = path.read_bytes()
    told = json.loads(whole)
    for _ in range(case.draw(st.integers(1, 2))):
        *way, last = case.draw(st.sampled_from(places(told)))
        holder = told
        for key in way:
            holder = holder[key]
        if case.draw(st.integers(0, 3)):
            holder[last] = case.draw(st.sampled_from(ODD))
        else:
            del holder[last]
    path.write_text(json.dumps(told), encoding="utf-8")
    try:
        for reader in readers:
            with contextlib.suppress(PacktrainError):  # anything else is a traceback for the user
                reader(made / kind)
    finally:
        path.write_bytes(whole)
    for reader in readers:
        reader(made / kind)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, "9" * 10_000, "", "nul", '"\\ud8', "\0"])
def test_a_file_that_is_no_marker_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=r"state\.json") as told:
        files.read_json(path)
    assert "\n" not in str(told.value)


def test_a_marker_of_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_JSON", 10)
    (tmp_path / "plan.json").write_text(json.dumps([1] * 20), encoding="utf-8")
    with pytest.raises(FormatError, match="at most 10"):
        files.read_json(tmp_path / "plan.json")


@pytest.mark.parametrize("error", [KeyError("x"), OverflowError("x"), RecursionError("x"), IndexError("x")])
def test_what_an_edited_marker_leads_to_is_one_format_error(error: Exception) -> None:
    with (
        pytest.raises(FormatError, match=r"a\.json is not a state") as told,
        files.reading("a.json", "a state"),
    ):
        raise error
    assert "\n" not in str(told.value)
    with pytest.raises(FormatError, match="own words"), files.reading("a.json", "a state"):
        raise FormatError("own words")
