"""Start of threads and thread pools, with an error that says what to do if the system refuses one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

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
        raise _refused(thread.name, error) from error


def start_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already: a job never finds that the system starts no further thread.

    Args:
        threads: number of threads.
        name: prefix of their names.

    Raises:
        Unavailable: the system starts no further thread in this process.
    """
    pool, together = ThreadPoolExecutor(threads, name), threading.Barrier(threads)
    try:
        wait([pool.submit(together.wait) for _ in range(threads)])
    except RuntimeError as error:
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise _refused(name, error) from error
    return pool


def _refused(name: str, error: RuntimeError) -> Unavailable:
    return Unavailable(f"the system starts no thread for '{name}' ({error}): {CURE}")
