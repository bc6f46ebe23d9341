"""Examples as users run them: transformers and trl are imported before packtrain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["hf_trainer_text", "hf_trainer_vl", "trl_sft"])
def test_an_example_imports_in_the_environment_of_setup(name: str) -> None:
    """`scripts/setup.sh` makes Python import this finder at its start."""
    script = (
        "import sys, runpy; sys.path.insert(0, 'scripts'); import torchvision_beside_cpu_torch; "
        "assert 'torch' not in sys.modules; "
        f"made = runpy.run_path('examples/{name}.py', run_name='example'); "
        "from transformers import Qwen3ForCausalLM; assert callable(made['main'])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_setup_installs_the_finder() -> None:
    text = (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert "cp scripts/torchvision_beside_cpu_torch.py" in text and ".pth" in text
