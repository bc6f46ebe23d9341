"""Exports read by the real Megatron-Energon, 5.0.0 and 7.4.1, each in its own environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from venvs import build, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "export"))
from export_sets import NAMES, Set, captions, records
from llava_sets import CAPTIONS, MIXED, VQA, planned
from real_sets import KINDS, RealSet, row_facts

from packtrain.collate import PaddingFreeCollator
from packtrain.data import open_packs
from packtrain.pipeline.export import export
from packtrain.store.shards import PackFiles

pytestmark = pytest.mark.hosts

VERSIONS = {"energon5": "megatron-energon==5.0.0", "energon7": "megatron-energon==7.4.1"}

#: For real templates inside energon.
PROCESSORS = ["transformers==5.24.0", "jinja2"]

#: Reads all packs once, through the mixin, and prints one JSON line a row.
READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[2])
from export_sets import Words
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from packtrain.collate import PaddingFreeCollator
from packtrain.hosts.energon import PackedTaskEncoder

class Encoder(PackedTaskEncoder, DefaultTaskEncoder):
    pass

class Longer(Words):
    def encode(self, sample):
        encoded = super().encode(sample)
        return {**encoded, "input_ids": encoded["input_ids"].repeat(2)}

words = Longer() if "longer" in sys.argv else Words()
rank, world = int(sys.argv[3]), int(sys.argv[4])
dataset = get_train_dataset(
    sys.argv[1], batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None,
    worker_config=WorkerConfig(rank=rank, world_size=world, num_workers=0),
    task_encoder=Encoder(words.encode, PaddingFreeCollator()),
)
loader = get_loader(dataset)
count = int(sys.argv[5])
if "longer" in sys.argv:
    try:
        print("READ", next(iter(loader)))
    except Exception as error:
        chain = []
        while error is not None:
            chain.append(f"{type(error).__name__}: {str(error)[:300]}")
            error = error.__cause__ or error.__context__
        print("STOP", " <- ".join(chain))
    raise SystemExit
for number, row in zip(range(count), loader):
    print("ROW", json.dumps({
        "ids": list(row.sample_ids), "tokens": row["input_ids"].reshape(-1).tolist(),
        "labels": row["labels"].reshape(-1).tolist(), "cu": row["cu_seq_lens_q"].tolist(),
        "positions": row["position_ids"].reshape(-1).tolist(),
    }))
"""

#: Reads a real set with its real template, through the mixin.
READ_REAL = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[2])
from real_sets import row_facts
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from packtrain.collate import PaddingFreeCollator
from packtrain.hosts.energon import PackedTaskEncoder
from packtrain.template import HFTemplate, load_processor

class Encoder(PackedTaskEncoder, DefaultTaskEncoder):
    pass

template = HFTemplate(load_processor(sys.argv[3]), allow_dropped=("tools", "tool_calls"))
dataset = get_train_dataset(
    sys.argv[1], batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None,
    worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    task_encoder=Encoder(template.encode, PaddingFreeCollator()),
)
for _, row in zip(range(int(sys.argv[4])), get_loader(dataset)):
    print("ROW", json.dumps(row_facts(row)))
"""

#: `packtrain verify` where the library is installed; then what it says about an export that was changed.
VERIFY = """
import json, sys
from pathlib import Path
from packtrain.cli._app import main
from packtrain.errors import PacktrainError
from packtrain.hosts.energon import read_through_energon
out = Path(sys.argv[1])
try:
    main(["verify", str(out), "--json"])
except SystemExit as stop:
    assert not stop.code, stop.code
def told(what):
    try:
        print("ROW", json.dumps([what, read_through_energon(out)]))
    except PacktrainError as error:
        print("ROW", json.dumps([what, f"{type(error).__name__}: {error}"]))
told("whole")
def changed(name, data):
    path = out / name
    held = path.read_bytes()
    path.write_bytes(data(held))
    told(name)
    path.write_bytes(held)
changed("pack-000001-000.tar.idx", lambda held: b"")
changed("pack-000002-000.tar", lambda held: held[:600] + bytes([held[600] ^ 1]) + held[601:])
changed(".nv-meta/split.yaml", lambda held: held.replace(b"  - pack-000000-000.tar\\n", b""))
(out / ".nv-meta" / "dataset.yaml").unlink()
told("no dataset.yaml")
"""

#: What the library itself writes beside the tars, and the bytes it reads.
PREPARE = """
import sys
from pathlib import Path
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
names = sorted(path.name for path in Path(sys.argv[1]).glob("*.tar"))
BaseWebdatasetFactory.prepare_dataset(
    EPath(sys.argv[1]), names, split_parts_patterns=[("train", "pack-.*")], tar_index_only=False, workers=1,
    progress_fn=lambda els, total: els,
)
"""

#: The training side of LLaVA-OneVision-1.5: its sample class, and its restoring of the members of a pack.
READ_LLAVA = """
import json, sys, types, warnings
from dataclasses import dataclass
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[2])
import megatron.energon as energon
from llava_encoders import encoded
from packtrain.template import load_processor

