"""Packs for a recipe of NeMo Automodel: its YAML names `Recipe`, `Packs` and `collate`.

PYTHONPATH=examples torchrun --nproc-per-node 8 -m nemo_automodel.cli.app examples/automodel_packs.yaml
"""

from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch.nn.functional import pad
from torch.utils.data import IterableDataset

import packtrain as pt
from packtrain.collate import IGNORE, PaddingFreeCollator
from packtrain.data import PackedDataset, pack_source
from packtrain.template import HFTemplate, load_processor
from packtrain.train import prove


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
    """A row as its models take it: restarting positions, no mask or cache, targets one place before."""
    row = PaddingFreeCollator()(packs)
    kept = {name: row[name] for name in ("input_ids", "position_ids", "use_cache")}
    return {**kept, "labels": pad(row["labels"][:, 1:], (0, 1), value=IGNORE)}


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Its recipe, with the isolation proof on the model that trains, behind its loading of a checkpoint."""

    def setup(self):
        super().setup()
        (model,) = self.model_parts
        prove(model, self.dataloader.dataset.packs, collate=collate)
