"""`packtrain which`: it names what the sampler really hands out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.cli import main
from packtrain.data import PackSampler
from packtrain.planning.replan import EpochPlans


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), json.loads(out) if "--json" in words and out else out, err


@pytest.mark.parametrize("options", [{}, {"samples_per_step": 24, "packs_multiple": 2, "seed": 1}])
@pytest.mark.parametrize("balance", [None, "step"])
def test_steps_are_those_of_the_sampler(
    options: dict[str, Any], balance: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = pt.plan([20 + (i * 37) % 60 for i in range(100)], 100, **options)
    plan.save(tmp_path / "plan")
    view = plan.align(2)
    accum = view.block // 2 if options else 3
    words = ["--world-size", 2, "--seed", 5, *(() if options else ("--grad-accum", 3))]
    words += ["--balance", balance] if balance else []
    seen: dict[int, list[tuple[int, int]]] = {}
    for epoch in (0, 1):
        for rank in (0, 1):
            sampler = PackSampler(view, rank, 5, balance=balance, grad_accum=accum)
            sampler.set_epoch(epoch)
            handed = list(sampler)
            for step in range(0, -(-len(handed) // accum), 2):
                args = ("--step", step, "--epoch", epoch, "--rank", rank, "--json")
                code, told, _ = call(capsys, "which", tmp_path / "plan", *words, *args)
                part = handed[step * accum : (step + 1) * accum]
                assert code == 0 and [row["pack"] for row in told["packs"]] == [view.pack_id(p) for p in part]
                assert told["ids"] == sorted({i for p in part for i in view[p].tolist()})
                for i in told["ids"]:
                    seen.setdefault(i, []).append((epoch, step))
    code, told, _ = call(
        capsys, "which", tmp_path / "plan", *words, "--step", told["steps_per_epoch"], "--json"
    )
    assert (told["epoch"], told["step"]) == (1, 0)
    for i in list(seen)[:5]:
        code, told, _ = call(
            capsys, "which", tmp_path / "plan", *words, "--sample", i, "--epoch", 1, "--json"
        )
        wanted = {step for epoch, step in seen[i] if epoch == 1}
        assert code == 0 and wanted <= {row["step"] for row in told["steps"]}
        assert all(row["pack"] >= 0 for row in told["steps"])


def test_text_and_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = pt.plan([5, 0, 5, 5, 5], 10, samples_per_step=2, packs_multiple=4)
    plan.save(tmp_path / "plan")
    code, out, _ = call(capsys, "which", tmp_path / "plan", "--step", 0, "--world-size", 4)
    assert code == 0 and "2 samples in 4 packs" in out and "filler" in out
    code, out, _ = call(capsys, "which", tmp_path / "plan", "--sample", 2)
    assert code == 0 and "sample 2" in out and "epoch 0, step 0" in out
    code, out, err = call(capsys, "which", tmp_path / "plan", "--sample", 2, "--rank", 0)
    assert code == 0 and "sample 2" in out and err == "--rank: no effect with --sample\n"
    for words, match in (
        ((), "either --step or --sample"),
        (("--step", 9, "--epoch", 0), "an epoch has 2 steps"),
        (("--sample", 1), "it is in the ledger: empty"),
        (("--sample", 77), "no such sample"),
        (("--step", 0, "--rank", 4, "--world-size", 4), "rank 4 of 4"),
        (("--step", 0, "--grad-accum", 3), "has 4 micro steps"),
        (("--step", 0, "--world-size", 3), "which 3 ranks cannot share"),
        (("--sample", 2, "--epoch", -1), "no epoch -1"),
        (("--step", 0, "--losses"), "--losses needs --step of a run"),
    ):
        code, _, err = call(capsys, "which", tmp_path / "plan", *words)
        assert code == 2 and match in err, err
    code, _, err = call(capsys, "which", tmp_path, "--step", 0)
    assert code == 2 and "no plan and no finished run" in err


@pytest.mark.parametrize(("epoch", "where"), [(None, "of this run"), (0, "of this run in epoch 0")])
def test_a_sample_that_no_step_saw(epoch: int | None, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    from packtrain.cli.which import _print_sample

    _print_sample(17, epoch, [], ["train.jsonl:18"], as_json=False)
    assert capsys.readouterr().out == f"sample 17 (train.jsonl:18)\n  no step {where} holds it\n"


def test_replan_names_the_packs_of_the_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = pt.Lengths([20 + (i * 37) % 6 for i in range(100)])
    lengths.save(tmp_path / "lengths")
    plan = pt.plan(lengths, 100)
    plan.save(tmp_path / "plan", origin={"lengths": str(tmp_path / "lengths")})
    words = [tmp_path / "plan", "--replan", "epoch", "--world-size", 2, "--seed", 5, "--json"]
    for epoch in (0, 1, 2):
        plans = EpochPlans(plan, lengths)
        view = plans.plan(epoch).align(2)
        sampler = PackSampler(plan.align(2), 1, 5, replan=plans)
        sampler.set_epoch(epoch)
        for step, position in enumerate(list(sampler)[:4]):
            args = ("--step", step, "--epoch", epoch, "--rank", 1)
            code, told, _ = call(capsys, "which", *words, *args)
            assert code == 0 and told["ids"] == view[position].tolist()
        code, told, _ = call(capsys, "which", *words, "--sample", told["ids"][0], "--epoch", epoch)
        assert code == 0 and (step, 1) in {(row["step"], row["rank"]) for row in told["steps"]}
    code, _, err = call(capsys, "which", tmp_path / "plan", "--step", 0, "--replan", "step")
    assert code == 2 and "epoch" in err