@dataclass
class PackedCaptioningSample(energon.Sample):
    images: list
    prompts: list
    captions: list

for name in ("aiak_training_llm", "aiak_training_llm.data", "aiak_training_llm.data.multimodal"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].PackedCaptioningSample = PackedCaptioningSample
processor, gate, count = load_processor(sys.argv[3]), sys.argv[4], int(sys.argv[5])

class Encoder(energon.DefaultTaskEncoder):
    if hasattr(energon, "SampleDecoder"):
        decoder = energon.SampleDecoder(image_decode="pilrgb")

    def encode_sample(self, sample):
        held = {name: getattr(sample, name) for name in ("images", "prompts", "captions")}
        return {"key": sample.__key__, "ids": encoded(held, processor, gate)}

    def batch(self, samples):
        return samples[0]

    def encode_batch(self, batch):
        return batch

for name in ("encode_sample", "batch", "encode_batch"):
    getattr(Encoder, name).__stateless__ = True
options = {} if hasattr(energon, "SampleDecoder") else {"image_decode": "pilrgb"}
dataset = energon.get_train_dataset(
    sys.argv[1], batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None,
    worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
    task_encoder=Encoder(), **options,
)
for _, pack in zip(range(count), energon.get_loader(dataset)):
    print("ROW", json.dumps([pack["key"].split("/")[-1], pack["ids"]]))
"""

LLAVA = """
import importlib.util, json, sys, tarfile
spec = importlib.util.spec_from_file_location("sample_loader", sys.argv[1] + "/.nv-meta/sample_loader.py")
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*.tar")):
    packs = {}
    for info in (tar := tarfile.open(path)):
        key, _, name = info.name.partition(".")
        packs.setdefault(key, {})[name] = tar.extractfile(info).read()
    for key, members in packs.items():
        members["json"] = json.loads(members["json"])
        made = module.sample_loader({"__key__": key, "__restore_key__": (key,), **members})
        assert len(made["images"]) == len(made["prompts"]) == len(made["captions"])
        print("ROW", json.dumps([key, [None if not one else len(one) for one in made["images"]]]))
