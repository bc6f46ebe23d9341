"""Rotary embeddings that look at the longest sample of a row: rows that mix are refused, others are exact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.collate import PaddingFreeCollator
from packtrain.collate.model_traits import Rotations, check_packs, rotations_of
from packtrain.data import PackedDataset, StreamingPackedDataset
from packtrain.errors import IsolationError
from packtrain.hosts.transformers import pack
from packtrain.pipeline.run import dry_run, run
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_config
from packtrain.train import prove
from packtrain.train.config import load_config

torch.set_num_threads(1)

LIMIT = 16


def phi3(**change: Any) -> Any:
    """Two layers; rotations of its kind change above 16 tokens."""
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "original_max_position_embeddings": LIMIT,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [float(2 + n) for n in range(8)],
        },
        **change,
    }
    if not hasattr(transformers.PretrainedConfig(), "rope_parameters"):  # before transformers 5
        scaling = dict(settings.pop("rope_parameters"))
        settings["rope_theta"] = scaling.pop("rope_theta")
        settings["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    return transformers.Phi3Config(**settings)


def dynamic() -> Any:
    """A Llama whose rotations grow with the longest sample from 16 tokens on."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LIMIT,
    )  # fmt: skip
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {"rope_theta": 1e4, **scaling}
    else:  # before transformers 5
        config.rope_scaling = scaling
    return config


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = False
    return model


def sample(number: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(3, 400, (tokens,), generator=torch.Generator().manual_seed(number))
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(tokens),
        "sample_id": number,
    }


@pytest.fixture(scope="module", params=[phi3, dynamic], ids=["longrope", "dynamic"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield made(request.param())


def apart(model: Any, lengths: list[int], before: int) -> float:
    """Largest difference of a row from its samples alone; a row of `before` tokens precedes each."""
    blind = PaddingFreeCollator("qwen3")  # of another model: it knows nothing of its rotations
    samples = [sample(number, tokens) for number, tokens in enumerate(lengths)]

    def logits(members: list[dict[str, Any]]) -> torch.Tensor:
        with torch.no_grad():
            if before:
                model(**blind([[sample(99, before)]]))
            found: torch.Tensor = model(**blind([members])).logits[0]
        return found

    alone = torch.cat([logits([one]) for one in samples])
    return float((logits(samples) - alone).abs().max())


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 28), min_size=1, max_size=4),
    before=st.sampled_from([0, 4, 12]),
)
def test_rows_that_are_not_refused_are_as_their_samples_alone(
    model: Any, lengths: list[int], before: int
) -> None:
    collate = PaddingFreeCollator(model)
    try:
        collate([[sample(number, tokens) for number, tokens in enumerate(lengths)]])
    except IsolationError as refused:
        assert len(lengths) > 1 and max(lengths) >= LIMIT and "\n" not in str(refused)
        return
    assert apart(model, lengths, before) < 1e-5


@pytest.mark.parametrize(
    ("make", "lengths"), [(phi3, [8, 20]), (phi3, [16, 17]), (dynamic, [8, 20]), (dynamic, [20, 28])]
)
def test_rows_that_are_refused_differ(make: Callable[[], Any], lengths: list[int]) -> None:
    model = made(make())
    assert apart(model, lengths, 0) > 1e-4
    members = [sample(number, tokens) for number, tokens in enumerate(lengths)]
    with pytest.raises(
        IsolationError, match=rf"sample 1 of {lengths[1]} tokens beside sample 0 of {lengths[0]}"
    ):
        PaddingFreeCollator(model)([members])


def test_after_a_long_row_a_short_one_is_turned_as_ever() -> None:
    for make in (phi3, dynamic):
        assert apart(made(make()), [8, 12], 40) < 1e-5


