"""Run in ms-swift's environment: `python swift_run.py SPEC.json`; writes what it saw to spec["report"].

spec: args (of `swift sft`), plugin (bool), install (options), order (sample ids: the plain host reads them
so), kind (of packs that are made: its name and their folder), break_at (a row that fails when it is
fetched), best (compare the weights at the end with the best checkpoint's).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402
from transformers import Trainer  # noqa: E402

torch.set_num_threads(1)
SPEC = json.loads(Path(sys.argv[1]).read_text())
SEEN: dict = {"losses": {}, "ids": [], "evals": [], "first_step_s": None}
STARTED = time.perf_counter()


def record() -> None:
    step = Trainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        loss = step(self, model, inputs, *args, **kwargs)
        SEEN["losses"].setdefault(str(self.state.global_step), []).append(float(loss))
        if SEEN["first_step_s"] is None:
            SEEN["first_step_s"] = time.perf_counter() - STARTED
        return loss

    Trainer.training_step = training_step


def note_best() -> None:
    train = Trainer.train

    def whole(self, *args, **kwargs):
        told = train(self, *args, **kwargs)
        best = Path(self.state.best_model_checkpoint)
        held = type(self.model).from_pretrained(best, dtype="float32").state_dict()
        found = self.model.state_dict()
        SEEN["best"] = [best.name, all(torch.equal(value, found[key]) for key, value in held.items())]
        return told

    Trainer.train = whole


def reorder(order: list[int]) -> None:
    from swift.dataloader.shard import BatchSamplerShard

    def batches(self):
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    BatchSamplerShard.__iter__ = batches


def watch() -> None:
    """Note the samples of every training pack that is collated, in the process that trains."""
    from packtrain.hosts.ms_swift import SwiftMixin

    make = SwiftMixin.get_train_dataloader

    def loader(self, skip_batches=0):
        collate = self.packs_collator

        def noting(packs):
            SEEN["ids"] += [member["sample_id"] for pack in packs for member in pack]
            return collate(packs)

        self.packs_collator = noting
        try:
            return make(self, skip_batches)
        finally:
            self.packs_collator = collate

    SwiftMixin.get_train_dataloader = loader


def made_packs() -> dict:
    """The source of a kind, made where its rank is known."""
    if "kind" not in SPEC:
        return {}
    sys.path.append(str(Path(__file__).resolve().parents[1] / "integrations"))
    from kinds import open_kind

    kind, folder = SPEC["kind"]
    return {"source": lambda: open_kind(kind, Path(folder)), "balance": None}


def fail_at(row: int) -> None:
    from packtrain.errors import SampleError
    from packtrain.hosts.ms_swift import SwiftPacks

    fetch = SwiftPacks._fetch

    def broken(self, sample_id):
        encode = self.encode
        if sample_id == row:
            self.encode = gone
        try:
            return fetch(self, sample_id)
        finally:
            self.encode = encode

    def gone(sample):
        raise SampleError("missing_media", "the disk is gone")

    SwiftPacks._fetch = broken


def main() -> None:
    record()
    if SPEC.get("plugin"):
        from packtrain.hosts.ms_swift import install

        install(**SPEC.get("install", {}), **made_packs())
        if "kind" not in SPEC:
            watch()
        if SPEC.get("break_at") is not None:
            fail_at(SPEC["break_at"])
    if SPEC.get("best"):
        note_best()
    if SPEC.get("order"):
        reorder(SPEC["order"])
    from swift.pipelines import sft_main

    made = sft_main(SPEC["args"])
    SEEN["log"] = [row for row in made["log_history"]]
    rank = int(os.environ.get("RANK", "0"))
    path = Path(SPEC["report"])
    path.with_name(f"{path.name}.{rank}").write_text(json.dumps(SEEN))


if __name__ == "__main__":
    main()
