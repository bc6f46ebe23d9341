"""The main job on the demo: every sample accounted for, packed equals unpacked, equal plans."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.cli import main
from packtrain.errors import DriftError, ForeignArtefactError, InputError, PlanError
from packtrain.pipeline.inputs import Inputs
from packtrain.pipeline.plan import ledger_rows
from packtrain.pipeline.prepare import prepare
from packtrain.pipeline.run import run
from packtrain.planning.packplan import PackPlan
from packtrain.testing.demo.resolve import resolve_demo
from packtrain.train.config import load_config


def faults() -> dict[str, list[int]]:
    return json.loads((resolve_demo("demo:formulas").parent / "faults.json").read_text())


def again(config: Any, folder: Path, **changes: Any) -> Any:
    values = config.to_dict()
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        if key:
            values[section][key] = value
        else:
            values[section] = value
    values["training"]["output_dir"] = str(folder)
    return load_config(values)


def test_the_ledger_is_the_planted_faults(finished: Any) -> None:
    planted = {i: reason for reason, ids in faults().items() for i in ids}
    ledger = finished.result.plan.ledger
    assert dict(zip(ledger.ids.tolist(), ledger.reasons, strict=True)) == planted
    assert set(planted.values()) == {
        "missing_media",
        "empty",
        "over_long",
        "truncated_media",
        "placeholder_mismatch",
    }
    rows = ledger_rows(
        finished.result.plan,
        finished.folder / "lengths",
        Inputs.of_config(finished.config).open_source().where,
    )
    assert all(row["where"] == f"train.jsonl:{row['id'] + 1}" and row["detail"] for row in rows)


def test_every_record_is_packed_or_in_the_ledger(finished: Any) -> None:
    plan = finished.result.plan
    records = len(resolve_demo("demo:formulas").read_text(encoding="utf-8").splitlines())
    assert sorted([*plan.indices.tolist(), *plan.ledger.ids.tolist()]) == list(range(records))


def test_packed_loss_is_the_unpacked_loss(finished: Any) -> None:
    loss = finished.result.figures["loss"]
    assert abs(loss["packed"] - loss["unpacked"]) <= 1e-4
    assert finished.result.figures["proof"] > 0


def test_the_loss_falls(finished: Any) -> None:
    figures = finished.result.figures
    assert figures["loss_last"] <= 0.7 * figures["loss_first"]


def test_the_run_is_written_down(finished: Any) -> None:
    stored = json.loads((finished.folder / "run.json").read_text())
    assert stored["result"]["checksum"] == finished.result.plan.checksum
    assert load_config(stored["config"]) == finished.config
    page = (finished.folder / "report.html").read_text(encoding="utf-8")
    assert finished.result.plan.checksum[:12] in page and "placeholder_mismatch" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)


def test_the_page_and_show_say_the_same_figures(
    finished: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """report.html, `show --json` and `show --html` of the run: one set of figures, the log's own."""

    def figures_of(page: Path) -> Any:
        text = page.read_text(encoding="utf-8")
        return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])  # type: ignore[index]

    with pytest.raises(SystemExit):
        main(["show", str(finished.folder), "--json", "--html", str(tmp_path / "again.html")])
    told = json.loads(capsys.readouterr().out)["report"]
    assert told == figures_of(finished.folder / "report.html") == figures_of(tmp_path / "again.html")
    rows = [json.loads(line) for line in (finished.folder / "train_log.jsonl").read_text().splitlines()]
    for name in ("loss", "step_s", "data_wait_s", "tokens_per_s", "eval_loss"):
        assert told["curves"].get(name, []) == [[row["step"], row[name]] for row in rows if name in row]
    assert len(told["curves"]["step_s"]) == len(told["curves"]["loss"]) > 3
    assert told["stats"] == json.loads(json.dumps(finished.result.plan.stats()))
    balance, forecast = told["steps"]["balance"], told["steps"]["forecast"]
    assert balance["world_size"] == 1 and balance["max_over_mean"] == balance["max_over_mean_before"] == 1
    assert forecast["tokens_per_step"] == pytest.approx(forecast["measured_tokens_per_step"], rel=1e-6)
    text = (finished.folder / "report.html").read_text(encoding="utf-8")
    assert "train.jsonl:" in text and "packtrain show" in text and "&#34;messages&#34;" in text


