"""Start of threads, with an error that says what to do if the system refuses one."""

from __future__ import annotations

import threading

from headrace.core.errors import Unavailable

CURE = "raise the limit of threads: ulimit -u, TasksMax of systemd, pids.max of the cgroup"


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Args:
        thread: not started yet. After an error it may not be joined.

    Raises:
        Unavailable: the system starts no further thread in this process.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise Unavailable(f"the system starts no thread for '{thread.name}' ({error}): {CURE}") from error