"""


@pytest.fixture(scope="module", params=list(VERSIONS))
def python(request: pytest.FixtureRequest) -> Path:
    return build(request.param, [VERSIONS[request.param], *PROCESSORS], no_deps=["torchvision==0.28.0"])


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Set]:
    def make(rows: list[Any], cap: int = 64) -> Set:
        return Set(tmp_path / "set", rows, cap, NAMES)

    return make


def rows_of(text: str) -> list[Any]:
    return [json.loads(line[4:]) for line in text.splitlines() if line.startswith("ROW ")]


HELPERS = Path(__file__).resolve().parents[1] / "export"


@pytest.mark.parametrize("kind", KINDS)
def test_real_sets_give_the_same_rows(python: Path, data: Path, tmp_path: Path, kind: str) -> None:
    """Ids, token ids, labels, positions and pixels out of energon are those of training without shards."""
    from packtrain.template import HFTemplate, load_processor

    processor = data / "processors" / "qwen2_5_vl"
    dropped = ("tools", "tool_calls")  # its chat template prints no tools
    made = RealSet(kind, data, tmp_path, HFTemplate(load_processor(str(processor)), allow_dropped=dropped))
    out = tmp_path / "out"
    export(made.plan_folder, out, format="energon", source=made.source, maxcount=2)
    collate = PaddingFreeCollator()
    want = [row_facts(collate([[made.encoded[i] for i in pack.tolist()]])) for pack in made.plan]
    read = rows_of(run(python, READ_REAL, out, HELPERS, processor, len(want), ours=True))
    assert len(read) == len(want)
    assert {tuple(row["ids"]): row for row in read} == {tuple(row["ids"]): row for row in want}


def test_verify_reads_through_the_library(python: Path, made: Callable[..., Set]) -> None:
    held = made(records(NAMES, 40))
    out = held.folder / "out"
    export(held.plan_folder, out, format="energon", source=held.source, maxcount=4)
    told = run(python, VERIFY, out, ours=True)
    checks = json.loads(told.splitlines()[0])["checks"]
    version = VERSIONS["energon5" if "energon5" in str(python) else "energon7"].partition("==")[2]
    assert checks["energon"] == f"14 packs, each once and whole, by megatron-energon {version}"
    said = dict(rows_of(told))
    assert said.pop("whole") == checks["energon"]
    assert len(said) == 4
    for what, error in said.items():
        assert error.startswith(("LawError: ", "ChecksumError: ")), (what, error)
    assert "ps_0000000" in said["pack-000002-000.tar"]


@pytest.mark.parametrize("layout", ["packtrain", "prompts"])
def test_two_ranks_read_every_pack_once(python: Path, made: Callable[..., Set], layout: str) -> None:
    held = made(records(NAMES, 40))
    out = held.folder / "out"
    options = {"prompts": "prompts"} if layout == "prompts" else {}
    export(held.plan_folder, out, format="energon", source=held.source, maxcount=4, options=options)
    packs = open_packs(out, held.template.encode)
    collate = PaddingFreeCollator()
    want = {}
    for number in range(len(packs)):
        row = collate([packs[number]])
        want[tuple(row.sample_ids)] = {
            "ids": list(row.sample_ids),
            "tokens": row["input_ids"].reshape(-1).tolist(),
            "labels": row["labels"].reshape(-1).tolist(),
            "cu": row["cu_seq_lens_q"].tolist(),
            "positions": row["position_ids"].reshape(-1).tolist(),
        }
    read = []
    for rank in (0, 1):
        read += rows_of(run(python, READ, out, HELPERS, rank, 2, len(packs) // 2, ours=True))
    assert len(read) == len(packs) == 14
    assert {tuple(row["ids"]): row for row in read} == want


def test_a_pack_that_grew_stops_the_loader(python: Path, made: Callable[..., Set]) -> None:
    held = made(records(NAMES, 20))
    out = held.folder / "out"
    export(held.plan_folder, out, format="energon", source=held.source)
    told = run(python, READ, out, HELPERS, 0, 1, 2, "longer", ours=True)
    assert "STOP FatalSampleError" in told and "PackFault: sample" in told and "was planned with" in told


def test_the_library_finds_the_same_places(python: Path, made: Callable[..., Set]) -> None:
    held = made(records(NAMES, 40))
    out = held.folder / "out"
    export(held.plan_folder, out, format="energon", source=held.source, maxcount=4)
    ours = {path.name: path.read_bytes() for path in out.glob("*.idx")}
    assert len(ours) == 4
    for path in out.glob("*.idx"):
        path.unlink()
    run(python, PREPARE, out)
    assert {path.name: path.read_bytes() for path in out.glob("*.idx")} == ours


@pytest.mark.spec(
    "003",
    "its sample class and loader through energon, and its restoring of captions, VQA and turns",
    key="`export.layout: llava`",
    api='`export(options={"layout": "llava"})`',
)
@pytest.mark.parametrize(
    ("rows", "task", "gate"),
    [(CAPTIONS, "captions", "captions"), (VQA, "vqa", "vqa"), (MIXED, "multi_turn", "mixed")],
    ids=["captions", "vqa", "multi_turn"],
)
def test_llava_restores_what_our_reader_gives(
    python: Path, data: Path, tmp_path: Path, rows: list[Any], task: str, gate: str
) -> None:
    """Every pack once through energon; its members, restored as in training, are our reader's tokens."""
    from packtrain.template import HFTemplate, load_processor

    folder = data / "processors" / "qwen2_5_vl"
    processor = load_processor(str(folder))
    template = HFTemplate(processor)
    source, _, plan = planned(tmp_path / "set", rows, template)
    out = tmp_path / "out"
    figures = export(plan, out, format="energon", source=source, options={"layout": "llava"}, maxcount=2)
    assert figures["task"] == task
    back = open_packs(out, template.encode)
    read = dict(rows_of(run(python, READ_LLAVA, out, HELPERS, folder, gate, len(back), ours=True)))
    assert sorted(read) == [f"ps_{number:08d}" for number in range(len(back))]
    line = processor.tokenizer("\n")["input_ids"]
    pad, end = processor.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_end|>"])
    said = 0
    for number in range(len(back)):
        for member, theirs in zip(back[number], read[f"ps_{number:08d}"], strict=True):
            ours = member["input_ids"].tolist()
            if gate == "captions":  # the image and the caption alone: no turns of a chat
                assert theirs.count(pad) == ours.count(pad) > 0
                caption = theirs[theirs.index(end) + 1 :]
                trained = [token for token in member["labels"].tolist() if token != -100]
                assert caption == trained[: len(caption)] and trained[len(caption) :] in ([], line)
            else:
                assert theirs == (ours[: -len(line)] if gate == "vqa" else ours)
            said += 1
    assert said == len(rows)


def test_the_llava_loader(made: Callable[..., Set]) -> None:
    held = made(captions(NAMES, 12, "\nwhat?"))
    out = held.folder / "out"
    export(held.plan_folder, out, format="energon", source=held.source, options={"layout": "llava"})
    packs = PackFiles(out)
    record = packs.record(0)
    assert record["images"][0] == "img0.jpg" and "prompts" in record and "prompt" not in record
    made_rows = rows_of(run(Path(sys.executable), LLAVA, out))
    want = [[len(m[n]) for n in packs.record(i, m)["images"]] for i, m in packs.stream()]
    assert [row[1] for row in made_rows] == want
