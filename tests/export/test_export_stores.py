"""Packs as rows of other libraries' stores: the laws of every export, each written and read by its library.

`datasets` is in the development environment; `tests/hosts/test_stores.py` runs this where the others are.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_sets import NAMES, Set

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, PackSampler, open_packs, pack_of_row
from packtrain.errors import ChecksumError, ForeignArtefactError, MissingExtraError
from packtrain.pipeline.export import export, finish_export
from packtrain.pipeline.verify_export import verify_export
from packtrain.store import shards
from packtrain.template import ensure_torchvision
from packtrain.testing import crash_points, snapshot

#: Format -> the module of its library.
STORES = {"mds": "streaming", "litdata": "litdata", "lance": "lance", "datasets": "datasets"}

#: Lance stamps its version with the time; the other files have the same bytes whoever writes.
STAMPED = ("_versions", "_transactions")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


@pytest.fixture(params=[name for name, module in STORES.items() if importlib.util.find_spec(module)])
def fmt(request: pytest.FixtureRequest) -> str:
    ensure_torchvision()
    return str(request.param)


def write(held: Set, out: Path, **options: Any) -> dict[str, Any]:
    return export(held.plan_folder, out, source=held.source, **{"maxcount": 4, **options})


def contents(out: Path) -> dict[str, str]:
    """Digests of all files but those that hold a time."""
    held = snapshot(out, ("origin.json",))
    return {name: digest for name, digest in held.items() if not name.startswith(STAMPED)}


def same(ours: Any, want: Any) -> None:
    collate = PaddingFreeCollator()
    one, other = collate([ours]), collate([want])
    assert one.keys() == other.keys() and one.sample_ids == other.sample_ids
    for name, value in other.items():
        assert torch.equal(one[name], value) if isinstance(value, torch.Tensor) else one[name] == value


def rows_of(fmt: str, out: Path) -> Any:
    """The store, opened as its users do."""
    if fmt == "mds":
        import streaming

        return streaming.LocalDataset(str(out))
    if fmt == "litdata":
        import litdata

        return litdata.StreamingDataset(str(out))
    if fmt == "lance":
        import lance

        return lance.dataset(str(out)).to_table().to_pylist()
    import datasets

    return datasets.load_from_disk(str(out))


def test_every_rank_reads_the_packs_of_the_plan(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=60)
    figures = write(held, held.folder / fmt, format=fmt, maxcount=5)
    assert figures["packs"] == len(held.plan) and figures["samples"] == 60
    packs = open_packs(held.folder / fmt, held.template.encode)
    direct = PackedDataset(held.plan, held.source, held.template.encode)
    aligned = packs.plan.align(world_size=2)
    packs = pickle.loads(pickle.dumps(open_packs(held.folder / fmt, held.template.encode, aligned=aligned)))
    seen = []
    for rank in range(2):
        for position in PackSampler(aligned, rank=rank):
            pack = packs[position]
            same(pack, direct[aligned.pack_id(position)])
            seen += pack.ids
    assert sorted(set(seen)) == list(range(60))


def test_its_own_rows_give_the_packs(made: Callable[..., Set], fmt: str) -> None:
    """Rows as the library hands them out, in order, with key and record; each makes its pack."""
    held = made(count=60)
    write(held, held.folder / fmt, format=fmt, maxcount=7)
    rows = rows_of(fmt, held.folder / fmt)
    direct = PackedDataset(held.plan, held.source, held.template.encode)
    assert len(rows) == len(held.plan)
    for number in range(len(rows)):
        assert rows[number]["key"] == f"ps_{number:08d}"
        assert json.loads(rows[number]["json"])["packtrain"]["ids"] == held.plan[number].tolist()
        pack = pack_of_row(rows[number], held.template.encode)
        assert pack.pack_id == number
        same(pack, direct[number])
    torn = {**rows[0], "json": rows[0]["json"].replace('"crc32":', '"crc32":1')}
    with pytest.raises(ChecksumError, match="ps_00000000"):
        pack_of_row(torn, held.template.encode)


def test_verify(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    out = held.folder / fmt
    write(held, out, format=fmt)
    done = verify_export(out, source=held.source, template=held.template)
    assert done["shards"] == f"rows, read through {fmt}"
    assert done["samples"] == "30 planned, each there once, text and media equal to the source"
    assert "encode to their planned lengths" in done["tokens"]


def test_damage_is_refused_by_name(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    out = held.folder / fmt
    write(held, out, format=fmt, maxcount=2)
    path = next(out.rglob("pack-000001-000*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    packs = open_packs(out, held.template.encode)
    packs[0]
    for _ in range(2):
        with pytest.raises(ChecksumError, match=r"pack-000001-000.* was cut or edited"):
            packs[2]
    with pytest.raises(ChecksumError, match=r"pack-000001-000"):
        verify_export(out, source=held.source)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ChecksumError, match=r"pack-000001-000"):
        open_packs(out, held.template.encode)[3]
    write(held, out, format=fmt, maxcount=2)  # a part that is not whole is made again
    verify_export(out, source=held.source)


def test_a_torn_index_is_refused(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=20)
    out = held.folder / fmt
    write(held, out, format=fmt)
    names = {"lance": "_versions/*.manifest", "datasets": "state.json"}
    (path,) = out.glob(names.get(fmt, "index.json"))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ChecksumError):
        open_packs(out, held.template.encode)[0]
    with pytest.raises(ChecksumError):
        verify_export(out, source=held.source)


def test_stopped_at_any_write(made: Callable[..., Set], tmp_path: Path, fmt: str) -> None:
    held = made(count=6, names=NAMES[:3])
    whole = tmp_path / "whole"
    write(held, whole, format=fmt, maxcount=2)

    def run(out: Path) -> None:
        write(held, out, format=fmt, maxcount=2)
        if shards.hidden(out, shards.EXPORT).is_file():
            assert contents(out) == contents(whole)
            for name in STAMPED:  # compared without its time
                for path in (out / name).glob("*") if (out / name).is_dir() else ():
                    path.unlink()

    def absent_or_whole(out: Path) -> None:
        if shards.hidden(out, shards.EXPORT).is_file():
            packs = open_packs(out, held.template.encode)
            assert sum(len(packs[i]) for i in range(len(packs))) == 6

    assert crash_points(run, tmp_path / "crash", check=absent_or_whole, ignore=("origin.json",), every=3) > 30


def test_workers_and_shares_write_the_same(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    whole, split, many = (held.folder / name for name in ("whole", "split", "many"))
    write(held, whole, format=fmt)
    write(held, many, format=fmt, workers=2)
    for number in (2, 0, 1):
        write(held, split, format=fmt, shard=(number, 3))
    finish_export(split)
    assert contents(many) == contents(whole) and contents(split) == contents(whole)
    verify_export(split, source=held.source)
    verify_export(many, source=held.source)


def test_maxsize_opens_new_files(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    out = held.folder / fmt
    write(held, out, format=fmt, maxcount=100, maxsize=1)
    assert len(list(out.rglob("pack-*"))) == (1 if fmt == "lance" else len(held.plan))
    verify_export(out, source=held.source)


def test_another_format_replaces_it_whole(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=20)
    out = held.folder / "out"
    write(held, out, format=fmt)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ForeignArtefactError, match="another format"):
        write(held, out)
    write(held, out, overwrite=True)
    left = {path.name for path in out.iterdir()} - {path.name for path in out.glob("pack-*.tar")}
    assert left == {shards.FOLDER, "notes.txt"}
    write(held, out, format=fmt, overwrite=True)
    verify_export(out, source=held.source)


def test_workers_of_a_loader_read_it(made: Callable[..., Set], fmt: str) -> None:
    held = made(count=30)
    out = held.folder / fmt
    write(held, out, format=fmt)
    packs = open_packs(out, held.template.encode)
    want = [held.plan[number].tolist() for number in range(len(held.plan))]
    assert packs[0].ids == want[0]  # the store is open in this process too
    method = "spawn" if fmt == "lance" else None  # Lance says itself that it does not survive a fork
    loader = torch.utils.data.DataLoader(
        packs, batch_size=None, num_workers=2, multiprocessing_context=method
    )
    assert [pack.ids for pack in loader] == want


def test_without_the_library(
    made: Callable[..., Set], tmp_path: Path, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said with a hint by export, by reading and by verify; nothing is left, no export is blamed."""
    held = made(count=10)
    out = tmp_path / "out"
    write(held, out, format=fmt)
    monkeypatch.setitem(sys.modules, STORES[fmt], None)
    for verb in (
        lambda: write(held, tmp_path / "other", format=fmt),
        lambda: open_packs(out, held.template.encode)[0],
        lambda: verify_export(out, source=held.source),
    ):
        with pytest.raises(MissingExtraError) as caught:
            verb()
        assert caught.value.exit_code == 2 and f"packtrain[{fmt}]" in str(caught.value.hint)
    assert not shards.is_export(tmp_path / "other")
