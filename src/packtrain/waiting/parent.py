"""Worker processes that end with the process that started them, however that one went.

The workers of a `ProcessPoolExecutor` wait for work that never comes when their parent is killed: they, and
the processors they hold, would stay in memory until somebody finds them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """To be called once in a worker process: it ends when its parent is gone, and leaves Ctrl-C to it."""
    with contextlib.suppress(ValueError, OSError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="packtrain-parent", daemon=True).start()
