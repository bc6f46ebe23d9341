"""The shared cache: hits across runs, misses where anything differs, and nothing ever overwritten."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from words import Texts, Words, many

from packtrain.errors import ChecksumError, FormatError, InputError, PlanError
from packtrain.pipeline.prepare import CacheRoot, prepare
from packtrain.pipeline.run import dry_run
from packtrain.planning.packplan import PackPlan
from packtrain.store import parts
from packtrain.testing import snapshot
from packtrain.train.config import load_config

OPTIONS = {"min_fill_ratio": None, "max_drop_fraction": None, "pack_length": 20}


class Counting(Words):
    """Counts how often a sample was measured."""

    measured = 0

    def measure(self, sample: Any) -> Any:
        Counting.measured += 1
        return super().measure(sample)


@pytest.fixture(autouse=True)
def fresh_count() -> None:
    Counting.measured = 0


def files_of(root: Path) -> dict[str, str]:
    return {
        name: digest for name, digest in snapshot(root, ("origin.json",)).items() if "claims/" not in name
    }


def test_equal_inputs_are_a_hit_and_a_planner_knob_never_measures_again(tmp_path: Path) -> None:
    cache = CacheRoot(tmp_path / "root")
    lengths, folder = cache.lengths(many(50), Counting())
    assert Counting.measured == 50
    plan, plan_folder = cache.plan(lengths, folder, **OPTIONS)
    before = files_of(tmp_path / "root")
    again, same = CacheRoot(tmp_path / "root").lengths(many(50), Counting())
    assert (again.digest, same, Counting.measured) == (lengths.digest, folder, 50)
    twin, twin_folder = cache.plan(again, same, **OPTIONS)
    assert (twin.checksum, twin_folder) == (plan.checksum, plan_folder)
    assert files_of(tmp_path / "root") == before
    for change in (
        {"pack_length": 30},
        {"packer": "ffd"},
        {"min_fill_ratio": 0.9},
        {"long_samples": "drop"},
        {"max_samples": 2},
    ):
        other, other_folder = cache.plan(again, same, **{**OPTIONS, **change})
        assert other_folder != plan_folder and len(other) > 0
    assert Counting.measured == 50
    assert {k: v for k, v in files_of(tmp_path / "root").items() if k in before} == before


def test_pb06_another_template_or_source_is_a_miss_beside_the_first(tmp_path: Path) -> None:
    cache = CacheRoot(tmp_path / "root")
    _, one = cache.lengths(many(50), Words(1))
    before = files_of(tmp_path / "root")
    found = {one, cache.lengths(many(50), Words(2))[1], cache.lengths(many(51), Words(1))[1]}
    assert len(found) == 3
    assert {k: v for k, v in files_of(tmp_path / "root").items() if k in before} == before


def test_a_limit_of_dropped_samples_is_checked_on_a_hit_too(tmp_path: Path) -> None:
    cache = CacheRoot(tmp_path / "root")
    lengths, folder = cache.lengths(many(50), Words())
    cache.plan(lengths, folder, **OPTIONS)
    with pytest.raises(PlanError, match=r"left out"):
        cache.plan(lengths, folder, **{**OPTIONS, "max_drop_fraction": 0.0})


@pytest.mark.parametrize("damage", ["marker", "array", "missing"])
def test_torn_folders_are_made_again_in_their_place(tmp_path: Path, damage: str) -> None:
    cache = CacheRoot(tmp_path / "root")
    lengths, folder = cache.lengths(many(50), Words())
    _, plan_folder = cache.plan(lengths, folder, **OPTIONS)
    before = files_of(tmp_path / "root")
    for place, marker, array in (
        (folder, "lengths.json", "tokens.npy"),
        (plan_folder, "plan.json", "indices.npy"),
    ):
        if damage == "marker":
            (place / marker).write_bytes(b"")
        elif damage == "array":
            os.truncate(place / array, (place / array).stat().st_size - 1)
        else:
            (place / array).unlink()
    lengths, folder = cache.lengths(many(50), Words())
    cache.plan(lengths, folder, **OPTIONS)
    assert files_of(tmp_path / "root") == before


def test_two_jobs_in_one_root_make_each_artefact_once(tmp_path: Path) -> None:
    """Threads as jobs: the second waits for the first and opens what it made."""
    gate, found, errors = threading.Barrier(4), [], []

    def job() -> None:
        try:
            cache = CacheRoot(tmp_path / "root", timeout_s=60)
            gate.wait()
            lengths, folder = cache.lengths(many(60, pause=0.01), Counting())
            plan, _ = cache.plan(lengths, folder, **OPTIONS)
            found.append((lengths.digest, plan.checksum))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and len(found) == 4 and len(set(found)) == 1 and Counting.measured == 60


def test_a_folder_whose_maker_is_still_in_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is there, the claim inside of the folder is not gone yet: a moment more to wait."""
    published, found = threading.Event(), []
    real = parts.clear_parts

    def slow(folder: Path) -> None:
        if (folder / "lengths.json").exists() and not published.is_set():
            published.set()
            time.sleep(0.3)
        real(folder)

    monkeypatch.setattr(parts, "clear_parts", slow)
    cache = CacheRoot(tmp_path / "root", timeout_s=60)
    first = threading.Thread(target=lambda: cache.lengths(many(5), Words()))
    first.start()
    assert published.wait(60)
    found.append(cache.lengths(many(5), Words())[0])
    first.join(60)
    assert len(found[0]) == 5


