"""What packtrain gave before its parts were put together anew, recorded once: the same today.

Plans, orders and streams are equal; losses to what another CPU rounds; states and folders of then go on.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import golden_runs  # noqa: E402

import golden  # noqa: E402

ROUNDING = 2e-6


def recorded(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def plain(values: Any) -> Any:
    return json.loads(json.dumps(values))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: reading may leave marks."""
    return Path(shutil.copytree(GOLDEN / "folders", tmp_path_factory.mktemp("golden") / "folders"))


def test_the_set_is_small_and_whole() -> None:
    held = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in held) < 300_000
    assert {path.stem for path in GOLDEN.glob("*.json")} == {
        "plans", "real_plans", "orders", "streams", "folders", "losses"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plans", "streams"])
def test_values_are_equal(name: str) -> None:
    expected, found = recorded(name), plain(getattr(golden, name)())
    assert found.keys() == expected.keys()
    if name == "plans":  # further figures may come to a forecast; those of then stay
        rows = zip(found["forecast"], expected["forecast"], strict=True)
        found["forecast"] = [{key: row[key] for key in then} for row, then in rows]
    else:  # states have another form now; those of then go on, below
        for values in (*found.values(), *expected.values()):
            assert values.pop("states").keys() == {"1", "7", "10"}
    assert {key: found[key] for key in expected if found[key] != expected[key]} == {}


def test_plans_of_real_lengths_are_equal(data: Path) -> None:
    assert plain(golden.real_plans(data / "lengths")) == recorded("real_plans")


@pytest.mark.parametrize("part", ["aligned", "balanced", "replanned"])
def test_orders_are_equal(part: str) -> None:
    expected = recorded("orders")[part]
    found = plain(getattr(golden, f"{part}_orders")())
    assert {key: found.get(key) for key in expected if found.get(key) != expected[key]} == {}


def test_positions_saved_then_go_on_as_then() -> None:
    """On the same number of ranks and on others; what was refused is refused."""
    orders = recorded("orders")
    assert plain(golden.resumed_positions(orders["saved"])) == orders["resumed"]


@pytest.mark.parametrize("name", sorted(recorded("streams")))
def test_states_of_streams_saved_then_go_on(name: str) -> None:
    expected = recorded("streams")[name]
    assert expected["states"]
    for stop, state in expected["states"].items():
        assert golden.followed(name, state) == expected["ranks"][0][int(stop) :], stop


def test_folders_written_then_are_read(folders: Path) -> None:
    expected = recorded("folders")
    found = plain(golden.folder_facts(folders))
    assert {key: found.get(key) for key in expected if found.get(key) != expected[key]} == {}
    assert golden.followed_growing(folders, expected["growing state"]) == expected["growing followed"]


@pytest.mark.parametrize("name", sorted(golden_runs.RUNS))
def test_losses_of_runs_are_equal_and_their_states_go_on(name: str, folders: Path, tmp_path: Path) -> None:
    """A checkpoint is given the state file of then, and the rest of the run has the losses of then."""
    expected = recorded("losses")[name]
    step, file = golden_runs.CHECKPOINTS.get(name, (0, ""))
    saving = {"save_strategy": "steps", "save_steps": step} if step else {}
    assert golden_runs.run_losses(tmp_path, name, folders, **saving) == pytest.approx(expected, rel=ROUNDING)
    if not step:
        return
    checkpoint = tmp_path / name / f"checkpoint-{step}"
    assert (checkpoint / file).is_file()
    shutil.copy(GOLDEN / "states" / f"{name}.{file}", checkpoint / file)
    again = golden_runs.run_losses(tmp_path, name, folders, resume_from_checkpoint=str(checkpoint))
    assert again[-len(expected) + step :] == pytest.approx(expected[step:], rel=ROUNDING)


def test_losses_of_a_vision_model_are_equal(tmp_path: Path) -> None:
    assert golden_runs.vision_losses(tmp_path) == pytest.approx(recorded("losses")["vision"], rel=ROUNDING)


@pytest.mark.parametrize(("name", "options"), [("", {}), (" same", {"samples_per_step": "same"})])
def test_losses_of_a_packed_trainer_are_equal(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = recorded("losses")[f"pack(trainer){name}"]
    assert golden_runs.packed_trainer_losses(tmp_path, **options) == pytest.approx(expected, rel=ROUNDING)
