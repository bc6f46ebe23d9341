"""MosaicML streaming, litdata and Lance: the laws of their exports and sources, where they are installed.

Their requirements (numpy below 2.2, transformers below 5, clouds' clients) do not fit the development
environment; what they import to write and read local files is installed beside them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from venvs import REPOSITORY, build

pytestmark = pytest.mark.hosts

STREAMING = "numpy==2.1.3 transformers==4.57.6 Brotli python-snappy xxhash zstd tqdm catalogue boto3 paramiko"
LITDATA = "lightning-utilities requests obstore tifffile filelock"
OURS = "pydantic pyyaml click rich pillow numba psutil accelerate zstandard pytest hypothesis"


def stores_python() -> Path:
    python = build(
        "stores",
        [*STREAMING.split(), *LITDATA.split(), "pylance==14.0.2", "datasets==4.0.0", *OURS.split()],
        no_deps=["mosaicml-streaming==0.13.0", "litdata==0.2.76", "torchvision==0.28.0"],
    )
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    shim = "torchvision_beside_cpu_torch"  # as `scripts/setup.sh` does: workers import it by themselves
    shutil.copy(REPOSITORY / "scripts" / f"{shim}.py", site)
    (site / f"{shim}.pth").write_text(f"import {shim}\n", encoding="utf-8")
    return python


SINKS, SOURCES = "tests/export/test_export_stores.py", "tests/sources/test_sources_stores.py"
URLS = "tests/export/test_written_behind_urls.py::test_an_export_has_the_bytes_of_one_on_a_disk"
KINDS = ("mds", "litdata", "lance")


@pytest.mark.parametrize(
    ("file", "kinds"), [(SINKS, {*KINDS, "datasets"}), (SOURCES, {*KINDS}), (URLS, {*KINDS, "datasets"})]
)
def test_the_laws_hold_where_the_libraries_are(file: str, kinds: set[str]) -> None:
    kept = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    kept["PYTHONPATH"] = os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests"))
    done = subprocess.run(
        [str(stores_python()), "-m", "pytest", "-v", str(REPOSITORY / file)],
        capture_output=True,
        text=True,
        timeout=1500,
        env=kept,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
    ran = {name for name in (*KINDS, "datasets") if f"[{name}] PASSED" in done.stdout}
    assert ran == kinds, done.stdout[-2000:]