def test_what_is_not_trained_may_stand_beside_a_longer_sample() -> None:
    model = made(phi3())
    assert PaddingFreeCollator(model, 24)([[sample(0, 20)]]).lengths == (20, 4)
    with pytest.raises(IsolationError, match="padding of 20 tokens beside sample 0 of 4"):
        PaddingFreeCollator(model, 24)([[sample(0, 4)]])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), cap=st.integers(8, 60), kind=st.booleans()
)
def test_a_plan_is_refused_where_one_of_its_rows_is(lengths: list[int], cap: int, kind: bool) -> None:
    config = phi3() if kind else dynamic()
    rotations = rotations_of(config)
    assert rotations is not None
    packs = plan(Lengths(lengths), pack_length=cap)
    held = [np.asarray(lengths)[ids] for ids in packs]
    bad = [number for number, one in enumerate(held) if rotations.mixes(one.max(), one.min())]
    if not bad:
        check_packs(config, packs, lengths)
        return
    with pytest.raises(IsolationError, match=rf"pack {bad[0]}\b.*template.max_length") as refused:
        check_packs(config, packs, lengths)
    assert cap > rotations.limit and "\n" not in str(refused.value)


def test_other_rotations_look_at_positions_alone() -> None:
    assert rotations_of(phi3()) == Rotations("longrope", LIMIT, "phi3")
    assert rotations_of(dynamic()) == Rotations("dynamic", LIMIT - 1, "llama")
    for name in ("tiny:qwen3", "tiny:mistral", "tiny:qwen2_5_vl", "tiny:gemma3"):
        assert rotations_of(tiny_config(name)) is None
    assert rotations_of(None) is None and rotations_of("phi3") is None


# ------------------------------------------------------------------------------------- entrances
def test_a_run_and_its_dry_run_refuse_the_plan_and_nothing_is_trained(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    made(phi3(original_max_position_embeddings=48)).save_pretrained(tmp_path / "model")
    values = text_run()
    values["model"]["name_or_path"] = str(tmp_path / "model")
    told = []
    for begin in (dry_run, run):
        (tmp_path / "run.yaml").write_text(json.dumps(values))
        with pytest.raises(IsolationError, match=r"pack \d+.* beside sample .*\(longrope\)") as refused:
            begin(load_config(tmp_path / "run.yaml"))
        told.append(str(refused.value))
    assert told[0] == told[1] and not list(tmp_path.rglob("train_log.jsonl"))


def trainer(model: Any, rows: list[dict[str, Any]], folder: Path) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, per_device_train_batch_size=1,
    )  # fmt: skip
    keep = ("input_ids", "labels")

    def collate(found: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: torch.stack([torch.as_tensor(one[key]) for one in found]) for key in keep}

    return transformers.Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)


def plain(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {key: sample(number, tokens)[key].tolist() for key in ("input_ids", "labels")}
        for number, tokens in enumerate(lengths)
    ]


def test_trainers_are_refused_when_they_are_packed(tmp_path: Path) -> None:
    model = made(phi3())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(IsolationError, match=r"\(longrope\)"):
        pack(trainer(model, plain([8, 20, 9, 30]), tmp_path), pack_length=64)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    sound = pack(trainer(model, plain([8, 20, 9, 30]), tmp_path / "sound"), pack_length=LIMIT)
    sound.train()
    assert sound.state.global_step == 2


def test_a_stream_is_refused_at_the_row_before_its_step(tmp_path: Path) -> None:
    model = made(phi3())
    data = StreamingPackedDataset([sample(n, k) for n, k in enumerate([6, 30])], None, pack_length=40)
    packs = pack(trainer(model, data, tmp_path))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(IsolationError, match=r"a row holds sample 1 of 30 tokens beside sample 0 of 6"):
        packs.train()
    assert packs.state.global_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loop_of_packs_is_refused_at_the_row_and_the_proof_holds_on_either_side() -> None:
    model = made(phi3())
    short, long = [sample(0, 6), sample(1, 9)], [sample(2, 20), sample(3, 30)]
    assert prove(model, [short, long]).ok
    assert prove(model, [long, long]).ok
    data = PackedDataset(plan(Lengths([6, 30]), pack_length=64), [sample(0, 6), sample(1, 30)])
    with pytest.raises(IsolationError, match="sample 1 of 30 tokens beside sample 0 of 6"):
        PaddingFreeCollator(model)([data[0]])
