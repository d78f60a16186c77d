"""The process of a model itself: its memory limit and its end. Used by the programs of Python models and of isolated models."""

from __future__ import annotations

import atexit
import os
import resource
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# Score of oom(5) that is added to the process's own; 1000 would make it the first victim of all.
_OOM_SCORE = "500"


def limit_memory(size_bytes: int) -> None:
    """Limit the private writable memory of this process; 0 sets no limit.

    RLIMIT_DATA counts what is allocated (setrlimit(2), Linux 4.7). RLIMIT_AS would count the address space as well, of which the
    CUDA driver reserves more than the machine has memory.
    """
    if size_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with suppress(OSError):  # a machine without memory then kills this process rather than the server
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def run_exit_handlers() -> None:
    """Call the functions that the model's code has registered with `atexit`; the errors are on standard error."""
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()


def exit_process(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown, in which threads of libraries are known to crash."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
