"""Ray Train on packs: two workers, lost once, train 200 real samples by the example as it stands."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_runs import REPOSITORY, leak_of
from loops import EXAMPLES, SETTINGS, named, unpacked

import packtrain as pt

pytestmark = pytest.mark.hosts


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`main` of the example, on a cluster of this machine that knows this module."""
    pytest.importorskip("ray", reason="needs the extra packtrain[ray]")
    import ray
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield runpy.run_path(str(EXAMPLES / "ray_train.py"))["main"]
    finally:
        ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.matrix("text, losses as unpacked", "every sample once", "resume", "two ranks")
@pytest.mark.filterwarnings("ignore")
def test_it_trains_as_unpacked_and_goes_on(network: Path, talks: Path, tmp_path: Path, example: Any) -> None:
    """Lost in step 3, the workers are started again by Ray and go on behind its checkpoint of step 2."""
    assert named("ray_train.py")
    worker, out = example.__globals__["train_worker"], tmp_path / "out"
    out.mkdir()
    result = example(network, talks, out, workers=2, use_gpu=False, worker=watched(worker, out), **SETTINGS)
    assert result.metrics["step"] == 5
    accum = pt.PackPlan.load(out / "plan").align(2).block // 2
    runs = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (out / f"seen.{attempt}.{rank}" for attempt in (1, 2) for rank in (0, 1))
    ]
    micro = [first[: 2 * accum] + second for first, second in ((runs[0], runs[2]), (runs[1], runs[3]))]
    assert [len(rank) for rank in micro] == [5 * accum] * 2
    places = [slice(step * accum, (step + 1) * accum) for step in range(5)]
    steps = [[n for rank in micro for _, ids in rank[place] for n in ids] for place in places]
    assert sorted(number for step in steps for number in step) == list(range(200))
    sums = [sum(loss for rank in micro for loss, _ in rank[place]) for place in places]
    assert sums == pytest.approx(unpacked(network, talks, steps, summed=True), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_attention_that_forgets_boundaries_is_refused(
    network: Path, talks: Path, tmp_path: Path, example: Any, record_property: Any
) -> None:
    """By each worker's own proof: Ray tells it, and no row was trained."""
    worker, out = example.__globals__["train_worker"], tmp_path / "out"
    out.mkdir()
    with pytest.raises(Exception) as told:
        example(network, talks, out, workers=2, use_gpu=False, worker=leaking(worker, out), **SETTINGS)
    record_property("refused", leak_of(str(told.value)))
    assert not list(out.glob("trained.*"))


def leaking(worker: Any, out: Path) -> Any:
    """`train_worker` whose attention reads the whole row, as a patched model may."""
    trained = worker.__globals__["loss_sum"]

    def leaks(config: Any) -> None:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def whole(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

        def loss_sum(model: Any, batch: Any) -> Any:
            (out / f"trained.{batch.sample_ids[0]}").touch()
            return trained(model, batch)

        torch.set_num_threads(1)
        AttentionInterface.register("sdpa", whole)
        worker.__globals__["loss_sum"] = loss_sum
        worker(config)

    return leaks


def watched(worker: Any, out: Path) -> Any:
    """`train_worker` that notes the loss and samples of each row, and is lost once."""
    trained = worker.__globals__["loss_sum"]

    def watching(config: Any) -> None:
        import ray.train

        torch.set_num_threads(1)
        rank = ray.train.get_context().get_world_rank()
        attempt = 1 + (out / f"seen.1.{rank}").exists()
        seen: list[Any] = []
        (path := out / f"seen.{attempt}.{rank}").touch()
        most = 2 * (pt.PackPlan.load(out / "plan").align(2).block // 2)

        def loss_sum(model: Any, batch: Any) -> Any:
            if attempt == 1 and len(seen) == most:
                raise RuntimeError("this worker is lost")
            found = trained(model, batch)
            seen.append([float(found.detach()), [int(number) for number in batch.sample_ids]])
            path.write_text("".join(json.dumps(row) + "\n" for row in seen))
            return found

        worker.__globals__["loss_sum"] = loss_sum
        worker(config)

    return watching
