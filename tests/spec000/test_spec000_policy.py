"""Spec 000: dataset-level packing is static only; cap, long samples, waits and workers as it names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.errors import ConfigError, ForeignArtefactError, InputError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.report.contents import plan_words
from packtrain.train.config import load_config
from packtrain.train.runtime import check_runtime, resolve_runtime


@pytest.mark.spec(
    "000",
    "static is the default; `dynamic` fails fast and says what to set",
    key="`training.packing_mode`",
    api="`load_config`",
)
def test_stage_1_dynamic_packing_mode_fails_fast() -> None:
    with pytest.raises(ConfigError, match=r"packing_mode 'dynamic'.*hint: set training.packing_mode: static"):
        load_config({"training": {"packing": True, "packing_mode": "dynamic"}})
    assert load_config({"training": {"packing": True}}).training.packing_mode == "static"


@pytest.mark.spec(
    "000",
    "evaluation is packed by default, through the same pipeline, dropping nothing",
    key="`data.eval_packing`",
    api="`pipeline.prepare(validation=True)`",
)
def test_stage_1_eval_packing_defaults_to_static_pack_plan_behavior(
    prepared: Callable[..., Any], tmp_path: Path
) -> None:
    options = {"packing_drop_last": True, "packing_min_fill_ratio": 1.0, "dataloader_drop_last": True}
    train = prepared(**options)
    val = prepared(validation=True, **options)
    assert load_config({}).training.eval_packing is True
    assert (
        val.plan.spec == train.plan.spec and len(val.plan.ledger) == 0
    )  # the same pipeline, nothing dropped
    assert train.plan.ledger.counts()["under_filled"] > 0
    config = load_config({"global_max_length": 128, "training": options})
    whole = plan([100] * 7, pack_length=128)
    told = resolve_runtime(config, whole, 4, whole)
    assert (told.n_aligned_packs, told.dropped_packs) == (4, 3)
    assert told.eval is not None and told.eval["n_aligned_packs"] == 8 and told.eval["packing"] is True
    assert (told.eval["packing_drop_last"], told.eval["dataloader_drop_last"]) == (False, False)


def test_a_validation_plan_is_told_as_a_training_plan_is(caplog: pytest.LogCaptureFixture) -> None:
    """Over-long packs, fill, and what is left out by reason: in figures, log and the table of a run."""
    lengths = Lengths([60, 60, 300, 0, 8], status=[0, 0, 0, 2, 0], reasons={3: "missing_media"})
    told = resolve_runtime(load_config({"global_max_length": 128}), plan([100], 128), 1, plan(lengths, 128))
    assert told.eval is not None
    names = ("read", "samples", "packs", "over_long_packs", "longest_pack", "dropped")
    assert [told.eval[name] for name in names] == [5, 4, 2, 1, 300, 1]
    caplog.set_level("INFO")
    told.log()
    lines = dict(plan_words(told.eval))
    assert lines == {
        "over-long": "1 of 2 packs exceed 128 tokens, longest 300",
        "samples": "4 of 5 read",
        "packs": "2 packs of 128 tokens, 100.00% of slots are real tokens",
        "left out": "1 sample: missing_media 1",
    }
    assert all(f"validation {name}: {words}" in caplog.text for name, words in lines.items())
    several = dict(plan_words({"packs": told.eval, "b": told.eval}))  # sets by name
    assert several["samples (b)"] == several["samples (packs)"] == "4 of 5 read" and len(several) == 8
    assert plan_words({"n_raw_packs": 2, "dropped_by_reason": {}}) == []  # of an older version


@pytest.mark.spec(
    "000",
    "`eval_packing: false`: a row a sample",
    key="`data.eval_packing`",
    api="`pipeline.prepare(validation=True)`",
)
def test_eval_packing_can_be_switched_off(prepared: Callable[..., Any]) -> None:
    val = prepared(validation=True, eval_packing=False)
    assert len(val.plan) == len(val.source) and np.diff(val.plan.offsets).max() == 1


@pytest.mark.spec(
    "000",
    "the cap is `template.max_length`, else the model's; `packing_length` is rejected",
    key="`template.max_length`, `model.max_model_len`, `global_max_length`",
    api="`RunConfig.pack_length`",
)
def test_packing_length_is_refused_and_the_cap_comes_from_the_template_then_the_model() -> None:
    with pytest.raises(ConfigError, match=r"training.packing_length .*template.max_length"):
        load_config({"training": {"packing_length": 4096}})
    both = {"template": {"max_length": 10}, "model": {"max_model_len": 20}}
    assert load_config(both).pack_length == 10
    assert load_config({"model": {"max_model_len": 20}}).pack_length == 20
    filled = load_config({"global_max_length": 30, "model": {"max_model_len": 20}})
    assert (filled.pack_length, filled.model.max_model_len) == (30, 20)
    with pytest.raises(ConfigError, match="global_max_length"):
        check_runtime(load_config({}), 1)


@pytest.mark.spec(
    "000",
    "every option under its name, with what it refuses",
    key="`training.packing_*`",
    api="`load_config`",
)
@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (
            "packing_wait_timeout_s",
            [0, 0.01, 7200, 1e9],
            [-1, float("nan"), float("inf"), True, "long", None],
        ),
        ("packing_length_cache_persist_every", [1, 4096, None], [0, -1, 2.5, True, "often"]),
        ("packing_length_precompute_workers", [1, 8], [0, -2, 1.5, True, None, "many"]),
        ("effective_batch_size", [1, 32, None], [0, -1, 7.5, True]),
        ("packing_min_fill_ratio", [0.01, 1, 1.0], [0, -0.1, 1.01, float("nan"), True]),
        ("eval_packing", [True, False], ["perhaps", 3, None]),
        ("packing_allow_single_long", [True, False], ["perhaps", None]),
        ("packing_drop_last", [True, False], [2, None]),
        ("dataloader_drop_last", [True, False], ["perhaps", None]),
        ("repeat_loss", ["keep", "zero"], ["none", 0, None]),
        ("static_packing_cache", [{}, {"root_dir": "cache"}, {"root_dir": None}], ["cache", {"root": "x"}]),
    ],
)
def test_every_option_keeps_its_name_and_refuses_what_it_cannot_mean(
    key: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        load_config({"training": {key: value}})
    for value in bad:
        with pytest.raises(ConfigError, match=key):
            load_config({"training": {key: value}})


@pytest.mark.spec(
    "000",
    "defaults: wait 7200 s, 8 workers, adaptive flush, single long samples",
    key="`data.wait_timeout_s`, `data.measure_workers`, `data.persist_every`",
    api="`RunConfig`",
)
def test_defaults_are_the_specs() -> None:
    training = load_config({}).training
    assert training.packing_wait_timeout_s == 7200 and training.packing_length_precompute_workers == 8
    assert training.packing_length_cache_persist_every is None and training.packing_allow_single_long
    assert training.static_packing_cache.root_dir is None and training.repeat_loss == "keep"


@pytest.mark.spec(
    "000",
    "a sample of length >= cap: a pack of its own, or dropped, and logged",
    key="`data.long_samples`",
    api='`plan(long_samples=, long_rule=">=")`',
)
def test_a_sample_as_long_as_the_cap_is_alone_or_dropped_and_logged(
    prepared: Callable[..., Any], text_run: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """`length >= cap`, not `>`: allow_single_long decides, and both outcomes are told."""
    measured = prepared().lengths.tokens
    cap = int(np.sort(measured, kind="stable")[-6])
    long = np.flatnonzero(measured >= cap)
    values = text_run(cap=cap)
    for allowed in (True, False):
        values["training"].update(
            packing_allow_single_long=allowed, output_dir=f"{values['training']['output_dir']}x"
        )
        config = load_config(values)
        from packtrain.pipeline.prepare import prepare

        made = prepare(config, Path(config.training.output_dir)).plan
        told = resolve_runtime(config, made, 1)
        with caplog.at_level("INFO"):
            told.log()
        if allowed:
            alone = [made[p].tolist() for p in range(len(made)) if int(made.pack_tokens[p]) >= cap]
            assert (
                sorted(i for pack in alone if len(pack) == 1 for i in pack if measured[i] >= cap)
                == long.tolist()
            )
            assert f"{made.long_samples} long alone" in caplog.text
            assert told.figures()["long_samples"] == made.long_samples > 0
        else:
            assert made.ledger.ids.tolist() == long.tolist() and set(made.ledger.reasons) == {"over_long"}
            assert f"{len(long)} left out: {{'over_long': {len(long)}}}" in caplog.text
        for pack in range(len(made)):
            assert len(made[pack]) == 1 or int(made.pack_tokens[pack]) <= cap


@pytest.mark.spec(
    "000",
    "sources that change by epoch are refused; static mixtures are read",
    key="`data.mixture`",
    api="`sources.mixture`",
)
def test_fusion_schedules_are_refused_and_static_mixtures_are_accepted(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from packtrain.pipeline.prepare import prepare

    values = text_run(30)
    train = values["custom"].pop("train_jsonl")
    columns = values["custom"].pop("columns")
    entry = {"path": train, "weight": 1.5, "chat": {"columns": columns}}
    for name, top in (("moving", {"resample_each_epoch": True}), ("static", {})):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"seed": 1, **top, "sources": [entry]}))
    values["custom"]["fusion_config"] = str(tmp_path / "moving.yaml")
    config = load_config(values)
    with pytest.raises(ConfigError, match=r"resample_each_epoch.*no static plan.*fixed weights"):
        prepare(config, Path(config.training.output_dir))
    values["custom"]["fusion_config"] = str(tmp_path / "static.yaml")
    config = load_config(values)
    made = prepare(config, Path(config.training.output_dir))
    assert len(made.source) == 45 == len(made.plan.indices)
    values["custom"]["train_jsonl"] = train
    with pytest.raises(ConfigError, match=r"custom.train_jsonl and custom.fusion_config are both set"):
        prepare(load_config(values), tmp_path / "both")


@pytest.mark.spec(
    "000",
    "the fingerprint covers the source; another one fails fast",
    key="`data.cache`",
    api="`pipeline.measure`",
)
def test_a_cache_of_another_source_fails_fast(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Source identity is in the fingerprint: another file in the same output folder is named."""
    from packtrain.pipeline.prepare import prepare

    one, two = load_config(text_run(40)), load_config(text_run(41, name="other"))
    prepare(one, tmp_path / "run")
    with pytest.raises(InputError, match=r"lengths of another number of samples, source.*overwrite=True"):
        prepare(two, tmp_path / "run")


