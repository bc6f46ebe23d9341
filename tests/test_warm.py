"""The server that stands in for `sys.executable` outlives clients that are killed at any moment."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

import warm


@pytest.mark.parametrize("sent", [b"", b"\0" * 7, (100).to_bytes(8, "big"), (100).to_bytes(8, "big") + b"[["])
def test_a_client_that_ends_in_its_words_ends_alone(sent: bytes) -> None:
    python = warm.python()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0packtrain-warm-{os.getpid()}")
        if sent:
            socket.send_fds(client, [sent], [2, 2, 2])
    words = subprocess.run([python, "-c", "print('alive')"], capture_output=True, text=True, timeout=120)
    assert words.stdout == "alive\n"
