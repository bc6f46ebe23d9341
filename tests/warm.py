"""Real processes whose imports are already made: `warm.python()` stands in for `sys.executable`.

    subprocess.run([warm.python(), "-m", "packtrain", "train", …], env=…)

A process of torch and transformers imports for longer than most tests run. One server a test session imports
them once; each run of this Python is a process forked from it, with its own arguments, environment, folder
and streams. It ends with the process that started it, takes its signals and gives back its exit status.
Not for tests of the start itself (imports, hash seeds, a missing main guard): those start Python anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = json.dumps([sys.argv[1:], os.getcwd(), {{**os.environ, "PYTHON_EXEC": sys.argv[0]}}]).encode()
socket.send_fds(server, [len(words).to_bytes(8, "big")], [0, 1, 2])
server.sendall(words)
pid = int.from_bytes(server.recv(8), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int.from_bytes(server.recv(8), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """A program that takes words as Python does; its server begins to import at the first call."""
    folder = Path(tempfile.mkdtemp(prefix="packtrain-warm-"))
    address = f"\0packtrain-warm-{os.getpid()}"
    program = folder / "python"
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @atexit.register
    def close() -> None:
        server.communicate()  # its input ends, so it ends what it started
        shutil.rmtree(folder)

    return str(program)


def load() -> None:
    """What most processes of tests import."""
    import torch
    import torch.distributed.run
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
    import transformers.models.qwen3.modeling_qwen3
    import trl

    import packtrain.cli
    import packtrain.hosts.transformers
    import packtrain.pipeline.run
    import packtrain.template
    import packtrain.testing.tiny
    import packtrain.train.trainer  # noqa: F401

    _ = transformers.Trainer, trl.SFTTrainer
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a forked process leaves these pages alone
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1, threads  # it can be forked


def received(client: socket.socket) -> tuple[bytes | None, list[int]]:
    """A client's words and streams; None: it was killed before it had sent them, and is closed."""
    streams: list[int] = []
    words = b""
    with contextlib.suppress(OSError):
        size, streams, _, _ = socket.recv_fds(client, 8, 3)
        while len(words) < int.from_bytes(size, "big") and (part := client.recv(1 << 20)):
            words += part
        if size and len(words) == int.from_bytes(size, "big"):
            return words, streams
    for stream in streams:
        os.close(stream)
    client.close()
    return None, []


def serve(listener: socket.socket) -> list[Any] | None:
    """Fork for every client; returns its words in a forked process, None when the session has ended."""
    clients: dict[
        int, tuple[socket.socket, int]
    ] = {}  # by the descriptor of the process: its client, its pid
    while True:
        watched = [0, listener.fileno(), *clients, *(client.fileno() for client, _ in clients.values())]
        ready = wait(watched)  # descriptors beyond 1,023 too, which it inherits where many are open
        if 0 in ready:
            for _, pid in clients.values():
                os.kill(pid, signal.SIGKILL)
            return None
        for process, (client, pid) in list(clients.items()):
            if process in ready:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with client, contextlib.suppress(OSError):  # the client was killed
                    client.sendall(code.to_bytes(8, "big", signed=True))
                os.close(process)
                del clients[process]
            elif client.fileno() in ready:  # the client has ended
                os.kill(pid, signal.SIGKILL)
        if listener.fileno() in ready:
            client, _ = listener.accept()
            words, streams = received(client)
            if words is None:
                continue
            pid = os.fork()
            if pid == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                for descriptor in (*streams, *clients, client.fileno(), listener.fileno()):
                    os.close(descriptor)
                for other, _ in clients.values():
                    other.detach()
                client.detach()
                listener.detach()
                return json.loads(words)  # type: ignore[no-any-return]
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(OSError):  # the client was killed, which is seen next
                client.sendall(pid.to_bytes(8, "big"))
            clients[os.pidfd_open(pid)] = client, pid


def run(words: list[str], folder: str, variables: dict[str, str]) -> None:
    """What `python WORDS` does, in this process."""
    import random
    import runpy
    import types
    import warnings

    import numpy as np

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    np.random.seed()  # noqa: NPY002
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = paths
    while words[0].startswith("-"):
        option = words.pop(0)
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        elif option == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
        elif option in ("-c", "-m"):
            what = words.pop(0)
            sys.argv = [option, *words]
            if option == "-m":
                sys.path.insert(0, folder)
                sys.modules.pop(what, None)
                runpy.run_module(what, run_name="__main__", alter_sys=True)
                return
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
            return
        else:
            raise SystemExit(f"warm python does not know {option}")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def end(*words: Any) -> None:
    """`run`, and the end of the process, without a walk through all that was imported."""
    import threading

    code: Any = 0
    try:
        run(*words)
    except SystemExit as leave:
        code = leave.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        load()
        _words = serve(_listener)
        if _words is not None:
            end(*_words)
