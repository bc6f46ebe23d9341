"""The command line in this process, with its exit codes."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner

from packtrain.cli._app import main

__all__ = ["call"]


def call(*arguments: str, code: int = 0) -> Any:
    from packtrain.cli._app import app  # noqa: F401

    result = CliRunner().invoke(_command(), list(arguments))
    assert result.exit_code == code, result.output
    return result


def _command() -> Any:
    import click

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def run(words: tuple[str, ...]) -> None:
        main(list(words))

    return run
