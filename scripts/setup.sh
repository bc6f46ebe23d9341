#!/bin/sh
# Make the development environment: torch first, so that nothing pulls a CUDA build behind it, then
# packtrain with its extras, then torchvision without its dependencies (see docs/dependencies.md).
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check --quiet"
# Most modules of torch and transformers are never imported: each is compiled when it first is.
$pip install --no-compile --constraint constraints.txt torch
$pip install --no-compile --constraint constraints.txt --editable '.[dev]'
$pip install --no-compile --no-deps --constraint constraints.txt torchvision
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp scripts/torchvision_beside_cpu_torch.py "$site/"
echo 'import torchvision_beside_cpu_torch' > "$site/torchvision_beside_cpu_torch.pth"
