"""Packs for a recipe of NeMo Automodel: its YAML names `Packs` and `collate`.

automodel examples/automodel_packs.yaml
"""

from torch.nn.functional import pad
from torch.utils.data import IterableDataset

import packtrain as pt
from packtrain.collate import IGNORE, PaddingFreeCollator
from packtrain.data import PackedDataset, pack_source
from packtrain.template import HFTemplate, load_processor


class Packs(IterableDataset):
    """The packs of a plan. Automodel asks for the share of its rank, and keeps where that stands."""

    def __init__(self, model, rows, plan):
        template = HFTemplate(load_processor(model))
        self.data = PackedDataset(pt.PackPlan.load(plan), pt.open_chats(rows), template.encode)

    def shard(self, world_size, rank):
        self.packs = pack_source(self.data, rank=rank, world_size=world_size)
        self.state_dict, self.load_state_dict = self.packs.state_dict, self.packs.load_state_dict
        return self

    def __len__(self):
        return len(self.packs)

    def __iter__(self):
        yield from self.packs
        self.packs.set_epoch(self.packs.epoch + 1)


def collate(packs):
    """A row as its models take it: restarting positions, no mask, targets at the positions before."""
    row = PaddingFreeCollator()(packs)
    labels = pad(row["labels"][:, 1:], (0, 1), value=IGNORE)
    return {"input_ids": row["input_ids"], "position_ids": row["position_ids"], "labels": labels}
