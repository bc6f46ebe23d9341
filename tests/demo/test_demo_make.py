"""make_demo: deterministic, idempotent, whole or absent, never over foreign files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from packtrain import files
from packtrain.errors import ForeignArtefactError, InputError
from packtrain.testing.demo import DemoSet, make_demo

SMALL = 60


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "set"
    make_demo(folder, samples=SMALL)
    return folder


def test_another_process_with_another_hash_seed_makes_the_same_bytes(small: Path, tmp_path: Path) -> None:
    code = (
        f"from packtrain.testing.demo import make_demo; make_demo({str(tmp_path / 'set')!r}, samples={SMALL})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "123"})
    assert contents(tmp_path / "set") == contents(small)


def test_records_are_the_ones_of_version_1(demo: DemoSet) -> None:
    # Golden: a change of any draw must raise demo.make.VERSION, or old cache folders would be reused.
    digest = hashlib.sha256(demo.val_jsonl.read_bytes()).hexdigest()
    assert digest[:16] == "0862153cca1b8423"


def test_second_call_writes_nothing(small: Path) -> None:
    steps: list[str] = []
    files.observer = lambda kind, path: steps.append(kind)
    try:
        again = make_demo(small, samples=SMALL)
    finally:
        files.observer = None
    assert steps == []
    assert again.faults.keys() == {
        "missing_media",
        "empty",
        "over_long",
        "truncated_media",
        "placeholder_mismatch",
    }


def test_other_parameters_rebuild_and_leave_no_old_picture(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    make_demo(folder, samples=SMALL + 20, seed=7)
    assert contents(folder).keys() != contents(small).keys()
    make_demo(folder, samples=SMALL)
    assert contents(folder) == contents(small)


def test_seed_changes_the_set(small: Path, tmp_path: Path) -> None:
    made = make_demo(tmp_path / "set", samples=SMALL, seed=1)
    assert made.train_jsonl.read_bytes() != (small / "train.jsonl").read_bytes()


def test_lost_picture_is_made_again(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    made = make_demo(folder, samples=SMALL)
    sorted((folder / "images").iterdir())[3].unlink()
    assert make_demo(folder, samples=SMALL) == made
    assert contents(folder) == contents(small)


@pytest.mark.parametrize("stop", [0, 5, 150, 290, -5, -1])
def test_stopped_anywhere_the_next_call_completes_it(small: Path, tmp_path: Path, stop: int) -> None:
    total = _steps(tmp_path / "whole")
    _run_until(tmp_path / "set", stop % total)
    assert not (tmp_path / "set" / "demo.json").exists() or stop == -1
    make_demo(tmp_path / "set", samples=SMALL)
    assert contents(tmp_path / "set") == contents(small)


class Stopped(BaseException):
    """As a kill: no code of the program catches it."""


def _run_until(folder: Path, step: int) -> int:
    seen = 0

    def observer(kind: str, path: Path) -> None:
        nonlocal seen
        if seen == step:
            raise Stopped
        seen += 1

    files.observer = observer
    try:
        make_demo(folder, samples=SMALL)
    except Stopped:
        pass
    finally:
        files.observer = None
    return seen


_TOTAL: list[int] = []


def _steps(folder: Path) -> int:
    if not _TOTAL:
        _TOTAL.append(_run_until(folder, 1 << 60))
    return _TOTAL[0]


def test_several_processes_at_once(small: Path, tmp_path: Path) -> None:
    code = (
        f"from packtrain.testing.demo import make_demo; make_demo({str(tmp_path / 'set')!r}, samples={SMALL})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert contents(tmp_path / "set") == contents(small)


def test_folder_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine\n", encoding="utf-8")
    with pytest.raises(ForeignArtefactError, match="not a demo set"):
        make_demo(tmp_path)
    assert contents(tmp_path) == {"train.jsonl": b"mine\n"}


def test_too_few_samples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="59 samples is too small"):
        make_demo(tmp_path / "set", samples=59)
    assert not (tmp_path / "set").exists()


def test_progress_counts_every_sample_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_demo(tmp_path / "set", samples=SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(k, SMALL + SMALL // 10) for k in range(1, SMALL + SMALL // 10 + 1)]


def test_all_record_shapes_and_picture_kinds_are_there(demo: DemoSet, records: list[dict[str, Any]]) -> None:
    keys = Counter(tuple(sorted(record)) for record in records)
    assert set(keys) == {
        ("conversations",),
        ("conversations", "images"),
        ("images", "messages"),
        ("input", "instruction", "output"),
        ("messages",),
    }
    text = demo.train_jsonl.read_text(encoding="utf-8")
    assert '"type": "image_url"' in text and '"type": "image"' in text and '"role": "system"' in text
    found: Counter[tuple[str, str, str]] = Counter()
    turned = 0
    for path in sorted((demo.train_jsonl.parent / "images").iterdir()):
        with Image.open(path) as picture:
            found[str(picture.format), path.suffix, picture.mode] += 1
            turned += "exif" in picture.info
    assert found["PNG", ".jpg", "RGB"] > 3, "PNG named .jpg"
    assert found["JPEG", ".png", "RGB"] > 3, "JPEG named .png"
    for kind in ("RGBA", "P", "L", "RGB"):
        assert found["PNG", ".png", kind] > 3
    assert found["WEBP", ".webp", "RGB"] > 3
    assert turned > 3, "EXIF"


def test_lengths_have_a_long_tail(records: list[dict[str, Any]]) -> None:
    turns = sorted(len(record.get("messages") or record.get("conversations") or [0, 0]) for record in records)
    assert turns[len(turns) // 2] == 2
    assert turns[-1] >= 20


def test_pictures_open_upright(demo: DemoSet, records: list[dict[str, Any]]) -> None:
    """Every picture but the faulty ones decodes; EXIF is applied where a reader applies it."""
    bad = set(demo.faults["truncated_media"])
    for path in sorted((demo.train_jsonl.parent / "images").iterdir()):
        split, sample, _ = path.stem.split("_")
        if split == "train" and int(sample) in bad:
            continue
        with Image.open(path) as picture:
            assert ImageOps.exif_transpose(picture).convert("RGB").size[0] > 0
