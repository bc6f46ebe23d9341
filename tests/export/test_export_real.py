"""Real data, a real template: plan → every format → every reader; the same ids, fields, bytes, token ids.

Readers: Python's `tarfile`, `webdataset`, Hugging Face `datasets`, plain files, Arrow, and our own. (Energon
reads the same sets in its own environments: `tests/hosts/test_host_energon.py`.)
"""

from __future__ import annotations

import glob
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_sets import KINDS, RealSet, facts_of, row_facts

from packtrain.collate import PaddingFreeCollator
from packtrain.data import open_packs
from packtrain.pipeline.export import export
from packtrain.pipeline.verify_export import verify_export
from packtrain.store.pack_records import members_of_row, restore

FORMATS = ("raw", "webdataset", "energon", "chunks", "datasets")


@pytest.fixture(scope="module")
def qwen(processor: Any) -> Any:
    from packtrain.template import HFTemplate

    return HFTemplate(
        processor("qwen2_5_vl"), allow_dropped=("tools", "tool_calls")
    )  # its chat template prints no tools


@pytest.fixture(scope="module")
def real(data: Path, qwen: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RealSet]:
    """A set by name, exported in all formats; made once."""
    held: dict[str, RealSet] = {}

    def make(kind: str) -> RealSet:
        if kind not in held:
            made = held[kind] = RealSet(kind, data, tmp_path_factory.mktemp(kind), qwen)
            for fmt in FORMATS:
                options = {"media": "tensor"} if fmt == "chunks" else None
                export(
                    made.plan_folder,
                    made.folder / fmt,
                    format=fmt,
                    source=made.source,
                    template=qwen,
                    maxcount=2,
                    options=options,
                )
        return held[kind]

    return make


def same_samples(made: RealSet, packs: dict[str, dict[str, bytes]]) -> None:
    """Members by key give every planned sample back, in the plan's order, to the letter and the byte."""
    assert list(packs) == [f"ps_{number:08d}" for number in range(len(made.plan))]
    for number, (key, members) in enumerate(packs.items()):
        samples = restore(json.loads(members["json"]), members.__getitem__, key)
        assert [sample.pop("sample_id") for sample in samples] == made.plan[number].tolist()
        for sample_id, sample in zip(made.plan[number].tolist(), samples, strict=True):
            assert facts_of(sample) == made.want[sample_id]
            if number % 4 == 0:  # encoding is slow; the readers of packs below encode all of them
                encoded = made.template.encode(sample)
                assert (encoded["input_ids"].tolist(), encoded["labels"].tolist()) == made.tokens[sample_id]


def by_key(named: Iterator[tuple[str, bytes]]) -> dict[str, dict[str, bytes]]:
    packs: dict[str, dict[str, bytes]] = {}
    for name, data in named:
        key, _, member = name.partition(".")
        packs.setdefault(key, {})[member] = data
    return packs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["webdataset", "energon"])
def test_tarfile(real: Callable[[str], RealSet], kind: str, fmt: str) -> None:
    made = real(kind)

    def named() -> Iterator[tuple[str, bytes]]:
        for path in sorted((made.folder / fmt).glob("*.tar")):
            with tarfile.open(path) as tar:
                for info in tar:
                    yield info.name, tar.extractfile(info).read()  # type: ignore[union-attr]

    same_samples(made, by_key(named()))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_files(real: Callable[[str], RealSet], kind: str) -> None:
    made = real(kind)
    found = sorted(path for path in (made.folder / "raw").iterdir() if path.is_file())
    same_samples(made, by_key((path.name, path.read_bytes()) for path in found))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["webdataset", "energon"])
def test_webdataset(real: Callable[[str], RealSet], kind: str, fmt: str) -> None:
    import webdataset

    made = real(kind)
    tars = sorted(glob.glob(str(made.folder / fmt / "*.tar")))
    packs = {}
    for row in webdataset.WebDataset(tars, shardshuffle=False, empty_check=False):
        packs[row["__key__"]] = {name: data for name, data in row.items() if not name.startswith("__")}
    same_samples(made, packs)


@pytest.mark.filterwarnings("ignore")  # of the library, about its own loading
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_webdataset(real: Callable[[str], RealSet], kind: str, tmp_path: Path) -> None:
    import datasets

    made = real(kind)
    tars = sorted(glob.glob(str(made.folder / "webdataset" / "*.tar")))
    names: set[str] = set()
    for path in tars:
        with tarfile.open(path) as tar:
            names |= {name.partition(".")[2] for name in tar.getnames()} - {"json"}
    features = datasets.Features(
        {
            "__key__": datasets.Value("string"),
            "__url__": datasets.Value("string"),
            "json": datasets.Json(),
            **{name: datasets.Image(decode=False) for name in sorted(names)},
        }
    )
    rows = datasets.load_dataset(
        "webdataset", data_files=tars, split="train", features=features, cache_dir=str(tmp_path)
    )
    packs = {}
    for row in rows:
        record = row["json"] if isinstance(row["json"], str) else json.dumps(row["json"])
        media = {name: row[name]["bytes"] for name in names if row[name] is not None}
        packs[row["__key__"]] = {**media, "json": record.encode()}
    same_samples(made, packs)