@pytest.mark.spec(
    "000",
    "evaluation covers every sample; what cannot be used is said",
    key="`data.long_samples` (of training alone)",
    api="`pipeline.prepare(validation=True)`",
)
def test_evaluation_keeps_long_samples_and_says_what_it_cannot_use(
    prepared: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """`packing_allow_single_long: false` drops over-long samples of training, none of the validation set."""
    options = {"cap": 40, "packing_allow_single_long": False}
    train = prepared(**options)
    gone = train.plan.ledger.counts()["over_long"]
    assert [row.getMessage() for row in caplog.records] == [
        f"{gone} of {len(train.source)} samples are in no pack: {{'over_long': {gone}}}"
    ]
    caplog.clear()
    val = prepared(validation=True, **options)
    assert len(val.plan.indices) == len(val.source) and not caplog.records
    values = Path(val.source.media_root) / "train.jsonl"
    rows = values.read_text().splitlines()
    values.write_text("\n".join([*rows[:-1], '{"question": "x"}']) + "\n")
    broken = prepared(validation=True, output_dir=values.parent / "other", **options)
    assert len(broken.plan.indices) == len(rows) - 1
    (line,) = [r.getMessage() for r in caplog.records if "validation samples" in r.getMessage()]
    assert line.startswith(f"1 of {len(rows)} validation samples cannot be used") and "malformed" in line


@pytest.mark.spec(
    "000",
    "packs of a step, realised: never more than there are",
    key="`training.effective_batch_size`",
    api="`resolve_runtime`",
)
def test_packs_of_a_step_are_never_more_than_there_are() -> None:
    config = load_config({"global_max_length": 128, "training": {"effective_batch_size": 64}})
    told = resolve_runtime(config, plan([100] * 7, pack_length=128), 4)
    assert (told.packs_per_step_requested, told.packs_per_step_realised, told.n_aligned_packs) == (64, 8, 8)


@pytest.mark.spec(
    "000",
    "another packer or length in one folder: the key that differs, and the way on",
    key="`data.packer`, `template.max_length`",
    api="`PackPlan.save`",
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packing_strategy": "ffd"}, "packer 'bfd' there, 'ffd' here"),
        ({"cap": 99}, "pack_length 128 there, 99 here"),
    ],
)
def test_another_plan_in_one_folder_names_the_key(
    prepared: Callable[..., Any], change: dict[str, Any], said: str
) -> None:
    prepared(packing_strategy="bfd")
    with pytest.raises(ForeignArtefactError) as told:
        prepared(**{"packing_strategy": "bfd", **change})
    assert said in str(told.value) and "training.output_dir" in str(told.value.hint)
