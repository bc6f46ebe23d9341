"""packtrain installed as users do: the built wheel with its extras, in clean environments.

`make test-install` runs them. The packages of an environment are installed once, in `PACKTRAIN_HOSTS`;
the wheel is built and installed anew. torch comes first, at the version of `constraints.txt`, so that nothing
brings another build.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "hosts"))

from venvs import REPOSITORY, TORCH, build

pytestmark = pytest.mark.install

#: extras of an environment, and a module that each brings
MODULES = {
    "train": ["torch", "transformers", "accelerate", "psutil"],
    "report": ["matplotlib", "jinja2"],
    "export": ["isal"],
    "energon": ["torch", "megatron.energon", "s3fs"],
    "ray": ["ray"],
}
ROWS = [[], ["train"], ["report"], ["export"], ["energon"], ["ray"], list(MODULES)]
#: Beside the versions of `constraints.txt`: what is pinned must not push another package back by years.
PINNED = [["train", "energon"]]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), "."]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("packtrain-*.whl"))


def requirements(wheel: Path, extras: list[str]) -> list[str]:
    """What the wheel asks for, with these extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    asked = []
    for line in told:
        requirement, _, marker = line.partition(";")
        if not marker or any(f'"{extra}"' in marker.replace("'", '"') for extra in extras):
            asked.append(requirement.strip())
    return asked


class Installed:
    """A clean environment with the wheel in it."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder

    def call(self, *words: object, code: int = 0) -> str:
        """What a program of the environment says (both outputs), away from the source tree."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        kept.update({"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
        first, *rest = map(str, words)
        command = [str(self.python.parent / first), *rest]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1500, env=kept, cwd=self.folder
        )
        told = done.stdout + done.stderr
        assert done.returncode == code, f"exit {done.returncode}: {' '.join(command)}\n{told[-4000:]}"
        return told


def installed(wheel: Path, extras: list[str], folder: Path, *, pinned: bool = False) -> Installed:
    torch = TORCH if {"train", "energon"} & set(extras) else None
    asked = ([torch] if torch else []) + requirements(wheel, extras)
    pins: list[str] = []
    if pinned:
        place = REPOSITORY / "constraints.txt"
        asked += ["--constraint", str(place)]
        pins = [hashlib.sha256(place.read_bytes()).hexdigest()[:8]]
    name = "-".join(["install", *(extras or ["bare"])[:2], *pins])
    try:
        python = build(name, asked, torch=torch)
    except pytest.skip.Exception as reason:
        if "ResolutionImpossible" in str(reason):  # not the network's fault: what we ask for cannot be had
            pytest.fail(str(reason))
        raise
    held = Installed(python, folder)
    held.call("python", "-m", "pip", "uninstall", "--quiet", "--yes", "packtrain")
    target = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    held.call("python", "-m", "pip", "install", "--quiet", target)
    return held


@pytest.mark.parametrize(
    ("extras", "pinned"),
    [pytest.param(extras, False, id="+".join(extras) or "bare") for extras in ROWS]
    + [pytest.param(extras, True, id="pinned-" + "+".join(extras)) for extras in PINNED],
)
def test_it_works_as_installed(
    wheel: Path, extras: list[str], pinned: bool, tmp_path: Path, tokenizer_folder: Path
) -> None:
    env = installed(wheel, extras, tmp_path, pinned=pinned)
    modules = ["packtrain", *(module for extra in extras for module in MODULES[extra])]
    env.call("python", "-c", "import " + ", ".join(modules))
    where = env.call("python", "-c", "import packtrain; print(packtrain.__file__)")
    assert "site-packages" in where
    plans_an_array(env, tmp_path)
    if "train" not in extras:
        told = env.call("packtrain", "doctor", "--model", "tiny:qwen3", code=2)
        assert "packtrain[train]" in told and "unexpected" not in told
        return
    assert "tiny:qwen3" in env.call("packtrain", "doctor", "--model", "tiny:qwen3")
    trains_and_exports(env, tmp_path, tokenizer_folder, energon="energon" in extras)


def plans_an_array(env: Installed, folder: Path) -> None:
    np.save(folder / "lengths.npy", np.arange(1, 301) % 97 + 1)
    env.call("packtrain", "plan", "lengths.npy", "--pack-length", 256, "--out", "planned")
    assert "300" in env.call("packtrain", "show", "planned")
    assert json.loads(env.call("packtrain", "verify", "planned", "--json"))["ok"]


def trains_and_exports(env: Installed, folder: Path, tokenizer: Path, *, energon: bool) -> None:
    """Ten samples: measured, planned, trained, exported and verified."""
    rows = [{"question": f"Count to {i}.", "answer": " ".join(map(str, range(i + 1)))} for i in range(10)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    config = {
        "global_max_length": 64,
        "model": {"name_or_path": "tiny:qwen3"},
        "template": {"processor": str(tokenizer)},
        "custom": {"train_jsonl": "train.jsonl", "columns": {"prompt": "question", "response": "answer"}},
        "training": {
            "output_dir": "run",
            "packing": True,
            "packing_length_precompute_workers": 1,
            "num_train_epochs": 1,
            "gradient_accumulation_steps": 1,
        },
    }
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    env.call("packtrain", "run", "run.yaml")
    assert json.loads(env.call("packtrain", "verify", "run", "--json"))["ok"]
    for fmt in ["webdataset", "raw", *(["energon"] if energon else [])]:
        env.call("packtrain", "export", "run/plan", fmt, "--format", fmt)
        checks = json.loads(env.call("packtrain", "verify", fmt, "--json"))["checks"]
        assert "10 planned, each there once" in checks["samples"] and "10 samples" in checks["tokens"]
        assert fmt != "energon" or "by megatron-energon" in checks["energon"]


def test_sdist_and_wheel_are_what_an_index_takes(tmp_path: Path) -> None:
    """`python -m build` in a clean environment makes the wheel from the sdist; `twine check` reads both."""
    python = build("dist", ["build", "twine"], torch=None)
    for words in (["build", "--outdir", str(tmp_path)], ["twine", "check", "--strict"]):
        paths = sorted(map(str, tmp_path.iterdir())) if words[0] == "twine" else []
        done = subprocess.run(
            [str(python), "-m", *words, *paths], cwd=REPOSITORY, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (sdist,), (made,) = tmp_path.glob("packtrain-*.tar.gz"), tmp_path.glob("packtrain-*.whl")
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
    assert {
        "packtrain/py.typed",
        "packtrain/report/report.html.j2",
        "packtrain/testing/demo/demo.yaml",
        "packtrain/testing/demo/processor_files/chat_template.jinja",
        "packtrain/hosts/scaffold/train.sh",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "examples"))]
    sources = {
        path.relative_to(REPOSITORY / "src").as_posix()
        for path in (REPOSITORY / "src" / "packtrain").rglob("*.py")
    }
    assert sources <= names
    assert re.fullmatch(r"packtrain-\d+\.\d+\.\d+((a|b|rc)\d+)?\.tar\.gz", sdist.name)  # a semantic version
