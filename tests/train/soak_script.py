"""`packtrain train FILE` as one rank, which notes its process first: soak_script.py FOLDER FILE."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from packtrain.cli import main

if __name__ == "__main__":
    (Path(sys.argv[1]) / f"pid.{os.getpid()}").touch()
    main(["train", sys.argv[2]])
