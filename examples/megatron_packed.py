"""Packs of a plan as packed data of Megatron-Bridge: `training.npy` (0.3) or `training.idx.parquet` (newer).

python examples/megatron_packed.py MODEL train.jsonl OUT

In its recipe: `packed_sequence_specs.packed_train_data_path: OUT/training.npy`. `loss_mask` is 1 where the
next token is trained, 0 at the end of every sample; `seq_start_id` holds where samples begin.
"""

import argparse
from pathlib import Path

import numpy as np

import packtrain as pt
from packtrain.collate import IGNORE
from packtrain.data import PackedDataset
from packtrain.template import HFTemplate, load_processor


def rows_of(packs):
    """A row of Megatron-Bridge for each pack."""
    for pack in packs:
        samples = [[np.asarray(one[name]) for name in ("input_ids", "labels")] for one in pack]
        trained = [np.append(labels[1:] != IGNORE, False) for _, labels in samples]
        starts = np.cumsum([0, *(len(ids) for ids, _ in samples)])[:-1]
        yield {
            "input_ids": np.concatenate([ids for ids, _ in samples]).tolist(),
            "loss_mask": np.concatenate(trained).astype(int).tolist(),
            "seq_start_id": starts.tolist(),
        }


def main(model, data, out, *, pack_length=4096, parquet=False):
    out, template, source = Path(out), HFTemplate(load_processor(str(model))), pt.open_chats(data)
    lengths = pt.measure(source, template, out / "lengths")
    plan = pt.plan(lengths, pack_length=pack_length)
    rows = list(rows_of(PackedDataset(plan, source, template.encode, lengths=lengths)))
    if parquet:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "seq_start_id": pa.int32()}
        schema = pa.schema([(name, pa.list_(kind)) for name, kind in types.items()])
        path = out / "training.idx.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=1000)
        return path
    path = out / "training.npy"
    np.save(path, np.array(rows, dtype=object))
    return path


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    for name in ("model", "data", "out"):
        words.add_argument(name)
    words.add_argument("--parquet", action="store_true")
    given = words.parse_args()
    print(main(given.model, given.data, given.out, parquet=given.parquet))