def test_a_job_that_fails_leaves_the_next_one_free(tmp_path: Path) -> None:
    class Faulty(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 30:
                raise OSError(5, "Input/output error")
            return super().__getitem__(index)

    source = many(50)
    cache = CacheRoot(tmp_path / "root", timeout_s=5)
    with pytest.raises((OSError, InputError)):
        cache.lengths(Faulty(source.texts), Words())
    lengths, _ = cache.lengths(source, Words())
    assert len(lengths) == 50


def test_changed_media_are_measured_beside_the_old_ones(processor: Any, tmp_path: Path) -> None:
    from PIL import Image

    from packtrain.sources import open_source
    from packtrain.sources.chat import ChatSource
    from packtrain.template import HFTemplate

    def write(size: int) -> None:
        Image.new("RGB", (size, size), (size % 256, 0, 0)).save(tmp_path / "a.png")

    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    (tmp_path / "s.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"]}) + "\n")
    template = HFTemplate(processor("qwen2_5_vl"))
    cache = CacheRoot(tmp_path / "root")

    def lengths() -> tuple[int, Path]:
        found, folder = cache.lengths(ChatSource(open_source(tmp_path / "s.jsonl")), template)
        return int(found.tokens[0]), folder

    write(280)
    small, first = lengths()
    assert lengths() == (small, first)
    write(560)
    large, second = lengths()
    assert large > small and second.name == first.name[:-1] + "1" and first.is_dir()
    assert lengths() == (large, second)


def test_a_run_of_another_output_folder_finds_lengths_and_plan(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packtrain.template import HFTemplate

    root = {"static_packing_cache": {"root_dir": str(tmp_path / "root")}}
    one = dry_run(load_config(text_run(output_dir=tmp_path / "one", **root)))
    assert (
        not (tmp_path / "one" / "plan").exists() and len(list((tmp_path / "root" / "plans").iterdir())) == 1
    )
    monkeypatch.setattr(HFTemplate, "measure_batch", lambda *_: pytest.fail("measured again"))
    two = dry_run(load_config(text_run(output_dir=tmp_path / "two", **root)))
    other = dry_run(load_config(text_run(output_dir=tmp_path / "one", cap=200, **root)))
    assert one.raw_checksum == two.raw_checksum != other.raw_checksum
    assert len(list((tmp_path / "root" / "plans").iterdir())) == 2


def test_in_the_output_folder_torn_artefacts_fail_fast_and_are_named(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = load_config(text_run())
    folder = tmp_path / "run"
    prepare(config, folder)
    os.truncate(folder / "lengths" / "tokens.npy", (folder / "lengths" / "tokens.npy").stat().st_size - 4)
    with pytest.raises(FormatError, match=r"lengths/tokens\.npy is torn"):
        prepare(config, folder)
    made = prepare(config, folder, overwrite=True).plan.checksum
    for name in ("plan", "lengths"):
        array = folder / name / {"plan": "indices.npy", "lengths": "tokens.npy"}[name]
        whole = array.read_bytes()
        array.write_bytes(whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:])
        with pytest.raises(ChecksumError, match=rf"{name}/{array.name[:-4]}\.npy: block 0"):
            prepare(config, folder)
        array.write_bytes(whole)
        assert prepare(config, folder).plan.checksum == made
    os.truncate(folder / "plan" / "indices.npy", 200)
    with pytest.raises(FormatError, match=r"plan/indices\.npy"):
        prepare(config, folder)
    assert prepare(config, folder, overwrite=True).plan.checksum == made
    PackPlan.load(folder / "plan").verify()
