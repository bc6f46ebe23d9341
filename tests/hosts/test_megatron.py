"""Megatron-Bridge and megatron-core: packs of a plan in their formats, read by their own code.

0.3.1 is the newest for Python 3.11 and reads `.npy`; of 0.6.2 the reader of Parquet is entered alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_runs import start
from venvs import build

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset
from packtrain.pipeline.export import export
from packtrain.template import HFTemplate, load_processor

pytestmark = pytest.mark.hosts

#: What the readers and megatron-core import; their own lists would bring CUDA builds.
LIGHT = "six regex pyyaml tqdm omegaconf numpy packaging einops requests sentencepiece"
CAP = 1280  # no sample is longer: rows of static shape take none that is
EOS = 10**6  # no token of the texts: it would be left out of the loss


def megatron_python() -> Path:
    return build(
        "megatron",
        ["transformers==4.57.6", "datasets==4.0.0", *LIGHT.split()],
        no_deps=["megatron-core==0.16.1", "megatron-bridge==0.3.1"],
    )


def newer_python() -> Path:
    return build(
        "megatron-new",
        ["transformers==5.12.1", "datasets==4.8.4", *LIGHT.split()],
        no_deps=[
            "--ignore-requires-python",
            "megatron-core==0.19.2",
            "megatron-bridge==0.6.2",
            "triton==3.9.0",
        ],
    )


def packed(
    network: Path, talks: Path, out: Path, *, multiple_of: int = 1, **options: Any
) -> tuple[PackedDataset, Path]:
    """The packs of a plan of 200 samples, and the folder of their export."""
    template, source = HFTemplate(load_processor(str(network))), pt.open_chats(talks)
    lengths = pt.measure(source, template, out / "lengths")
    plan = pt.plan(lengths, pack_length=CAP, multiple_of=multiple_of)
    plan.save(out / "plan")
    given = {"source": source, "template": template, "options": options}
    export(out / "plan", out / "packed", format="megatron", **given)
    return PackedDataset(plan, source, template.encode), out / "packed"


def same(data: PackedDataset, rows: list[Any]) -> None:
    """Tokens, targets, trained positions, positions and boundaries of every sample, each once."""
    assert len(rows) == len(data)
    trained = 0
    for pack, read in zip((data[number] for number in range(len(data))), rows, strict=True):
        samples = [{k: np.asarray(one[k]) for k in ("input_ids", "labels")} for one in pack]
        assert read["tokens"] == [t for one in samples for t in one["input_ids"][:-1].tolist()]
        assert read["labels"] == [t for one in samples for t in one["input_ids"][1:].tolist()]
        assert read["loss_mask"] == [int(t != -100) for one in samples for t in one["labels"][1:]]
        assert read["position_ids"] == [t for one in samples for t in range(len(one["input_ids"]) - 1)]
        ends = np.cumsum([0, *(len(one["input_ids"]) - 1 for one in samples)]).tolist()
        assert [end for end in read["boundaries"] if end >= 0] == ends
        trained += len(samples)
    assert trained == 200


@pytest.mark.spec(
    "002",
    "packed data of Megatron-Bridge, `PackedSeqParams`, labels of multi-token prediction",
    key="`packed_sequence_specs.packed_train_data_path`",
    api="`packtrain export -f megatron`, `PackBatch.packed_seq_params`",
)
def test_its_own_reader_gives_the_samples_back(network: Path, talks: Path, tmp_path: Path) -> None:
    """200 samples: tokens, targets, positions, boundaries; no target of any depth is behind a boundary."""
    data, folder = packed(network, talks, tmp_path, layout="npy")
    row = PaddingFreeCollator()([data[0]])
    params = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.packed_seq_params().items()}
    (file,) = folder.glob("*.npy")
    given = {"file": str(file), "eos": EOS, "params": params, "labels": row["labels"][0].tolist()}
    (seen,) = start(megatron_python(), "megatron_run.py", tmp_path, "read", **given)
    same(data, seen["rows"])
    labels = row["labels"][0].tolist()
    for depth, rolled in enumerate(seen["rolled"], 1):
        wanted = []
        for begin, end in zip(params["cu_seqlens_q"], params["cu_seqlens_q"][1:], strict=False):
            wanted += labels[begin + depth : end] + [0] * min(depth, end - begin)
        assert rolled == wanted, depth


def test_its_reader_of_parquet_gives_the_samples_back(network: Path, talks: Path, tmp_path: Path) -> None:
    """By the folder's name, as a recipe gives it; boundaries of one shape come from `packing.json`."""
    pytest.importorskip("pyarrow.parquet", reason="needs the extra packtrain[arrow]")
    data, folder = packed(network, talks, tmp_path)
    given = {"file": str(folder), "eos": EOS, "packing": str(folder / "packing.json"), "cap": CAP}
    (seen,) = start(newer_python(), "megatron_run.py", tmp_path, "read", **given)
    same(data, seen["rows"])
    most = max(len(data[number]) for number in range(len(data)))
    assert {len(row) for row in seen["static"]} == {most + 2}
    for pack, boundaries in zip((data[number] for number in range(len(data))), seen["static"], strict=True):
        ends = np.cumsum([0, *(len(one["input_ids"]) - 1 for one in pack)]).tolist()
        assert boundaries[: len(ends)] == ends and set(boundaries[len(ends) :]) <= {CAP}