def test_show_prints_a_sample_with_its_record(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan = finished.result.plan
    left, reason = next(iter(plan.ledger))
    for folder in (finished.folder, finished.folder / "plan"):
        for sample, pack in ((int(plan.indices[-1]), len(plan) - 1), (left, None)):
            with pytest.raises(SystemExit):
                main(["show", str(folder), "--sample", str(sample), "--json"])
            told = json.loads(capsys.readouterr().out)
            assert told["pack"] == pack and told["where"].endswith(f"train.jsonl:{sample + 1}")
            assert told["reason"] == (reason if pack is None else None)
            lines = (
                Path(told["where"].rpartition(":")[0]).read_text().splitlines()
                if "/" in told["where"]
                else None
            )
            assert isinstance(told["record"], dict) and (
                lines is None or told["record"] == json.loads(lines[sample])
            )
    with pytest.raises(SystemExit) as stopped:
        main(["show", str(finished.folder), "--sample", "320"])
    assert stopped.value.code == 2 and "0 to 319" in capsys.readouterr().err


def test_losses_of_a_step_are_those_of_the_samples_that_which_names(
    finished: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace's steps are the plan's: the same samples, whose token mean is the logged loss."""

    def which(*words: Any) -> str:
        with pytest.raises(SystemExit) as done:
            main(["which", *map(str, words)])
        assert not done.value.code
        return capsys.readouterr().out

    rows = [json.loads(line) for line in (finished.folder / "train_log.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "loss" in row)
    assert first["step"] == 1
    for step in (0, 11, 23):
        told = json.loads(which(finished.folder, "--step", step, "--losses", "--json"))
        assert sorted(row["id"] for row in told["losses"]) == told["ids"] and told["run_step"] == step
        assert all(row["row"] and row["tokens"] > 0 for row in told["losses"])
        losses = [row["loss"] for row in told["losses"]]
        assert losses == sorted(losses, reverse=True)
        if step == 0:
            tokens = sum(row["tokens"] for row in told["losses"])
            mean = sum(row["loss"] * row["tokens"] for row in told["losses"]) / tokens
            assert first["loss"] == pytest.approx(mean, abs=1e-3)
    assert "samples, loss and supervised tokens" in which(finished.folder, "--step", 23, "--losses")


def test_two_runs_give_the_same_plan(finished: Any, tmp_path: Path) -> None:
    twin = prepare(again(finished.config, tmp_path / "twin"), tmp_path / "twin")
    assert twin.plan.checksum == finished.result.plan.checksum
    assert twin.lengths.digest == PackPlan.load(finished.folder / "plan").lengths_digest
    for name in ("offsets.npy", "indices.npy", "ledger.npy", "pack_tokens.npy", "plan.json"):
        assert (tmp_path / "twin" / "plan" / name).read_bytes() == (
            finished.folder / "plan" / name
        ).read_bytes()


def test_a_second_start_measures_nothing_again(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.template import HFTemplate

    def never(self: HFTemplate, samples: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(HFTemplate, "measure_batch", never)
    found = prepare(finished.config, finished.folder)
    assert found.plan.checksum == finished.result.plan.checksum


def test_a_planner_knob_does_not_measure_again_but_is_refused_in_the_same_folder(
    finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packtrain.template import HFTemplate

    monkeypatch.setattr(HFTemplate, "measure_batch", lambda *_: pytest.fail("measured again"))
    new = {"global_max_length": 900, "template__max_length": 900, "model__max_model_len": 900}
    changed = again(finished.config, finished.folder, **new)
    with pytest.raises(ForeignArtefactError, match="another plan"):
        prepare(changed, finished.folder)
    assert PackPlan.load(finished.folder / "plan").checksum == finished.result.plan.checksum


def test_too_many_dropped_samples_stop_the_run_and_are_named(finished: Any, tmp_path: Path) -> None:
    strict = again(finished.config, tmp_path / "s", training__max_drop_fraction=0.01)
    with pytest.raises(PlanError, match=r"15 of 320 samples \(4\.7%\).*train\.jsonl:\d+ \(\w+\)"):
        prepare(strict, tmp_path / "s")
    assert not (tmp_path / "s" / "plan" / "plan.json").exists()
    prepare(again(finished.config, tmp_path / "s", training__max_drop_fraction=0.5), tmp_path / "s")


def test_lengths_that_lie_are_found_before_planning(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packtrain.template import HFTemplate

    honest = HFTemplate.measure_batch

    def short(self: HFTemplate, samples: Any) -> list[Any]:
        return [m if isinstance(m, Exception) else type(m)(m - 1, **m.costs) for m in honest(self, samples)]

    monkeypatch.setattr(HFTemplate, "measure_batch", short)
    with pytest.raises(DriftError, match="measured"):
        prepare(again(finished.config, tmp_path / "d"), tmp_path / "d")
    assert not (tmp_path / "d" / "plan").exists()


@pytest.mark.spec(
    "001",
    "`packing: false`: a row a sample, through the same plan",
    key="`data.packing`",
    api="`pipeline.prepare`",
)
def test_without_packing_a_row_holds_one_sample(finished: Any, tmp_path: Path) -> None:
    made = prepare(again(finished.config, tmp_path / "n", data__packing=False), tmp_path / "n").plan
    assert all(len(made[pack]) == 1 for pack in range(len(made)))
    packed = finished.result.plan
    assert sorted(made.indices.tolist()) == sorted(packed.indices.tolist()) and len(made) > len(packed)


@pytest.mark.spec(
    "001",
    "`padding_free` without packing: a batch of N samples is one row",
    key="`data.samples_per_row` (`template.padding_free`)",
    api="`pipeline.prepare`",
)
def test_without_packing_a_row_holds_so_many_samples(finished: Any, tmp_path: Path) -> None:
    """VeOmni's dyn_bsz: false in epochs, ms-swift's padding_free without packing."""
    packed = set(finished.result.plan.indices.tolist())
    for shuffle in (True, False):
        options = {"packing": False, "samples_per_row": 4, "shuffle": shuffle, "long_samples": "single"}
        out = tmp_path / str(shuffle)
        named = {f"data__{key}": value for key, value in options.items()}
        made = prepare(again(finished.config, out, **named), out).plan
        rows = [made[pack].tolist() for pack in range(len(made))]
        assert packed <= {i for row in rows for i in row} and sum(map(len, rows)) == len(made.indices)
        assert sorted(map(len, rows))[1:] == [4] * (len(made) - 1)
        assert all(row[-1] - row[0] == 3 for row in rows[:3]) == (not shuffle)


def test_steps_of_samples_go_on_with_the_packs_they_began_with(finished: Any, tmp_path: Path) -> None:
    """On every number of ranks that divides the packs of a step; the plan was made for others."""
    asked = again(finished.config, tmp_path, data__samples_per_step=16, data__packer="auto")
    begun = prepare(asked, tmp_path, world_size=4).plan
    packs = begun.spec.packs_per_step
    assert packs and packs % 4 == 0
    for ranks in (1, 2, packs):
        made = prepare(asked, tmp_path, world_size=ranks).plan
        assert made.checksum == begun.checksum and made.align(ranks).block == packs
    with pytest.raises(ForeignArtefactError, match="packs_multiple 4 there"):
        prepare(asked, tmp_path, world_size=packs + 1)
    alone = prepare(asked, tmp_path, world_size=1, overwrite=True).plan
    assert alone.spec.packs_multiple == 1


def test_a_row_of_so_many_samples_has_them_whatever_their_lengths(finished: Any, tmp_path: Path) -> None:
    """Samples longer than `max_length` stand in rows as all others: a row has no cap."""
    tokens = prepare(finished.config, finished.folder).lengths.tokens
    named = {"packing": False, "samples_per_row": 4, "long_samples": "single"}
    options = {f"data__{key}": value for key, value in named.items()}
    short = again(finished.config, tmp_path, template__max_length=int(tokens.max()) // 4, **options)
    made = prepare(short, tmp_path)
    rows = [made.plan[pack] for pack in range(len(made.plan))]
    assert sorted(map(len, rows))[1:] == [4] * (len(rows) - 1)
    assert max(made.lengths.tokens[row].sum() for row in rows) > made.lengths.tokens.max()
    assert sorted(made.plan.indices.tolist()) == np.flatnonzero(made.lengths.status == 0).tolist()


@pytest.mark.spec(
    "003",
    "limits on samples and images of a pack from YAML and CLI",
    key="`data.limits`, `data.max_samples`",
    api="`plan(limits=, max_samples=)`",
)
@pytest.mark.parametrize("packer", ["auto", "diverse"])
def test_limits_of_a_pack_from_yaml(finished: Any, tmp_path: Path, packer: str) -> None:
    named = {"data__packer": packer, "data__max_samples": 3, "data__limits": {"supervised": 60}}
    made = prepare(again(finished.config, tmp_path, **named), tmp_path)
    weights = made.lengths.costs["supervised"]
    held = [made.plan[pack].tolist() for pack in range(len(made.plan))]
    packed = {i for row in held for i in row}
    left = set(finished.result.plan.indices.tolist()) - packed
    assert len(packed) == len(made.plan.indices) and all(weights[i] > 60 for i in left)
    assert 1 < max(map(len, held)) <= 3 < max(len(pack) for pack in finished.result.plan)
    assert all(int(weights[row].sum()) <= 60 for row in held if len(row) > 1)


def test_which_knows_a_run(finished: Any) -> None:
    from packtrain.pipeline.which import order_of, rows_of

    order = order_of(finished.folder, world_size=None, grad_accum=None, seed=None, balance=None)
    assert order.run_steps == finished.result.figures["metrics"]["steps"] == 24 and order.epochs == 1
    held = [i for step in range(24) for i in order.step(step)["ids"]]
    assert len(held) == len(set(held)) and set(held) < set(finished.result.plan.indices.tolist())
    rows = rows_of(order.folder, held[:2])
    assert rows is not None and len(rows) == 2 and ".jsonl:" in rows[0]
    places = order.sample(held[0], [0])
    assert [place["step"] for place in places] == [0]
    late = next(i for i in finished.result.plan.indices.tolist() if i not in held)
    assert order.sample(late, [0]) == [], "the run stopped before it"
    with pytest.raises(InputError, match="step 24 of a run of 24 steps"):
        order.step(24)


def test_run_json_holds_the_warnings_of_reading_and_running(finished: Any) -> None:
    told = finished.result.figures["warnings"]
    assert len(told) == len(set(told))
    assert json.loads((finished.folder / "run.json").read_text())["result"]["warnings"] == told


def test_a_run_that_is_refused_leaves_the_finished_one_in_its_folder(finished: Any) -> None:
    before = (finished.folder / "run.json").read_bytes()
    values = finished.config.to_dict()
    values["data"]["path"] = "demo:formulas-val"
    with pytest.raises(InputError, match="holds lengths of another number of samples, source"):
        run(load_config(values))
    assert (finished.folder / "run.json").read_bytes() == before


@pytest.mark.parametrize(("limit", "stops"), [(None, True), (0.4, True), (0.6, False)])
def test_validation_samples_have_the_limit_of_training_samples(
    limit: float | None, stops: bool, finished: Any, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    shown = [{"role": "user", "content": "<image> what?"}, turns[1]]
    rows = [{"messages": turns}] * 2 + [{"messages": shown, "images": ["absent.png"]}] * 2
    path = tmp_path / "val.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = finished.config.to_dict()
    values["data"] |= {"val": str(path), "max_drop_fraction": limit}
    config = load_config(values)
    if stops:
        with pytest.raises(PlanError, match=r"2 of 4 samples \(50.0%\) are left out: missing_media 2"):
            prepare(config, tmp_path, validation=True)
        return
    plan = prepare(config, tmp_path, validation=True).plan
    assert plan.ledger.counts() == {"missing_media": 2}


def test_the_comparison_is_of_evenly_spaced_packs_and_signed(finished: Any) -> None:
    loss = finished.result.figures["loss"]
    assert loss["packs"] == min(64, len(finished.result.plan))
    assert loss["difference"] == loss["packed"] - loss["unpacked"]
