"""Launch lines of the documents on the ranks of one torchrun, one after the other: a JSON list of words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import packtrain.cli._options as recipe
import packtrain.cli.train as train
from packtrain.cli import main


def nothing() -> None:
    """A verb that trained would end the process here."""


if __name__ == "__main__":
    recipe.end_of_training = train.end_of_training = nothing  # type: ignore[assignment]
    for words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            main(words)
        except SystemExit as end:
            if end.code:
                raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