@pytest.mark.filterwarnings("ignore")  # of the library, about its own loading
@pytest.mark.parametrize("reader", ["arrow", "datasets"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_as_arrow(real: Callable[[str], RealSet], kind: str, reader: str, tmp_path: Path) -> None:
    """Encoded packs without any code of ours: ids, tokens, labels and pixels by column."""
    import pyarrow

    made = real(kind)
    paths = sorted(glob.glob(str(made.folder / "chunks" / "*.arrow")))
    columns = ["sample_id", "input_ids", "labels"]
    pixels: dict[int, Any] = {}
    rows: list[dict[str, Any]] = []
    if reader == "arrow":
        batches = 0
        for path in paths:
            with pyarrow.memory_map(path) as held, pyarrow.ipc.open_file(held) as file:
                batches += file.num_record_batches
                table = file.read_all()
                rows += table.select(columns).to_pylist()
                pixels.update(_pixels(table))
        assert batches == len(made.plan), "one record batch a pack"
    else:
        import datasets

        for path in paths:
            loaded = datasets.load_dataset("arrow", data_files=[path], split="train", cache_dir=str(tmp_path))
            rows += loaded.select_columns(columns).to_list()
            pixels.update(_pixels(loaded.data.table))
    assert [row["sample_id"] for row in rows] == made.plan.indices.tolist()
    assert {row["sample_id"]: (row["input_ids"], row["labels"]) for row in rows} == made.tokens
    want = {i: one["pixel_values"] for i, one in made.encoded.items() if "pixel_values" in one}
    assert pixels.keys() == want.keys() and (kind == "text_sft" or pixels)
    assert all(torch.equal(pixels[i], value) for i, value in want.items())


def _pixels(table: Any) -> dict[int, Any]:
    """Sample id -> pixels, out of two columns."""
    if "pixel_values" not in table.column_names:
        return {}
    shapes, values = table["pixel_values.shape"], table["pixel_values"]
    return {
        sample_id: torch.tensor(values[row].values.to_numpy()).reshape(shapes[row].as_py())
        for row, sample_id in enumerate(table["sample_id"].to_pylist())
        if values[row].is_valid
    }


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_datasets(real: Callable[[str], RealSet], kind: str) -> None:
    import datasets

    made = real(kind)
    rows = datasets.load_from_disk(str(made.folder / "datasets"))
    same_samples(made, {row["key"]: members_of_row(row) for row in rows})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_our_own_readers(real: Callable[[str], RealSet], kind: str, fmt: str) -> None:
    made = real(kind)
    packs, collate = open_packs(made.folder / fmt, made.template.encode), PaddingFreeCollator()
    for number in range(len(made.plan)):
        want = collate([[made.encoded[i] for i in made.plan[number].tolist()]])
        assert row_facts(collate([packs[number]])) == row_facts(want)
    checks = verify_export(made.folder / fmt, source=made.source, template=made.template, encode=0)
    assert f"{len(made.source)} planned" in checks["samples"]


@pytest.fixture(scope="module")
def model(qwen: Any) -> Any:
    """A tiny model of the real processor. Its logits are of 64 tokens: those of all take most of the time."""
    from packtrain.testing.tiny import tiny_model

    made = tiny_model("tiny:qwen2_5_vl", qwen.processor)
    torch.manual_seed(0)
    made.set_output_embeddings(torch.nn.Linear(made.config.get_text_config().hidden_size, 64, bias=False))
    return made


@pytest.mark.parametrize("fmt", ["webdataset", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_forward_from_shards_equals_unpacked(
    real: Callable[[str], RealSet], model: Any, kind: str, fmt: str
) -> None:
    made = real(kind)
    packs = open_packs(made.folder / fmt, made.template.encode)
    collate = PaddingFreeCollator(model=model)

    def logits(pack: Any) -> torch.Tensor:
        return model(**{name: value for name, value in collate([pack]).items() if name != "labels"}).logits[0]

    several = [number for number in range(len(made.plan)) if len(made.plan[number]) > 1]
    number = min(several, key=lambda i: int(made.plan.pack_tokens[i]))
    with torch.no_grad():
        row = logits(packs[number])
        start = 0
        for sample_id in made.plan[number].tolist():
            alone = logits([made.encoded[sample_id]])
            torch.testing.assert_close(row[start : start + len(alone)], alone, rtol=1e-4, atol=1e-4)
            start += len(alone)
    assert start == len(row)
