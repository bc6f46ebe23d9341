"""Megatron-Bridge 0.3.1 and megatron-core 0.16.1: packs of a plan in their formats, read by their code."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_runs import REPOSITORY, start
from venvs import build

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset
from packtrain.template import HFTemplate, load_processor

pytestmark = pytest.mark.hosts

EXAMPLE = REPOSITORY / "examples" / "megatron_packed.py"
#: What the reader and megatron-core import; their own lists would bring CUDA builds.
LIGHT = "six regex pyyaml tqdm omegaconf numpy packaging einops requests sentencepiece"
EOS = 10**6  # no token of the texts: it would be left out of the loss


def megatron_python() -> Path:
    return build(
        "megatron",
        ["transformers==4.57.6", "datasets==4.0.0", *LIGHT.split()],
        no_deps=["megatron-core==0.16.1", "megatron-bridge==0.3.1"],
    )


def packs(network: Path, talks: Path, out: Path) -> PackedDataset:
    template = HFTemplate(load_processor(str(network)))
    plan = pt.plan(pt.Lengths.load(out / "lengths"), pack_length=1024)
    return PackedDataset(plan, pt.open_chats(talks), template.encode)


@pytest.mark.spec(
    "002",
    "packed data of Megatron-Bridge, `PackedSeqParams`, labels of multi-token prediction",
    key="`packed_sequence_specs.packed_train_data_path`",
    api="`examples/megatron_packed.py`, `PackBatch.packed_seq_params`",
)
def test_its_own_reader_gives_the_samples_back(network: Path, talks: Path, tmp_path: Path) -> None:
    """200 samples: tokens, targets, positions, boundaries; no target of any depth is behind a boundary."""
    example: Any = runpy.run_path(str(EXAMPLE))["main"]
    file = example(network, talks, tmp_path, pack_length=1024)
    data = packs(network, talks, tmp_path)
    row = PaddingFreeCollator()([data[0]])
    params = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.packed_seq_params().items()}
    given = {"file": str(file), "eos": EOS, "params": params, "labels": row["labels"][0].tolist()}
    (seen,) = start(megatron_python(), "megatron_run.py", tmp_path, "read", **given)
    assert len(seen["rows"]) == len(data)
    trained = 0
    for pack, read in zip((data[number] for number in range(len(data))), seen["rows"], strict=True):
        samples = [{k: np.asarray(one[k]) for k in ("input_ids", "labels")} for one in pack]
        assert read["tokens"] == [t for one in samples for t in one["input_ids"][:-1].tolist()]
        assert read["labels"] == [t for one in samples for t in one["input_ids"][1:].tolist()]
        assert read["loss_mask"] == [int(t != -100) for one in samples for t in one["labels"][1:]]
        assert read["position_ids"] == [t for one in samples for t in range(len(one["input_ids"]) - 1)]
        ends = np.cumsum([0, *(len(one["input_ids"]) - 1 for one in samples)]).tolist()
        assert [end for end in read["cu_seqlens"] if end >= 0] == ends
        trained += len(samples)
    assert trained == 200
    labels = row["labels"][0].tolist()
    for depth, rolled in enumerate(seen["rolled"], 1):
        wanted = []
        for begin, end in zip(params["cu_seqlens_q"], params["cu_seqlens_q"][1:], strict=False):
            wanted += labels[begin + depth : end] + [0] * min(depth, end - begin)
        assert rolled == wanted, depth


def test_packed_parquet_holds_the_same_rows(network: Path, talks: Path, tmp_path: Path) -> None:
    """Columns and types as newer releases read them; none of them runs under Python 3.11 on a CPU."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra packtrain[arrow]")
    example: Any = runpy.run_path(str(EXAMPLE))["main"]
    rows = np.load(example(network, talks, tmp_path, pack_length=1024), allow_pickle=True).tolist()
    table = parquet.read_table(example(network, talks, tmp_path, pack_length=1024, parquet=True))
    assert table.to_pylist() == rows
    assert [str(field.type) for field in table.schema] == [
        f"list<element: {kind}>" for kind in ("int32", "uint8", "int32")
    ]
