"""A config of torchtitan that trains on packs. Lines that packtrain adds end in `# packtrain`.

torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_config --config packed

Measured and planned before, with `packtrain measure` and `packtrain plan`; MODEL, ROWS and PLAN say where.
"""

import os

from torchtitan.models.qwen3.config_registry import qwen3_0_6b

import packtrain as pt
from packtrain.data import PackedDataset
from packtrain.hosts.torchtitan import pack  # packtrain
from packtrain.template import HFTemplate, load_processor

MODEL, ROWS, PLAN = (os.environ.get(name, "") for name in ("MODEL", "ROWS", "PLAN"))


def packs():
    """The packs of the plan, on every rank."""
    template = HFTemplate(load_processor(MODEL))
    return PackedDataset(pt.PackPlan.load(PLAN), pt.open_chats(ROWS), template.encode)


def packed(config=None):
    config = config or qwen3_0_6b()
    config.training.seq_len = pt.PackPlan.load(PLAN).spec.pack_length
    return pack(config, packs)  # packtrain
