"""Models that train in other ways than plain weights, each proven on the live object.

4 and 8 bit (bitsandbytes), int8 weights (torchao), adapters on each, compiled with a real compiler, experts:
clean ones are accepted and left as they were to the bit, patched ones are refused by function and file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from venvs import build, run

pytestmark = pytest.mark.hosts

REQUIREMENTS = ["transformers==5.24.0", "accelerate==1.15.0", "peft==0.21.2", "torchao==0.18.0"]
OURS = ["bitsandbytes==0.50.2", "numba", "pydantic", "pyyaml", "click", "rich", "pillow", "psutil"]
CASES = {
    "4 bit", "4 bit with adapters", "8 bit", "8 bit with outliers and adapters", "int8 weights",
    "int8 weights with adapters", "int8 weights of transformers", "int8 by token", "compiled",
    "4 bit with adapters, compiled", "experts", "experts in bfloat16",
}  # fmt: skip


def test_the_proof_answers_on_each() -> None:
    python = build("quantised", [*REQUIREMENTS, *OURS])
    script = Path(__file__).with_name("quantised_run.py")
    paths = [str(script.parent), str(script.parents[1] / "train")]
    told = run(python, script.read_text(encoding="utf-8"), json.dumps(paths), ours=True, timeout_s=1200)
    rows = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert {row["case"] for row in rows} == CASES
    for row in rows:
        assert row["clean"] == "accepted" and row["changed"] == [], row
        for leak, what in {"on_the_object": "plain_causal in", "pooled": "with_mean in"}.items():
            line = row[leak]
            assert "packed samples read each other in" in line and what in line and "leaks.py:" in line, row