@pytest.mark.parametrize("layout", ["npy", "parquet"])
def test_samples_are_padded_for_ranks_that_share_a_row(
    network: Path, talks: Path, tmp_path: Path, layout: str
) -> None:
    """Context parallelism of 4: both readers tell tokens from padding, and train none of it."""
    if layout == "parquet":
        pytest.importorskip("pyarrow.parquet", reason="needs the extra packtrain[arrow]")
    given = {"multiple_of": 8, "layout": layout, "context_parallel": 4}
    data, folder = packed(network, talks, tmp_path, **given)
    file = str(folder) if layout == "parquet" else str(next(folder.glob("*.npy")))
    eos = HFTemplate(load_processor(str(network))).tokenizer.eos_token_id
    python = newer_python() if layout == "parquet" else megatron_python()
    spec = {"file": file, "eos": eos, "multiple": 8, "cap": CAP}
    (seen,) = start(python, "megatron_run.py", tmp_path, "read", **spec)
    assert len(seen["rows"]) == len(data)
    shorter = trained = 0
    for number, row in enumerate(seen["rows"]):
        samples = [{k: np.asarray(one[k]) for k in ("input_ids", "labels")} for one in data[number]]
        ends, real = row["padded"], np.diff(row["real"]).tolist()
        assert all(end % 8 == 0 for end in ends) and ends[-1] == CAP == len(row["tokens"])
        used = np.zeros(CAP, bool)
        for one, begin, end, tokens in zip(samples, ends, ends[1:], real, strict=False):
            length = len(one["input_ids"])
            assert 0 <= end - begin + 1 - length < 8
            whole = np.pad(one["input_ids"], (0, end - begin + 1 - length), constant_values=eos)
            assert tokens == int(np.flatnonzero(whole[:-1] != eos)[-1]) + 1 and tokens <= length
            span = slice(begin, end)
            assert row["tokens"][span] == whole[:-1].tolist() and row["labels"][span] == whole[1:].tolist()
            wanted = (one["labels"][1:] != -100) & (whole[: length - 1] != eos)
            mask = row["loss_mask"][span]
            assert mask[: length - 1] == wanted.astype(int).tolist() and not any(mask[length - 1 :])
            used[span] = True
            shorter += end - begin > length
        assert not np.asarray(row["loss_mask"])[~used].any()
        trained += len(samples)
    assert trained == 200 and shorter > 100
